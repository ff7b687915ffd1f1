"""Faults planted in the child process, to prove that the crash loops can see them.

    no-fdatasync          segments are not synced before their pages are published
    overwrite-in-place    a freed slot is written again before its free is committed
    no-verify             neither header nor checksum is looked at on a read
    failed-write-visible  a write that failed or fell short is published anyway

Each replaces a method of the product in this process; the product knows nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.tiers import page_io
from kvstore.tiers.disk_publisher import Publisher
from kvstore.tiers.segment_set import FREE
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from crash_files import CrashFiles

ONLY_POWER_CUT = ("no-fdatasync",)  # kill -9 leaves the page cache as it is


def plant(name: str, files: CrashFiles) -> None:
    """Make this process the mutant `name`."""
    MUTANTS[name](files)


def _no_fdatasync(files: CrashFiles) -> None:
    files.lose_syncs = True


def _overwrite_in_place(files: CrashFiles) -> None:
    _method(Publisher, "_retire")
    _method(Publisher, "_release")

    def retire(self: Any, segment: Any, slot: int) -> None:
        segment.set_state(slot, FREE)  # instead of FREED: it can be reserved right now
        self.freed[slot] = None

    def release(self: Any, slots: Any) -> None:
        for slot in slots:
            self.freed.pop(slot, None)

    Publisher._retire = retire  # type: ignore[method-assign]
    Publisher._release = release  # type: ignore[method-assign]


def _no_verify(files: CrashFiles) -> None:
    _method(page_io.PageIo, "_verify")
    page_io.PageIo._verify = lambda *_: ReadStatus.OK  # type: ignore[method-assign]


def _failed_write_visible(files: CrashFiles) -> None:
    _method(Publisher, "_sound")
    Publisher._sound = lambda self, group, errors: list(group)  # type: ignore[method-assign]
    _method(page_io, "write_fully")
    page_io.write_fully = lambda layer, descriptor, buffers, offset: layer.pwritev(
        descriptor, buffers, offset
    )


def _method(owner: Any, name: str) -> Callable[..., Any]:
    """What is about to be replaced: a mutant of a method that is gone would prove nothing."""
    found: Callable[..., Any] = getattr(owner, name)
    return found


MUTANTS: dict[str, Callable[[Any], None]] = {
    "no-fdatasync": _no_fdatasync,
    "overwrite-in-place": _overwrite_in_place,
    "no-verify": _no_verify,
    "failed-write-visible": _failed_write_visible,
}
