"""Stands in for torch.cuda on a machine without a GPU: streams whose work runs as late as it may.

Work runs when somebody waits for it, or work behind it, and not before. So a buffer that is filled
again too early, bytes that are read too early, and work that is not ordered behind other work show
as wrong bytes, each time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from kvstore.kernels.gather import gather
from kvstore.kernels.jit import interpreted
from kvstore.kernels.scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class LateStream:
    """Runs its work in order, when it must."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._work: list[Callable[[], None]] = []
        self._at_once = at_once
        self._done = 0
        self._lock = threading.RLock()

    @property
    def length(self) -> int:
        return len(self._work)

    def give(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if self._at_once:
            self.synchronize()

    def run_until(self, count: int) -> None:
        with self._lock:
            while self._done < count:
                self._work[self._done]()
                self._done += 1

    def wait_event(self, event: LateEvent) -> None:
        self.give(event.synchronize)

    def synchronize(self) -> None:
        self.run_until(len(self._work))


class LateEvent:
    """A place in a stream."""

    def __init__(self) -> None:
        self._stream: LateStream | None = None
        self._count = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._count = stream, stream.length

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run_until(self._count)


class LateDevice:
    """As much of torch.cuda as the copies use, and gather and scatter that queue.

    `compute` is the stream that is current where no other is; `launches`: what was queued where.
    """

    Event = LateEvent

    def __init__(self, *, compute_at_once: bool = False, wrappers: bool = False) -> None:
        """compute_at_once: for an engine whose own work is no stream's, as any on a CPU.

        wrappers: they copy as for a CPU, and don't interpret the kernels, which takes long.
        """
        self._wrappers = wrappers
        self.compute = LateStream(at_once=compute_at_once)
        self.launches: list[tuple[str, LateStream]] = []
        self._local = threading.local()

    def Stream(self, device: Any) -> LateStream:
        return LateStream()

    def current_stream(self) -> LateStream:
        found: LateStream = getattr(self._local, "stream", self.compute)
        return found

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def gather(self, *args: Any) -> None:
        self._queue("gather", gather, args)

    def scatter(self, *args: Any) -> None:
        self._queue("scatter", scatter, args)

    def _queue(self, name: str, wrapper: Callable[..., None], args: tuple[Any, ...]) -> None:
        stream = self.current_stream()
        self.launches.append((name, stream))

        def run() -> None:
            with contextlib.nullcontext() if self._wrappers else interpreted():
                wrapper(*args)

        stream.give(run)
