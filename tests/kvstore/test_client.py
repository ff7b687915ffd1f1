"""A client and a real server: the same answers as the library, whatever happens to the server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import known_pages
import numpy as np
import pytest
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, content, load, prompt, save
from server_process import ServerProcess

from kvstore import CacheSpec, Store
from kvstore.client import RemoteStore, ServerUnavailable
from kvstore.connect import connect
from kvstore.errors import ClosedError, InvalidRequest
from kvstore.live_session import ABANDONED_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.interface import StoreLike
    from kvstore.remote_session import RemoteSession

pytestmark = pytest.mark.slow

# Tests run beside others on few cores: a miss because the machine is busy would say nothing.
PATIENT = {"lookup_deadline_s": 5.0}
# For child processes that import what the tests do.
SUPPORTED = os.environ | {"PYTHONPATH": os.path.dirname(known_pages.__file__ or "")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("shared") / "store") as server:
        yield server.start()


@pytest.fixture(params=["embedded", "shared memory", "stream"])
def store(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[StoreLike]:
    """The library, and the two ways to a server: all must answer the same."""
    if request.param == "embedded":
        with Store.open(server.directory.with_name("own"), host_bytes="32MiB") as store:
            yield store
        return
    shared = request.param == "shared memory"
    with connect(server.address, shared_memory=shared, **PATIENT) as store:
        yield store


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server for one test to maltreat."""
    with ServerProcess(tmp_path / "store") as server:
        yield server


_salts = iter(range(1_000_000))


def opened(store: Any) -> Any:
    """A session that shares nothing with those of other tests."""
    return store.session(SPEC, salt=f"{os.getpid()} {next(_salts)}".encode())


def eventually(check: Callable[[], Any], within_s: float) -> float:
    """Seconds until `check` is true; a test fails when it takes longer than `within_s`."""
    start = time.monotonic()
    while not check():
        assert time.monotonic() - start < within_s
        time.sleep(0.005)
    return time.monotonic() - start


def remote(address: str, **settings: Any) -> RemoteStore:
    store = connect(address, **(PATIENT | settings))
    assert isinstance(store, RemoteStore)
    return store


def test_what_was_stored_is_found_with_the_same_bytes(store: StoreLike) -> None:
    session, tokens = opened(store), prompt(1, 20)
    assert load(session, tokens) == 0
    assert save(session, tokens) == 20
    assert load(session, tokens) == 20
    assert load(session, tokens[: 7 * PAGE_TOKENS + 1]) == 7


def test_a_match_tells_what_it_has(store: StoreLike) -> None:
    session, tokens = opened(store), prompt(2, 6)
    save(session, tokens)
    with session.match(tokens) as hit:
        assert (hit.pages, hit.tokens) == (6, 6 * PAGE_TOKENS)
        assert hit.tiers == ["host"] * 6
        assert hit.stage(5.0) == 6
        assert hit.host_pages == 6
        views = hit.views(2, 5)
        assert [bytes(view) for view in views] == [content(tokens, page) for page in (2, 3, 4)]
        assert all(view.readonly for view in views)
        assert hit.valid()
        with pytest.raises(InvalidRequest, match="views"):
            hit.views(0, 7)
        del views
    assert (hit.pages, hit.host_pages, hit.tiers) == (0, 0, [])
    hit.release()
    with session.match(prompt(3, 2)) as miss:
        assert (miss.pages, miss.stage(1.0), miss.views(), miss.tiers) == (0, 0, [], [])


def test_a_reservation_starts_after_what_is_stored_and_says_why_it_is_empty(
    store: StoreLike,
) -> None:
    session, tokens = opened(store), prompt(4, 8)
    save(session, tokens[: 3 * PAGE_TOKENS])
    with session.reserve(tokens) as run:
        assert (run.start, run.count, run.reason) == (3, 5, "")
        with session.reserve(tokens) as other:
            assert (other.count, other.reason) == (0, "in progress")
            with pytest.raises(InvalidRequest):
                other.commit()
    with session.reserve(tokens) as again:
        assert again.count == 5, "the first was given up"
    with session.reserve(tokens[: 3 * PAGE_TOKENS]) as present:
        assert (present.count, present.reason) == (0, "present")
        assert present.views() == []
        assert present.commit(durable=True, deadline_s=10).durable


def test_a_commit_can_be_durable_and_can_be_made_once(store: StoreLike) -> None:
    session, tokens = opened(store), prompt(5, 4)
    with session.reserve(tokens) as run:
        for page, view in enumerate(run.views()):
            view[:] = content(tokens, page)
        done = run.commit(durable=True)
        assert (done.pages, done.durable, done.reason) == (4, True, "")
        with pytest.raises(InvalidRequest):
            run.commit()
        assert run.views() == []
    assert session.flush(10.0)
    assert load(session, tokens) == 4


def test_extras_and_salts_keep_prompts_apart(store: StoreLike) -> None:
    session, tokens = opened(store), prompt(6, 4)
    with session.reserve(tokens, {1: b"image A"}) as run:
        assert run.count == 4
        run.commit()
    assert session.match(tokens, {1: b"image A"}).pages == 4
    assert session.match(tokens, {1: b"image B"}).pages == 1
    assert session.match(tokens).pages == 1
    assert opened(store).match(tokens, {1: b"image A"}).pages == 0


def test_pins_name_how_long_the_chain_is(store: StoreLike) -> None:
    session, tokens = opened(store), prompt(7, 5)
    save(session, tokens[: 3 * PAGE_TOKENS])
    assert session.pin(tokens, 60.0) == 3
    assert session.unpin(tokens) == 3
    assert session.pin(prompt(8, 2), 60.0) == 0


def test_malformed_arguments_are_refused_and_nothing_else(store: StoreLike) -> None:
    session = opened(store)
    for bad in ([-1], [2**31], [[1, 2]], np.zeros(4, np.float32), b"abc", ["a"]):
        with pytest.raises(InvalidRequest):
            session.match(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            session.reserve(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        session.match([1, 2], {0: "text"})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest):
        session.reserve([1, 2], deadline_s=-1)
    with pytest.raises(InvalidRequest):
        session.pin([1, 2], float("nan"))
    with pytest.raises(InvalidRequest):
        store.session(SPEC, writer="w" * 65)


def test_a_long_prompt_is_stored_in_several_runs(server: ServerProcess) -> None:
    """Staging is smaller than the prompt: the caller goes on until nothing is left."""
    for shared in (True, False):
        with remote(server.address, shared_memory=shared) as store:
            session, tokens = opened(store), prompt(9, 1500)
            with session.reserve(tokens) as run:
                assert 0 < run.count < 1500
                assert run.reason == "limit"
            assert save(session, tokens) == 1500
            assert session.flush(10)
            assert load(session, tokens) > 1000


def test_big_pages_cross_in_pieces(server: ServerProcess) -> None:
    spec = CacheSpec.opaque("big", page_tokens=PAGE_TOKENS, page_bytes=(5 << 19) + 4)
    rng = np.random.default_rng(0)
    pages = [rng.bytes(spec.page_bytes) for _ in range(2)]
    for shared in (False, True):
        with remote(server.address, shared_memory=shared) as store:
            session = store.session(spec, salt=bytes([shared]))
            tokens, written = prompt(1, 2), 0
            while written < 2:
                with session.reserve(tokens) as run:
                    for offset, view in enumerate(run.views()):
                        view[:] = pages[run.start + offset]
                    written += run.commit().pages
            for other in (shared, not shared):
                with (
                    remote(server.address, shared_memory=other) as reader,
                    reader.session(spec, salt=bytes([shared])).match(tokens) as hit,
                ):
                    assert hit.stage(10.0) == 2
                    assert [bytes(view) for view in hit.views()] == pages


def test_a_prompt_longer_than_a_message_is_served_as_far_as_one_reaches(
    server: ServerProcess,
) -> None:
    with remote(server.address) as store:
        session = opened(store)
        tokens = np.arange(1_200_000, dtype=np.int32)
        save(session, tokens[: 10 * PAGE_TOKENS])
        assert session.match(tokens).pages == 10
        assert session.match(tokens, dict.fromkeys(range(9, 9000), b"x" * 1000)).pages == 9


def test_another_tenant_cannot_be_named(server: ServerProcess) -> None:
    with remote(server.address) as store, pytest.raises(InvalidRequest, match="credential"):
        store.session(SPEC, tenant="other")


def test_stats_come_as_the_server_has_them(server: ServerProcess) -> None:
    with remote(server.address) as store:
        assert "tiers" in store.stats().to_dict()
    with pytest.raises(ClosedError):
        store.session(SPEC)
    with remote("kvstore://unix:/nowhere/kv.sock") as store:
        store.config  # noqa: B018 - there is one without a server
        with pytest.raises(ServerUnavailable):
            store.stats()


def test_sessions_come_and_go_without_a_trace(server: ServerProcess) -> None:
    def cycle() -> None:
        with remote(server.address) as store:
            session = opened(store)
            save(session, prompt(10, 2))
            load(session, prompt(10, 2))

    for _ in range(2):
        cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        cycle()
    eventually(lambda: threading.active_count() <= before[1], 5)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 2, 5)


def test_threads_may_share_a_session(server: ServerProcess) -> None:
    failures: list[BaseException] = []
    with remote(server.address) as store:
        session = opened(store)

        def work(seed: int) -> None:
            try:
                for turn in range(10):
                    tokens = prompt(100 + (seed + turn) % 5, 6)
                    save(session, tokens)
                    load(session, tokens)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert all(load(session, prompt(100 + seed, 6)) == 6 for seed in range(5))


def test_valid_is_false_once_a_page_has_moved(server: ServerProcess) -> None:
    """What a lease protects is lost with it: then the generations tell."""
    from kvstore import kvstore_pb2 as pb

    with remote(server.address) as store:
        session, tokens = opened(store), prompt(11, 4)
        save(session, tokens)
        hit = session.match(tokens)
        assert hit.stage(5.0) == 4
        views = hit.views()
        assert hit.valid()
        store._link.give_back.release(hit._live, hit._id)
        gone = pb.EvictRequest(everything=True)
        eventually(lambda: store._link.channel.call("Evict", gone, 5).kept_leased == 0, 10)
        assert not hit.valid()
        del views


def test_a_killed_server_is_a_miss_and_hits_follow_within_a_second_of_its_return(
    own: ServerProcess,
) -> None:
    own.start()
    with remote(own.address) as store:
        session, tokens = opened(store), prompt(1, 12)
        save(session, tokens, durable=True)
        held = session.match(tokens)
        assert held.stage(5.0) == 12
        run = session.reserve(prompt(2, 3))
        assert run.count == 3
        own.kill()
        assert [bytes(v) for v in held.views()] == [content(tokens, page) for page in range(12)]
        assert held.valid(), "what is mapped stays as it was"
        for view in run.views():
            view[:] = bytes(PAGE_BYTES)
        assert run.commit(durable=True, deadline_s=5.0).pages == 0
        start = time.monotonic()
        for _ in range(20):
            assert load(session, tokens) == 0
            assert session.reserve(tokens).reason == "unreachable"
        assert time.monotonic() - start < 1.0
        assert (session.pin(tokens, 5), session.unpin(tokens), session.flush(1)) == (0, 0, False)
        assert held.stage(1.0) == 12
        held.release()
        own.start(wait_warm=False)
        assert eventually(lambda: session.is_open, 5) < 1.0
        eventually(lambda: load(session, tokens) == 12, 5)
        assert save(session, prompt(2, 3)) == 3
        assert store.client_counters()["sessions_opened"] == 2


def test_without_shared_memory_a_killed_server_is_the_same(own: ServerProcess) -> None:
    own.start()
    with remote(own.address, shared_memory=False) as store:
        session, tokens = opened(store), prompt(1, 12)
        save(session, tokens, durable=True)
        held, late = session.match(tokens), session.match(tokens)
        assert held.stage(5.0) == 12
        run = session.reserve(prompt(2, 3))
        own.kill()
        assert [bytes(v) for v in held.views()] == [content(tokens, page) for page in range(12)]
        assert late.stage(1.0) == 0
        assert run.commit().pages == 0
        assert load(session, tokens) == 0
        own.start()
        eventually(lambda: load(session, tokens) == 12, 5)


def test_what_was_matched_before_a_restart_is_never_mixed_with_what_came_after(
    own: ServerProcess,
) -> None:
    own.start()
    with remote(own.address) as store:
        session, tokens = opened(store), prompt(1, 4)
        save(session, tokens, durable=True)
        old, run = session.match(tokens), session.reserve(prompt(2, 2))
        own.kill()
        own.start()
        eventually(lambda: load(session, tokens) == 4, 5)
        new = session.match(tokens)
        assert new._id > 0
        assert run.commit().pages == 0
        old.release()
        run.abort()
        assert new.stage(5.0) == 4
        assert new.valid()


def test_engines_may_come_first(own: ServerProcess) -> None:
    with remote(own.address, open_wait_s=10.0) as store:
        start = time.monotonic()
        session, tokens = opened(store), prompt(1, 3)
        assert time.monotonic() - start < 2.0, "waited for a server that is not there"
        assert load(session, tokens) == 0
        assert save(session, tokens) == 0
        own.start(wait_warm=False)
        assert eventually(lambda: session.is_open, 5) < 1.0
        assert eventually(lambda: save(session, tokens) == 3, 5) < 5
        assert load(session, tokens) == 3


def test_a_paused_server_costs_a_few_deadlines_and_is_used_again_when_it_goes_on(
    own: ServerProcess,
) -> None:
    own.start()
    with remote(own.address, lookup_deadline_s=0.2) as store:
        session, tokens = opened(store), prompt(1, 3)
        save(session, tokens)
        eventually(lambda: load(session, tokens) == 3, 5)
        own.pause()
        start = time.monotonic()
        for _ in range(50):
            with session.match(tokens) as hit:
                assert hit.pages == 0
        assert time.monotonic() - start < 1.5, "three deadlines, then the breaker"
        assert store.client_counters()["breaker_opened"] >= 1
        own.resume()
        assert eventually(lambda: load(session, tokens) == 3, 5) < 1.5


def test_calls_that_got_no_answer_in_time_are_taken_back_and_end_no_session(
    own: ServerProcess,
) -> None:
    """A session ended, with all that it had leased, at the 32nd of them in its life, or at the
    first reservation."""
    own.start()
    with remote(own.address) as patient, remote(own.address, lookup_deadline_s=0.05) as store:
        session, tokens = store.session(SPEC), prompt(70, 4)
        other = patient.session(SPEC)
        eventually(lambda: save(other, tokens) or load(other, tokens) == 4, 10)
        eventually(lambda: load(session, tokens) == 4, 10)
        epoch, held = session.epoch, session.match(tokens)
        assert held.pages == 4
        for _ in range(ABANDONED_MAX + 2):
            own.pause()
            assert session.match(tokens).pages == 0
            own.resume()
            eventually(lambda: load(session, tokens) == 4, 10)
        own.pause()
        assert session.reserve(prompt(71, 4), deadline_s=0.0).reason == "unreachable"
        own.resume()
        eventually(lambda: save(other, prompt(71, 4)) == 4, 10)
        assert session.epoch == epoch, "the same session all the time"
        assert held.valid()
        held.release()
        eventually(lambda: patient.stats().leases == 0, 10)


def test_a_server_that_was_asked_to_stop_is_left_and_found_again(own: ServerProcess) -> None:
    own.start()
    with remote(own.address) as store:
        session, tokens = opened(store), prompt(1, 3)
        save(session, tokens)
        assert own.terminate() == 0
        assert load(session, tokens) == 0
        own.start()
        eventually(lambda: load(session, tokens) == 3, 5)


def test_engines_under_load_survive_restarts_without_a_wrong_byte(own: ServerProcess) -> None:
    """Look-ups, stores and their checks go on in several threads while the server is killed."""
    own.start()
    failures: list[BaseException] = []
    hits, slowest_s = [0], [0.0]
    done = threading.Event()

    def work(store: RemoteStore, seed: int) -> None:
        session = store.session(SPEC)
        turn = 0
        try:
            while not done.is_set():
                turn += 1
                tokens = prompt(200 + (seed + turn) % 20, 4)
                start = time.monotonic()
                with session.match(tokens) as hit:
                    slowest_s[0] = max(slowest_s[0], time.monotonic() - start)
                    copied = [bytes(view) for view in hit.views(0, hit.stage(5.0))]
                    good = copied == [content(tokens, page) for page in range(len(copied))]
                    assert good or not hit.valid()
                    hits[0] += bool(copied)
                save(session, tokens, wait_s=0.1, durable=turn % 5 == 0)
                time.sleep(0.002)
        except BaseException as exc:
            failures.append(exc)

    with (
        remote(own.address, lookup_deadline_s=1.0) as store,
        remote(own.address, lookup_deadline_s=1.0, shared_memory=False) as stream,
    ):
        threads = [
            threading.Thread(target=work, args=(each, seed))
            for seed, each in enumerate((store, store, stream))
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            before = hits[0]
            eventually(lambda before=before: hits[0] > before + 20 or failures, 20)
            own.kill()
            own.start()
        before = hits[0]
        eventually(lambda: hits[0] > before + 20 or failures, 20)
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert slowest_s[0] < 3.0


def test_over_a_network_pages_come_as_a_stream(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--host-bytes=32MiB", f"--listen=127.0.0.1:{port}", "--insecure-network")
    with ServerProcess(tmp_path / "store", *flags) as server:
        server.start()
        with remote(f"kvstore://127.0.0.1:{port}", insecure_network=True) as store:
            session, tokens = opened(store), prompt(1, 30)
            assert session.wait_open(5.0)
            assert save(session, tokens) == 30
            assert load(session, tokens) == 30
        with remote(f"kvstore://127.0.0.1:{port}") as careful:
            session = opened(careful)
            assert not session.wait_open(0.5), "without TLS, and nobody said that this is fine"
            assert load(session, tokens) == 0


def test_a_process_ends_well_that_never_closed_its_client(own: ServerProcess) -> None:
    own.start()
    code = (
        "import sys; from known_pages import *; from kvstore.connect import connect\n"
        "store = connect(sys.argv[1]); session = store.session(SPEC)\n"
        "hit = session.match(prompt(1, 2)); run = session.reserve(prompt(1, 2))\n"
        "assert run.count == 2"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code, own.address], env=SUPPORTED, check=True, timeout=20)
    assert time.monotonic() - start < 10
    with remote(own.address) as store:
        assert eventually(lambda: save(store.session(SPEC), prompt(1, 2)) == 2, 5) < 2


def test_a_forked_child_gets_misses_and_does_no_harm(own: ServerProcess) -> None:
    own.start()
    with remote(own.address) as store:
        session, tokens = opened(store), prompt(1, 3)
        save(session, tokens)
        held = session.match(tokens)
        assert held.stage(5.0) == 3
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ok = session.match(tokens).pages == 0 and held.stage(1.0) == 0
                ok = ok and held.views() == [] and not held.valid()
                ok = ok and session.reserve(prompt(2, 1)).reason == "unreachable"
                held.release()
                session.close()
                store.close()
                code = 0 if ok else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert held.valid()
        assert load(session, tokens) == 3


WRITER = """
import sys
from known_pages import SPEC, prompt
from kvstore.connect import connect
store = connect(sys.argv[1], lookup_deadline_s=5.0)
session = store.session(SPEC)
assert session.reserve(prompt(1, 3)).count == 3
print("reserved", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_client_had_reserved_is_free_within_a_second(own: ServerProcess) -> None:
    own.start()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, own.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=SUPPORTED,
    )
    with remote(own.address) as store, writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"reserved\n"
        session = store.session(SPEC)
        assert session.reserve(prompt(1, 3)).reason == "in progress"
        writer.kill()
        assert eventually(lambda: save(session, prompt(1, 3)) == 3, 5) < 1.5


def test_without_access_to_its_memory_a_server_is_used_by_stream(own: ServerProcess) -> None:
    own.start()
    os.unlink(own.directory / "extents.sock")
    with remote(own.address) as store:
        session: RemoteSession = store.session(SPEC)
        assert session.wait_open(5.0)
        assert session._live is not None
        assert not session._live.is_shared
        assert save(session, prompt(1, 3)) == 3
        assert load(session, prompt(1, 3)) == 3
