# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Products of one to a few rows with a weight: what a step of the autoregressive twin is made of.

Here nothing counts but how soon the weights are read. So there are no tensor cores, which would want 16 rows; no
routing, since a pair of token and expert reads its expert by itself; and no pass that rounds activations, which stay
bfloat16 and are summed in float32. Many programs take a few rows of the weight each. The second product of the experts
goes over a token's experts in order, so that their sum needs no pass either: two launches instead of five.

Legend: K inputs, O outputs, N rows (tokens), k experts a token, R rows of the weight a program reads, G a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.int4_triton import halves
from diffusiongemma.ops.product_triton import outputs_of
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.tiles import format_of

FEW = 4  # tokens: with more, several read the same expert, which a routing notices


@dataclass(frozen=True)
class Piece:
    outputs: int  # of a program; of pairs, how many bytes' rows
    step: int  # inputs that one turn of the loop takes
    warps: int
    stages: int


@triton.jit
def few_kernel(x, x_scale, w, w_scale, index, share, out, K: tl.constexpr, O: tl.constexpr, TOP_K: tl.constexpr,
               FORMAT: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, ROUTED: tl.constexpr,
               BO: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """w of [E, O or 2 O, K]. ROUTED "no": x [N, K] -> out [N, O]. "in": x [N, K], index [N, k] -> a row a pair
    [N k, O]. "out": x [N k, K] -> out [N, O], sums over a token's pairs times share [N, k]."""
    ready(HOPPER)
    MADE: tl.constexpr = BO * (2 if FORMAT == "pairs" and not GATED else 1)  # outputs of a program
    TILES: tl.constexpr = (O + MADE - 1) // MADE
    ROWS: tl.constexpr = 2 * O if GATED else O
    SLOTS: tl.constexpr = TOP_K if ROUTED == "out" else 1
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    p = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    row = p // TOP_K if ROUTED == "in" else p * SLOTS
    expert = tl.full((), 0, tl.int64)
    if ROUTED == "in":
        expert += tl.load(index + p)
    if FORMAT == "pairs":
        NG: tl.constexpr = STEP // GROUP
        PARTS: tl.constexpr = 64 // BO
        g, c = tl.arange(0, NG), tl.arange(0, GROUP)
        r = tile % PARTS * BO + tl.arange(0, BO)
        one = tl.zeros((NG, BO), tl.float32)
        two = tl.zeros((NG, BO), tl.float32)
        for i in tl.range(0, SLOTS * STEPS, num_stages=STAGES):
            slot, b = i // STEPS, i % STEPS * NG
            factor = 256.0
            if ROUTED == "out":
                expert = tl.load(index + row + slot).to(tl.int64)
                factor *= tl.load(share + row + slot)
            ok = g < K // GROUP - b
            first = (expert * (ROWS // 128) + tile // PARTS) * (K // GROUP) + b
            numbers = tl.load(w + (first + g)[:, None, None] * (64 * GROUP) + r[None, :, None] * GROUP
                              + c[None, None, :], mask=ok[:, None, None], other=0)  # fmt: skip
            s = tl.load(w_scale + (first + g)[:, None] * 64 + r[None, :], mask=ok[:, None], other=0)
            at = x + (row + slot) * K + (b + g)[:, None] * GROUP + c[None, :]
            v = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32) * factor
            low, high = halves(numbers, HOPPER)
            s_low = (s << 16).to(tl.float32, bitcast=True)
            s_high = (s & -65536).to(tl.float32, bitcast=True)
            one += tl.sum(low.to(tl.float32) * v[:, None, :], axis=2) * s_low
            two += tl.sum(high.to(tl.float32) * v[:, None, :], axis=2) * s_high
        gate, up = tl.sum(one, axis=0), tl.sum(two, axis=0)
        o = tile // PARTS * (64 if GATED else 128) + r
    else:
        R: tl.constexpr = 2 * BO if GATED else BO
        c, r = tl.arange(0, STEP), tl.arange(0, R)
        o = tile * BO + r % BO
        line = tl.minimum(o, O - 1) + r // BO * O  # of the weight
        total = tl.zeros((R, STEP), tl.float32)
        for i in tl.range(0, SLOTS * STEPS, num_stages=STAGES):
            slot, k = i // STEPS, i % STEPS * STEP
            ok = c < K - k
            v = tl.load(x + (row + slot) * K + k + c, mask=ok, other=0.0).to(tl.float32)
            if ROUTED == "out":
                expert = tl.load(index + row + slot).to(tl.int64)
                v *= tl.load(share + row + slot)
            numbers = tl.load(w + (expert * ROWS + line)[:, None] * K + (k + c)[None, :], mask=ok[None, :], other=0.0)
            numbers = numbers.to(tl.float32)
            if ROUTED == "out" and w_scale is not None:
                numbers *= tl.load(w_scale + expert * ROWS + line)[:, None]
            total += numbers * v[None, :]
        sums = tl.sum(total, axis=1)
        if ROUTED != "out" and w_scale is not None:
            sums *= tl.load(w_scale + expert * ROWS + line)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(sums, (2, BO))))
            o = tile * BO + tl.arange(0, BO)
        else:
            gate, up = sums, sums
    if x_scale is not None:
        scale = tl.load(x_scale + row)
        gate *= scale
        up *= scale
    if GATED:  # gelu in its tanh form, which is x sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    at = out + p * O + o
    tl.store(at, gate.to(out.dtype.element_ty), mask=o < O)
    if FORMAT == "pairs" and not GATED:
        tl.store(at + 64, up.to(out.dtype.element_ty))


def choose(fmt: str, inputs: int, gated: bool) -> Piece:
    """By rule: turns of about 4 KB, several programs a multiprocessor"""
    step = min(256 if gated or inputs > 1024 else 1024, triton.next_power_of_2(inputs))
    if fmt == "pairs":
        return Piece(8 if gated else 4, step, 4, 4)
    return Piece(8 if gated else 4, step // (2 if fmt == "bf16" else 1), 4, 4)


def few(x: Rows, w: Tensor, w_scale: Tensor | None = None, *, gated: bool = False, index: Tensor | None = None,
        share: Tensor | None = None, piece: Piece | None = None) -> Tensor:  # fmt: skip
    """x [N, K], fp8 or not, w of [O, K] -> [N, O], GeGLU of it where gated

    With index [N, k], w is of [E, O, K] and the result a row a pair [N k, O]; with share [N, k] too, x are the pairs
    [N k, K] and the result is each token's sum of them.
    """
    fmt, values = format_of(w), x.values
    assert share is None or x.scale is None, "the second product takes rows as they are"
    assert all(t is None or t.is_contiguous() for t in (values, x.scale, w, w_scale, index, share))
    inputs, width = values.shape[1], outputs_of(w, gated)
    if w.dtype == torch.float32:  # for the interpreter
        fmt = "bf16"
    assert fmt is not None, f"no kernel for weights of {w.dtype}"
    piece = piece or choose(fmt, inputs, gated)
    group = w.shape[-1] if fmt == "pairs" else 0
    made = piece.outputs * (2 if fmt == "pairs" and not gated else 1)
    rows = len(values) if index is None else len(index) if share is not None else index.numel()
    out = torch.empty(rows, width, dtype=torch.bfloat16 if values.dtype == FP8 else values.dtype, device=values.device)
    run(
        few_kernel, rows * triton.cdiv(width, made), values, x.scale, w, w_scale, index, share, out, K=inputs, O=width,
        TOP_K=1 if index is None else index.shape[1], FORMAT=fmt, GROUP=group, GATED=gated,
        ROUTED="no" if index is None else "in" if share is None else "out", BO=piece.outputs,
        STEP=max(piece.step, group), STAGES=piece.stages, num_warps=piece.warps,
    )  # fmt: skip
    return out


def experts_few(x: Rows, index: Tensor, weight: Tensor, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor,
                down_scale: Tensor | None) -> Tensor:  # fmt: skip
    """As `experts_triton.experts_rows`, for a few tokens; index and weight [N, k] -> [N, D]"""
    index = index.contiguous()
    hidden = few(x, up_q, up_scale, gated=True, index=index)
    return few(Rows(hidden), down_q, down_scale, index=index, share=weight.float().contiguous())


def mlp_few(x: Rows, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor, down_scale: Tensor | None) -> Tensor:
    """As `linear_triton.mlp`, for a few rows"""
    return few(Rows(few(x, up_q, up_scale, gated=True)), down_q, down_scale)
