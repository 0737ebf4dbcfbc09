# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Both products of the experts, and the rounding between them, in one launch that never stops reading weights.

For few rows an expert (one user's canvas) the time is that of reading all experts once. Two kernels of many programs
lose a tenth of it: where one ends and the other begins, and wherever a program begins. Here a program stays on its
multiprocessor, and its warps have different work:

    plan     takes the next tile and tells the others
    weights  asks for the weights of that tile, stage by stage, as long as the ring has room: also of the next tile,
             while this one is multiplied, and of the first before the launch before this one has ended
    rows     brings the rows of x, or of what the first product made, to the same stages
    sums     two groups of four warps, a tile each by turns: one multiplies while the other finishes and stores
    round    rounds what the first product made to fp8

The second product of a block begins when all of its first is there, rounded: `flags` counts that. Rows, products and
sums are those of `product_triton`, bit for bit: steps of 32 bytes along K, in order.

Legend: N tokens, k experts a token, E experts, D hidden, I width of an expert, T rows of a block, BK numbers a stage.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.stream_copies_gluon import rows_part, weights_part
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

STAGES = {32: 6, 64: 5}  # for blocks of so many rows: 120 KB, so that the dense MLP fits beside it


@gluon.jit
def _multiply(ring, xs, ready, free, place, mma: gl.constexpr, STEPS: gl.constexpr, T: gl.constexpr,
              STAGES: gl.constexpr, FENCE: gl.constexpr):  # fmt: skip
    """-> two sums [64, T]. A stage is free when the products behind it have begun: the tensor cores never wait.
    FENCE: the rows came by copies of threads, which the tensor cores do not see by themselves"""
    one = gl.zeros((64, T), gl.float32, mma)
    two = gl.zeros((64, T), gl.float32, mma)
    stage = place % STAGES
    phase = (place // STAGES) & 1
    last = place % STAGES  # not `stage`: what is the same before a loop the compiler takes for the same in it
    for k in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        if FENCE:
            fence_async_shared()
        rows = xs.index(stage).permute((1, 0))
        one = warpgroup_mma(ring.index(2 * stage), rows, one, is_async=True)
        two = warpgroup_mma(ring.index(2 * stage + 1), rows, two, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        mbarrier.arrive(free.index(last), count=1, pred=k > 0)
        last = stage
        stage, phase = following(stage, phase, STAGES)
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    mbarrier.arrive(free.index(last), count=1)
    return one, two


@gluon.jit
def _sums_part(x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, go, box, told,
               heard, counts, flags, each, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr,
               TOP_K: gl.constexpr, T: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
               MINE: gl.constexpr):  # fmt: skip
    """MINE: 0 or 1, every second tile is for this group. `go`: it may multiply, because the other one has"""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    QUANT: gl.constexpr = x_scale is not None
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 256 // ring.dtype.primitive_bitwidth])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, T, gl.SliceLayout(0, mma))
    j = gl.arange(0, 64, gl.SliceLayout(1, mma))
    row = gl.arange(0, T, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    whose = 0
    may = 1 - MINE
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        if whose == MINE:
            ok = start + i < end
            expert = start // each
            store = gl.expand_dims(start + row < end, 1) & (column < 64)
            if at < ups:
                tile = at % UP
                if QUANT:
                    token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
                    factor = gl.load(x_scale + token, mask=ok, other=0.0)
                    w_one = gl.load(up_scale + expert * (2 * I) + tile * 64 + j)
                    w_two = gl.load(up_scale + expert * (2 * I) + I + tile * 64 + j)
                mbarrier.wait(go.index(MINE), may)
                one, two = _multiply(ring, xs, ready, free, place, mma, (D + BK - 1) // BK, T, STAGES, True)
                mbarrier.arrive(go.index(1 - MINE), count=1)
                if QUANT:
                    one = one * gl.expand_dims(w_one, 1) * gl.expand_dims(factor, 0)
                    two = two * gl.expand_dims(w_two, 1) * gl.expand_dims(factor, 0)
                one = gated(one, two)
                to = hidden + gl.expand_dims((start + row).to(gl.int64) * I, 1) + (tile * 64 + column)
                store_rows(one, to, store, wide)
                barrier()
                gl.atomic_add(flags + at // UP, 1, sem="acq_rel", scope="gpu")
            else:
                tile = (at - ups) % DOWN
                factor = gl.load(share + start + i, mask=ok, other=0.0)
                target = gl.load(order + start + row, mask=start + row < end, other=0)
                if QUANT:
                    w_one = gl.load(down_scale + expert * D + tile * 128 + j)
                    w_two = gl.load(down_scale + expert * D + tile * 128 + 64 + j)
                mbarrier.wait(go.index(MINE), may)
                if QUANT:  # the scales of the rows are there when the rows are
                    mbarrier.wait(ready.index(place % STAGES), (place // STAGES) & 1)
                    factor = gl.load(h_scale + start + i, mask=ok, other=0.0, cache_modifier=".cg") * factor
                one, two = _multiply(ring, xs, ready, free, place, mma, (I + BK - 1) // BK, T, STAGES, False)
                mbarrier.arrive(go.index(1 - MINE), count=1)
                if QUANT:
                    one = one * gl.expand_dims(w_one, 1)
                    two = two * gl.expand_dims(w_two, 1)
                to = out + gl.expand_dims(target.to(gl.int64) * D, 1) + (tile * 128 + column)
                store_rows(one * gl.expand_dims(factor, 0), to, store, wide)
                store_rows(two * gl.expand_dims(factor, 0), to + 64, store, wide)
            may ^= 1
        whose ^= 1
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)


@gluon.jit(do_not_specialize=["each"])
def experts_kernel(x, x_scale, w_up, up_scale, w_down, down_scale, hidden, rounded, h_rows, h_scale, out, order, share,
                   counts, beyond, marks, each, D: gl.constexpr, I: gl.constexpr, APART: gl.constexpr,
                   TOP_K: gl.constexpr, EXPERTS: gl.constexpr, T: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                   WIDTH: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    """x [N, D] times w_up [E 2 I, D] -> hidden [E N, I]; that times w_down [E D, I] -> out [N k, D].

    order, share, counts, beyond, marks: of `Placed`; each: N. rounded, h_scale: `hidden` as fp8, in the first half of
    each row's bytes (APART from each other); h_rows: the same as bulk copies see it. WIDTH: a power of two, I or more.
    REGISTERS, FEW: of a thread of the second group of sums, and of the single warps; the first group has the rest.
    """
    SIZE: gl.constexpr = w_up.dtype.primitive_bitwidth // 8
    QUANT: gl.constexpr = x_scale is not None
    UP: gl.constexpr = I // 64
    UP_STEPS: gl.constexpr = (D + BK - 1) // BK
    DOWN_STEPS: gl.constexpr = (I + BK - 1) // BK
    DONE: gl.constexpr = 2 * UP if QUANT else UP
    flags = marks + 4
    ring = gl.allocate_shared_memory(w_up.dtype, [2 * STAGES, 64, BK], w_up.layout)
    xs = gl.allocate_shared_memory(w_up.dtype, [STAGES, T, BK], w_up.layout)
    ready, free = ring_barriers(STAGES, 33, 1)  # filled by the warp that brings rows, and the thread that asks
    go = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(go.index(n), count=1)
    box, told, heard = mailbox(MOST, 4)
    guess, guessed, unused = mailbox(1, 1)
    if QUANT:
        later, later_told, later_heard = mailbox(ROUNDS, 1)
    fence_async_shared()
    if QUANT:  # Gluon keeps no lists of parts: those that both have stand here twice
        gl.warp_specialize([
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, go,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, BK, STAGES, 0)),
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, go,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, BK, STAGES, 1)),
            (weights_part, (w_up, w_down, ring, ready, free, box, told, heard, guess, guessed, unused, counts, each, D,
                            I, EXPERTS, BK, STAGES, 2 * 64 * BK * SIZE)),
            (rows_part, (x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D, I, EXPERTS, TOP_K, T,
                         BK, STAGES, SIZE, DONE)),
            (plan_part, (box, told, heard, guess, guessed, unused, later, later_told, later_heard, counts, beyond,
                         marks, None, each, UP, D // 128, UP_STEPS, DOWN_STEPS, EXPERTS, T, True)),
            (round_part, (hidden, rounded, h_scale, later, later_told, later_heard, flags, I, APART, WIDTH, UP)),
        ], [4, 1, 1, 1, 1], [REGISTERS, FEW, FEW, FEW, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, go,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, BK, STAGES, 0)),
            (_sums_part, (x_scale, up_scale, down_scale, hidden, h_scale, out, order, share, ring, xs, ready, free, go,
                          box, told, heard, counts, flags, each, D, I, EXPERTS, TOP_K, T, BK, STAGES, 1)),
            (weights_part, (w_up, w_down, ring, ready, free, box, told, heard, guess, guessed, unused, counts, each, D,
                            I, EXPERTS, BK, STAGES, 2 * 64 * BK * SIZE)),
            (rows_part, (x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D, I, EXPERTS, TOP_K, T,
                         BK, STAGES, SIZE, DONE)),
            (plan_part, (box, told, heard, guess, guessed, unused, None, None, None, counts, beyond,
                         marks, None, each, UP, D // 128, UP_STEPS, DOWN_STEPS, EXPERTS, T, False)),
            (idle_part, ()),
        ], [4, 1, 1, 1, 1], [REGISTERS, FEW, FEW, FEW, FEW])  # fmt: skip


def tiles_of(w: Tensor, rows: int) -> Any:
    """A matrix as bulk copies read it: `rows` rows of 128 bytes"""
    wide = 128 // w.element_size()
    return TensorDescriptor.from_tensor(w, [rows, wide], gl.NVMMASharedLayout(128, 8 * w.element_size(), 2))


def experts_streamed(
    x: Rows, placed: Placed, up: Tensor, up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None
) -> Tensor:
    """As `experts_triton.experts_pairs`, bit for bit: x [N, D], in fp8 where the weights are -> [N k, D].

    `placed.marks` must be zero when this begins, for the first tile is taken then, and that is before the launches
    before it have ended: all eager ones (`early_triton`), and the one before those.
    """
    (experts, hidden_size, width), tokens = down.shape, len(x.values)
    quant = up.dtype == FP8
    assert x.values.dtype == up.dtype, f"{x.values.dtype} rows for {up.dtype} experts"
    assert all(t is None or t.is_contiguous() for t in (x.values, x.scale, up, up_scale, down, down_scale))
    hidden = torch.empty(experts * tokens, width, dtype=torch.bfloat16, device=up.device)
    rounded = hidden.view(FP8)[:, :width] if quant else hidden
    h_scale = torch.empty(experts * tokens, 1, device=up.device) if quant else None
    out = torch.empty(tokens * placed.top_k, hidden_size, dtype=torch.bfloat16, device=up.device)
    launch(
        experts_kernel, multiprocessors(up.device),
        x.values, x.scale, tiles_of(up.view(-1, hidden_size), 64), up_scale,
        tiles_of(down.view(-1, width), 64), down_scale,
        hidden, rounded, tiles_of(rounded, placed.block), h_scale, out,
        placed.lists, placed.share, placed.counts, placed.beyond, placed.marks, tokens,
        D=hidden_size, I=width, APART=rounded.stride(0), TOP_K=placed.top_k, EXPERTS=experts, T=placed.block,
        BK=128 // up.element_size(), STAGES=STAGES[placed.block], WIDTH=triton.next_power_of_2(width),
        REGISTERS=128, FEW=80, num_warps=4, maxnreg=112, **early(),
    )  # fmt: skip
    return out
