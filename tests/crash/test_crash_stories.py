"""Bugs that the crash loops found, each as one small story that repeats."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from typing import TYPE_CHECKING

from disk_pages import Chains, read, write
from known_pages import SPEC, load, prompt, save

from kvstore import Store
from kvstore.removal import Selection
from kvstore.tiers.catalog import catalog_name
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import FileLayer
from kvstore.tiers.segment import FORMAT_VERSION
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Watched(FileLayer):
    """Real files; tests set what happens on a sync, or before a header is wiped."""

    def __init__(self) -> None:
        self.on_sync: Callable[[], None] | None = None
        self.on_wipe: Callable[[], None] | None = None

    def fdatasync(self, descriptor: int) -> None:
        if self.on_sync is not None:
            self.on_sync()
        super().fdatasync(descriptor)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        hook = self.on_wipe
        if hook is not None and not any(buffers[0][:8]):  # no magic: a header is wiped
            self.on_wipe = None
            hook()
        return super().pwritev(descriptor, buffers, offset)


def opened(path: Path, files: FileLayer | None = None) -> Store:
    return Store.open(path / "store", files=files, host_bytes=1 << 20, disk_bytes=8 << 20)


def fail_sync() -> None:
    raise OSError(errno.EIO, "made to fail")


def test_a_rebuild_prefers_the_published_page_to_its_unpublished_twin(tmp_path: Path) -> None:
    """A group whose sync failed leaves headers of pages that were never published. After a restart
    the same prompt is saved again, durably, in other slots. A rebuild from headers then met two
    first pages of that prompt; it kept the older one, and dropped the durable one with all below.
    """
    files = Watched()
    with opened(tmp_path, files) as store:
        session = store.session(SPEC)
        save(session, prompt(9, 1), durable=True)  # the segment exists
        files.on_sync = fail_sync
        save(session, prompt(1, 9))
        save(session, prompt(0, 3), durable=True)
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        assert load(session, prompt(0, 3)) == 0
        assert save(session, prompt(0, 3), durable=True) == 3
        assert save(session, prompt(0, 6), durable=True) == 3
    os.truncate(tmp_path / "store" / "catalog" / "data.mdb", 8192)
    with opened(tmp_path) as store:
        assert load(store.session(SPEC), prompt(0, 6)) == 6
        store.check()


def test_wiping_a_freed_page_never_hits_the_page_that_has_its_slot_now(tmp_path: Path) -> None:
    """Freeing with `erase` gave slots up and wiped their headers after that. A group committed in
    between freed them for good, and other pages, published there meanwhile, were wiped instead.
    """
    files, chains = Watched(), Chains()
    tier = DiskTier.open([tmp_path / "tier"], 2 << 20, files, load=True)
    full = [chains.page() for _ in range(1000)]
    full = full[: sum(write(tier, [item])[0] for item in full)]
    tier.free_many([item.slot for item in full[:1]])
    tier.commit_frees()  # room for one page, whose commit frees what is being wiped
    late = [chains.page() for _ in range(5)]
    writer = threading.Thread(target=lambda: [write(tier, [item]) for item in late])

    def meanwhile() -> None:
        writer.start()
        writer.join(0.3)

    files.on_wipe = meanwhile
    tier.free_many([item.slot for item in full[1:5]], erase=True)
    writer.join()
    assert [read(tier, item) for item in late] == [ReadStatus.OK] * 5
    tier.close()


def test_what_an_operator_evicted_is_gone_even_if_it_left_the_disk_before(tmp_path: Path) -> None:
    """The record of a page that the policy takes off the disk is deleted with the next commit. When
    an operator evicted that page before, there was nothing to wipe, so nothing was committed: after
    a kill the page was back.
    """
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 5), durable=True)
        save(session, prompt(1, 5), durable=True)
        state = store.state
        with state.lock:  # what making room does to the coldest chain
            pages = state.index.match(session.root, prompt(0, 5).tobytes(), {})
            state.leave_disk(pages[::-1])
        root = store.root(SPEC.namespace)
        assert store.evict(Selection(prefix=prompt(0, 1), root=root)).pages == 5
        killed = shutil.copytree(tmp_path / "store", tmp_path / "killed" / "store")
    with opened(killed.parent) as store:
        session = store.session(SPEC)
        assert load(session, prompt(0, 5)) == 0
        assert load(session, prompt(1, 5)) == 5


def test_no_older_copy_of_an_evicted_page_comes_back_by_a_rebuild(tmp_path: Path) -> None:
    """Making room frees a slot without wiping it, for it will be written soon. A page that left the
    disk so, and was written again elsewhere or stayed in memory, lay there twice: an operator's
    eviction wiped one copy, and a rebuild from headers found the other.
    """
    with opened(tmp_path) as store:
        session, state = store.session(SPEC), store.state
        assert state.disk is not None
        save(session, prompt(0, 5), durable=True)
        save(session, prompt(1, 2), durable=True)
        with state.lock:  # what making room does to the coldest chain
            pages = state.index.match(session.root, prompt(0, 5).tobytes(), {})
            state.leave_disk(pages[::-1])
        state.free_unused_slots()
        state.disk.commit_frees()
        assert store.evict(Selection(prefix=prompt(0, 1), namespace=SPEC.namespace)).pages == 5
        killed = shutil.copytree(tmp_path / "store", tmp_path / "killed" / "store")
    (killed / catalog_name(FORMAT_VERSION) / "data.mdb").write_bytes(b"no catalog" * 1000)
    with opened(killed.parent) as store:
        session = store.session(SPEC)
        assert load(session, prompt(0, 5)) == 0
        assert load(session, prompt(1, 2)) == 2


def test_a_good_end_leaves_no_header_of_a_page_that_left(tmp_path: Path) -> None:
    """Else nobody would know of it after the next start."""
    with opened(tmp_path) as store:
        session, state = store.session(SPEC), store.state
        save(session, prompt(0, 5), durable=True)
        with state.lock:
            pages = state.index.match(session.root, prompt(0, 5).tobytes(), {})
            state.leave_disk(pages[::-1])
    catalog = tmp_path / "store" / catalog_name(FORMAT_VERSION) / "data.mdb"
    catalog.write_bytes(b"no catalog" * 1000)
    with opened(tmp_path) as store:
        assert load(store.session(SPEC), prompt(0, 5)) == 0
