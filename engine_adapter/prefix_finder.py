"""Finds the stored prefix of a batch, and holds the pages that it is made of until it is loaded.

All rows share one cache length, so the row with the least decides; transformers_adapter.py draws
it. A page that also lies in the pool on the device is taken from there, and needs no staging. Must
not be here: how pages become layers (prefix_load.py), what is kept on the device.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.model_probe import prefill
from kvstore.engine_adapter.prefix_load import PrefixLoad, RowPages
from kvstore.kernels.paged_kv import page_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvstore.device_pages import DeviceLease, DevicePages
    from kvstore.engine_adapter.layout import LayerKv
    from kvstore.engine_adapter.page_copier import PageCopier
    from kvstore.engine_adapter.transformers_cache import Row, StoreLink
    from kvstore.interface import MatchLike

DEVICE = "device"


class PrefixFinder:
    """For one batch: find() once. `deadline_s` is for bringing pages into memory."""

    def __init__(
        self,
        link: StoreLink,
        rows: Sequence[Row],
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        pool: DevicePages | None,
        deadline_s: float,
    ) -> None:
        self._link = link
        self._inputs = input_ids, mask
        self._pool = pool
        self._deadline = time.monotonic() + deadline_s
        self._rows = [FoundRow(row) for row in rows]
        # One column at least is the engine's to compute: it needs logits to go on from.
        self._columns = rows[0].padding + len(rows[0].tokens) - 1

    def find(self) -> PrefixLoad | None:
        """The longest prefix that all rows have; None when there is none.

        Whatever the store raises is passed on, and nothing is held then.
        """
        with ExitStack() as held:
            for row in self._rows:
                row.match = held.enter_context(self._link.session.match(row.tokens))
                self._columns = min(self._columns, row.padding + row.match.tokens)
            for row in self._rows:
                self._stage(row, held)
            for row in self._rows:
                self._choose(row)
            tiers = Counter(name for row in self._rows for name in row.tiers)
            if not tiers:
                return None
            pages = HeldPages(self._link, self._columns, self._rows, self._inputs, held.pop_all())
        device = tiers[DEVICE]
        self._link.count(pages_from_device=device, pages_from_host=tiers.total() - device)
        rows = [RowPages(row.padding, row.pages) for row in self._rows]
        return PrefixLoad(self._link.shape, self._columns, rows, pages, dict(+tiers))

    def _pages(self, row: FoundRow) -> int:
        return -(-max(0, self._columns - row.padding) // self._link.shape.page_tokens)

    def _stage(self, row: FoundRow, held: ExitStack) -> None:
        """Have the pages of a row where they can be read; fewer columns if that takes long."""
        wanted = self._pages(row)
        if not wanted:
            return
        there = 0
        if self._pool is not None:
            row.lease = self._pool.lease(row.match.versions[:wanted])
            held.callback(row.lease.release)
            there = row.lease.leading
        if there < wanted:
            row.tiers = row.match.tiers[:wanted]  # before they are staged
            left_s = max(0.0, self._deadline - time.monotonic())
            there = max(there, row.match.stage(deadline_s=left_s))
        end = row.padding + there * self._link.shape.page_tokens
        self._columns = min(self._columns, end)

    def _choose(self, row: FoundRow) -> None:
        """The pages of a row, each from the nearest memory that has it."""
        count = self._pages(row)
        here = set() if row.lease is None else {at for at in row.lease.held if at < count}
        missing = [at for at in range(count) if at not in here]
        row.tiers = [DEVICE if at in here else row.tiers[at] for at in range(count)]
        views: dict[int, memoryview] = {}
        if missing:
            first, stop = missing[0], missing[-1] + 1
            views = dict(zip(range(first, stop), row.match.views(first, stop), strict=True))
            row.reads_host = True
        pages: dict[int, torch.Tensor] = {}
        if row.lease is not None and self._pool is not None:
            self._pool.fill(row.lease, {at: views[at] for at in missing}, row.match.valid)
            pages = row.lease.pages()
        row.pages = [pages[at] if at in pages else page_tensor(views[at]) for at in range(count)]


class FoundRow:
    """What is known of one row by now."""

    match: MatchLike

    def __init__(self, row: Row) -> None:
        self.padding = row.padding
        self.tokens = row.tokens
        self.lease: DeviceLease | None = None
        self.tiers: list[str] = []  # where each page was found
        self.pages: list[torch.Tensor] = []
        self.reads_host = False


class HeldPages:
    """The pages of a load stay what they are until release(), unless valid() says that they moved.

    `close` gives the leases of the store and of the pool back.
    """

    def __init__(
        self,
        link: StoreLink,
        columns: int,
        rows: Sequence[FoundRow],
        inputs: tuple[torch.Tensor, torch.Tensor],
        held: ExitStack,
    ) -> None:
        self.device = link.model.device
        self.abandoned: Callable[[Callable[[], None]], None] = link.abandoned.append
        self._link = link
        self._columns = columns
        self._matches = [row.match for row in rows if row.reads_host]
        self._leases = [row.lease for row in rows if row.lease is not None]
        self._inputs = inputs
        self._held = held

    def copier(self, device: torch.device) -> PageCopier:
        """For what is to be read now, on whatever device a layer is."""
        copier = self._link.copier(device)
        with copier.stream():
            for lease in self._leases:
                lease.pages()  # its stream waits for those who fill them
        return copier

    def valid(self) -> bool:
        """Ask after each copy: whether it was of the pages that were matched."""
        return all(match.valid() for match in self._matches)

    def recompute(self) -> list[LayerKv]:
        """What the pages should have held: [rows, heads, columns, dim] of every layer."""
        ids, mask = (each[:, : self._columns] for each in self._inputs)
        return prefill(self._link.model, ids, mask)

    def failed(self, error: Exception) -> None:
        """Count and log it."""
        self._link.load_failed(error)

    def took(self, seconds: float) -> None:
        """Count time that the engine waited for a layer."""
        self._link.count(load_s=seconds)

    def release(self, event: Any) -> None:
        """Once; `event` is behind the last copy out of them."""
        try:
            for lease in self._leases:
                lease.release(event)
            self._held.close()
        except Exception as error:  # not the engine's problem, which has what it needs
            self._link.store_failed("releasing", error)
