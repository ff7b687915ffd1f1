"""Page events as a router sees them: vLLM's format, over a real socket, with replay."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, prompt, save

from kvstore import Store
from kvstore.errors import ConfigError, DirectoryError
from kvstore.events_listen import check_events_listen
from kvstore.removal import Selection
from kvstore.server import Server
from kvstore.server_config import ServerConfig

zmq = pytest.importorskip("zmq", reason="events need pyzmq")
msgspec = pytest.importorskip("msgspec", reason="events need msgspec")

from kvstore import kv_event_publisher  # noqa: E402 # needs both
from kvstore.kv_event_publisher import END, EventBatch, KvEventPublisher  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_MS = 10_000


class Router:
    """A subscriber, as one is written against vLLM."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.context = zmq.Context()
        events, self.replay_endpoint = publisher.endpoints
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(events)

    def next(self) -> tuple[int, Any]:
        assert self.events.poll(WAIT_MS), "no event came"
        _, number, payload = self.events.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def close(self) -> None:
        self.context.destroy(linger=0)


def replayed(router: Router, first: int) -> list[tuple[int, Any]]:
    """All batches from a number on, over a DEALER, which may get several answers."""
    found = []
    with router.context.socket(zmq.DEALER) as asking:
        asking.connect(router.replay_endpoint)
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        while asking.poll(WAIT_MS):
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    raise AssertionError("the replay did not end")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Store, KvEventPublisher, Router]]:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB") as store:
        publisher = KvEventPublisher(
            store.state,
            store.spec_json,
            listen=f"ipc://{tmp_path}/events",
            replay_listen=f"ipc://{tmp_path}/replay",
        )
        store.events.listen(publisher.record)
        publisher.start()
        router = Router(publisher)
        # A subscription takes a moment that nobody announces: store until the first event is seen.
        for seed in itertools.count(1000):
            save(store.session(SPEC), prompt(seed, 1), durable=True)
            if router.events.poll(100):
                break
        while router.events.poll(300):
            router.next()
        yield store, publisher, router
        router.close()
        publisher.stop()


def test_a_router_sees_what_is_stored_where_and_what_leaves(
    world: tuple[Store, KvEventPublisher, Router],
) -> None:
    store, _, router = world
    save(store.session(SPEC), prompt(0, 3), durable=True)
    first, (when, [stored], rank) = router.next()
    second, (_, [on_disk], _) = router.next()
    assert (second, rank) == (first + 1, 0)
    assert when > 1e9
    assert stored["type"] == "BlockStored"
    assert (stored["medium"], on_disk["medium"]) == ("CPU", "STORAGE")
    assert stored["token_ids"] == prompt(0, 3).tolist()
    assert (stored["block_size"], len(stored["block_hashes"])) == (PAGE_TOKENS, 3)
    assert (stored["parent_block_hash"], stored["lora_name"]) == (None, None)
    chain = store.chains(sort="size")[0][0].chain_id
    assert stored["block_hashes"][-1].hex() == chain
    save(store.session(SPEC), prompt(0, 4), durable=True)
    _, (_, [more], _) = router.next()
    assert more["parent_block_hash"] == stored["block_hashes"][-1]
    router.next()
    store.evict(Selection(root=store.root(SPEC.namespace), prefix=prompt(0, 1)))
    gone = [router.next()[1][1][0] for _ in range(2)]
    assert {each["type"] for each in gone} == {"BlockRemoved"}
    assert {each["medium"] for each in gone} == {"CPU", "STORAGE"}
    assert set(gone[0]["block_hashes"]) == {*stored["block_hashes"], *more["block_hashes"]}


def test_who_missed_some_can_ask_for_them(world: tuple[Store, KvEventPublisher, Router]) -> None:
    store, _, router = world
    save(store.session(SPEC), prompt(0, 3), durable=True)
    seen = [router.next(), router.next()]
    assert replayed(router, seen[0][0]) == seen
    assert replayed(router, seen[1][0] + 1) == []
    before = replayed(router, 0)
    assert before[-2:] == seen
    assert [number for number, _ in before] == list(range(len(before)))


def test_a_full_queue_is_a_gap_in_the_numbers_and_delays_nobody(tmp_path: Path) -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        publisher = KvEventPublisher(
            store.state,
            store.spec_json,
            listen=f"ipc://{tmp_path}/e",
            replay_listen=f"ipc://{tmp_path}/r",
        )
        session = store.session(SPEC)
        save(session, prompt(0, 1))
        ids = store.state.index.match(session.root, prompt(0, 1).tobytes())
        for _ in range(kv_event_publisher.QUEUE_STEPS_MAX + 7):
            publisher.record(ids, 0, True)
        router = Router(publisher)
        publisher.start()
        while not publisher._queue.empty():
            assert router.events.poll(100) in (0, zmq.POLLIN)
            while router.events.poll(0):
                router.next()
        publisher.record(ids, 0, True)
        last: list[tuple[int, Any]] = []
        while not last or last[-1][0] < kv_event_publisher.QUEUE_STEPS_MAX + 7:
            last = replayed(router, kv_event_publisher.QUEUE_STEPS_MAX - 1)
        numbers = [number for number, _ in last]
        assert numbers[0] == kv_event_publisher.QUEUE_STEPS_MAX - 1
        assert numbers[1] == kv_event_publisher.QUEUE_STEPS_MAX + 7
        router.close()
        publisher.stop()


@pytest.mark.slow
def test_a_server_tells_what_it_had_from_before(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, 3), durable=True)
    config = ServerConfig(
        directory=tmp_path / "s",
        host_bytes="16MiB",
        events_listen=f"ipc://{tmp_path}/e",
        events_replay_listen=f"ipc://{tmp_path}/r",
    )
    server = Server(config)
    server.start()
    assert server._events is not None
    router = Router(server._events)
    found: list[tuple[int, Any]] = []
    while not found:
        found = replayed(router, 0)
    (event,) = found[0][1][1]
    assert (event["medium"], event["token_ids"]) == ("STORAGE", prompt(0, 3).tolist())
    router.close()
    assert server.stop()


def test_a_batch_is_what_vllm_decodes() -> None:
    """The bytes that vLLM 0.1x's own structs encode for the same events (msgspec, tagged maps)."""
    batch = EventBatch(
        1.5,
        [
            kv_event_publisher.BlockStored(
                [b"k" * 16], None, [1, 2], 2, None, "CPU", None, "LOCAL"
            ),
            kv_event_publisher.BlockRemoved([b"k" * 16], "STORAGE", "LOCAL"),
        ],
        0,
    )
    stored = {
        "type": "BlockStored",
        "block_hashes": [b"k" * 16],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "locality": "LOCAL",
    }
    removed = {
        "type": "BlockRemoved",
        "block_hashes": [b"k" * 16],
        "medium": "STORAGE",
        "locality": "LOCAL",
    }
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert found == [1.5, [stored, removed], 0]


def test_only_this_host_may_hear_of_prompts(tmp_path: Path) -> None:
    for good in ("", "ipc:///run/e", "tcp://127.0.0.1:5557", "tcp://[::1]:1"):
        assert check_events_listen("events_listen", good) == good
    for bad in ("tcp://*:5557", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "ipc://", "127.0.0.1:1"):
        with pytest.raises(ConfigError, match="events_listen"):
            check_events_listen("events_listen", bad)
    with pytest.raises(ConfigError, match="events_replay_listen"):
        ServerConfig(directory=tmp_path, events_replay_listen="ipc:///run/r")
    with (
        Store.open(None, host_bytes="4MiB") as store,
        pytest.raises(DirectoryError, match="events_listen"),
    ):
        KvEventPublisher(store.state, store.spec_json, listen=f"ipc://{tmp_path}/none/e")
