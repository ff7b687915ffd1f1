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


SCALINGS: dict[str, dict[str, float | str]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 4096},
}


def scaled(scaling: str, dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position, and what a model of this scaling multiplies its keys with."""
    if scaling == "none":
        return frequencies(dim // 2), 1.0
    transformers = pytest.importorskip("transformers", reason="scalings as models have them")
    config = transformers.LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=1 << 16,
        rope_parameters={"rope_type": scaling, "rope_theta": THETA} | SCALINGS[scaling],
    )
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    per_position, factor = functions[scaling](config, "cpu")
    return per_position.double(), factor


def pairs_of(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def in_float64(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., tokens, dim] turned by angles [tokens, pairs]."""
    a, b = pairs_of(x.double(), interleaved)
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def lengths(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The length of the pair that each number of x belongs to."""
    size = torch.hypot(*pairs_of(x.double(), interleaved))
    return torch.stack([size, size], -1).flatten(-2) if interleaved else torch.cat([size, size], -1)


def as_plane(keys: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """[heads, tokens, dim] as [blocks, heads, tokens of a block, dim]."""
    heads, _, dim = keys.shape
    return (
        keys.reshape(heads, -1, block_tokens, dim)
        .transpose(0, 1)
        .clone(memory_format=torch.contiguous_format)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
@pytest.mark.parametrize(
    ("heads", "block_tokens", "dim", "first", "rotated"),
    [(2, 4, 16, 0, 16), (3, 5, 22, 4, 10), (1, 7, 40, 34, 6), (1, 1, 2, 0, 2)],
)
def test_turned_keys_are_those_of_the_new_position(
    dtype: torch.dtype,
    interleaved: bool,
    scaling: str,
    heads: int,
    block_tokens: int,
    dim: int,
    first: int,
    rotated: int,
) -> None:
    """Exact to the dtype: within the roundings of the stored and of the turned key, half a unit of
    the pair's length each, the first one on both numbers of a pair; and, of what is stored, nearly
    always the nearest number there is. Odd sizes; channels that do not turn stay, bit for bit."""
    blocks = 3
    per_position, factor = scaled(scaling, rotated)
    generator = torch.Generator().manual_seed(heads * dim)
    plain = torch.randn(heads, blocks * block_tokens, dim, generator=generator)
    part = slice(first, first + rotated)
    old = torch.arange(blocks * block_tokens) + 100
    new = torch.randint(0, 60_000, old.shape, generator=generator)

    def at(positions: torch.Tensor) -> torch.Tensor:
        turned = plain.double()
        angle = positions[:, None].double() * per_position
        turned[..., part] = in_float64(plain[..., part] * factor, angle, interleaved)
        return turned

    stored = at(old).to(dtype)
    plane = as_plane(stored, block_tokens)
    kv = PagedKv((plane, torch.zeros_like(plane)), 2)
    rotate(
        kv,
        range(blocks),
        old,
        new,
        per_position,
        first_channel=first,
        interleaved=interleaved,
    )
    found = plane.transpose(0, 1).reshape(stored.shape)
    units = 1.25 if dtype.itemsize == 2 else 4.0  # float32 is also what it is computed in
    size = lengths(plain[..., part] * factor, interleaved)
    error = (found.double() - at(new))[..., part].abs()
    assert (error <= units * torch.finfo(dtype).eps * size).all()
    if dtype.itemsize == 2:
        shift = (new - old)[:, None].double() * per_position
        nearest = in_float64(stored[..., part], shift, interleaved).to(dtype)
        assert (found[..., part] != nearest).double().mean() <= 0.01
    found[..., part] = stored[..., part]
    assert torch.equal(found, stored)
    assert not kv.planes[1].any()


@pytest.mark.parametrize(
    ("module", "interleaved"), [("llama.modeling_llama", False), ("cohere.modeling_cohere", True)]
)
def test_pairs_and_direction_are_those_of_real_models(module: str, interleaved: bool) -> None:
    """A model's own code turns the same keys to both places, in float32, angles included."""
    code = pytest.importorskip(f"transformers.models.{module}", reason="a model's own code")
    tokens, dim = 12, 16
    plain = torch.randn(1, 2, tokens, dim, generator=torch.Generator().manual_seed(5))
    per_position = frequencies(dim // 2).float()

    def at(positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None].float() * per_position
        both = angle.repeat_interleave(2, 1) if interleaved else torch.cat([angle, angle], 1)
        turned: torch.Tensor
        turned = code.apply_rotary_pos_emb(plain, plain, both.cos()[None], both.sin()[None])[1]
        return turned[0]

    old, new = torch.arange(tokens) + 3, torch.arange(tokens) + 1500
    plane = as_plane(at(old), 4)
    kv = PagedKv((plane, torch.zeros_like(plane)), 2)
    rotate(kv, [0, 1, 2], old, new, per_position, interleaved=interleaved)
    found = plane.transpose(0, 1).reshape(2, tokens, dim)
    angle_error = 1512 * torch.finfo(torch.float32).eps  # of the model, whose angle is a float32
    assert (found - at(new)).abs().max() <= 2 * angle_error * plain.abs().max()
    assert (found - at(old)).abs().max() > 0.1


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
