"""What a request's kv_transfer_params ask for, down to what a real server lets go of first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from known_pages import SPEC, load, prompt, save

from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode
from kvstore.engine_adapter.plan_records import Chain, Policy
from kvstore.engine_adapter.vllm_settings import VllmSettings
from kvstore.engine_adapter.vllm_wishes import NO_LOADS, OPTIONS, policy_of
from kvstore.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = VllmSettings(store="/store", session_pin_s=60.0, pin_ttl_s_max=100.0)
PAGES = 4


def wished(wishes: dict[str, Any]) -> tuple[Policy, list[str]]:
    said: list[str] = []
    policy = policy_of(wishes, SETTINGS, said.append, may_load=True, may_store=True)
    return policy, said


def test_every_wish_reaches_the_record_that_the_planner_obeys() -> None:
    wishes = {"priority": -1, "next_use_s": 3, "done": True, "session": "a", "pin_ttl_s": 500}
    policy, said = wished(wishes)
    assert not said
    assert policy.hints == Hints(next_use_s=3, priority=-1, done=True, conversation="a")
    assert (policy.pin_ttl_s, policy.session, policy.tells) == (100.0, "a", True)
    assert wished({"session": "a"})[0].pin_ttl_s == 60.0
    assert wished({"load": False, "store": False})[0] == Policy(False, False, note="not wanted")
    assert not wished({})[0].tells
    only_saves = policy_of({}, SETTINGS, said.append, may_load=False, may_store=True)
    assert only_saves == Policy(load=False, note=NO_LOADS)
    assert set(wishes) <= OPTIONS


def test_the_end_of_a_session_pins_nothing_and_names_the_session() -> None:
    policy, said = wished({"session": "a", "session_end": True, "pin_ttl_s": 5})
    assert not said
    assert (policy.pin_ttl_s, policy.session, policy.ends_session) == (0.0, "a", True)
    assert policy.hints == Hints(done=True)


@pytest.mark.parametrize(
    "wrong",
    [{"priority": 9}, {"priority": "1"}, {"next_use_s": -1}, {"done": "yes"}, {"pin_ttl_s": "x"}],
)
def test_wishes_that_make_no_sense_are_said_and_change_nothing(wrong: dict[str, Any]) -> None:
    policy, said = wished(wrong)
    assert policy == Policy()
    assert len(said) == 1
    assert next(iter(wrong)).split("_")[0] in said[0] or "seconds" in said[0]
    assert wished({"prio": 1})[1] == ["unknown kv_transfer_params.kvstore: prio"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("grpc", reason="the service needs grpcio")
    from server_process import ServerProcess

    flags = ("--host-bytes=512KiB", "--disk-bytes=0", "--staging-bytes=64KiB")
    with ServerProcess(tmp_path / "store", *flags) as started:
        yield started.start(wait_warm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wishes",
    [{"priority": 2}, {"next_use_s": 30}, {"pin_ttl_s": 90}, {"session": "chat"}],
    ids=lambda wishes: next(iter(wishes)),
)
def test_over_the_wire_what_a_request_wishes_is_what_stays(
    server: Any, wishes: dict[str, Any]
) -> None:
    from kvstore.connect import connect
    from kvstore.engine_adapter.lookups import Lookups

    with connect(server.address, lookup_deadline_s=5.0) as store:
        session = store.session(SPEC)
        assert session.wait_open(10.0)
        lookups = Lookups(LoadChoice(LoadMode.ALWAYS, SPEC.page_bytes, SPEC.page_tokens))
        lookups.use(session)
        for number in range(2):
            save(session, prompt(number, PAGES))
        policy, _ = wished(wishes)
        chain = Chain(prompt(0, PAGES).tobytes(), {})
        if policy.pin_ttl_s:
            lookups.pin(chain, policy.pin_ttl_s)
        if policy.hints.for_policy:
            lookups.hint(chain, policy.hints)
        settle(lookups)
        for number in range(100, 250):
            save(session, prompt(number, PAGES))
        assert load(session, prompt(0, PAGES)) == PAGES
        assert load(session, prompt(1, PAGES)) < PAGES
        if "session" in wishes:
            lookups.end_conversation("chat")
            settle(lookups)
            for number in range(300, 330):
                save(session, prompt(number, PAGES))
            with session.match(np.append(prompt(0, PAGES), 1)) as found:
                assert found.pages < PAGES
        lookups.close()


def settle(lookups: Any) -> None:
    """Until the threads have done what is queued for them."""
    import threading

    passed = threading.Barrier(3)
    for _ in range(2):
        lookups._save_crew.do(lambda: passed.wait(10) and None)
    passed.wait(10)
