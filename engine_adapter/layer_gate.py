"""Which layers of a load are there already: its thread opens them in turn, the forward waits.

Invariant: whoever waits is let through in the end, also by a load that fails; whether what it then
read was right, the load says. Must not be here: copies, engines.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class LayerGate:
    """For one load. `steps`: the layers that each brings; of a layer in two, the later counts."""

    def __init__(self, steps: Sequence[Sequence[str]]) -> None:
        self._last = {layer: step for step, layers in enumerate(steps) for layer in layers}
        self._steps = len(steps)
        self._asked: set[str] = set()
        self._ready: list[Any] = []  # of each step that is there: what the device waits for
        self._changed = threading.Condition()
        self.ended = threading.Event()  # nothing is copied any more

    def open(self, ready: Any) -> None:
        """The next step is there, for the device after `ready`."""
        with self._changed:
            self._ready.append(ready)
            self._changed.notify_all()

    def end(self) -> None:
        """The load is over; what it did not bring, nobody waits for."""
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    def wait(self, layer: str) -> Any:
        """Until a layer is there, or never will be: what the device waits for, None for nothing.

        For one that is not among them, as one that shares another's memory: until all are.
        """
        step = self._last.get(layer, self._steps - 1)
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) > step or self.ended.is_set())
            self._asked.add(layer)
            return self._ready[step] if 0 <= step < len(self._ready) else None

    @property
    def unasked(self) -> set[str]:
        """Layers that nobody waited for: they may have been read before they were there."""
        with self._changed:
            return self._last.keys() - self._asked
