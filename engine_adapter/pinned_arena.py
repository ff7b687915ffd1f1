"""Whether a device may read the store's shared memory itself, and the registration that allows it.

A device copies fast, and beside the engine's thread, only from page-locked memory. The arena is
mapped read-only and belongs to a server, so the engine's process registers what it has mapped, in
the best way that its device knows (`choose_pin`); where there is none, pages pass a BounceRing.
Invariant: what is registered is let go of before it is unmapped. Must not be here: what is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger("kvstore.engine_adapter")

# Flags of cudaHostRegister, and attributes of cuDeviceGetAttribute, as CUDA's headers number them.
PORTABLE, READ_ONLY = 1, 8
HOST_REGISTER, HOST_PAGE_TABLES, READ_ONLY_HOST_REGISTER = 99, 100, 113
SAME_POINTER = 91


class PinWay(StrEnum):
    """How pages come to the device."""

    NONE = "none"  # the KV cache is in the CPU's memory
    READ_ONLY = "read-only"  # the arena is registered, the device cannot write it
    TRUSTED = "trusted workers"  # registered as the writable mapping that an operator granted
    BOUNCE = "bounce ring"  # pages are copied into pinned buffers first


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device reports. `host_register`: it can use memory that was not made by CUDA."""

    type: str
    host_register: bool = False
    read_only_host_register: bool = False  # the flag for memory that is mapped read-only
    host_page_tables: bool = False  # it reads the CPU's page tables: read-only needs no flag
    same_pointer: bool = True  # kernels may use the CPU's addresses of what is registered


@dataclass(frozen=True, slots=True)
class PinChoice:
    """The way, the flags of cudaHostRegister, and a sentence for the log and `kvstore doctor`."""

    way: PinWay
    flags: int
    why: str

    @property
    def registers(self) -> bool:
        """Whether extents are to be registered."""
        return self.way in (PinWay.READ_ONLY, PinWay.TRUSTED)


def choose_pin(facts: DeviceFacts, *, writable: bool = False) -> PinChoice:
    """The best way for a device; `writable`: the arena is mapped writable (trusted workers)."""
    if facts.type == "cpu":
        return PinChoice(PinWay.NONE, 0, "the KV cache is in the CPU's memory")
    if not facts.host_register:
        return PinChoice(
            PinWay.BOUNCE, 0, f"this {facts.type} device reports no registration of host memory"
        )
    if not facts.same_pointer:
        return PinChoice(
            PinWay.BOUNCE, 0, "the device knows registered memory by other addresses than the CPU"
        )
    if facts.read_only_host_register:
        return PinChoice(
            PinWay.READ_ONLY, PORTABLE | READ_ONLY, "the device registers memory read-only"
        )
    if facts.host_page_tables:
        return PinChoice(PinWay.READ_ONLY, PORTABLE, "the device uses the CPU's page tables")
    if writable:
        return PinChoice(
            PinWay.TRUSTED, PORTABLE, "trusted_workers: the arena is mapped writable here"
        )
    return PinChoice(
        PinWay.BOUNCE,
        0,
        "the device registers only writable memory, and the arena is mapped read-only",
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Ask the driver. What it does not answer, as any but NVIDIA's, counts as not supported."""
    if device.type != "cuda" or torch.version.hip is not None:
        return DeviceFacts(device.type)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return DeviceFacts(device.type)
    cuda: Any = torch.cuda  # torch leaves init() and cudart() untyped
    cuda.init()
    number = torch.cuda.current_device() if device.index is None else device.index
    # torch and the driver count devices alike: both honour CUDA_VISIBLE_DEVICES.
    return DeviceFacts(
        device.type,
        host_register=_attribute(driver, HOST_REGISTER, number),
        read_only_host_register=_attribute(driver, READ_ONLY_HOST_REGISTER, number),
        host_page_tables=_attribute(driver, HOST_PAGE_TABLES, number),
        same_pointer=_attribute(driver, SAME_POINTER, number),
    )


class Registrar(Protocol):
    """cudaHostRegister and its reverse; both answer CUDA's error number, 0 for success."""

    def register(self, address: int, size: int, flags: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaRegistrar:
    """The two calls on one device, through torch's own runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int, flags: int) -> int:
        """Lock pages and map them for the device."""
        return self._call("cudaHostRegister", address, size, flags)

    def unregister(self, address: int) -> int:
        """Undo it, by the first address."""
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        with torch.cuda.device(self._device):
            cuda: Any = torch.cuda
            error = int(getattr(cuda.cudart(), name)(*arguments))
            if error:
                # The runtime keeps the error for whoever asks next, which would be the engine's
                # next kernel. A launch of our own takes it away.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
        return error


class PinnedArena:
    """Registers mapped extents for one device. Thread-safe; falls back to bouncing for good.

    `choice` says how, for the log: what the device reports, or why registering failed after all.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        writable: bool = False,
        facts: DeviceFacts | None = None,
        registrar: Registrar | None = None,
    ) -> None:
        self.choice = choose_pin(facts or device_facts(device), writable=writable)
        self._registrar = registrar or CudaRegistrar(device)
        self._lock = threading.Lock()
        # What is registered, by address. It is held, so that nobody unmaps it before unpin().
        self._held: dict[int, memoryview] = {}
        log.info("kvstore: pages reach %s by %s: %s", device, self.choice.way, self.choice.why)

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered now."""
        with self._lock:
            return sum(each.nbytes for each in self._held.values())

    def pin(self, memory: memoryview) -> bool:
        """Register a whole mapping (MappedExtent.memory); whether the device may read it now.

        It costs about 0.1 s a GiB: once an extent, never once a page. The mapping stays until
        unpin(), follow() or close(). Doing it again does nothing.
        """
        with self._lock:
            return self._pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Let go of a mapping; nothing happens if it is not registered.

        Copies that read it must have ended.
        """
        with self._lock:
            self._unpin(_place(memory)[0])

    def follow(self, memories: Iterable[memoryview]) -> None:
        """Register what is new among the mappings of a session, let go of all that is gone.

        For after Attachment.refresh(). Copies that read what is gone must have ended.
        """
        wanted = {_place(memory)[0]: memory for memory in memories}
        with self._lock:
            for address in self._held.keys() - wanted.keys():
                self._unpin(address)
            for memory in wanted.values():
                self._pin(memory)

    def holds(self, memory: memoryview) -> bool:
        """Whether the device may read all these bytes in place."""
        address, size = _place(memory)
        with self._lock:
            return any(
                start <= address and address + size <= start + held.nbytes
                for start, held in self._held.items()
            )

    def close(self) -> None:
        """Let go of everything."""
        self.follow(())

    def _pin(self, memory: memoryview) -> bool:
        address, size = _place(memory)
        if address in self._held:
            return self._held[address].nbytes == size
        if not self.choice.registers:
            return False
        error = self._registrar.register(address, size, self.choice.flags)
        if error:
            why = f"cudaHostRegister of {size} bytes answered error {error}"
            self.choice = PinChoice(PinWay.BOUNCE, 0, why)
            log.warning("kvstore: %s: pages pass pinned buffers instead", why)
            return False
        self._held[address] = memory
        return True

    def _unpin(self, address: int) -> None:
        if self._held.pop(address, None) is None:
            return
        if error := self._registrar.unregister(address):
            log.warning("kvstore: cudaHostUnregister answered error %d", error)


class BounceRing:
    """Pinned buffers that are used in turn. Not thread-safe: one a thread that copies.

    take() waits for the copies of the buffer's last use, which used() names by an event. On a CPU
    there is nothing to wait for, and the buffers are ordinary memory.
    """

    def __init__(self, device: torch.device, size_bytes: int, buffers: int = 2) -> None:
        pinned = device.type != "cpu"
        self._buffers = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(buffers)
        ]
        self._events: list[Any] = [None] * buffers
        self._taken = -1
        # A kernel may still read a buffer whose ring is gone: its memory stays until then.
        weakref.finalize(self, _wait_for, self._events, self._buffers)

    def take(self) -> torch.Tensor:
        """The next buffer, free to be filled."""
        self._taken = (self._taken + 1) % len(self._buffers)
        event, self._events[self._taken] = self._events[self._taken], None
        if event is not None:
            event.synchronize()
        return self._buffers[self._taken]

    def used(self, event: Any) -> None:
        """The event behind the last copy from or to the buffer taken last; None on a CPU."""
        self._events[self._taken] = event


def _attribute(driver: Any, attribute: int, device: int) -> bool:
    value = ctypes.c_int()
    if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
        return False
    return bool(value.value)


def _wait_for(events: list[Any], _buffers: list[torch.Tensor]) -> None:
    for event in events:
        if event is not None:
            event.synchronize()


def _place(memory: memoryview) -> tuple[int, int]:
    array = np.frombuffer(memory, np.uint8)
    return int(array.ctypes.data), array.size
