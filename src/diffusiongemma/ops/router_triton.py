# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The router: norm, product, softmax, the best experts and their weights, in two kernels. Twin of `fused.route`.

The product is small (256 x 2,816 x 128) but its weights would keep 16 multiprocessors busy for long, so the first
kernel splits the sum over 176 programs, each of which asks for all it reads at once, and for its weights before the
kernel ahead of it has ended; the second adds the parts in order and picks, a warp a row, so that no round of the
picking waits for another warp. Many tokens get larger blocks, so that the weights are not read over and over.

Bits: a row's sums do not depend on the others. The parts are the same for any number of rows, and operands are
swapped (experts are the M side of the tensor cores), so that blocks of any size use one kind of instruction.

Legend: N tokens, D hidden, E experts, k experts a token, S parts of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.kernels import unavailable


class Blocks(NamedTuple):
    rows: int  # of a program
    part: int  # numbers of a row that one program sums
    depth: int  # of a step
    warps: int
    pick_warps: int


BLOCKS = Blocks(16, 256, 256, 4, 1)


def blocks_for(rows: int) -> Blocks:
    """About as many programs as a card runs at once; parts and depth order the sums and are the same for all."""
    size = next((size for size in (16, 32, 64) if rows <= 32 * size), 128)
    return BLOCKS._replace(rows=size, warps=4 if size < 64 else 8)


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


@triton.jit(do_not_specialize=["rows", "parts"])
def _pick_kernel(part, square, per_expert, index, weight, rows, width, eps, parts, E: tl.constexpr, TOP: tl.constexpr,
                 SLOTS: tl.constexpr, PARTS: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    ready(HOPPER)
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, E)
    place, real = tl.arange(0, PARTS) * rows + row, tl.arange(0, PARTS) < parts
    scores = tl.sum(tl.load(part + place[:, None] * E + e[None, :], mask=real[:, None], other=0.0), axis=0)
    squares = tl.sum(tl.load(square + place, mask=real, other=0.0))
    scores *= 1.0 / (tl.sqrt(squares / width + eps) * tl.sqrt(width.to(tl.float32)))
    # Numerators of the softmax are enough: the weights of the chosen are divided by their sum.
    left = tl.exp(scores - tl.max(scores))
    slot = tl.arange(0, SLOTS)
    chosen, kept = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for i in tl.static_range(TOP):
        best = tl.max(left)
        at = tl.min(tl.where(left == best, e, E - 1))  # NaN equals nothing, and must not lead astray
        chosen, kept = tl.where(slot == i, at, chosen), tl.where(slot == i, best, kept)
        left = tl.where(e == at, -1.0, left)
    kept = kept / tl.sum(kept) * tl.load(per_expert + chosen).to(tl.float32)
    tl.store(index + row * TOP + slot, chosen.to(tl.int64), mask=slot < TOP)
    tl.store(weight + row * TOP + slot, kept, mask=slot < TOP)


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
    x, proj = x.contiguous(), proj.contiguous()
    (rows, width), experts = x.shape, proj.shape[0]
    b = blocks or blocks_for(rows)
    parts = triton.cdiv(width, b.part)
    part = torch.empty(parts, rows, experts, dtype=torch.float32, device=x.device)
    square = torch.empty(parts, rows, dtype=torch.float32, device=x.device)
    run(
        _scores_kernel, triton.cdiv(rows, b.rows) * parts, x, proj, scale, part, square, rows, width,
        E=experts, PART=b.part, ROWS=b.rows, BLOCK=b.depth, num_warps=b.warps,
    )  # fmt: skip
    index = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    weight = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    run(
        _pick_kernel, rows, part, square, per_expert_scale, index, weight, rows, width, eps, parts,
        E=experts, TOP=top_k, SLOTS=triton.next_power_of_2(top_k), PARTS=triton.next_power_of_2(parts),
        num_warps=b.pick_warps,
    )  # fmt: skip
    return index, weight
