# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Experts whose weights are packed (`ops/packed.py`), in one launch that never stops reading them, as
`experts_gluon.py` has plain ones and `pairs_gluon.py` those of 4 bits: two programs stay on a multiprocessor, and one
unpacks while the other waits.

    plan, round    as there (`stream_gluon.py`)
    weights        asks for pieces
    rows           brings rows, 32 bytes of each along K a step, waits for them some stages later, and makes the tensor
                   cores see them
    sums           makes all pieces of those that lie there, and multiplies them from registers; blocks with at most
                   half of the rows that they may have take half as many columns

Steps along K are those of `experts_gluon.py`, in their order, so that the same numbers give the same bits.

Legend: N tokens, k experts a token, E experts, D hidden, I width of an expert, T rows of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diffusiongemma.ops.early_triton import multiprocessors
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import early, launch
from diffusiongemma.ops.packed import LINE, SEVEN, STEP, TWELVE, Packed, code, constraints
from diffusiongemma.ops.packed_copies_gluon import rows_part, weights_part
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.stream_gluon import (
    MOST,
    ROUNDS,
    barrier,
    begin,
    following,
    gated,
    hear,
    idle_part,
    mailbox,
    plan_part,
    ring_barriers,
    round_part,
    store_rows,
)

PROGRAMS = 2  # of a multiprocessor
REGISTERS, FEW = 96, 48  # of a thread, before parts give back what they do not need, and of the single warps
OF_SEVEN, OF_TWELVE = (gl.constexpr(code(packing)) for packing in (SEVEN, TWELVE))
BOUND_SEVEN, BOUND_TWELVE = (gl.constexpr(constraints(packing)) for packing in (SEVEN, TWELVE))


def ring_of(block: int) -> tuple[int, int]:
    """For blocks of so many rows: stages of a program, and how many stages later rows are waited for. With more of
    them the dense MLP has no room beside two programs."""
    return (4, 2) if block <= 32 else (3, 1)


@gluon.jit
def _piece(ring, at, mma: gl.constexpr):
    WIDTH: gl.constexpr = 256 // ring.dtype.primitive_bitwidth
    return ring.index(at).reshape([64, WIDTH]).load(gl.DotOperandLayout(0, mma, WIDTH // 8))


@gluon.jit
def _step(xs, at, a, b, one, two, T: gl.constexpr):
    """One step along K of both halves of a tile"""
    rows = xs.index(at).slice(0, T).permute((1, 0))
    one = warpgroup_mma(a.to(xs.dtype, bitcast=True), rows, one, is_async=True)
    two = warpgroup_mma(b.to(xs.dtype, bitcast=True), rows, two, is_async=True)
    return one, two


@gluon.jit
def _eight(ring, xs, at, step, one, two, mma: gl.constexpr, T: gl.constexpr):
    """Eight pieces of fp8 numbers, which lie in seven"""
    n0 = _piece(ring, at, mma)
    n1 = _piece(ring, at + 1, mma)
    n2 = _piece(ring, at + 2, mma)
    n3 = _piece(ring, at + 3, mma)
    n4 = _piece(ring, at + 4, mma)
    n5 = _piece(ring, at + 5, mma)
    n6 = _piece(ring, at + 6, mma)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        OF_SEVEN, BOUND_SEVEN, [n0, n1, n2, n3, n4, n5, n6], is_pure=True, pack=4,
        dtype=(gl.uint8, gl.uint8, gl.uint8, gl.uint8, gl.uint8, gl.uint8, gl.uint8, gl.uint8),
    )  # fmt: skip
    one, two = _step(xs, step, a, b, one, two, T)
    one, two = _step(xs, step + 1, c, d, one, two, T)
    one, two = _step(xs, step + 2, e, f, one, two, T)
    one, two = _step(xs, step + 3, g, h, one, two, T)
    return one, two


@gluon.jit
def _four(ring, xs, at, step, one, two, mma: gl.constexpr, T: gl.constexpr):
    """Four pieces of bfloat16 numbers, which lie in three"""
    n0 = _piece(ring, at, mma)
    n1 = _piece(ring, at + 1, mma)
    n2 = _piece(ring, at + 2, mma)
    a, b, c, d = gl.inline_asm_elementwise(
        OF_TWELVE, BOUND_TWELVE, [n0, n1, n2], is_pure=True, pack=2, dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
    )  # fmt: skip
    one, two = _step(xs, step, a, b, one, two, T)
    one, two = _step(xs, step + 1, c, d, one, two, T)
    return one, two


@gluon.jit
def _stage_products(ring, xs, stage, one, two, mma: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr,
                    HALF: gl.constexpr):  # fmt: skip
    """HALF: of half a stage, of which fp8 numbers lie there as they are"""
    at = stage * SLOTS
    if SLOTS == 6:
        one, two = _four(ring, xs, at, 4 * stage, one, two, mma, T)
        if not HALF:
            one, two = _four(ring, xs, at + 3, 4 * stage + 2, one, two, mma, T)
    elif HALF:
        one, two = _step(xs, 4 * stage, _piece(ring, at, mma), _piece(ring, at + 1, mma), one, two, T)
        one, two = _step(xs, 4 * stage + 1, _piece(ring, at + 2, mma), _piece(ring, at + 3, mma), one, two, T)
    else:
        one, two = _eight(ring, xs, at, 4 * stage, one, two, mma, T)
    return warpgroup_mma_wait(0, deps=(one, two))


@gluon.jit
def _multiply(ring, xs, ready, free, place, mma: gl.constexpr, HALVES: gl.constexpr, T: gl.constexpr,
              SLOTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """-> two sums [64, T], along so many half stages"""
    one = gl.zeros((64, T), gl.float32, mma)
    two = gl.zeros((64, T), gl.float32, mma)
    stage = place % STAGES
    phase = (place // STAGES) & 1
    for _ in range(HALVES // 2):
        mbarrier.wait(ready.index(stage), phase)
        one, two = _stage_products(ring, xs, stage, one, two, mma, T, SLOTS, False)
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    if HALVES % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        one, two = _stage_products(ring, xs, stage, one, two, mma, T, SLOTS, True)
        mbarrier.arrive(free.index(stage), count=1)
    return one, two


@gluon.jit
def _up_tile(x_scale, up_scale, hidden, order, ring, xs, ready, free, flags, each, at, start, end, place,
             D: gl.constexpr, I: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = I // 64
    SIZE: gl.constexpr = ring.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32 // SIZE])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, T, gl.SliceLayout(0, mma))
    j = gl.arange(0, 64, gl.SliceLayout(1, mma))
    row = gl.arange(0, T, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    tile = at % UP
    scales = up_scale + start // each * (2 * I) + tile * 64 + j
    w_one = gl.load(scales)
    w_two = gl.load(scales + I)
    if x_scale is not None:
        ok = start + i < end
        token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
        factor = gl.load(x_scale + token, mask=ok, other=0.0)
    one, two = _multiply(ring, xs, ready, free, place, mma, D * SIZE // 64, T, SLOTS, STAGES)
    one = one * gl.expand_dims(w_one, 1)
    two = two * gl.expand_dims(w_two, 1)
    if x_scale is not None:
        one = one * gl.expand_dims(factor, 0)
        two = two * gl.expand_dims(factor, 0)
    one = gated(one, two)
    to = hidden + gl.expand_dims((start + row).to(gl.int64) * I, 1) + (tile * 64 + column)
    store_rows(one, to, gl.expand_dims(start + row < end, 1) & (column < 64), wide)
    barrier()
    gl.atomic_add(flags + at // UP, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _down_tile(h_scale, down_scale, out, order, share, ring, xs, ready, free, each, at, start, end, place,
               D: gl.constexpr, I: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """at: counted from the first tile of the second product"""
    SIZE: gl.constexpr = ring.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32 // SIZE])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, T, gl.SliceLayout(0, mma))
    j = gl.arange(0, 64, gl.SliceLayout(1, mma))
    row = gl.arange(0, T, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    ok = start + i < end
    tile = at % (D // 128)
    scales = down_scale + start // each * D + tile * 128 + j
    w_one = gl.load(scales)
    w_two = gl.load(scales + 64)
    factor = gl.load(share + start + i, mask=ok, other=0.0)
    target = gl.load(order + start + row, mask=start + row < end, other=0)
    if h_scale is not None:
        mbarrier.wait(ready.index(place % STAGES), (place // STAGES) & 1)  # the rows' scales are there when they are
        factor = gl.load(h_scale + start + i, mask=ok, other=0.0, cache_modifier=".cg") * factor
    one, two = _multiply(ring, xs, ready, free, place, mma, I * SIZE // 64, T, SLOTS, STAGES)
    one = one * gl.expand_dims(w_one, 1)
    two = two * gl.expand_dims(w_two, 1)
    to = out + gl.expand_dims(target.to(gl.int64) * D, 1) + (tile * 128 + column)
    store = gl.expand_dims(start + row < end, 1) & (column < 64)
    store_rows(one * gl.expand_dims(factor, 0), to, store, wide)
    store_rows(two * gl.expand_dims(factor, 0), to + 64, store, wide)


@gluon.jit
def _sums_part(x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, box, told,
               heard, counts, flags, each, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr,
               TOP_K: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Blocks with at most half of the rows that they may have take half as many columns."""
    HALF: gl.constexpr = T // 2
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, I // 64)
    while at >= 0:
        if at < ups:
            if end - start <= HALF:
                _up_tile(x_scale, up_scale, hidden, order, ring, xs, ready, free, flags, each, at, start, end, place,
                         D, I, TOP_K, HALF, SLOTS, STAGES)  # fmt: skip
            else:
                _up_tile(x_scale, up_scale, hidden, order, ring, xs, ready, free, flags, each, at, start, end, place,
                         D, I, TOP_K, T, SLOTS, STAGES)  # fmt: skip
        else:
            if end - start <= HALF:
                _down_tile(h_scale, down_scale, out, order, share, ring, xs, ready, free, each, at - ups, start, end,
                           place, D, I, HALF, SLOTS, STAGES)  # fmt: skip
            else:
                _down_tile(h_scale, down_scale, out, order, share, ring, xs, ready, free, each, at - ups, start, end,
                           place, D, I, T, SLOTS, STAGES)  # fmt: skip
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)


@gluon.jit(do_not_specialize=["each", "mask"])
def packed_kernel(x, x_scale, w_up, up_scale, w_down, down_scale, up_pages, down_pages, processors, mask, hidden,
                  rounded, h_rows, h_scale, out, order, share, counts, beyond, marks, each, D: gl.constexpr,
                  I: gl.constexpr, APART: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, T: gl.constexpr,
                  SLOTS: gl.constexpr, LEFT: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
                  FEW: gl.constexpr):  # fmt: skip
    """x [N, D] times w_up, pieces of `packed.pack` as lines of 128 bytes -> hidden [E N, I]; that times w_down
    -> out [N k, D]. up_scale, down_scale: float32 a row. The others are those of `experts_gluon.experts_kernel`."""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    SIZE: gl.constexpr = w_up.dtype.primitive_bitwidth // 8
    QUANT: gl.constexpr = x_scale is not None
    DONE: gl.constexpr = 2 * UP if QUANT else UP
    UP_STAGES: gl.constexpr = (D * SIZE // 64 + 1) // 2
    DOWN_STAGES: gl.constexpr = (I * SIZE // 64 + 1) // 2
    flags = marks + 4
    ring = gl.allocate_shared_memory(w_up.dtype, [SLOTS * STAGES, 16, 128 // SIZE], w_up.layout)
    xs = gl.allocate_shared_memory(h_rows.dtype, [4 * STAGES, T, 32 // SIZE], h_rows.layout)
    ready, free = ring_barriers(STAGES, 33, 1)  # filled by the thread that asks, and the warp that brings rows
    box, told, heard = mailbox(MOST, 3)
    guess, guessed, unused = mailbox(1, 1)
    if QUANT:
        later, later_told, later_heard = mailbox(ROUNDS, 1)
    fence_async_shared()
    if QUANT:  # Gluon keeps no lists of parts: those that both have stand here twice
        gl.warp_specialize([
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, SLOTS, STAGES)),
            (weights_part, (w_up, w_down, up_pages, down_pages, mask, ring, ready, free, box, told, heard, guess,
                            guessed, unused, counts, each, D, I, EXPERTS, SLOTS, LEFT, STAGES)),
            (rows_part, (x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D, I, EXPERTS, TOP_K, T,
                         STAGES, LAG, DONE)),
            (plan_part, (box, told, heard, guess, guessed, unused, later, later_told, later_heard, counts, beyond,
                         marks, processors, each, UP, DOWN, UP_STAGES, DOWN_STAGES, EXPERTS, T, True)),
            (round_part, (hidden, rounded, h_scale, later, later_told, later_heard, flags, I, APART, 256, UP)),
        ], [1, 1, 1, 1], [FEW, FEW, FEW, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, SLOTS, STAGES)),
            (weights_part, (w_up, w_down, up_pages, down_pages, mask, ring, ready, free, box, told, heard, guess,
                            guessed, unused, counts, each, D, I, EXPERTS, SLOTS, LEFT, STAGES)),
            (rows_part, (x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D, I, EXPERTS, TOP_K, T,
                         STAGES, LAG, DONE)),
            (plan_part, (box, told, heard, guess, guessed, unused, None, None, None, counts, beyond,
                         marks, processors, each, UP, DOWN, UP_STAGES, DOWN_STAGES, EXPERTS, T, False)),
            (idle_part, ()),
        ], [1, 1, 1, 1], [FEW, FEW, FEW, FEW])  # fmt: skip


def _lines(pieces: Tensor, size: int) -> Any:
    """As bulk copies read them, a piece at once"""
    lines = pieces.view(torch.uint8 if size == 1 else torch.int16).view(-1, LINE // size)
    return TensorDescriptor.from_tensor(lines, [16, LINE // size], gl.NVMMASharedLayout(LINE, 8 * size, 2))


def packed_streamed(x: Rows, placed: Placed, w: Packed) -> Tensor:
    """As `experts_gluon.experts_streamed`, bit for bit, for the same numbers packed: x [N, D], in fp8 where they are ->
    [N k, D]. `placed.marks` must be zero long before, as there."""
    (tokens, hidden_size), experts, size = x.values.shape, len(w.up_scale), x.values.element_size()
    width, quant = w.up_scale.shape[1] // 2, x.values.dtype == FP8
    assert w.packing is not None, "4-bit weights are not packed"
    assert x.values.dtype == w.packing.dtype, f"{x.values.dtype} rows for {w.packing.name}"
    assert all(t is None or t.is_contiguous() for t in (x.values, x.scale, w.up_scale, w.down_scale))
    hidden = torch.empty(experts * tokens, width, dtype=torch.bfloat16, device=x.values.device)
    stages, lag = ring_of(placed.block)
    rounded = hidden.view(FP8)[:, :width] if quant else hidden
    rows = gl.NVMMASharedLayout(STEP, 8 * size, 2)
    h_rows = TensorDescriptor.from_tensor(rounded, [placed.block, STEP // size], rows)
    h_scale = torch.empty(experts * tokens, 1, device=x.values.device) if quant else None
    out = torch.empty(tokens * placed.top_k, hidden_size, dtype=torch.bfloat16, device=x.values.device)
    launch(
        packed_kernel, PROGRAMS * multiprocessors(x.values.device),
        x.values, x.scale, _lines(w.up.lines, size), w.up_scale, _lines(w.down.lines, size), w.down_scale,
        w.up.pages, w.down.pages, w.up.sides.processors, w.up.sides.mask, hidden, rounded, h_rows, h_scale, out,
        placed.lists, placed.share, placed.counts, placed.beyond, placed.marks, tokens,
        D=hidden_size, I=width, APART=rounded.stride(0), TOP_K=placed.top_k, EXPERTS=experts, T=placed.block,
        SLOTS=w.packing.slots, LEFT=w.packing.left, STAGES=stages, LAG=lag, FEW=FEW, num_warps=4, maxnreg=REGISTERS,
        **early(),
    )  # fmt: skip
    return out
