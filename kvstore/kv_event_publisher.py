"""Page events in vLLM's KV event format over ZMQ, for routers that know where a prompt's pages are.

As vLLM's publisher: PUB sends (topic, number, batch), ROUTER answers "from that number on" out of a
buffer; msgpack maps tagged by "type" in an array [time, events, rank]. A page is a block: its key
is the block's hash, its medium CPU (host) or STORAGE (disk, Redis). Events carry tokens, which are
prompts, of all tenants: config allows no address but of this host. The store never waits: what a
full queue does not take is a gap in the numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from kvstore.errors import DirectoryError
from kvstore.page_sweep import chain_ends
from kvstore.state import DISK, HOST, NO_PAGE, REDIS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.state import StoreState

QUEUE_STEPS_MAX = 4096
BUFFER_STEPS = 10_000
SEND_MESSAGES_MAX = 100_000
POLL_MS = 50
ANNOUNCED_PAGES = 256  # with the lock held once
STOP_S = 2.0
MEDIA = {HOST: "CPU", DISK: "STORAGE", REDIS: "STORAGE"}
END = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger("kvstore.server")


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages that follow each other came into a medium."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages left a medium."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one message carries."""

    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Gap:
    """So many batches did not fit in the queue."""

    batches: int


class KvEventPublisher:
    """Owns the sockets and their thread. Give `record` to EventLog.listen."""

    def __init__(
        self,
        state: StoreState,
        spec_of: Callable[[bytes], str | None],
        *,
        listen: str,
        replay_listen: str = "",
        topic: str = "",
    ) -> None:
        """spec_of: the JSON of a namespace's spec. Raises DirectoryError when it can't listen."""
        self._state = state
        self._spec_of = spec_of
        self._adapters: dict[bytes, str | None] = {}
        self._topic = topic.encode()
        self._queue: queue.Queue[list[BlockStored | BlockRemoved] | _Gap] = queue.Queue(
            QUEUE_STEPS_MAX
        )
        self._dropped = 0
        self._number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._sender = self._context.socket(zmq.PUB)
        self._replayer = self._context.socket(zmq.ROUTER) if replay_listen else None
        try:
            self._sender.set_hwm(SEND_MESSAGES_MAX)
            self._sender.bind(listen)
            if self._replayer is not None:
                self._replayer.bind(replay_listen)
        except zmq.ZMQError as exc:
            self._close()
            raise DirectoryError(f"events_listen: {listen} {replay_listen}: {exc}") from exc
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)

    @property
    def endpoints(self) -> list[str]:
        """Where it listens: events, then replay."""
        sockets = [self._sender, *filter(None, (self._replayer,))]
        return [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets]

    def start(self) -> None:
        """Send from now on."""
        self._thread.start()

    def record(self, pages: NDArray[np.int32], tier: int, is_stored: bool) -> None:
        """Called under the store's lock, with pages that are still in its table."""
        events: list[BlockStored | BlockRemoved] = []
        events += self._stored(pages, tier) if is_stored else self._removed(pages, tier)
        try:
            if self._dropped:
                self._queue.put_nowait(_Gap(self._dropped))
                self._dropped = 0
            self._queue.put_nowait(events)
        except queue.Full:
            self._dropped += 1

    def stop(self) -> None:
        """Send what is queued and close."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._close()

    def _stored(self, pages: NDArray[np.int32], tier: int) -> Iterator[BlockStored]:
        """One event for each run of pages that follow each other."""
        index, table = self._state.index, self._state.index.table
        ids = pages.tolist()
        start = 0
        while start < len(ids):
            stop = start + 1
            while stop < len(ids) and int(table.parent[ids[stop]]) == ids[stop - 1]:
                stop += 1
            run, parent = ids[start:stop], int(table.parent[ids[start]])
            info = self._state.trees[index.root_of(run[0])]
            tokens = b"".join(map(index.tokens_of, run))
            yield BlockStored(
                block_hashes=[table.key_of(page) for page in run],
                parent_block_hash=table.key_of(parent) if parent != NO_PAGE else None,
                token_ids=np.frombuffer(tokens, "<i4").tolist(),
                block_size=info.page_tokens,
                lora_id=None,
                medium=MEDIA[tier],
                lora_name=self._adapter(info.namespace),
                locality="REMOTE" if tier == REDIS else "LOCAL",
            )
            start = stop

    def _removed(self, pages: NDArray[np.int32], tier: int) -> Iterator[BlockRemoved]:
        keys = [self._state.index.table.key_of(page) for page in pages.tolist()]
        yield BlockRemoved(keys, MEDIA[tier], "REMOTE" if tier == REDIS else "LOCAL")

    def _adapter(self, namespace: bytes) -> str | None:
        if namespace not in self._adapters:
            text = self._spec_of(namespace)
            found = json.loads(text)["adapter"] if text is not None else "none"
            self._adapters[namespace] = found if found != "none" else None
        return self._adapters[namespace]

    # The thread

    def _run(self) -> None:
        announced = False
        while True:
            with contextlib.suppress(Exception):  # a malformed request is not our trouble
                self._answer_replays()
            if not announced and self._state.warm:
                announced = True
                self._announce()
            try:
                found = self._queue.get(timeout=POLL_MS / 1000)
            except queue.Empty:
                if self._stopping.is_set():
                    return
                continue
            try:
                self._publish(found)
            except Exception:  # the thread must live on; subscribers see the gap
                _log.exception("a batch of events was not sent")

    def _publish(self, found: list[BlockStored | BlockRemoved] | _Gap) -> None:
        if isinstance(found, _Gap):
            self._number += found.batches
            return
        payload = self._encoder.encode(EventBatch(time.time(), found, 0))
        number, self._number = self._number, self._number + 1
        self._buffer.append((number, payload))
        self._sender.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _announce(self) -> None:
        """What was there at the start, from disk: nobody has told of it. In pieces, so that what
        comes to the disk meanwhile may be told of twice."""
        state = self._state
        for pages, sequences in self._at_start():
            for start in range(0, len(pages), ANNOUNCED_PAGES):
                part = slice(start, start + ANNOUNCED_PAGES)
                with state.lock:
                    table, ids = state.index.table, pages[part]
                    same = (table.node[ids] >= 0) & (table.sequence[ids] == sequences[part])
                    events = list(self._stored(ids[same & state.in_tier(ids, DISK)], DISK))
                if events:
                    self._publish(list(events))

    def _at_start(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint64]]]:
        """Pages with their sequence numbers, chain by chain, without those of earlier chains."""
        state = self._state
        with state.lock:
            roots = list(state.trees)
        told = np.zeros(0, np.bool_)
        ends = [end for each in chain_ends(state, roots).values() for end in each]
        for part in state.pieces(len(ends)):
            for page, sequence in ends[part]:
                with state.lock:
                    table = state.index.table
                    if not table.is_live(page) or int(table.sequence[page]) != sequence:
                        continue
                    chain, rows = state.index.chain(page), table.rows
                    sequences = table.sequence[chain]
                if rows > len(told):
                    told = np.concatenate((told, np.zeros(rows - len(told), np.bool_)))
                fresh = ~told[chain]
                told[chain] = True
                yield chain[fresh], sequences[fresh]

    def _answer_replays(self) -> None:
        """Batches from the number that was asked for on, as far as the buffer goes, then END."""
        if self._replayer is None or not self._replayer.poll(0):
            return
        client, *rest = self._replayer.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            return
        first = int.from_bytes(rest[1], "big")
        for number, payload in list(self._buffer):
            if number >= first:
                message = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                self._replayer.send_multipart(message, zmq.NOBLOCK)
        self._replayer.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)

    def _close(self) -> None:
        sockets: list[Any] = [self._sender, self._replayer]
        for each in filter(None, sockets):
            each.close(linger=0)
        self._context.term()
