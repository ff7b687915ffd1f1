"""This store, as its users have it: attached to a server by shared memory, and embedded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from contract import IndexPeer, PagePeer, Process

import kvstore
from kvstore import CacheSpec, Store
from kvstore.connect import connect
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import DISK, NO_PAGE
from kvstore.removal import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from contract import Pages, Tokens

    from kvstore.interface import SessionLike

PAGE_TOKENS = 16
ROOT = bytes(range(32))
DEADLINE_S = 30.0


class Attached(PagePeer):
    """A client process of `kvstore serve`; pages travel through shared memory."""

    version = f"kvstore {kvstore.__version__}"

    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        # A session may lease a quarter of the arena. Staging is what a server of 8 GiB has for one
        # session, a run at least, times as many sessions as there are sizes.
        staging_bytes = len(page_bytes) * run_bytes
        host_bytes = 8 * run_bytes + staging_bytes + (256 << 20)
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory / "store")]
        command += [f"--host-bytes={host_bytes}", "--disk-bytes=0"]
        command += [f"--staging-bytes={staging_bytes}"]
        self.server = Process(command, directory / "server.log")
        self.server.wait_for(directory / "store" / "kvstore.sock")
        address = f"kvstore://unix:{directory / 'store' / 'kvstore.sock'}"
        self.store_ = connect(address, lookup_deadline_s=5.0)
        self._open_sessions(page_bytes)

    def _open_sessions(self, page_bytes: Sequence[int]) -> None:
        self.sessions: dict[int, SessionLike] = {
            size: self.store_.session(
                CacheSpec.opaque("peers", page_tokens=PAGE_TOKENS, page_bytes=size)
            )
            for size in page_bytes
        }

    def prepare(self, run: int, count: int, size: int) -> None:
        self.session = self.sessions[size]
        rng = np.random.default_rng(run)
        self.tokens = rng.integers(0, 128_000, count * PAGE_TOKENS, dtype=np.int32)

    def store(self, run: int, pages: Pages) -> None:
        stored = 0
        while stored < len(pages):
            with self.session.reserve(self.tokens, deadline_s=DEADLINE_S) as part:
                assert part.count, part.reason
                for view, page in zip(part.views(), pages[stored:], strict=False):
                    np.copyto(np.frombuffer(view, np.uint8), page)
                stored += part.commit().pages

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        with self.session.match(self.tokens) as hit:
            assert hit.stage(DEADLINE_S) == len(targets), f"{hit.pages} of {len(targets)} pages"
            for view, target in zip(hit.views(), targets, strict=True):
                np.copyto(target, np.frombuffer(view, np.uint8))
            assert hit.valid()
        return [target.data for target in targets]

    def remove(self, run: int, count: int) -> None:
        gone = 0
        selection = Selection(namespace=self.session.spec.namespace)
        while gone < count:  # the lease of the last look-up ends a moment later
            gone += self.store_.evict(selection).pages  # type: ignore[attr-defined]

    def close(self) -> None:
        self.store_.close()
        self.server.close()


class Embedded(Attached):
    """The store in the caller's own process, without a server."""

    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        self.store_ = Store.open(None, host_bytes=8 * run_bytes + (256 << 20))
        self._open_sessions(page_bytes)

    def close(self) -> None:
        self.store_.close()


class IndexOfArray(IndexPeer):
    """The prefix index alone, given an int32 array."""

    version = Attached.version

    def __init__(self) -> None:
        self.index = PrefixIndex()

    def insert(self, tokens: Tokens) -> None:
        pages = len(tokens) // PAGE_TOKENS
        first = len(self.index) + 1
        numbers = np.arange(first, first + pages, dtype=np.uint64)
        sums = np.stack([numbers, numbers], axis=1)
        run = tokens.tobytes()
        ids = self.index.insert(
            ROOT, PAGE_TOKENS, NO_PAGE, run, None, sums.tobytes(), numbers, 8192, sums, 1.0
        )
        self.index.set_tier(ids, DISK, numbers.astype(np.int64))

    def prepare(self, tokens: Tokens) -> object:
        return tokens

    def match(self, prompt: object) -> int:
        return len(self.index.match(ROOT, prompt)) * PAGE_TOKENS  # type: ignore[arg-type]


class IndexOfList(IndexOfArray):
    """The same, given a list of ints, as engines have it."""

    def prepare(self, tokens: Tokens) -> object:
        return tokens.tolist()


class SessionLookUp(IndexPeer):
    """What a user calls, in the store's own process: look-up and lease, from an array."""

    version = Attached.version

    def __init__(self) -> None:
        spec = CacheSpec.opaque("look-up", page_tokens=PAGE_TOKENS, page_bytes=4096)
        self.store = Store.open(None, host_bytes=512 << 20)
        self.session = self.store.session(spec)

    def insert(self, tokens: Tokens) -> None:
        stored = 0
        while stored < len(tokens) // PAGE_TOKENS:
            with self.session.reserve(tokens, deadline_s=DEADLINE_S) as part:
                assert part.count, part.reason
                for view in part.views():
                    view[:] = bytes(len(view))
                stored += part.commit().pages

    def prepare(self, tokens: Tokens) -> object:
        return tokens

    def match(self, prompt: object) -> int:
        with self.session.match(prompt) as hit:  # type: ignore[arg-type]
            return hit.tokens
