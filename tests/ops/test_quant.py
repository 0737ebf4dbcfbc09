"""Number formats: ranges, errors, packing by hand, and the figures that the module's docstring gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.errors import ConfigError
from diffusiongemma.ops import quant
from diffusiongemma.ops.quant import (
    FP8,
    Format,
    best_scales,
    dequantize,
    dequantize_into,
    error_of,
    pack_int4,
    parse_format,
    quantize,
    quantize_into,
    quantize_tokens,
    unpack_int4,
)

FORMATS = [Format("int8"), Format("fp8"), Format("int4", 32), Format("int4", 64)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("fmt", "error"), list(zip(FORMATS, (0.0085, 0.0264, 0.0818, 0.0902), strict=True)), ids=str)
def test_the_documented_errors(fmt: Format, error: float) -> None:
    w = gauss(256, 2816)
    relative, cosine = error_of(w, *quantize(w, fmt))
    assert relative == pytest.approx(error, rel=0.02)
    assert cosine == pytest.approx(1 - relative**2 / 2, abs=2e-4)


@every_format
def test_shapes_and_dtypes_are_what_the_format_says(fmt: Format) -> None:
    w = gauss(3, 16, 128)
    q, scale = quantize(w, fmt)
    assert q.shape == fmt.q_shape((3, 16, 128))
    assert scale.shape == fmt.scale_shape((3, 16, 128))
    assert (q.dtype, scale.dtype) == (fmt.dtype, fmt.scale_dtype)
    assert dequantize(q, scale).shape == w.shape
    assert dequantize(q, scale, torch.bfloat16).dtype == torch.bfloat16


@every_format
def test_each_row_stands_alone(fmt: Format) -> None:
    """So the rows of a fused weight can be cut apart and put together: the parts are those of the whole."""
    w = gauss(4, 24, 64)
    q, scale = quantize(w, fmt)
    for part, rows in [((2,), slice(None)), ((1,), slice(5, 12))]:
        alone = quantize(w[part][rows], fmt)
        assert torch.equal(alone[0].view(torch.uint8), q[part][rows].contiguous().view(torch.uint8))
        assert torch.equal(alone[1], scale[part][rows])


@every_format
def test_blocks_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    w = gauss(2, 40, 64)
    q, scale = quantize(w, fmt)
    back, error = dequantize(q, scale), error_of(w, q, scale)
    monkeypatch.setattr(quant, "BLOCK", 3 * 64)
    small = quantize(w, fmt)
    assert torch.equal(small[0].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(small[1], scale)
    assert torch.equal(dequantize(q, scale), back)
    assert error_of(w, q, scale) == pytest.approx(error, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-30, 1e-6, 1.0, 1e6]), st.floats(0, 1))
def test_int8_is_within_half_a_step(seed: int, size: float, zeros: float) -> None:
    w = gauss(4, 64, seed=seed) * size
    w[torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    q, scale = quantize(w, Format("int8"))
    assert ((dequantize(q, scale) - w).abs() <= scale * 0.5001).all()
    assert q.min() >= -127
    assert torch.equal(q == 0, (w / scale).abs() <= 0.5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))
def test_fp8_is_within_half_a_step(seed: int, size: float) -> None:
    """Three bits behind the point: 1/16 of a number, or half of the smallest subnormal."""
    w = gauss(4, 64, seed=seed) * size
    q, scale = quantize(w, Format("fp8"))
    assert ((dequantize(q, scale) - w).abs() <= torch.maximum(w.abs() / 16, scale * 2**-10) * 1.0001).all()
    assert q.float().isfinite().all()
    assert torch.equal(q.float().abs().amax(1), torch.full((4,), 448.0))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([32, 64]), st.sampled_from([1e-6, 1.0, 1e4]))
def test_int4_is_never_worse_than_without_search(seed: int, group: int, size: float) -> None:
    w = gauss(4, 128, seed=seed) ** 3 * size  # heavy tails
    relative, _ = error_of(w, *quantize(w, Format("int4", group)))
    groups = w.view(-1, group)
    scale = (groups.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).norm() / w.norm()
    assert relative <= plain + 1e-7


def test_4_bit_search_pays_a_seventh() -> None:
    """A tenth by clipping, the rest by scales whose sign puts the largest number of a group at -8."""
    w = gauss(64, 2816)
    groups = w.view(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    plain = float(((groups / scale).round().clamp(-8, 7) * scale - groups).norm() / w.norm())
    q, found = quantize(w, Format("int4", 32))
    assert error_of(w, q, found)[0] < 0.86 * plain
    assert 0.4 < float((found < 0).float().mean()) < 0.6


def test_4_bit_scales_by_hand() -> None:
    """The largest number is at -8 whatever its sign, unless that clips one of the other sign."""
    for sign in (1.0, -1.0):
        w = sign * torch.tensor([[8.0, *([3.0] * 15), *([-5.0] * 16)]])
        q, scale = quantize(w, Format("int4", 32))
        assert scale.tolist() == [[-sign]]
        assert unpack_int4(q)[0, 0] == -8
        assert torch.equal(dequantize(q, scale), w)
        both = sign * torch.tensor([[7.0, -7.0] * 16])
        assert torch.equal(dequantize(*quantize(both, Format("int4", 32))), both)


def test_what_counts_more_is_nearer() -> None:
    groups = gauss(64, 32)
    importance = torch.ones(32)
    importance[:4] = 1000.0

    def error(scale: Tensor) -> Tensor:
        return ((groups / scale).round().clamp(-8, 7) * scale - groups).square()

    even, uneven = error(best_scales(groups)), error(best_scales(groups, importance))
    assert uneven[:, :4].sum() < 0.7 * even[:, :4].sum()
    assert uneven.sum() > even.sum()
    # The last of all are least squares of what counts: no scale near them is better.
    best = (error(best_scales(groups, importance)) * importance).sum()
    for factor in (0.99, 1.01):
        assert (error(best_scales(groups, importance) * factor) * importance).sum() > best


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_stay_visible(value: float) -> None:
    w = gauss(4, 64)
    w[2, 40] = value
    for fmt in FORMATS:
        _, scale = quantize(w, fmt)
        assert scale.isfinite().all(dim=1).tolist() == [True, True, False, True]


@every_format
@pytest.mark.parametrize("value", [0.0, 1e-44, 3.0, -3.0])
def test_constant_rows(fmt: Format, value: float) -> None:
    w = torch.full((2, 64), value)
    back = dequantize(*quantize(w, fmt))
    assert torch.allclose(back, w, rtol=0.01, atol=1e-40)


@pytest.mark.parametrize("fmt", FORMATS[:2], ids=str)
def test_quantising_twice_is_quantising_once(fmt: Format) -> None:
    """8-bit formats are stable: what was dequantised comes back to the same numbers."""
    q, scale = quantize(gauss(16, 64), fmt)
    again = quantize(dequantize(q, scale), fmt)
    assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8))
    assert torch.allclose(again[1], scale, rtol=1e-6)


def test_nibbles_by_hand() -> None:
    """Eight numbers a word, the first in the lowest bits, each plus 8."""
    numbers = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]], dtype=torch.int8)
    word = sum((int(n) + 8) << (4 * i) for i, n in enumerate(numbers[0]))
    packed = pack_int4(numbers)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[word - (1 << 32)]]  # the highest bit is the sign
    assert torch.equal(unpack_int4(packed), numbers)


def test_packing_comes_back() -> None:
    numbers = torch.randint(-8, 8, (3, 5, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpack_int4(pack_int4(numbers)), numbers)
    assert torch.equal(unpack_int4(pack_int4(numbers)[:, ::2]), numbers[:, ::2])  # views too


@every_format
def test_into_views_of_another_dtype(fmt: Format) -> None:
    w = gauss(8, 64)
    q, scale = quantize(w.bfloat16(), fmt)
    big_q, big_scale = q.new_zeros(20, q.shape[1]), scale.new_zeros(20, scale.shape[1])
    quantize_into(w.bfloat16(), fmt, big_q[5:13], big_scale[5:13])
    assert torch.equal(big_q[5:13].view(torch.uint8), q.view(torch.uint8))
    assert not big_scale[:5].any()
    out = torch.zeros(20, 64, dtype=torch.bfloat16)
    dequantize_into(q, scale, out[3:11])
    assert torch.equal(out[3:11], dequantize(q, scale, torch.bfloat16))
    assert not out[11:].any()


def test_tokens_have_a_scale_each() -> None:
    x = torch.cat([gauss(3, 64), gauss(1, 64) * 1e5, torch.zeros(1, 64)])
    q, scale = quantize_tokens(x)
    assert q.dtype == FP8
    assert torch.allclose(q.float() * scale, x, rtol=1 / 16, atol=float(x.abs().max()) * 1e-5)
    assert torch.equal(quantize_tokens(x[2:3])[0].view(torch.uint8), q[2:3].view(torch.uint8))


def test_error_of_nothing() -> None:
    assert error_of(torch.zeros(2, 32), *quantize(torch.zeros(2, 32), Format("int8"))) == (0.0, 1.0)


def test_names() -> None:
    assert parse_format("fp8") == Format("fp8")
    assert parse_format("int4") == Format("int4", 64)
    assert parse_format("int4", 32) == Format("int4", 32)
    assert str(parse_format("int4", 64)) == "int4 in groups of 64"
    for kind, group, words in [
        ("int3", None, "int8, fp8, int4"),
        ("int4", 48, "32 or 64"),
        ("int8", 32, "leave it out"),
        ("INT4", None, "no number format"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse_format(kind, group)
