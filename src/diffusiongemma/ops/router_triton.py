# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The router: norm, product, softmax, the best experts and their weights, in two kernels. Twin of `fused.route`; with
the pairs placed in their experts' lists by the same two kernels (`place`), twin of that and `routing.place`.

The product is small (256 x 2,816 x 128) but its weights would keep 16 multiprocessors busy for long, so the first
kernel splits the sum over 176 programs, each of which asks for all it reads at once, and for its weights before the
kernel ahead of it has ended; the second adds the parts in order and picks, a warp a row, so that no round of the
picking waits for another warp. Many tokens get larger blocks, so that the weights are not read over and over.
(One kernel, in which the last program of some rows picks for them all, was slower: 16 programs pick, not 256.)

Bits: a row's sums do not depend on the others. The parts are the same for any number of rows, and operands are
swapped (experts are the M side of the tensor cores), so that blocks of any size use one kind of instruction. Both ways
pick by the same lines, whose sums have an order of their own, and no product is fused with a sum (`SEPARATE`).

Legend: N tokens, D hidden, E experts, k experts a token, S parts of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import kernels
from diffusiongemma.ops.early_triton import SEPARATE, ready, run
from diffusiongemma.ops.kernels import unavailable
from diffusiongemma.ops.routing import Placed, counters, most_beyond


class Blocks(NamedTuple):
    rows: int  # of a program
    part: int  # numbers of a row that one program sums
    depth: int  # of a step
    warps: int
    pick_warps: int


BLOCKS = Blocks(16, 256, 256, 4, 1)


def blocks_for(rows: int, small: bool = False) -> Blocks:
    """About as many programs as a card runs at once; parts and depth order the sums and are the same for all. `small`:
    for a card with less shared memory than Hopper"""
    size = next((size for size in (16, 32, 64) if rows <= 32 * size), 64 if small else 128)
    return BLOCKS._replace(rows=size, warps=4 if size < (32 if small else 64) else 8)


class To(NamedTuple):
    """Where what was picked goes; the last five: where it is placed."""

    chosen: Tensor  # int64 [N, k]
    weight: Tensor  # float32 [N, k]
    lists: Tensor | None = None
    place: Tensor | None = None
    share: Tensor | None = None
    counts: Tensor | None = None
    beyond: Tensor | None = None


def supported(x: Tensor, proj: Tensor, top_k: int) -> str | None:
    """Why `route` cannot run, or None."""
    if reason := unavailable(x.device):
        return reason
    experts = proj.shape[0]
    if experts & (experts - 1) or experts < 16:
        return f"the number of experts must be a power of two from 16 on, not {experts}"
    if x.dtype not in (torch.bfloat16, torch.float32) or proj.dtype != x.dtype:
        return f"rows of {x.dtype} and a projection of {proj.dtype} must both be bfloat16 or float32"
    return None if top_k <= 32 else f"{top_k} experts a token are too many"


@triton.jit(do_not_specialize=["rows"])
def _scores_kernel(x, proj, scale, part, square, rows, width, E: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """One part of (x scale) [N, D] times proj [E, D], and of the sum of squares of x"""
    blocks = tl.cdiv(rows, ROWS)
    row, which = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.program_id(0) // blocks
    e = tl.arange(0, E)
    live = row < rows
    acc = tl.zeros((E, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for begin in tl.static_range(0, PART, BLOCK):
        d = which * PART + begin + tl.arange(0, BLOCK)
        inside = d < width
        w = tl.load(proj + e[:, None] * width + d[None, :], mask=inside[None, :], other=0.0)
        s = tl.load(scale + d, mask=inside, other=0.0).to(tl.float32)
        if begin == 0:  # no kernel writes weights: only x must be waited for
            ready(HOPPER)
        a = tl.load(x + row.to(tl.int64)[:, None] * width + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        wide = a.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        acc = tl.dot(w, tl.trans((wide * s[None, :]).to(w.dtype)), acc, input_precision="ieee")
    place = which.to(tl.int64) * rows + row
    tl.store(square + place, squares, mask=live)
    tl.store(part + place[:, None] * E + e[None, :], tl.trans(acc), mask=live[:, None])


@triton.jit(do_not_specialize=["rows"])
def _pick_kernel(part, square, per_expert, index, weight, lists, place, share, counts, beyond, rows, width, eps,
                 E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, PLACE: tl.constexpr,
                 HOPPER: tl.constexpr):  # fmt: skip
    """The best experts of a row and their weights, of equal experts the first; and where PLACE, the rows of a block, is
    not 0: each pair into the list of its expert"""
    ready(HOPPER)
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, E)
    scores, squares = tl.zeros((E,), tl.float32), 0.0
    for i in tl.static_range(PARTS):
        at = i * rows + row
        scores += tl.load(part + at * E + e)
        squares += tl.load(square + at)
    scores *= 1.0 / (tl.sqrt(squares / width + eps) * tl.sqrt(width.to(tl.float32)))
    # Numerators of the softmax are enough: the weights of the chosen are divided by their sum.
    soft = tl.exp(scores - tl.max(scores))
    # As whole numbers, the bits of numbers from 0 on are in the same order, and a warp finds the largest at once. NaN
    # counts as 0 here: it must not lead astray, nor any expert be taken twice.
    left = tl.where(soft == soft, soft, 0.0).to(tl.int32, bitcast=True)
    slot, total = tl.arange(0, SLOTS), 0.0
    chosen, kept = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for i in tl.static_range(TOP):
        best = tl.max(left)
        first = tl.min(tl.where(left == best, e, E))
        left = tl.where(e == first, -1, left)
        best = best.to(tl.float32, bitcast=True)
        chosen, kept = tl.where(slot == i, first, chosen), tl.where(slot == i, best, kept)
        total += best
    pair, mine = row * TOP + slot, slot < TOP
    scale = tl.load(per_expert + chosen).to(tl.float32)
    if PLACE > 0:
        before = tl.atomic_add(counts + chosen, 1, mask=mine, sem="relaxed")
    worth = kept / total * scale
    tl.store(index + pair, chosen.to(tl.int64), mask=mine)
    tl.store(weight + pair, worth, mask=mine)
    if PLACE > 0:
        at = chosen * rows + before
        tl.store(lists + at, pair.to(tl.int32), mask=mine)
        tl.store(share + at, worth, mask=mine)
        tl.store(place + pair, at, mask=mine)
        opens = mine & (before > 0) & (before % PLACE == 0)
        begun = tl.atomic_add(counts + E + chosen * 0, 1, mask=opens, sem="relaxed")
        tl.store(beyond + begun, at, mask=opens)


def route(
    x: Tensor,
    proj: Tensor,
    scale: Tensor,
    per_expert_scale: Tensor,
    top_k: int,
    eps: float,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """As `fused.route`."""
    to = _to(x, top_k)
    _run(x, proj, scale, per_expert_scale, eps, to, 0, blocks or blocks_for(len(x), kernels.card(x.device).small))
    return to.chosen, to.weight


def place(
    x: Tensor,
    proj: Tensor,
    scale: Tensor,
    per_expert_scale: Tensor,
    top_k: int,
    eps: float,
    block: int,
    counts: Tensor,
    eager: bool = False,
) -> tuple[Tensor, Tensor, Placed]:
    """As `fused.route` and `routing.place`. counts: zeros (`routing.counters`), which become counts and marks.
    `eager`: as in `early_triton.run`"""
    rows, experts = len(x), len(proj)
    many, first = counters(experts, rows * top_k)
    assert counts.numel() == many, f"{counts.numel()} counters do not fit {experts} experts of {rows} tokens"
    counts, marks = counts[: experts + 1], counts[first:]
    lists = torch.empty(experts, rows, dtype=torch.int32, device=x.device)
    at = torch.empty(rows * top_k, dtype=torch.int32, device=x.device)
    share = torch.empty(experts, rows, dtype=torch.float32, device=x.device)
    beyond = torch.empty(most_beyond(rows * top_k, block), dtype=torch.int32, device=x.device)
    to = _to(x, top_k)._replace(lists=lists, place=at, share=share, counts=counts, beyond=beyond)
    _run(x, proj, scale, per_expert_scale, eps, to, block, blocks_for(rows, kernels.card(x.device).small), eager)
    return to.chosen, to.weight, Placed(lists, at, share, counts, beyond, marks, block, top_k)


def _to(x: Tensor, top_k: int) -> To:
    index = torch.empty(len(x), top_k, dtype=torch.int64, device=x.device)
    return To(index, torch.empty(len(x), top_k, dtype=torch.float32, device=x.device))


def _run(
    x: Tensor, proj: Tensor, scale: Tensor, per_expert: Tensor, eps: float, to: To, place: int, b: Blocks,
    eager: bool = False,
) -> None:  # fmt: skip
    """`place`: rows of the blocks that pairs are placed for; 0: they are not"""
    x, proj = x.contiguous(), proj.contiguous()
    (rows, width), experts = x.shape, proj.shape[0]
    parts = triton.cdiv(width, b.part)
    part = torch.empty(parts, rows, experts, dtype=torch.float32, device=x.device)
    square = torch.empty(parts, rows, dtype=torch.float32, device=x.device)
    run(
        _scores_kernel, triton.cdiv(rows, b.rows) * parts, x, proj, scale, part, square, rows, width,
        E=experts, PART=b.part, ROWS=b.rows, BLOCK=b.depth, num_warps=b.warps, eager=eager,
    )  # fmt: skip
    k = to.chosen.shape[1]
    run(
        _pick_kernel, rows, part, square, per_expert, *to, rows, width, eps, E=experts, TOP=k,
        SLOTS=triton.next_power_of_2(k), PARTS=parts, PLACE=place, num_warps=b.pick_warps, eager=eager, **SEPARATE,
    )  # fmt: skip
