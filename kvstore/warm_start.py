"""Rebuilds the trees from the disk tier's catalog after a start, while look-ups already run.

Works on pieces in order of sequence, so that parents come before children and the lock is free
again after some milliseconds; the index takes each piece in numpy. Rows that no chain
reaches give their slots back. When the disk can't be read at all, `error` says why and the store
goes on with its memory alone.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.edge_plan import PageRows
from kvstore.state import DISK, NO_PAGE, TreeInfo
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.state import StoreState
    from kvstore.tiers.disk_tier import DiskTier
    from kvstore.tiers.page_rows import RootRows

PIECE_PAGES = 2048  # in one hold of the lock: 2 us each
LOST = -2  # as a parent page: the row hangs under one that was dropped

_log = logging.getLogger("kvstore.store")


class WarmStart:
    """Owns the thread; the store is warm when it has ended."""

    def __init__(self, state: StoreState, disk: DiskTier) -> None:
        self._state = state
        self._disk = disk
        self._stopping = False
        self.error = ""
        state.warm = False
        self._thread = threading.Thread(target=self._run, name="kvstore-warm-start", daemon=True)
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """End early; what is not loaded stays on disk for the next start."""
        self._stopping = True
        self._thread.join(max(0.1, deadline - self._state.clock()))

    def _run(self) -> None:
        state = self._state
        try:
            self._disk.load()
            with state.lock:
                state.counters.key_missing += self._disk.counters.key_missing
            for rows in self._disk.rows():
                self._load_tree(rows)
                if self._stopping:
                    return
            self._disk.prove_read()
        except (TierError, OSError) as exc:
            self.error = str(exc)
            self._disk.prove_read(failed=True)
            _log.error("disk tier: %s", exc)
        except Exception as exc:
            self.error = f"reading the catalog failed: {exc!r}"
            self._disk.prove_read(failed=True)
            _log.exception("reading the catalog failed: pages not yet found stay misses")
        finally:
            with state.lock:
                state.warm = True
                state.changed.notify_all()

    def _load_tree(self, rows: RootRows) -> None:
        state = self._state
        payload = int(rows.payload_bytes.max())
        info = TreeInfo(rows.root, rows.tenant, rows.namespace, rows.page_tokens, payload)
        with state.lock:
            state.trees.setdefault(rows.root, info)
            names = {number: state.writer_id(name) for number, name in rows.writers.items()}
        writers = np.zeros(max(names, default=0) + 1, dtype=np.uint32)
        writers[list(names)] = list(names.values())
        order = np.argsort(rows.sequences, kind="stable")
        page_of_row = np.full(len(rows), LOST, dtype=np.int32)
        place = np.full(len(rows), NO_PAGE, dtype=np.int32)  # in the piece under way
        has_extras = np.zeros(len(rows), bool)
        has_extras[list(rows.extras)] = True
        for start in range(0, len(order), PIECE_PAGES):
            if self._stopping:
                return
            piece = order[start : start + PIECE_PAGES]
            place[piece] = np.arange(len(piece), dtype=np.int32)
            extras = {
                int(place[row]): rows.extras[row] for row in piece[has_extras[piece]].tolist()
            }
            self._load_piece(rows, piece, place, extras, writers, page_of_row)
            place[piece] = NO_PAGE

    def _load_piece(
        self,
        rows: RootRows,
        piece: NDArray[np.int64],
        place: NDArray[np.int32],
        extras: dict[int, bytes],
        writers: NDArray[np.uint32],
        page_of_row: NDArray[np.int32],
    ) -> None:
        """Load rows `piece`; their parents are among them or, by page_of_row, in the tree.

        `place`: where in the piece each row is; `extras`: of its rows, by that.
        """
        state = self._state
        parents = rows.parent_rows[piece]
        has_parent = parents >= 0
        here = np.where(has_parent, place[parents], NO_PAGE)
        earlier = has_parent & (here < 0)
        part = PageRows(
            tokens=np.ascontiguousarray(rows.tokens[piece]),
            parent_rows=here,
            keys=np.ascontiguousarray(rows.keys[piece]).view(np.uint64),
            sequences=rows.sequences[piece],
            payload_bytes=rows.payload_bytes[piece],
            checksums=rows.checksums[piece],
            created=rows.created_s[piece],
            writers=writers[rows.writer_ids[piece]],
            slots=rows.slots[piece],
            extras=extras,
            parent_pages=np.where(earlier, page_of_row[parents], NO_PAGE).astype(np.int32),
            parent_sequences=np.where(earlier, rows.sequences[parents], np.uint64(0)),
        )
        with state.lock:
            loaded = state.index.bulk_load(rows.root, rows.page_tokens, part, DISK)
            page_of_row[piece] = np.where(loaded.ids == NO_PAGE, LOST, loaded.ids)
            ids = loaded.ids[loaded.ids != NO_PAGE]
            # The catalog knows when a page was stored, not when it was last asked for.
            age_s = state.wall_clock() - state.index.table.created[ids].astype(np.float64)
            state.index.table.last_use[ids] = state.clock() - np.maximum(age_s, 0.0)
            state.policy.restored(ids, state.index.table, rows.page_tokens)
            state.count_disk(ids, part.slots[loaded.ids != NO_PAGE], 1)
            state.unused_slots.extend(part.slots[loaded.dropped].tolist())
            state.changed.notify_all()
            state.disk_work.notify_all()
