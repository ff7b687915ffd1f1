"""Re-rotation: kernel and reference agree to the bit; turned keys are those of the new place."""

from __future__ import annotations

import pytest
import torch
from paged_caches import Sizes, apart_hnd, apart_nhd, latent, numbers, same_bits, strided

from kvstore.kernels.jit import INTERPRETED
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv
from kvstore.kernels.rope import launch_blocks, rotate, rotate_reference

THETA = 10_000.0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def frequencies(pairs: int) -> torch.Tensor:
    return THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def rotated(x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, dim] turned to positions, in float64: what a model would compute, exactly."""
    pairs = x.shape[1] // 2
    angle = positions[:, None].double() * frequencies(pairs)
    x = x.double()
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :pairs], x[:, pairs:])
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, 2).flatten(1) if interleaved else torch.cat(turned, 1)


def copy_of(kv: PagedKv) -> PagedKv:
    return PagedKv(tuple(plane.clone() for plane in kv.planes), kv.kinds)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_turns_as_the_reference_does(dtype: torch.dtype, interleaved: bool) -> None:
    for arrangement in (apart_nhd, strided, latent):
        kv = arrangement(Sizes(2, 6, 3, 2, 10), dtype, numbers)
        wanted, found = copy_of(kv), copy_of(kv)
        ids = [4, NO_BLOCK, 1]
        angles = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        cos, sin = angles.cos().float(), angles.sin().float()
        rotate_reference(wanted, ids, cos, sin, 2, interleaved)
        launch_blocks(found, kv.check_ids(ids), cos, sin, 2, interleaved)
        assert same_bits(found, wanted)
        assert not same_bits(found, kv)
        for plane, before in zip(
            found.planes[1 :: kv.kinds], kv.planes[1 :: kv.kinds], strict=True
        ):
            assert kv.kinds == 1 or torch.equal(plane, before)  # values stay


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_turned_keys_are_those_of_the_new_position(dtype: torch.dtype, interleaved: bool) -> None:
    """Within the two roundings to the dtype: half a unit each of a number of the pair's length."""
    tokens, dim = 8, 16
    plain = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(2))
    old, new = torch.arange(100, 108), torch.arange(5000, 5008)
    blocks = rotated(plain, old, interleaved).to(dtype).reshape(2, 1, 4, dim)
    kv = PagedKv((blocks, torch.zeros_like(blocks)), 2)
    rotate(kv, [0, 1], old, new, frequencies(dim // 2), interleaved=interleaved)
    wanted = rotated(plain, new, interleaved)
    unit = torch.finfo(dtype).eps * plain.double().abs().max() * 1.5
    assert (blocks.reshape(tokens, dim).double() - wanted).abs().max() <= unit


def test_no_shift_changes_no_bit_and_back_is_back() -> None:
    kv = apart_hnd(Sizes(1, 3, 4, 1, 8), torch.float32, numbers)
    before = copy_of(kv)
    here = torch.arange(8)
    rotate(kv, [0, 2], here, here, frequencies(4))
    assert torch.equal(kv.planes[0], before.planes[0])
    rotate(kv, [0, 2], here, here + 777, frequencies(4))
    assert not torch.allclose(kv.planes[0][0], before.planes[0][0], atol=1e-3)
    assert torch.equal(kv.planes[0][1], before.planes[0][1])
    rotate(kv, [0, 2], here + 777, here, frequencies(4))
    assert torch.allclose(kv.planes[0], before.planes[0], atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    kv = apart_hnd(Sizes(1, 3, 4, 1, 8), torch.float32, numbers)
    four, five = torch.arange(4), torch.arange(5)
    for ids, old, new, pairs, first, message in (
        ([0], five, five, 4, 0, "positions"),
        ([0], four, five, 4, 0, "positions"),
        ([0], four, four, 5, 0, "5 pairs"),
        ([0], four, four, 4, 1, "from channel 1"),
        ([0, 0], four, four, 4, 0, "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate(kv, ids, old, new, frequencies(pairs), first_channel=first)
    bytes_only = PagedKv((torch.zeros(1, 1, 4, 8, dtype=torch.uint8),), 1)
    with pytest.raises(ValueError, match="uint8"):
        rotate(bytes_only, [0], four, four, frequencies(4))
