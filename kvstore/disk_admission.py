"""The store's admission to disk at work: told of pages by number, asked which are to be written.

When it is asked is the write policy's: at commit and at each use (through), or when a page leaves
memory (back, selective). It lives under the store's lock. Durable commits do not ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import DISK, HOST, rows_of
from kvstore.tiers.admission import make_admission

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.config import StoreConfig
    from kvstore.prefix_index.page_table import PageTable

# What is remembered is for so many pages at least.
PAGES_MIN = 4096
NO_PAGES = np.zeros(0, np.int32)


class DiskAdmission:
    """For one store; see tiers/admission.py for what each of them admits."""

    def __init__(self, config: StoreConfig, table: PageTable, pages: int) -> None:
        """pages: about how many the disk holds."""
        name = config.admission
        if config.write_policy == "selective" and name == "always":
            name = "second-touch"
        self.name = name
        self._through = config.write_policy == "through"
        self._selects = name != "always"
        self._made = make_admission(name, max(pages, PAGES_MIN))
        self._table = table

    @property
    def keeps_back(self) -> bool:
        """Whether pages may be in memory only, and nobody failed to write them."""
        return self._selects or not self._through

    def stored(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages were published; those to write now."""
        if not self._selects:
            return pages if self._through else NO_PAGES
        self._made.seen(self._keys(pages))
        return self.worth_writing(pages) if self._through else NO_PAGES

    def touched(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages from the first of a chain on were used; those to write now."""
        if not self._selects:
            return NO_PAGES
        self._made.seen(self._keys(pages))
        if not self._through:
            return NO_PAGES
        state = self._table.state[rows_of(pages)]
        only_host = ((state >> HOST) & 1 == 1) & ((state >> DISK) & 1 == 0)
        return self.worth_writing(pages[only_host]) if only_host.any() else NO_PAGES

    def worth_writing(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Of pages that only memory has, those that the disk is to keep."""
        if not self._selects or not len(pages):
            return pages
        uses = self._table.hits[pages].astype(np.int64)
        return pages[self._made.admits(self._keys(pages), uses)]

    def gone(self, keys: NDArray[np.uint64]) -> None:
        """Pages are in no tier any more. keys: shape [n, 2]."""
        if self._selects and len(keys):
            self._made.gone(keys[:, 0])

    def evicted(self, pages: NDArray[np.int32]) -> None:
        """Pages are about to leave the disk for others."""
        if self._selects and len(pages):
            self._made.evicted(self._keys(pages))

    def _keys(self, pages: NDArray[np.int32]) -> NDArray[np.uint64]:
        keys: NDArray[np.uint64] = self._table.key[pages, 0]
        return keys
