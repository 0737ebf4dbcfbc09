# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""From attention to the experts of a few tokens in one kernel: residual, norms, scores, the best experts.
Twin of `one.route`.

A program scores a few experts, whose weights it asks for while the product before it still runs. It makes the token's
residual and norm by itself, which costs less than to wait for another's; the first stores them, and the last to arrive
picks the experts. Picking is by rank: an expert's place is how many are better, all counted at once, because one after
another would be 2 k sums that all warps wait for.

Legend: N tokens, D hidden, E experts, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.last_triton import is_last
from diffusiongemma.ops.norm_triton import (
    added,
    limit_of,
    load_row,
    normed,
    piece_for,
    put_row,
    rows_like,
    store_row,
    stored,
    warps_for,
    weighed,
    wide,
)
from diffusiongemma.ops.one import Routed, Router

EACH = 4  # experts of a program


@triton.jit
def _picked(scores, per_expert, index, weight, E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr):
    """A token's best experts, best first and of equal ones the first, and their weights; scores [E]"""
    e, slot = tl.arange(0, E), tl.arange(0, SLOTS)
    # Numerators of the softmax are enough: the weights of the chosen are divided by their sum.
    share = tl.exp(scores - tl.max(scores))
    order = tl.where(share == share, share, -1.0)  # NaN is neither more nor less, and must not lead astray
    better = order[None, :] > order[:, None]
    before = (order[None, :] == order[:, None]) & (e[None, :] < e[:, None])
    rank = tl.sum((better | before).to(tl.int32), axis=1)
    own = rank[None, :] == slot[:, None]  # [SLOTS, E]
    chosen = tl.sum(tl.where(own, e[None, :], 0), axis=1)
    kept = tl.sum(tl.where(own, share[None, :], 0.0), axis=1)
    kept = tl.where(slot < TOP, kept, 0.0)
    kept = kept / tl.sum(kept) * tl.load(per_expert + chosen).to(tl.float32)
    tl.store(index + slot, chosen.to(tl.int64), mask=slot < TOP)
    tl.store(weight + slot, kept, mask=slot < TOP)


@triton.jit
def route_one_kernel(
    x, branch, post, dense, sparse, proj, scale, per_expert, x_out, dense_out, dense_scale, sparse_out, sparse_scale,
    scores, index, weight, counters, width, eps, E: tl.constexpr, EACH: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, LIMIT: tl.constexpr, PIECE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = E // EACH  # of a token
    row, which = (tl.program_id(0) // PROGRAMS).to(tl.int64), tl.program_id(0) % PROGRAMS
    e, d = which * EACH + tl.arange(0, EACH), tl.arange(0, PIECE)
    at = proj + e[:, None] * width + d[None, :]
    w0 = tl.load(at, mask=(d < width)[None, :], other=0.0)
    w1 = tl.load(at + PIECE, mask=(PIECE + d < width)[None, :], other=0.0)
    w2 = tl.load(at + 2 * PIECE, mask=(2 * PIECE + d < width)[None, :], other=0.0)
    w_post, w_scale = load_row(post, width, PIECE), load_row(scale, width, PIECE)
    # Program 0 makes the row of the dense MLP, program 1 that of the experts: others read nothing here.
    w_dense = load_row(dense, tl.where(which == 0, width, 0), PIECE)
    w_sparse = load_row(sparse, tl.where(which == 1, width, 0), PIECE)
    ready(HOPPER)
    z = load_row(branch + row * width, width, PIECE)
    y = load_row(x + row * width, width, PIECE)
    y = stored(added(wide(y), weighed(normed(wide(z), width, eps), w_post)), x_out)
    squares = tl.sum(y[0] * y[0] + y[1] * y[1] + y[2] * y[2])
    v = weighed(y, w_scale)
    kind: tl.constexpr = proj.dtype.element_ty
    sums = w0.to(tl.float32) * v[0].to(kind).to(tl.float32)[None, :]
    sums += w1.to(tl.float32) * v[1].to(kind).to(tl.float32)[None, :]
    sums += w2.to(tl.float32) * v[2].to(kind).to(tl.float32)[None, :]
    inverse = 1.0 / (tl.sqrt(squares / width + eps) * tl.sqrt(width.to(tl.float32)))
    tl.store(scores + row * E + e, tl.sum(sums, axis=1) * inverse)
    if which == 0:
        store_row(x_out + row * width, y, width, PIECE)
        put_row(dense_out, dense_scale, weighed(normed(y, width, eps), w_dense), row, width, PIECE, LIMIT, HOPPER)
    elif which == 1:
        put_row(sparse_out, sparse_scale, weighed(normed(y, width, eps), w_sparse), row, width, PIECE, LIMIT, HOPPER)
    if is_last(counters + row, PROGRAMS):
        all_scores = tl.load(scores + row * E + tl.arange(0, E), cache_modifier=".cg")
        _picked(all_scores, per_expert, index + row * TOP, weight + row * TOP, E, TOP, SLOTS)


def route(
    x: Tensor, branch: Tensor, norms: tuple[Tensor, Tensor, Tensor], router: Router, eps: float,
    quant: torch.dtype | None, counters: Tensor,
) -> Routed:  # fmt: skip
    """As `one.route`; counters: N zeros at least. The number of experts is a power of two."""
    x, branch = x.contiguous(), branch.contiguous()
    (tokens, width), experts, k = x.shape, len(router.proj), router.top_k
    assert experts & (experts - 1) == 0 < experts - 1, f"{experts} experts are no power of two"
    assert counters.numel() >= tokens, f"{tokens} counters are needed, not {counters.numel()}"
    x_out, to_dense, to_sparse = torch.empty_like(x), rows_like(x, quant), rows_like(x, quant)
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    index = torch.empty(tokens, k, dtype=torch.int64, device=x.device)
    weight = torch.empty(tokens, k, dtype=torch.float32, device=x.device)
    each, piece = min(EACH, experts // 2), piece_for(width)
    run(
        route_one_kernel, tokens * (experts // each), x, branch, *norms,
        *router[:3], x_out, to_dense.values, to_dense.scale, to_sparse.values, to_sparse.scale, scores, index, weight,
        counters, width, eps, E=experts, EACH=each, TOP=k, SLOTS=triton.next_power_of_2(k), LIMIT=limit_of(quant),
        PIECE=piece, num_warps=max(4, warps_for(piece)),
    )  # fmt: skip
    return x_out, to_dense, to_sparse, index, weight
