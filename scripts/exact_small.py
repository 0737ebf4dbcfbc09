"""The small operations in float64: norms, rounding, rotary embedding, heads, router, the sort by expert, draws.

Each gives the parts of a result (`exact_limits.Part`). Where an operation makes a second result of its first as that is
stored, the reference reads the stored one too: the error of one step is not blamed on the next.

Legend: N tokens, D hidden, H query heads, K key/value heads, Dh head size, E experts, k experts a token.
"""

from __future__ import annotations

import torch
from exact_limits import (
    A_FEW,
    BF16,
    FP32,
    SPREAD,
    Part,
    fp8_scale,
    int8_scale,
    named,
    rounded,
    sum_float32,
    to_bf16,
    together,
)
from torch import Tensor

from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed, Routing, capacity_of


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] float64 -> its RMS norm, times the weight"""
    y = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def rows(what: str, got: Rows, want: Tensor, before: Tensor | None, quant: torch.dtype | None) -> list[Part]:
    """Rows that are stored as `quant` says, and their scales, which the largest number of a row gives; `before`: how
    far they were off before that"""
    bounds = [rounded(want, quant), A_FEW * want.abs()]
    if before is not None:
        bounds.append(before)
    wide = got.values.double() if got.scale is None else got.values.double() * got.scale.double()
    parts = [Part(what, wide, want, together(*bounds))]
    assert (got.scale is None) == (quant is None), f"{what}: rows in {got.values.dtype} where {quant} was asked for"
    if got.scale is not None:
        scale = (fp8_scale if quant == FP8 else int8_scale)(want)
        off = A_FEW * scale
        if before is not None:
            top = want.abs().argmax(dim=-1, keepdim=True)
            off = off + before.expand_as(want).gather(-1, top) / want.abs().gather(-1, top) * scale
        parts.append(Part(f"{what} scale".strip(), got.scale.double(), scale, off))
    return parts


def norm_rows(got: Rows, x: Tensor, weight: Tensor | None, eps: float, quant: torch.dtype | None) -> list[Part]:
    want = norm(x.double(), weight, eps)
    # It may be rounded to bfloat16 before it is rounded to 8 bits.
    before = sum_float32(x.shape[-1]) * want.abs()
    return rows("", got, want, before if quant is None else together(before, to_bf16(want)), quant)


def after_attention(
    got: tuple[Tensor, Rows, Rows], x: Tensor, branch: Tensor, weights: list[Tensor], eps: float,
    quant: torch.dtype | None,
) -> list[Part]:  # fmt: skip
    normed = norm(branch.double(), weights[0], eps)
    want = x.double() + normed
    # The norm may be rounded to bfloat16 before it is added.
    bound = together(to_bf16(want), to_bf16(normed), sum_float32(x.shape[-1]) * normed)
    return [
        Part("residual", got[0], want, bound),
        *named("dense", norm_rows(got[1], got[0], weights[1], eps, quant)),
        *named("sparse", norm_rows(got[2], got[0], weights[2], eps, quant)),
    ]


def after_feed_forward(
    got: tuple[Tensor, Rows], x: Tensor, dense: Tensor, sparse: Tensor, weights: tuple[Tensor, Tensor, Tensor],
    scalar: Tensor, following: Tensor, eps: float, quant: torch.dtype | None,
) -> list[Part]:  # fmt: skip
    pairs = sparse.double().view(len(x), -1, x.shape[1]).sum(dim=1)
    one, two = norm(dense.double(), weights[0], eps), norm(pairs, weights[1], eps)
    both = one + two
    factor = weights[2].double() / (both.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    total = x.double() + both * factor
    # Any of these may be rounded to bfloat16 on the way: the sum over experts, both norms, their sum, its norm, the
    # sum with x.
    bound = together(to_bf16(one), to_bf16(two), to_bf16(two), to_bf16(both)) * factor.abs()
    bound = together(bound, to_bf16(both * factor), to_bf16(total), sum_float32(x.shape[-1]) * both * factor)
    want, bound = total * scalar.double(), together(bound * scalar.double().abs(), to_bf16(total * scalar.double()))
    return [
        Part("residual", got[0], want, bound),
        *named("following", norm_rows(got[1], got[0], following, eps, quant)),
    ]


# ---- heads -------------------------------------------------------------------------------------------------------


def rope_at(got: tuple[Tensor, Tensor], positions: Tensor, frequency: Tensor) -> list[Part]:
    angle = positions.double()[:, None] * frequency.double()
    # The angle itself is a float32, and turning by 2^17 radians loses what it has rounded.
    off = FP32 * angle.abs() + A_FEW
    pairs = zip(("cos", "sin"), got, (angle.cos(), angle.sin()), strict=True)
    return [Part(name, one, want, together(to_bf16(want), off)) for name, one, want in pairs]


def split_heads(
    got: tuple[Tensor, Tensor, Tensor], qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rope: tuple[Tensor, Tensor],
    heads: int, kv_heads: int, eps: float,
) -> list[Part]:  # fmt: skip
    parts = qkv.double().view(qkv.shape[0], -1, q_weight.shape[0])
    q, k = parts[:, :heads], parts[:, heads : heads + kv_heads]
    v = parts[:, heads + kv_heads :] if parts.shape[1] > heads + kv_heads else k
    cos, sin = (t.double()[:, None, :] for t in rope)
    found = []
    for name, one, x, weight in (("q", got[0], q, q_weight), ("k", got[1], k, k_weight)):
        a, b = norm(x, weight, eps).chunk(2, dim=-1)
        want = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        # The norm may be rounded to bfloat16, and so may both products before they are added.
        size = torch.cat((together(a * cos, b * sin), together(b * cos, a * sin)), dim=-1)
        found.append(Part(name, one, want, together(to_bf16(want), to_bf16(size), to_bf16(size), A_FEW * size)))
    want = norm(v, None, eps)
    return [*found, Part("v", got[2], want, together(to_bf16(want), sum_float32(v.shape[-1]) * want))]


# ---- router ------------------------------------------------------------------------------------------------------


def route(
    got: tuple[Tensor, Tensor], x: Tensor, proj: Tensor, scale: Tensor, per_expert: Tensor, top_k: int, eps: float
) -> list[Part]:
    index, weight = got
    inputs = norm(x.double(), None, eps) * scale.double() * x.shape[1] ** -0.5
    scores = inputs @ proj.double().t()
    size = (inputs.square() @ proj.double().square().t()).sqrt()
    # The inputs may be rounded to bfloat16 after each of their three factors, and the scores when they are stored.
    off = together(3**0.5 * BF16 * size, to_bf16(scores), sum_float32(x.shape[1]) * size)
    wrong = (index < 0) | (index >= len(proj)) | (index.sort(dim=1).values.diff(prepend=index[:, :1] * 0 - 1) == 0)
    parts = [Part("experts there, each once", wrong, torch.zeros_like(wrong), how="equal")]
    index = index.clamp(0, len(proj) - 1)
    # Is one that was left out better than one that was taken, by more than rounding explains?
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
    out, left = scores.masked_fill(chosen, -torch.inf).max(dim=1)
    least, taken = scores.masked_fill(~chosen, torch.inf).min(dim=1)
    slack = SPREAD * together(*(off.gather(1, at[:, None]).squeeze(1) for at in (left, taken)))
    gap = (out - least).clamp_min(0)
    parts.append(Part("best left out", gap, torch.zeros_like(gap), slack, "most"))
    shares = scores.gather(1, index).softmax(dim=1)
    each = off.gather(1, index)
    mean = (shares * each).square().sum(dim=1, keepdim=True).sqrt()
    want = shares * per_expert.double()[index]
    return [*parts, Part("weights", weight, want, want.abs() * (together(each, mean.expand_as(each)) + A_FEW))]


def lost(got: tuple[Tensor, Tensor], experts: int) -> list[Part]:
    """Tokens that are not numbers must not lead beyond the experts."""
    outside = (got[0] < 0) | (got[0] >= experts)
    return [Part("experts of NaN", outside, torch.zeros_like(outside), how="equal")]


def sort(got: Routing, index: Tensor, experts: int, block: int) -> list[Part]:
    """Pairs by expert, in their own order within one, and the blocks that they are cut into: whole numbers"""
    flat = index.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    table, start = [], 0
    for expert in range(experts):
        end = start + flat.count(expert)
        table += [(expert, first, end) for first in range(start, end, block)]
        start = end
    table += [(-1, 0, 0)] * (capacity_of(len(flat), experts, block) - len(table))
    return [
        Part("order", got.order.cpu(), torch.tensor(order, dtype=torch.int32), how="equal"),
        Part("table", got.table.cpu(), torch.tensor(table, dtype=torch.int32).view(-1, 3).t(), how="equal"),
    ]


def placed(got: Placed, index: Tensor, weight: Tensor) -> list[Part]:
    """Every pair once, in the list of its expert, found there with its weight, and blocks that cover all: equal"""
    experts, tokens = got.lists.shape
    counts = torch.bincount(index.flatten(), minlength=experts).cpu()
    there = torch.arange(tokens) < counts[:, None]
    lists = got.lists.cpu().long().masked_fill(~there, index.numel()).sort(dim=1).values
    flat = index.flatten().cpu()
    want = torch.full_like(lists, index.numel())
    for expert, count in enumerate(counts.tolist()):
        want[expert, :count] = (flat == expert).nonzero().flatten()
    begin = [e * tokens + at for e, count in enumerate(counts.tolist()) for at in range(got.block, count, got.block)]
    found = torch.cat([got.counts.cpu(), got.beyond[: len(begin)].cpu().sort().values])
    there = got.place.long()
    return [
        Part("lists", lists, want, how="equal"),
        Part("pairs at their places", got.lists.flatten()[there].cpu().long(), torch.arange(len(flat)), how="equal"),
        Part("weights at their places", got.share.flatten()[there], weight.flatten(), how="equal"),
        Part("counts, blocks beyond", found, torch.tensor([*counts.tolist(), len(begin), *begin]), how="equal"),
    ]


# ---- chance ------------------------------------------------------------------------------------------------------


def draws(got: tuple[Tensor, Tensor], seed: Tensor, step: Tensor, position: Tensor, vocab: int) -> list[Part]:
    """Philox 4x32-10 (Salmon et al., 2011) in Python's integers"""
    word = (1 << 32) - 1
    uniform, tokens = [], []
    for key, c1, c0 in zip(seed.tolist(), step.tolist(), position.tolist(), strict=True):
        counter, k0, k1 = (c0 & word, c1 & word, 0, 0), key & word, key >> 32 & word
        for _ in range(10):
            a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = (b >> 32 ^ counter[1] ^ k0, b & word, a >> 32 ^ counter[3] ^ k1, a & word)
            k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
        uniform.append((counter[0] >> 8) / 2**24)
        tokens.append(counter[1] * vocab >> 32)
    return [
        Part("uniform", got[0].double().cpu(), torch.tensor(uniform, dtype=torch.float64), how="equal"),
        Part("token", got[1].cpu(), torch.tensor(tokens), how="equal"),
    ]
