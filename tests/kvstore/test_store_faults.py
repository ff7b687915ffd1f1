"""A disk that fails, hangs or lies never stops the store: memory goes on, the rest is a miss."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, load, prompt, save

from kvstore import Store
from kvstore.tenants import Quota
from kvstore.tiers.file_layer import FileLayer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class BadDisk(FileLayer):
    """The real files, until a switch is thrown."""

    def __init__(self) -> None:
        self.failing_reads = False
        self.failing_writes = False
        self.failing_syncs = False
        self.hangs = threading.Event()
        self.goes_on = threading.Event()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_hang()
        if self.failing_reads:
            raise OSError(errno.EIO, "made to fail")
        return super().preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_hang()
        if self.failing_writes:
            raise OSError(errno.ENOSPC, "made to fail")
        return super().pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        if self.failing_syncs:
            raise OSError(errno.EIO, "made to fail")
        super().fdatasync(descriptor)

    def _maybe_hang(self) -> None:
        if self.hangs.is_set():
            self.goes_on.wait(30)


def opened(path: Path, disk: BadDisk) -> Store:
    return Store.open(path / "store", host_bytes=1 << 20, disk_bytes="64MiB", files=disk)


def test_a_failing_write_keeps_pages_in_memory_and_says_so(tmp_path: Path) -> None:
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        session = store.session(SPEC)
        disk.failing_writes = True
        with session.reserve(prompt(0, 3)) as run:
            done = run.commit(durable=True)
        assert (done.pages, done.durable) == (3, False)
        assert "disk" in done.reason
        with session.match(prompt(0, 3)) as hit:
            assert hit.tiers == ["host"] * 3
        disk.failing_writes = False
        # The children of pages that are not on disk take them along.
        longer = prompt(0, 5)
        with session.reserve(longer) as run:
            assert run.start == 3
            assert run.commit(durable=True).durable
        store.check()
    with Store.open(tmp_path / "store", host_bytes=1 << 20) as store:
        assert store.session(SPEC).match(longer).pages == 5


def test_after_a_failed_sync_nothing_more_is_called_durable(tmp_path: Path) -> None:
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        session = store.session(SPEC)
        assert save(session, prompt(0, 3), durable=True) == 3
        disk.failing_syncs = True
        with session.reserve(prompt(1, 3)) as run:
            assert not run.commit(durable=True).durable
        disk.failing_syncs = False  # too late: what was lost before stays lost
        with session.reserve(prompt(2, 3)) as run:
            assert not run.commit(durable=True).durable
        assert load(session, prompt(0, 3)) == 3
        assert store.stats().tiers[1].state != "ok"
    with Store.open(tmp_path / "store", host_bytes=1 << 20) as store:
        session = store.session(SPEC)
        assert load(session, prompt(0, 3)) == 3
        assert session.match(prompt(1, 3)).pages == 0


def test_failing_reads_are_misses_and_open_the_breaker(tmp_path: Path) -> None:
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        for seed in range(8):
            save(store.session(SPEC), prompt(seed, 2))
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        session = store.session(SPEC)
        disk.failing_reads = True
        for seed in range(4):
            assert load(session, prompt(seed, 2)) == 0
        begun = time.monotonic()
        assert load(session, prompt(5, 2)) == 0  # the breaker is open: no read, no wait
        assert store.stats().counters["disk_read_errors"] <= 8
        disk.failing_reads = False
        later = store.state.clock() + 5
        store.state.clock = lambda: later + time.monotonic() - begun
        assert load(session, prompt(5, 2)) == 2
        assert load(session, prompt(0, 2)) == 2  # an error is not damage: nothing was dropped
        store.check()


@pytest.mark.slow
def test_a_hung_disk_costs_only_the_deadline_and_memory_goes_on(tmp_path: Path) -> None:
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        for seed in range(3):
            save(store.session(SPEC), prompt(seed, 4))
    disk = BadDisk()
    with opened(tmp_path, disk) as store:
        session = store.session(SPEC)
        assert load(session, prompt(0, 4)) == 4  # in memory now
        disk.hangs.set()
        begun = time.monotonic()
        with session.match(prompt(1, 4)) as hit:
            assert hit.stage(0.1) == 0
        assert load(session, prompt(0, 4)) == 4
        assert save(session, prompt(9, 4)) == 4
        assert load(session, prompt(9, 4)) == 4
        assert not session.flush(0.1)
        assert time.monotonic() - begun < 10
        disk.hangs.clear()
        disk.goes_on.set()
        assert session.flush(10)
        assert load(session, prompt(1, 4)) == 4
        store.check()


def test_a_tenant_finds_its_part_of_the_disk_queue_free_however_others_flood(
    tmp_path: Path,
) -> None:
    disk = BadDisk()
    limit = 64 * 4096  # half of it for all, a quarter each
    path = tmp_path / "store"
    with Store.open(
        path, host_bytes=1 << 20, disk_bytes="64MiB", dirty_bytes_max=limit, files=disk
    ) as store:
        assert store.state.host is not None
        assert store.state.host.wait_populated(10.0)
        store.set_quotas({"a": Quota(), "b": Quota()})
        mine, theirs = store.session(SPEC, tenant="b"), store.session(SPEC, tenant="a")
        disk.hangs.set()
        for seed in range(20):
            with theirs.reserve(prompt(seed, 4), deadline_s=0.0) as run:
                if not run.count:
                    break
                run.commit()
        assert run.reason == "disk behind"
        assert store.stats().dirty_bytes == 48 * 4096
        for seed in range(3):
            with mine.reserve(prompt(seed, 4), deadline_s=0.0) as run:
                assert run.count == 4
                run.commit()
        with mine.reserve(prompt(7, 20), deadline_s=0.0) as run:
            assert (run.count, run.reason) == (0, "disk behind"), "more than it has left"
        assert store.stats().dirty_bytes <= limit
        disk.hangs.clear()
        disk.goes_on.set()
        assert store.flush(10)
        store.check()


def test_the_queue_for_the_disk_is_bounded_and_its_overflow_is_refused(tmp_path: Path) -> None:
    disk = BadDisk()
    limit = 16 * 4096
    path = tmp_path / "store"
    with Store.open(
        path, host_bytes=1 << 20, disk_bytes="64MiB", dirty_bytes_max=limit, files=disk
    ) as store:
        assert store.state.host is not None
        assert store.state.host.wait_populated(10.0)
        session = store.session(SPEC)
        disk.hangs.set()
        reasons = []
        for seed in range(8):
            with session.reserve(prompt(seed, 4), deadline_s=0.0) as run:
                reasons.append(run.reason)
                if run.count:
                    run.commit()
            assert store.stats().dirty_bytes <= limit
        assert "disk behind" in reasons
        disk.hangs.clear()
        disk.goes_on.set()
        assert session.flush(10)
        assert save(session, prompt(99, 4)) == 4
