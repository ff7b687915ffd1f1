"""The connector's hooks in the order of an engine's steps, with stand-ins for vLLM's classes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess

pytest.importorskip("torch", reason="KV caches are tensors")

from fake_vllm import KVConnectorRole, StepLoop, install, make_request

from kvstore.engine_adapter.lookups import GRANT_S_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # each starts a session with a server

BLOCK, PAGE = 8, 16
PROMPT = list(range(100, 140))  # two pages and a half


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("connector") / "store") as server:
        yield server.start()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = install(monkeypatch)
    regions = made.facts_from_config
    monkeypatch.setattr(
        made,
        "facts_from_config",
        lambda vllm_config, config: regions(
            vllm_config, config, inside=lambda config, spec: "STANDIN"
        ),
    )
    return made


@pytest.fixture
def engines(module: Any, server: ServerProcess) -> Iterator[Any]:
    made: list[StepLoop] = []

    def make(
        version: str | None = "1",
        events: bool = False,
        model: Any = "standin",
        blocks: int = 40,
        **extra: Any,
    ) -> StepLoop:
        by_layer = bool(extra.get("load_by_layer"))
        settings = {
            "store": server.address,
            "load": "always",
            "weights_version": version,
            "page_tokens": PAGE,
            "start_wait_s": 20.0,
        }
        more: dict[str, Any] = {
            "blocks": blocks,
            "events": events,
            "model": str(model),
            "by_layer": by_layer,
        }
        made.append(StepLoop(module, settings | extra, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def bytes_of(engine: StepLoop, blocks: list[int]) -> bytes:
    return b"".join(
        tensor.numpy()[block].tobytes()
        for tensor in engine.cache.kv_caches.values()
        for block in blocks
    )


def attached(engine: StepLoop) -> StepLoop:
    """Once its worker has the server's memory."""
    engine.idle()
    assert engine.match(make_request([1] * (PAGE + 1))) == (0, False)
    return engine


def stored(engine: StepLoop, prompt: list[int], blocks: list[int]) -> Any:
    """A request that is computed and saved; what the client is told."""
    request = make_request(prompt)
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (0, False)
    engine.compute(request, blocks)
    told = engine.scheduler.request_finished(request, blocks)
    engine.idle()
    assert engine.pool.pinned == 0
    return told


def test_what_one_engine_computed_another_loads_byte_for_byte(engines: Any) -> None:
    first, second = attached(engines("a")), attached(engines("a"))
    delays, told = stored(first, PROMPT, [1, 2, 3, 4, 5])
    assert not delays
    assert told["kvstore"]["reused_tokens"] == 0
    request = make_request(PROMPT)
    second.scheduler.on_new_request(request)
    tokens, is_async = second.match(request)
    assert (tokens, is_async) == (2 * PAGE, False)
    blocks = [11, 12, 13, 14, 15]
    second.compute(request, blocks, external=tokens)
    assert bytes_of(second, blocks[:4]) == bytes_of(first, [1, 2, 3, 4])
    assert not second.bad_blocks
    sources = second.scheduler.get_external_cache_hit_sources(request, tokens)
    assert sum(sources.values()) == tokens
    _, told = second.scheduler.request_finished(request, blocks)
    assert told["kvstore"]["reused_tokens"] == 2 * PAGE


class Listening:
    """A session, and what it is told of prefill."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.prefill: list[tuple[int, int, float]] = []
        self.saved: list[float] = []

    def report_prefill(self, tokens: int, before: int, seconds: float) -> None:
        self.prefill.append((tokens, before, seconds))
        self._session.report_prefill(tokens, before, seconds)

    def report_saved(self, seconds: float) -> None:
        self.saved.append(seconds)
        self._session.report_saved(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def test_the_store_is_told_how_long_prompts_took_and_what_hits_saved(engines: Any) -> None:
    engine = attached(engines("told", blocks=400))
    scheduler = engine.scheduler._scheduler
    listening = Listening(scheduler.lookups._session)
    scheduler.lookups.use(listening)
    prompt = list(range(100))
    for times in (1, 2):
        request = make_request(prompt)
        engine.scheduler.on_new_request(request)
        external, _ = engine.match(request)
        assert external == (0 if times == 1 else 6 * PAGE)
        engine.compute(request, list(range(1 + 13 * (times - 1), 14 * times)), external=external)
        request.num_tokens += 1  # its first token
        engine.scheduler.request_finished(request, [])
        engine.idle()
    ((tokens, before, seconds),) = listening.prefill  # the second computed too little to say
    assert (tokens, before) == (100, 0)
    assert seconds > 0
    rate = scheduler.choice.prefill_tokens_a_second
    assert listening.saved == [pytest.approx(6 * PAGE / rate)]


@pytest.mark.parametrize(
    ("mode", "metadata", "by_layer"),
    [
        ("NONE", {"layer": 1}, 1),
        ("PIECEWISE", {"layer": 1}, 1),
        ("FULL", {"layer": 1}, 0),
        ("NONE", None, 0),
        ("SOME_NEW_MODE", {"layer": 1}, 0),
    ],
)
def test_layers_come_during_a_forward_that_asks_for_them_and_else_before_it(
    engines: Any, mode: str, metadata: Any, by_layer: int
) -> None:
    name = f"layers {mode} {metadata}"
    first, second = attached(engines(name)), attached(engines(name, load_by_layer=True))
    stored(first, PROMPT, [1, 2, 3, 4, 5])
    context = SimpleNamespace(
        cudagraph_runtime_mode=SimpleNamespace(name=mode), attn_metadata=metadata
    )
    blocks, expected = [11, 12, 13, 14, 15], bytes_of(first, [1, 2, 3, 4])
    begin = second.worker.start_load_kv

    def begin_and_compute(_: Any) -> None:
        begin(context)
        if not by_layer:
            assert bytes_of(second, blocks[:4]) == expected
        for layer in second.cache.kv_caches:
            second.worker.wait_for_layer_load(layer)
        assert bytes_of(second, blocks[:4]) == expected

    request = make_request(PROMPT)
    second.scheduler.on_new_request(request)
    assert second.match(request) == (2 * PAGE, False)
    second.worker.start_load_kv = begin_and_compute
    second.compute(request, blocks, external=2 * PAGE)
    assert not second.bad_blocks
    told = second.scheduler.get_kv_connector_stats().data
    assert told["loads_ok"] == 1
    assert told.get("loads_by_layer", 0) == by_layer


def test_a_slow_copy_is_loaded_beside_the_steps_and_reported_once(engines: Any) -> None:
    engine = attached(engines("b"))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    engine.scheduler._scheduler.choice.copy_bytes_a_second = 1.0
    request = make_request(PROMPT)
    engine.scheduler.on_new_request(request)
    tokens, is_async = engine.match(request)
    assert (tokens, is_async) == (2 * PAGE, True)
    blocks = [11, 12, 13, 14]
    engine.scheduler.update_state_after_alloc(request, (blocks,), tokens)
    received: list[str] = []
    while engine.scheduler.has_pending_push_work():
        received += engine.step()
    assert received == [request.request_id]
    assert bytes_of(engine, blocks) == bytes_of(engine, [1, 2, 3, 4])


def test_an_engine_of_other_weights_and_a_request_of_another_salt_find_nothing(
    engines: Any,
) -> None:
    first, other = attached(engines("c")), attached(engines("d"))
    stored(first, PROMPT, [1, 2, 3, 4, 5])
    for engine, request, expected in (
        (other, make_request(PROMPT), 0),
        (first, make_request(PROMPT, cache_salt="x"), 0),
        (first, make_request(PROMPT), 2 * PAGE),
    ):
        engine.scheduler.on_new_request(request)
        assert engine.match(request)[0] == expected


def test_two_images_behind_the_same_placeholder_find_nothing_of_each_other(engines: Any) -> None:
    from types import SimpleNamespace

    def with_image(name: str) -> Any:
        place = SimpleNamespace(offset=4, length=6)
        return make_request(
            PROMPT, mm_features=[SimpleNamespace(identifier=name, mm_position=place)]
        )

    engine = attached(engines("e"))
    cat = with_image("cat")
    engine.scheduler.on_new_request(cat)
    assert engine.match(cat)[0] == 0
    engine.compute(cat, [1, 2, 3, 4, 5])
    engine.scheduler.request_finished(cat, [1, 2, 3, 4, 5])
    engine.idle()
    for request, expected in (
        (with_image("dog"), 0),
        (make_request(PROMPT), 0),
        (with_image("cat"), 2 * PAGE),
    ):
        engine.scheduler.on_new_request(request)
        assert engine.match(request)[0] == expected


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"prompt_token_ids": None, "prompt_embeds": object()}, "prompt embeddings"),
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"pooling_params": object()}, "a pooling request"),
    ],
)
def test_requests_that_tokens_do_not_name_load_and_save_nothing(
    engines: Any, more: dict[str, Any], why: str
) -> None:
    engine = attached(engines("o"))
    plain = make_request(PROMPT)
    engine.scheduler.on_new_request(plain)
    engine.match(plain)
    engine.compute(plain, [1, 2, 3, 4, 5])
    engine.scheduler.request_finished(plain, [1, 2, 3, 4, 5])
    engine.idle()
    before = engine.scheduler.get_kv_connector_stats().data.get("pages_saved", 0)
    assert before or match(engine)[0] == 2 * PAGE
    for tokens in (PROMPT, list(range(300, 340))):
        made = make_request(tokens, **more)
        engine.scheduler.on_new_request(made)
        assert engine.match(made) == (0, False)
        engine.compute(made, [11, 12, 13, 14, 15])
        _, told = engine.scheduler.request_finished(made, [11, 12, 13, 14, 15])
        engine.idle()
        assert (told["kvstore"]["reused_tokens"], told["kvstore"]["reason"]) == (0, why)
        assert engine.pool.pinned == 0
    stats = engine.scheduler.get_kv_connector_stats()
    assert stats is None or not stats.data.get("pages_saved")


def test_stored_blocks_become_events_under_the_engines_own_hashes(engines: Any) -> None:
    engine = attached(engines("f", events=True))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    [event] = engine.scheduler.take_events()
    assert event.told["block_hashes"] == [("int", bytes([number])) for number in range(4)]
    assert event.told["parent_block_hash"] is None
    assert event.told["token_ids"] == PROMPT[: 2 * PAGE]
    assert (event.told["block_size"], event.told["medium"]) == (BLOCK, "STORAGE")
    assert not engine.scheduler.take_events()
    quiet = attached(engines("g"))
    stored(quiet, PROMPT, [1, 2, 3, 4, 5])
    assert not quiet.scheduler.take_events(), "vLLM's events are off"


def test_a_reset_ignores_what_was_stored_and_deletes_nothing(engines: Any) -> None:
    first, other = attached(engines("h")), attached(engines("h"))
    stored(first, PROMPT, [1, 2, 3, 4, 5])
    assert first.scheduler.reset_cache()
    for engine, expected in ((first, 0), (other, 2 * PAGE)):
        request = make_request(PROMPT)
        engine.scheduler.on_new_request(request)
        assert engine.match(request)[0] == expected


@pytest.mark.parametrize("call", ["reload_weights", "wake_up"])
def test_a_reload_or_a_wake_up_without_a_version_turns_it_off_with_one_line(
    engines: Any, caplog: pytest.LogCaptureFixture, call: str, tmp_path: Any
) -> None:
    (tmp_path / "model.safetensors").write_bytes(call.encode())
    engine = attached(engines(None, model=tmp_path))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    matched = make_request(PROMPT)
    engine.scheduler.on_new_request(matched)
    assert engine.match(matched) == (2 * PAGE, False)
    blocks = [11, 12, 13, 14, 15]
    with caplog.at_level(logging.WARNING, "kvstore.vllm"):
        getattr(engine.engine_worker, call)()
        engine.compute(matched, blocks, external=2 * PAGE)
        assert engine.bad_blocks == {11, 12, 13, 14}
        engine.scheduler.request_finished(matched, blocks)
        stored(engine, PROMPT, [1, 2, 3, 4, 5])  # which finds nothing
        stored(engine, list(range(300, 340)), [1, 2, 3, 4, 5])
    stats = engine.scheduler.get_kv_connector_stats().data
    assert stats["pages_saved"] == 2, "those of before"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("off, the engine runs without it")
    assert call in line
    assert "weights_version" in line
    other = attached(engines(None, model=tmp_path))
    assert match(other) == (2 * PAGE, False), "what was stored before is others' still"


def test_other_weights_under_a_version_are_shared_with_nobody_else(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = attached(engines("n"))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    with caplog.at_level(logging.WARNING, "kvstore.vllm"):
        engine.engine_worker.wake_up()
        assert match(engine) == (2 * PAGE, False)
        assert engine.scheduler.reset_cache(), "as a trainer does that updates weights"
        engine.engine_worker.reload_weights(1.0)
        stored(engine, PROMPT, [1, 2, 3, 4, 5])  # whose step finds out, and saves nothing
        assert match(engine) == (0, False)
        stored(engine, PROMPT, [1, 2, 3, 4, 5])
    assert match(engine) == (2 * PAGE, False)
    assert match(attached(engines("n"))) == (2 * PAGE, False), "of before the change"
    [line] = [record.getMessage() for record in caplog.records]
    assert "the weights are others" in line


@pytest.mark.parametrize("call", ["write_weights", "reload_weights"])
def test_a_load_by_layers_of_other_weights_moves_no_page_and_keeps_no_layer_waiting(
    engines: Any, call: str
) -> None:
    """It was planned before the change, and comes with a forward that asks layer by layer."""
    engine = attached(engines(f"r {call}", load_by_layer=True))
    blocks = [11, 12, 13, 14, 15]

    def store_sevens() -> None:
        engine.cache.raw.fill_(7)
        stored(engine, PROMPT, [1, 2, 3, 4, 5])

    def loaded(change: float) -> dict[str, float]:
        engine.cache.raw.zero_()
        engine.scheduler.get_kv_connector_stats()
        request = make_request(PROMPT)
        engine.scheduler.on_new_request(request)
        assert engine.match(request) == (2 * PAGE, False)
        if change:
            getattr(engine.engine_worker, call)(change)
        engine.compute(request, blocks, external=2 * PAGE)
        engine.scheduler.request_finished(request, blocks)
        stats: dict[str, float] = engine.scheduler.get_kv_connector_stats().data
        assert set(engine.read) == set(engine.cache.kv_caches), "the forward went on"
        return stats

    store_sevens()
    assert loaded(0.0)["loads_by_layer"] == 1
    assert set(bytes_of(engine, blocks[:4])) == {7}
    assert not engine.bad_blocks
    stats = loaded(1e-3)
    assert (stats["loads_by_layer"], stats["loads_failed"]) == (1, 1)
    assert stats.get("load_bytes", 0) == 0
    assert engine.bad_blocks == set(blocks[:4]), "the engine computes them"
    assert not any(map(any, engine.read.values())), "no layer had a byte of a page"
    assert not any(bytes_of(engine, [*range(40)])), "nor got one later"
    engine.bad_blocks.clear()
    store_sevens()  # which finds nothing: what was stored before is not used any more
    assert loaded(0.0)["loads_by_layer"] == 1, "those of the weights that are there now"
    assert set(bytes_of(engine, blocks[:4])) == {7}
    assert not engine.bad_blocks


def test_weights_that_cannot_be_read_move_no_page_and_the_engine_goes_on(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = attached(engines("p"))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    engine.worker._weights._sample._bytes.clear()
    request = make_request(PROMPT)
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (2 * PAGE, False)
    with caplog.at_level(logging.ERROR, "kvstore.vllm"):
        engine.compute(request, [11, 12, 13, 14, 15], external=2 * PAGE)
    assert engine.bad_blocks == {11, 12, 13, 14}
    assert ["weights" in record.getMessage() for record in caplog.records] == [True]


def match(engine: StepLoop) -> tuple[int, bool]:
    """What there is of the prompt for a request that leaves again."""
    request = make_request(PROMPT)
    engine.scheduler.on_new_request(request)
    answer = engine.match(request)
    engine.scheduler.request_finished(request, [])
    return answer


def test_the_failure_policy_becomes_recompute_unless_the_user_keeps_it(engines: Any) -> None:
    assert engines("i").config.kv_transfer_config.kv_load_failure_policy == "recompute"
    kept = engines("i", keep_failure_policy=True)
    assert kept.config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_a_hook_that_fails_is_a_miss_and_said_once(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = attached(engines("j"))
    with caplog.at_level(logging.ERROR, "kvstore.vllm"):
        for _ in range(3):
            assert engine.scheduler.get_num_new_matched_tokens(None, 0) == (0, False)
            engine.scheduler.update_state_after_alloc(None, None, 8)
            assert engine.scheduler.request_finished(None, []) == (False, None)
    assert len(caplog.records) == 3, "one line for each hook"
    assert engine.scheduler.get_kv_connector_stats().data["hook_errors"] == 9
    assert stored(engine, PROMPT, [1, 2, 3, 4, 5])[1]["kvstore"]["reused_tokens"] == 0


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"stroe": "x"}, "stroe"),
        ({"store": "kvstore://host:1"}, "network"),
        ({"page_tokens": 12}, "multiple"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_misses(
    engines: Any, caplog: pytest.LogCaptureFixture, extra: dict[str, Any], word: str
) -> None:
    with caplog.at_level(logging.ERROR, "kvstore.vllm"):
        engine = engines("k", **extra)
    assert [word in record.getMessage() for record in caplog.records] == [True]
    request = make_request(PROMPT)
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (0, False)
    engine.compute(request, [1, 2, 3, 4, 5])
    assert engine.scheduler.request_finished(request, []) == (False, None)
    assert not engine.scheduler.has_pending_push_work()


def test_pins_are_counted_at_their_peak_and_stay_under_a_tenth_of_the_pool(engines: Any) -> None:
    engine = attached(engines("l"))
    stored(engine, list(range(200, 200 + 6 * PAGE)), list(range(1, 13)))
    counted = engine.scheduler.get_kv_connector_stats().data
    assert 0 < counted["pinned_blocks_peak"] <= 4, "40 blocks in all"
    assert counted["saves_over_pin_cap"] > 0
    assert counted["pages_saved"] == 6, "the rest in turns, after the end"
    assert counted.get("pages_left_behind", 0) == 0


def test_more_pages_at_once_than_staging_takes_are_all_saved(engines: Any) -> None:
    engine = attached(engines("burst", blocks=8000))
    pages, requests, first = 60, [], 1
    for number in range(20):
        request = make_request(list(range(1000 * number, 1000 * number + pages * PAGE + 2)))
        count = -(-request.num_tokens // BLOCK)
        requests.append((request, list(range(first, first + count)), 0))
        first += count
    for request, blocks, _ in requests:
        engine.scheduler.on_new_request(request)
        assert engine.match(request) == (0, False)
        engine.scheduler.update_state_after_alloc(request, (blocks,), 0)
        for block in blocks[: request.num_tokens // BLOCK]:
            engine.pool.blocks[block].block_hash = object()
    engine.step({each.request_id: each.num_tokens for each, _, _ in requests}, tuple(requests))
    for request, blocks, _ in requests:
        request.num_computed_tokens = request.num_tokens
        engine.scheduler.request_finished(request, blocks)
    engine.idle()
    counted = engine.scheduler.get_kv_connector_stats().data
    assert counted["pages_saved"] == 20 * pages
    assert not counted.get("pages_lost")
    assert engine.pool.pinned == 0


def test_a_request_is_told_that_leases_cut_its_hit_short_and_the_log_how_to_change_that(
    engines: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It said "miss", as of a prompt that nobody has stored."""
    with ServerProcess(tmp_path / "small", "--host-bytes=4MiB", "--disk-bytes=64MiB") as small:
        engine = attached(engines("cut", blocks=2000, store=small.start().address))
        pages = 60
        prompts = [
            list(range(2000 * number, 2000 * number + pages * PAGE + 2)) for number in range(9)
        ]
        for prompt in prompts:
            stored(engine, prompt, list(range(1, 2 + len(prompt) // BLOCK)))
        waiting = [make_request(prompt) for prompt in prompts]
        found = []
        for request in waiting:
            engine.scheduler.on_new_request(request)
            found.append(engine.match(request)[0])
        assert found[0] == pages * PAGE
        assert found[-1] < pages * PAGE
        told = [engine.scheduler.request_finished(each, [])[1]["kvstore"] for each in waiting]
        assert told[0]["reason"] == "always: settings"
        assert told[-1]["reason"] == "lease limit"
        assert engine.scheduler.get_kv_connector_stats().data["lookups_cut"] >= 1
        lines = [each for each in caplog.messages if "a quarter of the store's memory" in each]
        assert len(lines) == 1, "once for all of them"
        assert "host_bytes" in lines[0]


@pytest.mark.parametrize("aged_s", [0.0, GRANT_S_MAX])
def test_a_grant_that_expired_while_the_engine_was_idle_is_made_anew(
    engines: Any, aged_s: float
) -> None:
    engine = engines(f"n{aged_s}")
    lookups = engine.scheduler._scheduler.lookups
    deadline = time.monotonic() + 20
    while not lookups._grants:
        lookups.wait(0.05)
        assert time.monotonic() < deadline, "no grant at start"
    asked_s, grant = lookups._grants.popleft()
    forgotten = tuple(bytes(len(token)) for token in grant.tokens)
    lookups._grants.append((asked_s - aged_s, replace(grant, tokens=forgotten)))
    stored(engine, PROMPT, [1, 2, 3, 4, 5])
    again = make_request([*PROMPT, 1])
    engine.scheduler.on_new_request(again)
    assert engine.match(again) == (2 * PAGE, False)


def test_the_role_is_told_by_vllm_and_a_worker_plans_nothing(engines: Any) -> None:
    engine = engines("m")
    assert engine.worker.get_num_new_matched_tokens(make_request(PROMPT), 0) == (0, False)
    assert engine.scheduler.get_finished(set()) == (None, None)
    assert engine.module.KVStoreConnector.requires_kv_delivery.fget(engine.scheduler) is False
    assert KVConnectorRole.WORKER is not KVConnectorRole.SCHEDULER


def test_a_directory_that_cannot_be_made_is_named_and_the_engine_runs(
    engines: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    with caplog.at_level(logging.INFO, "kvstore"):
        engine = engines(store=str(tmp_path / "file" / "kv"))
        request = make_request(PROMPT)
        engine.scheduler.on_new_request(request)
        assert engine.match(request) == (0, False)
        engine.compute(request, [1, 2, 3, 4, 5])
        engine.scheduler.request_finished(request, [1, 2, 3, 4, 5])
    [line] = [each.getMessage() for each in caplog.records if "identity" in each.getMessage()]
    assert "misses until one does" in line
    assert f"{tmp_path}/file/kv cannot be made: " in line
    assert "Not a directory" in line
