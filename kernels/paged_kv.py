"""An engine's paged KV as planes of blocks: the one place that knows how its tensors are put.

A plane is the keys, the values or the latent of one layer, seen as [blocks, heads, tokens, dim]
whatever the order in memory is; planes ascend by layer, K before V. Invariant: all planes have one
shape, dtype, device and set of strides, so a kernel needs a list of addresses and three strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NO_BLOCK = -1  # in a list of block ids: leave this part of the page alone
BLOCKS_MAX = 1 << 31
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TokenOrder(StrEnum):
    """The order of heads and tokens in a block, or in a page's planes."""

    HND = "hnd"  # [heads, tokens, dim]
    NHD = "nhd"  # [tokens, heads, dim]


@dataclass(frozen=True, slots=True)
class PagedKv:
    """All planes of an engine's KV cache. Use a constructor below; it keeps the tensors alive."""

    planes: tuple[torch.Tensor, ...]  # each [blocks, heads, tokens, dim], strides as they are
    kinds: int  # 2: K and V of each layer; 1: MLA's latent
    # Taken once: engines call with one page at a time, and hundreds of planes.
    _places: int = field(init=False, repr=False, compare=False)  # bits of addresses and strides
    _stacked: dict[int, list[NDArray[Any]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first = self.planes[0] if self.planes else None
        if first is None or self.kinds not in (1, 2) or len(self.planes) % self.kinds:
            raise ValueError(f"{len(self.planes)} planes of {self.kinds} kinds make no layers")
        if first.dim() != 4 or first.stride(3) != 1 or min(first.shape[1:]) < 1:
            raise ValueError(
                f"a plane of shape {tuple(first.shape)}, strides {first.stride()}: 4 dimensions "
                "are needed, the last one dense"
            )
        if min(first.stride()) < 0 or first.shape[0] > BLOCKS_MAX:
            raise ValueError(f"a plane of {first.shape[0]} blocks, at most {BLOCKS_MAX}")
        for number, plane in enumerate(self.planes):
            for name in ("shape", "dtype", "device"):
                if getattr(plane, name) != getattr(first, name):
                    raise ValueError(
                        f"plane {number}: {name} {getattr(plane, name)}, plane 0 has "
                        f"{getattr(first, name)}"
                    )
            if plane.stride() != first.stride():
                raise ValueError(f"plane {number}: strides {plane.stride()}, not {first.stride()}")
        size = first.dtype.itemsize
        places = [plane.data_ptr() for plane in self.planes]
        places += [stride * size for stride in first.stride()[:3]]
        places += [first.shape[3] * size]
        object.__setattr__(self, "_places", int(np.bitwise_or.reduce(np.array(places, np.uint64))))
        object.__setattr__(self, "_stacked", {})

    @classmethod
    def apart(
        cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], order: TokenOrder
    ) -> PagedKv:
        """Keys and values of each layer in tensors of their own, [blocks, *order]."""
        pairs = zip(keys, values, strict=True)
        return cls(tuple(_heads_first(t, order) for pair in pairs for t in pair), 2)

    @classmethod
    def together(cls, layers: Sequence[torch.Tensor], order: TokenOrder, kv_axis: int) -> PagedKv:
        """Keys and values of a layer in one tensor of 5 dimensions; `kv_axis`, 0 or 1, has both.

        0: [2, blocks, *order]. 1: [blocks, 2, *order].
        """
        for layer in layers:
            if layer.dim() != 5 or kv_axis not in (0, 1) or layer.shape[kv_axis] != 2:
                raise ValueError(f"shape {tuple(layer.shape)} has no K and V on axis {kv_axis}")
        return cls.apart(
            [layer.select(kv_axis, 0) for layer in layers],
            [layer.select(kv_axis, 1) for layer in layers],
            order,
        )

    @classmethod
    def latent(cls, layers: Sequence[torch.Tensor]) -> PagedKv:
        """MLA: one latent a layer, [blocks, tokens, dim]."""
        for layer in layers:
            if layer.dim() != 3:
                raise ValueError(f"shape {tuple(layer.shape)} is not [blocks, tokens, dim]")
        return cls(tuple(layer.unsqueeze(1) for layer in layers), 1)

    @classmethod
    def cross_layer(
        cls, tensor: torch.Tensor, layer_axis: int, order: TokenOrder, kv_axis: int
    ) -> PagedKv:
        """One tensor of 6 dimensions for all layers; `kv_axis` is counted without the layers."""
        return cls.together(list(tensor.unbind(layer_axis)), order, kv_axis)

    @property
    def layers(self) -> int:
        return len(self.planes) // self.kinds

    @property
    def blocks(self) -> int:
        return self.planes[0].shape[0]

    @property
    def heads(self) -> int:
        return self.planes[0].shape[1]

    @property
    def block_tokens(self) -> int:
        return self.planes[0].shape[2]

    @property
    def dim(self) -> int:
        return self.planes[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.planes[0].dtype

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        values = len(self.planes) * self.heads * self.block_tokens * self.dim
        return values * self.dtype.itemsize

    def check_ids(self, block_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """The ids as int64; ValueError unless each is NO_BLOCK or a block of this cache."""
        ids = np.ascontiguousarray(block_ids, np.int64)
        if ids.ndim != 1:
            raise ValueError(f"block ids of shape {ids.shape}; a flat list is needed")
        if ids.size and (ids.min() < NO_BLOCK or ids.max() >= self.blocks):
            raise ValueError(
                f"block ids from {ids.min()} to {ids.max()}; this cache has {self.blocks} blocks"
            )
        return ids

    def word_bytes(self, addresses: Sequence[int]) -> int:
        """Bytes of the widest integer that all rows, strides and `addresses` are multiples of."""
        together = reduce(or_, addresses, self._places)
        return next(width for width in (8, 4, 2, 1) if together % width == 0)

    def words(self, width: int) -> tuple[torch.Tensor, ...]:
        """The planes' memory as integers of `width` bytes; no copy."""
        if width == self.dtype.itemsize:
            return tuple(plane.view(_INTEGERS[width]) for plane in self.planes)
        return tuple(plane.view(torch.int8).view(_INTEGERS[width]) for plane in self.planes)

    def stacked(self, width: int) -> list[NDArray[Any]]:
        """The planes in few numpy views [planes, blocks, heads, tokens, words]: one if it can be.

        One view for all spares numpy's call for each plane. It is possible where all lie in one
        storage at equal distances: one cross-layer tensor, or K and V of a layer.
        """
        if width not in self._stacked:
            self._stacked[width] = _stacked(self.words(width), width)
        return self._stacked[width]


class _Memory:
    """Memory as numpy takes it from strangers, who say themselves whether it may be written."""

    def __init__(self, memory: memoryview) -> None:
        self._array = np.frombuffer(memory, np.uint8)
        place = self._array.ctypes.data, False
        self.__array_interface__ = self._array.__array_interface__ | {"data": place}


def page_tensor(memory: memoryview) -> torch.Tensor:
    """Host memory as uint8, no copy; it keeps the memory alive.

    torch knows no read-only tensors: one of a page that is mapped read-only must not be written.
    """
    return torch.from_numpy(np.asarray(_Memory(memory)))


def page_rows(
    pages: torch.Tensor | Sequence[torch.Tensor], page_bytes: int, count: int
) -> list[torch.Tensor]:
    """The pages one by one; ValueError unless they are `count` dense uint8 runs of `page_bytes`.

    A 2-dimensional tensor is a sequence of its rows.
    """
    rows = list(pages)
    if len(rows) != count:
        raise ValueError(f"{len(rows)} pages for block ids of {count}")
    shape, device = torch.Size([page_bytes]), rows[0].device if rows else None
    for row in rows:
        if row.dtype != torch.uint8 or row.shape != shape or row.stride(0) != 1:
            raise ValueError(
                f"a page of {row.dtype} {tuple(row.shape)}; dense uint8 [{page_bytes}] is needed"
            )
        if row.device != device:
            raise ValueError(f"pages on {row.device} and on {device} in one call")
    return rows


def check_reach(rows: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether the pages are pinned host memory, not the device's own; ValueError if neither."""
    if not rows or rows[0].device == device:
        return False
    if rows[0].device.type == "cpu" and all(row.is_pinned() for row in rows):
        return True
    raise ValueError(f"pages on {rows[0].device}: {device} reaches its own and pinned host memory")


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The addresses of tensors, int64 on the CPU."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def _heads_first(tensor: torch.Tensor, order: TokenOrder) -> torch.Tensor:
    if tensor.dim() != 4:
        raise ValueError(f"shape {tuple(tensor.shape)} is not [blocks, {order}]")
    return tensor.transpose(1, 2) if order is TokenOrder.NHD else tensor


def _stacked(planes: Sequence[torch.Tensor], width: int) -> list[NDArray[Any]]:
    first = planes[0]
    steps = np.diff([plane.data_ptr() for plane in planes])
    storages = {plane.untyped_storage().data_ptr() for plane in planes}
    if len(planes) > 1 and (len(storages) > 1 or (steps != steps[0]).any() or steps[0] < 0):
        return [plane.unsqueeze(0).numpy() for plane in planes]
    step = int(steps[0]) // width if len(planes) > 1 else 0
    if len(planes) > 1 and int(steps[0]) % width:
        return [plane.unsqueeze(0).numpy() for plane in planes]
    stacked = first.as_strided((len(planes), *first.shape), (step, *first.stride()))
    return [stacked.numpy()]
