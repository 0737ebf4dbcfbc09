"""Rounding by what is multiplied: against a twin that inverts anew for every column, and what it gains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.ops.gptq import ENOUGH, RIDGE, gram_of, product_change, quantize_fitted
from diffusiongemma.ops.quant import FP8, FP8_MAX, Format, best_scales, dequantize, quantize

FORMATS = [Format("int8"), Format("fp8"), Format("int4", 32), Format("int4", 64)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def inputs(tokens: int, columns: int, seed: int = 0, rank: int = 8) -> Tensor:
    """Inputs as networks have them: a few directions that all share, and something of their own."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    return shared + torch.randn(tokens, columns, generator=generator)


def weights(outputs: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(outputs, columns, generator=torch.Generator().manual_seed(seed))


def slow(weight: Tensor, gram: Tensor, tokens: int, fmt: Format) -> Tensor:
    """[O, I], [I, I] -> dequantised [O, I]: optimal brain surgery, column by column, in float64"""
    w, columns = weight.double().clone(), weight.shape[1]
    h = gram.double() + torch.eye(columns) * gram.diagonal().mean() * RIDGE * max(1, ENOUGH * columns / max(1, tokens))
    if not gram.any():
        h = torch.eye(columns).double()
    scale = w.abs().amax(1, keepdim=True) / (FP8_MAX if fmt.kind == "fp8" else 127)
    cost = torch.stack([1 / torch.linalg.inv(h[j:, j:])[0, 0] for j in range(columns)])
    for j in range(columns):
        if fmt.group and j % fmt.group == 0:
            part = slice(j, j + fmt.group)
            scale = best_scales(w[:, part].float(), cost[part].float()).double()
        if fmt.kind == "fp8":
            number = (w[:, j : j + 1] / scale).clamp(-FP8_MAX, FP8_MAX).float().to(FP8).double()
        else:
            number = (w[:, j : j + 1] / scale).round().clamp(*((-8, 7) if fmt.group else (-127, 127)))
        inverse = torch.linalg.inv(h[j:, j:])
        error = w[:, j : j + 1] - number * scale
        w[:, j:] -= error / inverse[0, 0] * inverse[:1]
        w[:, j : j + 1] = number * scale
    return w


@every_format
@pytest.mark.parametrize("tokens", [1000, 60, 0])
def test_equals_the_slow_twin(fmt: Format, tokens: int) -> None:
    w, x = weights(24, 128), inputs(tokens, 128)
    gram = gram_of(x)
    ours = dequantize(*(part[0] for part in quantize_fitted(w[None], gram[None], [tokens], fmt)))
    theirs = slow(w, gram, tokens, fmt)
    # One weight that lies between two numbers may round the other way in float32, and all behind it follow.
    assert ((ours - theirs).abs() < 1e-4).double().mean() > (0.995 if fmt.kind == "fp8" else 0.999)


@every_format
def test_products_change_less(fmt: Format) -> None:
    w, x, fresh = weights(64, 256), inputs(4000, 256), inputs(4000, 256, seed=0)[2000:]
    plain = dequantize(*quantize(w, fmt))
    fitted = dequantize(*(part[0] for part in quantize_fitted(w[None], gram_of(x[:2000])[None], [2000], fmt)))
    change = ((fresh @ (w - fitted).t()).norm() / (fresh @ (w - plain).t()).norm()).item()
    assert change < 0.75  # on inputs that it has not seen
    assert (w - fitted).norm() > (w - plain).norm()  # though every weight is further from what it was


@every_format
def test_nothing_seen_is_plain_rounding(fmt: Format) -> None:
    w = weights(16, 128)
    q, scale = quantize_fitted(w[None], torch.zeros(1, 128, 128), [0], fmt)
    plain_q, plain_scale = quantize(w, fmt)
    assert (q.dtype, scale.dtype, q[0].shape, scale[0].shape) == (
        plain_q.dtype, plain_scale.dtype, plain_q.shape, plain_scale.shape,
    )  # fmt: skip
    assert torch.equal(q[0].view(torch.uint8), plain_q.view(torch.uint8))
    assert torch.equal(scale[0], plain_scale)


@every_format
def test_experts_together_and_alone(fmt: Format) -> None:
    """Batched, each gets what it gets alone, also beside one that saw nothing."""
    w = torch.stack([weights(16, 128, seed) for seed in range(3)])
    counts = [400, 0, 90]
    grams = torch.stack([gram_of(inputs(n, 128, seed)) for seed, n in enumerate(counts)])
    q, scale = quantize_fitted(w, grams, counts, fmt)
    for e, n in enumerate(counts):
        alone = dequantize(*(part[0] for part in quantize_fitted(w[e : e + 1], grams[e : e + 1], [n], fmt)))
        assert ((dequantize(q[e], scale[e]) - alone).abs() < 1e-4).double().mean() > 0.99


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-4, 1.0, 1e4]), st.integers(1, 40), st.booleans())
def test_inputs_that_repeat(seed: int, size: float, rank: int, dead: bool) -> None:
    """Fewer directions than columns, columns without any input, numbers of any size: finite, and no worse than plain
    rounding by more than the ridge explains."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, rank, generator=generator) @ torch.randn(rank, 64, generator=generator) * size
    if dead:
        x[:, ::3] = 0
    w, gram = weights(8, 64, seed), gram_of(x)
    for fmt in (Format("fp8"), Format("int4", 32)):
        q, scale = quantize_fitted(w[None], gram[None], [300], fmt)
        fitted = dequantize(q[0], scale[0])
        assert fitted.isfinite().all()
        change, whole = product_change(w[None], fitted[None], gram[None])
        plain, _ = product_change(w[None], dequantize(*quantize(w, fmt))[None], gram[None])
        assert change.sum() <= 1.5 * plain.sum() + 1e-6 * whole.sum()


def test_what_changed_is_measured() -> None:
    w, x = weights(5, 32), inputs(50, 32)
    other = w + 0.1 * weights(5, 32, 9)
    change, whole = product_change(w[None], other[None], gram_of(x)[None])
    assert torch.allclose(change[0], (x @ (w - other).t()).square().sum(0), rtol=1e-4)
    assert torch.allclose(whole[0], (x @ w.t()).square().sum(0), rtol=1e-4)


def test_numbers_stay_in_the_range() -> None:
    """Rows whose largest weights have to make up for others: -128 and what is no fp8 number are never written."""
    x = inputs(400, 64, rank=1)
    w = torch.where(torch.arange(64) % 2 == 0, -1.0, 0.99)[None].repeat(32, 1) + 0.004 * weights(32, 64)
    for fmt in FORMATS[:2]:
        q, scale = quantize_fitted(w[None], gram_of(x)[None], [400], fmt)
        assert q.float().abs().max() == (448.0 if fmt.kind == "fp8" else 127.0)
        assert torch.equal(q.float().isfinite().all(), torch.tensor(True))
        assert torch.equal(scale[0], w.abs().amax(1, keepdim=True) / (448.0 if fmt.kind == "fp8" else 127.0))


def test_a_gram_that_float32_spoilt() -> None:
    """Where rounding made it indefinite, there is more of a ridge, for that expert alone."""
    w, gram = weights(8, 64), gram_of(inputs(500, 64))
    spoilt = gram - 0.2 * gram.diagonal().mean() * torch.eye(64)
    assert torch.linalg.cholesky_ex(spoilt + 0.05 * gram.diagonal().mean() * torch.eye(64)).info > 0
    q, scale = quantize_fitted(torch.stack([w, w]), torch.stack([spoilt, gram]), [500, 500], Format("int4", 32))
    whole = product_change(w[None], torch.zeros_like(w)[None], gram[None])[1].sum()
    for e in range(2):
        change, _ = product_change(w[None], dequantize(q[e], scale[e])[None], gram[None])
        assert change.sum() < 0.02 * whole
    alone = quantize_fitted(w[None], gram[None], [500], Format("int4", 32))
    assert torch.equal(q[1], alone[0][0])


@pytest.mark.parametrize("blind", [False, True])
def test_inputs_that_are_no_numbers(blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`blind`: as on a card, where a factor of NaN is no failure."""
    if blind:
        found = torch.linalg.cholesky_ex
        monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (found(a)[0].fill_(torch.nan), torch.zeros(len(a))))
    for fmt in FORMATS:
        with pytest.raises(ArithmeticError, match="no numbers"):
            quantize_fitted(weights(4, 64)[None], torch.full((1, 64, 64), torch.nan), [10], fmt)
