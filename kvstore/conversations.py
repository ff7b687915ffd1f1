"""Which chains belong to a conversation that its client named, until it says that it has ended.

A conversation is known by its chains' last pages: a longer turn takes the place of the one that it
goes on from. Pages that other prompts go on from are never told to leave, whoever ends. It lives
under the store's lock. Invariant: bounded; what is too much is forgotten, the oldest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import NO_PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.prefix_index.index import PrefixIndex

CONVERSATIONS_MAX = 65_536
ENDS_MAX = 64  # chains of one conversation


class Conversations:
    """Last pages by (root of the tree, name), with the sequence number that tells a page's life."""

    def __init__(self) -> None:
        self._ends: dict[tuple[bytes, str], dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, index: PrefixIndex, root: bytes, name: str, pages: NDArray[np.int32]) -> None:
        """A stored chain, first page to last, is of this conversation."""
        if not len(pages):
            return
        ends = self._ends.pop((root, name), {})
        for page in ends.keys() & set(pages.tolist()):
            del ends[page]
        last = int(pages[-1])
        ends[last] = int(index.table.sequence[last])
        while len(ends) > ENDS_MAX:
            del ends[next(iter(ends))]
        self._ends[root, name] = ends  # the newest is last
        while len(self._ends) > CONVERSATIONS_MAX:
            del self._ends[next(iter(self._ends))]

    def end(self, index: PrefixIndex, root: bytes, name: str) -> NDArray[np.int32]:
        """Forget a conversation; the pages that are nobody's but its own."""
        ends = self._ends.pop((root, name), {})
        others = {page for each in self._ends.values() for page in each} if ends else set()
        own: list[int] = []
        for end, sequence in ends.items():
            if not index.table.is_live(end) or int(index.table.sequence[end]) != sequence:
                continue
            gone = set(own)
            page = end
            while page != NO_PAGE and page not in others:
                if set(index.children(page)) - gone:
                    break  # another prompt goes on from here
                own.append(page)
                gone.add(page)
                page = int(index.table.parent[page])
        return np.array(own, np.int32)
