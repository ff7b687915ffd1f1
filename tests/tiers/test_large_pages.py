"""Large pages behind shared memory: where it is mapped, and that no byte is lost under use."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from kvstore.tiers.extent import Memfd
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.large_pages import LARGE_PAGE_BYTES, LargePages, map_shared

MIB = 1 << 20


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def in_large_pages(address: int) -> int:
    """Bytes of the mapping at that address that are mapped in large pages."""
    here = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                here = line.startswith(f"{address:x}-")
            elif here and line.startswith("ShmemPmdMapped"):
                return int(line.split()[1]) << 10
    raise AssertionError(f"no mapping begins at {address:x}")


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return len(file.readlines())


@pytest.mark.parametrize("size", [4096, LARGE_PAGE_BYTES, 5 * MIB + 4096, 64 * MIB, 3 * MIB + 17])
def test_what_is_as_large_as_a_page_is_mapped_at_a_multiple_of_its_size(size: int) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    before = mappings()
    mapping = map_shared(fd, size)
    assert len(mapping) == size
    if size >= LARGE_PAGE_BYTES:
        assert address_of(mapping) % LARGE_PAGE_BYTES == 0
    mapping[size - 1] = 7
    assert os.pread(fd, 1, size - 1) == b"\7", "it is the file"
    mapping.close()
    assert mappings() <= before, "the range that was reserved for it is given back"
    os.close(fd)


def test_gaps_that_fit_elsewhere_do_not_keep_it_from_its_place() -> None:
    """A new mapping goes to the highest gap; here are some that are too small to be aligned in."""
    size, unit = 3 * MIB, 4096
    walls = [mmap.mmap(-1, size + unit) for _ in range(11)]
    for wall in walls[1::2]:
        wall.close()
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    made = [map_shared(fd, size) for _ in range(3)]
    assert [address_of(each) % LARGE_PAGE_BYTES for each in made] == [0, 0, 0]
    for each in (*made, *walls[::2]):
        each.close()
    os.close(fd)


TIGHT = """
import mmap, os, resource
from pathlib import Path
from kvstore.tiers.large_pages import map_shared
size, unit = 3 << 20, 4096
walls = [mmap.mmap(-1, size + unit) for _ in range(11)]
for wall in walls[1::2]:
    wall.close()
fd = os.memfd_create("test", os.MFD_CLOEXEC)
os.ftruncate(fd, size)
there = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (there + size + (1 << 20), resource.RLIM_INFINITY))
print(len(map_shared(fd, size)) == size)
"""


def test_where_address_space_is_limited_what_fits_is_mapped_anywhere() -> None:
    """A second attempt, beside the first, would be too much."""
    done = subprocess.run([sys.executable, "-c", TIGHT], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_read_only_mapping_stays_one() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * MIB)
    mapping = map_shared(fd, 4 * MIB, mmap.PROT_READ)
    assert memoryview(mapping).readonly
    assert np.frombuffer(mapping, np.uint8).ctypes.data % LARGE_PAGE_BYTES == 0
    mapping.close()
    os.close(fd)


def test_bytes_that_are_written_and_read_meanwhile_stay_what_they_are() -> None:
    """Another mapping of the same memory, as a client has it, is read; this one is written."""
    memory = Memfd(32 * MIB + 4096)
    memory.populate()
    ours = np.frombuffer(memory.mapping, np.uint8)
    ours[:] = np.arange(len(ours), dtype=np.uint8)
    theirs = np.frombuffer(map_shared(memory.fd.fileno(), memory.size, mmap.PROT_READ), np.uint8)
    wanted = ours.copy()
    stop, wrong = threading.Event(), list[int]()

    def use(written: np.ndarray, read: np.ndarray) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            written[::MIB] = number % 256
            if not (read[::MIB] == number % 256).all():
                wrong.append(number)

    writer = threading.Thread(target=use, args=(ours, theirs))
    writer.start()
    pages = LargePages()
    pages.add(memory.mapping)
    assert pages.wait(60)
    stop.set()
    writer.join()
    pages.close()
    assert not wrong
    wanted[::MIB] = ours[0]
    assert np.array_equal(ours, wanted)
    assert np.array_equal(theirs, wanted)
    del ours, theirs, writer
    assert memory.close(), "nobody holds it any more"


def test_a_populated_memory_lies_in_large_pages_where_the_system_has_some() -> None:
    memory = Memfd(8 * MIB)
    memory.populate()
    pages = LargePages()
    pages.add(memory.mapping)
    assert pages.wait(60)
    got = in_large_pages(address_of(memory.mapping))
    pages.close()
    memory.close()
    if not got:
        pytest.skip("this system has no large pages for shared memory now: old, or set to deny")
    assert got <= 8 * MIB
    assert got % LARGE_PAGE_BYTES == 0


def test_memory_that_ends_before_its_turn_is_passed_over_and_does_not_linger() -> None:
    pages, memories = LargePages(), [Memfd(16 * MIB) for _ in range(4)]
    for memory in memories:
        memory.populate()
        pages.add(memory.mapping)
    left = [weakref.ref(each.mapping) for each in memories[1:]]
    for memory in memories[1:]:
        memory.close()  # unmaps it, unless the thread is at it this moment
    del memory, memories[1:]
    assert pages.wait(60)
    pages.close()
    assert [each() for each in left] == [None] * 3
    assert memories[0].close()
    pages.add(Memfd(4 * MIB).mapping)  # too late: nothing happens


def test_an_arena_says_when_it_is_through() -> None:
    before = threading.enumerate()
    tier = HostTier(48 * MIB)
    assert tier.wait_populated(60)
    [slot] = tier.reserve("a", 4 * MIB, 1)
    tier.view(slot, 4 * MIB)[:] = bytes([9]) * (4 * MIB)
    tier.publish_many([slot])
    assert tier.wait_large_pages(60)
    assert bytes(tier.view(slot, 4 * MIB)) == bytes([9]) * (4 * MIB)
    tier.check()
    tier.close()
    assert set(threading.enumerate()) <= set(before)


FORKS = """
import os, time
from kvstore.tiers.extent import Memfd
from kvstore.tiers.large_pages import LargePages

def memories():
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum("memfd" in os.readlink(each) for each in links if os.path.islink(each))

for turn in range(8):
    memory, pages = Memfd(64 << 20), LargePages()
    memory.populate()
    pages.add(memory.mapping)
    time.sleep(turn * 0.003)  # whatever it is at
    child = os.fork()
    if child == 0:
        os._exit(memories())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    pages.close()
    memory.close()
"""


@pytest.mark.slow
def test_a_child_that_is_forked_meanwhile_keeps_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True
    )
    assert done.stdout.split() == ["0"] * 8, done.stderr
