"""How an engine's process makes the arena readable for its device: the decision, the bookkeeping.

The registration itself needs a GPU: the last test is skipped without one, loudly.
"""

from __future__ import annotations

import logging
import mmap
import os
import warnings

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")

from kvstore.engine_adapter.pinned_arena import (  # noqa: E402 - after the importorskip
    PORTABLE,
    READ_ONLY,
    BounceRing,
    DeviceFacts,
    PinnedArena,
    PinWay,
    choose_pin,
    device_facts,
)

CPU = torch.device("cpu")
SIZE = 4 * mmap.PAGESIZE
READS_ONLY = DeviceFacts("cuda", host_register=True, read_only_host_register=True)


class BookRegistrar:
    """Keeps CUDA's rules: no range twice, none that is not there; error numbers, not exceptions."""

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self.refuse = 0

    def register(self, address: int, size: int, flags: int) -> int:
        taken = any(a < address + size and address < a + s for a, (s, _) in self.ranges.items())
        if self.refuse or taken or address % mmap.PAGESIZE:
            return self.refuse or 712  # cudaErrorHostMemoryAlreadyRegistered
        self.ranges[address] = (size, flags)
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.ranges.pop(address, None) else 713


def arena(registrar: BookRegistrar, facts: DeviceFacts = READS_ONLY) -> PinnedArena:
    return PinnedArena(torch.device("cuda"), facts=facts, registrar=registrar)


def mapping() -> memoryview:
    return memoryview(mmap.mmap(-1, SIZE))


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    ("facts", "read_only", "granted"),
    [
        (DeviceFacts("cpu"), PinWay.NONE, PinWay.NONE),
        (DeviceFacts("cpu", True, True, True), PinWay.NONE, PinWay.NONE),
        (DeviceFacts("cuda"), PinWay.BOUNCE, PinWay.BOUNCE),
        (DeviceFacts("cuda", False, True, True), PinWay.BOUNCE, PinWay.BOUNCE),
        (DeviceFacts("cuda", True, True, False), PinWay.READ_ONLY, PinWay.READ_ONLY),
        (DeviceFacts("cuda", True, True, True), PinWay.READ_ONLY, PinWay.READ_ONLY),
        (DeviceFacts("cuda", True, False, True), PinWay.READ_ONLY, PinWay.READ_ONLY),
        (DeviceFacts("cuda", True, False, False), PinWay.BOUNCE, PinWay.TRUSTED),
        (DeviceFacts("cuda", True, True, True, False), PinWay.BOUNCE, PinWay.BOUNCE),
        (DeviceFacts("xpu"), PinWay.BOUNCE, PinWay.BOUNCE),
    ],
)
def test_what_the_device_reports_decides_the_way(
    facts: DeviceFacts, read_only: PinWay, granted: PinWay, writable: bool
) -> None:
    choice = choose_pin(facts, writable=writable)
    assert choice.way is (granted if writable else read_only)
    assert choice.registers == (choice.flags != 0)
    # The flag is an error on a device that does not report it.
    assert bool(choice.flags & READ_ONLY) == (choice.registers and facts.read_only_host_register)
    assert choice.why


def test_a_cpu_reports_itself() -> None:
    assert device_facts(CPU) == DeviceFacts("cpu")
    pinned = PinnedArena(CPU)
    assert not pinned.pin(mapping())
    assert pinned.pinned_bytes == 0


def test_a_mapping_is_registered_once_and_stays_mapped_until_it_is_let_go() -> None:
    registrar = BookRegistrar()
    pinned = arena(registrar)
    room = mmap.mmap(-1, SIZE)
    assert pinned.pin(memoryview(room))
    assert pinned.pin(memoryview(room))
    assert list(registrar.ranges.values()) == [(SIZE, PORTABLE | READ_ONLY)]
    assert pinned.pinned_bytes == SIZE
    with pytest.raises(BufferError):
        room.close()
    pinned.unpin(memoryview(room))
    assert not registrar.ranges
    room.close()


def test_only_bytes_within_one_registered_mapping_are_held() -> None:
    pinned = arena(BookRegistrar())
    memory, other = mapping(), mapping()
    assert pinned.pin(memory[: SIZE // 2])
    assert pinned.holds(memory[: SIZE // 2])
    assert pinned.holds(memory[100:200])
    assert not pinned.holds(memory[SIZE // 2 - 1 : SIZE // 2 + 1])
    assert not pinned.holds(other[:1])


def test_follow_registers_new_mappings_and_lets_go_of_those_that_are_gone() -> None:
    registrar = BookRegistrar()
    pinned = arena(registrar)
    first, second, third = mapping(), mapping(), mapping()
    pinned.follow([first, second])
    assert pinned.pinned_bytes == 2 * SIZE
    pinned.follow([second, third])
    assert [pinned.holds(each) for each in (first, second, third)] == [False, True, True]
    assert len(registrar.ranges) == 2
    pinned.close()
    assert not registrar.ranges
    assert pinned.pinned_bytes == 0


def test_a_refused_registration_is_not_tried_again_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = BookRegistrar()
    pinned = arena(registrar)
    kept = mapping()
    assert pinned.pin(kept)
    registrar.refuse = 2
    with caplog.at_level(logging.WARNING, logger="kvstore.engine_adapter"):
        assert not pinned.pin(mapping())
        assert not pinned.pin(mapping())
    assert pinned.choice.way is PinWay.BOUNCE
    assert [f"{SIZE} bytes answered error 2" in each.message for each in caplog.records] == [True]
    assert pinned.holds(kept)  # what was registered stays so
    registrar.refuse = 0
    assert not pinned.pin(mapping())


class Copy:
    """An event that notes when somebody waits for it."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_buffer_of_the_ring_is_given_again_only_after_its_last_copy() -> None:
    ring = BounceRing(CPU, 64)
    copies = [Copy() for _ in range(3)]
    taken = []
    for copy in copies:
        taken.append(ring.take())
        ring.used(copy)
    assert taken[0].data_ptr() == taken[2].data_ptr() != taken[1].data_ptr()
    assert [copy.waited for copy in copies] == [1, 0, 0]
    ring.take()
    ring.take()
    assert [copy.waited for copy in copies] == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED: nothing was registered: no GPU is here"
)
def test_a_gpu_copies_from_a_read_only_mapping_in_the_way_it_reports() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    fd = os.memfd_create("pinned")
    os.truncate(fd, SIZE)
    os.pwrite(fd, bytes(range(256)) * (SIZE // 256), 0)
    room = memoryview(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ))
    pinned = PinnedArena(device)
    assert pinned.choice.way in (PinWay.READ_ONLY, PinWay.BOUNCE)
    assert pinned.pin(room) == pinned.choice.registers
    assert torch.ones(3, device=device).sum().item() == 3  # no error is left behind
    if pinned.choice.registers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have writable memory
            source = torch.frombuffer(room, dtype=torch.uint8)
        assert source.is_pinned()
        assert torch.equal(source.to(device, non_blocking=True).cpu(), source)
    pinned.close()
