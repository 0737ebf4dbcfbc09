# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""fp8 experts of many rows in one launch that never stops reading weights, as `experts_gluon.py` has those of few.

With so many rows, the tensor cores have as much to do as the memory, and what limits is the way from the L2 cache: each
tile reads all rows of its block again. So a unit is two neighbouring tiles, both groups multiply at once, and rows are
brought once for both. Nothing fits beside a program that has all registers and most of the shared memory: the launches
before it need not be eager, and the dense MLP begins before the router, as with two kernels.

    plan           as for the others (`stream_gluon.py`), but of units
    weights, rows  one warp asks for weights, four bring rows (`wide_copies_gluon.py`)
    round          two warps, several rows at once (there, too)
    sums           two groups, one tile of a unit each; blocks with more than T rows have a small product beside the
                   other. Sums are finished and stored in halves of the rows, for want of registers

Sums are those of `product_triton`, bit for bit.

Legend: N tokens, k experts a token, E experts, D hidden, I width of an expert, T rows of a block, and MORE beside them.
"""

from __future__ import annotations

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

from diffusiongemma.ops.early_triton import multiprocessors
from diffusiongemma.ops.experts_gluon import tiles_of
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import early, launch
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
    mailbox,
    plan_part,
    ring_barriers,
    store_rows,
)
from diffusiongemma.ops.wide_copies_gluon import BK, PIECE, STAGES, WARPS, T, round_part, rows_part, weights_part

# By rows of a block. B: rows that are rounded at once; REGISTERS, SOME, FEW: of a thread of the second group, of those
# that bring rows (with fewer than 56 they go to memory), and of the others. The first group has what they leave.
NUMBERS = {
    128: {"MORE": 0, "B": 4, "REGISTERS": 200, "SOME": 56, "FEW": 56},
    160: {"MORE": 32, "B": 2, "REGISTERS": 208, "SOME": 56, "FEW": 40},
}
MOST_REGISTERS = 128  # of a thread, before parts give back what they do not need


@gluon.jit
def _multiply(ring, xs, ms, ready, free, place, mma: gl.constexpr, less: gl.constexpr, STEPS: gl.constexpr,
              M: gl.constexpr, FENCE: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    """-> two sums [64, T], and of the M rows beside them two [64, M]. A stage is free when the products behind it have
    begun. FENCE: rows were brought by threads"""
    one = gl.zeros((64, T), gl.float32, mma)
    two = gl.zeros((64, T), gl.float32, mma)
    three = gl.zeros((64, M if M > 0 else 16), gl.float32, less)
    four = gl.zeros((64, M if M > 0 else 16), gl.float32, less)
    stage = place % STAGES
    phase = (place // STAGES) & 1
    last = place % STAGES
    for k in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        if FENCE:
            fence_async_shared()
        rows = xs.index(stage).permute((1, 0))
        one = warpgroup_mma(ring.index(4 * stage + 2 * MINE), rows, one, is_async=True)
        two = warpgroup_mma(ring.index(4 * stage + 2 * MINE + 1), rows, two, is_async=True)
        if M > 0:
            rows = ms.index(stage).permute((1, 0))
            three = warpgroup_mma(ring.index(4 * stage + 2 * MINE), rows, three, is_async=True)
            four = warpgroup_mma(ring.index(4 * stage + 2 * MINE + 1), rows, four, is_async=True)
        if M > 0:
            one, two, three, four = warpgroup_mma_wait(4, deps=(one, two, three, four))
        else:
            one, two = warpgroup_mma_wait(2, deps=(one, two))
        mbarrier.arrive(free.index(last), count=1, pred=k > 0)
        last = stage
        stage, phase = following(stage, phase, STAGES)
    if M > 0:
        one, two, three, four = warpgroup_mma_wait(0, deps=(one, two, three, four))
    else:
        one, two = warpgroup_mma_wait(0, deps=(one, two))
    mbarrier.arrive(free.index(last), count=1)
    return one, two, three, four


@gluon.jit
def _pass_by(ready, free, place, STEPS: gl.constexpr):
    """The unit has no tile for this group"""
    stage = place % STAGES
    phase = (place // STAGES) & 1
    for _ in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _halves(sums):
    """[64, T] -> of the first and of the last half of the rows [64, T / 2]"""
    return gl.split(gl.permute(gl.reshape(sums, (64, 2, T // 2)), (0, 2, 1)))


@gluon.jit
def _store(sums, to, apart: gl.constexpr, first, end, N: gl.constexpr):
    """sums [64, N] -> N rows of 64 numbers, from row `first` on, those before `end`"""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first + gl.arange(0, N, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    to += gl.expand_dims(row.to(gl.int64) * apart, 1) + column
    store_rows(sums, to, gl.expand_dims(row < end, 1) & (column < 64), wide)


@gluon.jit
def _scatter(sums, to, apart: gl.constexpr, targets, FIRST: gl.constexpr, start, end, N: gl.constexpr):
    """The same, but row r, from FIRST on, goes to row targets[r], and need not stay in the L2 cache"""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = start + FIRST + gl.arange(0, N, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    target = targets.slice(FIRST, N).load(gl.SliceLayout(1, wide))
    rows = gl.convert_layout(gl.permute(sums.to(gl.bfloat16), (1, 0)), wide)
    to += gl.expand_dims(target.to(gl.int64) * apart, 1) + column
    gl.store(to, rows, mask=gl.expand_dims(row < end, 1) & (column < 64))


@gluon.jit
def _up_tile(scale, to, ring, xs, ms, factors, ready, free, start, end, place, D: gl.constexpr, I: gl.constexpr,
             M: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    less: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M if M > 0 else 16, 32])
    j = gl.arange(0, 64, gl.SliceLayout(1, mma))
    w_one = gl.load(scale + j)
    w_two = gl.load(scale + I + j)
    one, two, three, four = _multiply(ring, xs, ms, ready, free, place, mma, less, D // BK, M, True, MINE)
    factor = gl.expand_dims(factors.slice(0, T).load(gl.SliceLayout(0, mma)), 0)
    one = one * gl.expand_dims(w_one, 1) * factor
    two = two * gl.expand_dims(w_two, 1) * factor
    a, b = _halves(gated(one, two))
    _store(a, to, I, start, end, T // 2)
    _store(b, to, I, start + T // 2, end, T // 2)
    if M > 0:
        factor = gl.expand_dims(factors.slice(T, M).load(gl.SliceLayout(0, less)), 0)
        three = three * gl.expand_dims(gl.convert_layout(w_one, gl.SliceLayout(1, less)), 1) * factor
        four = four * gl.expand_dims(gl.convert_layout(w_two, gl.SliceLayout(1, less)), 1) * factor
        _store(gated(three, four), to, I, start + T, end, M)


@gluon.jit
def _down_tile(scale, to, ring, xs, ms, factors, targets, ready, free, start, end, place, D: gl.constexpr,
               I: gl.constexpr, M: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    less: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M if M > 0 else 16, 32])
    STEPS: gl.constexpr = (I + BK - 1) // BK
    j = gl.arange(0, 64, gl.SliceLayout(1, mma))
    w_one = gl.load(scale + j)
    w_two = gl.load(scale + 64 + j)
    one, two, three, four = _multiply(ring, xs, ms, ready, free, place, mma, less, STEPS, M, False, MINE)
    factor = gl.expand_dims(factors.slice(0, T).load(gl.SliceLayout(0, mma)), 0)
    one = one * gl.expand_dims(w_one, 1) * factor
    two = two * gl.expand_dims(w_two, 1) * factor
    a, b = _halves(one)
    _scatter(a, to, D, targets, 0, start, end, T // 2)
    _scatter(b, to, D, targets, T // 2, start, end, T // 2)
    a, b = _halves(two)
    _scatter(a, to + 64, D, targets, 0, start, end, T // 2)
    _scatter(b, to + 64, D, targets, T // 2, start, end, T // 2)
    if M > 0:
        factor = gl.expand_dims(factors.slice(T, M).load(gl.SliceLayout(0, less)), 0)
        three = three * gl.expand_dims(gl.convert_layout(w_one, gl.SliceLayout(1, less)), 1) * factor
        four = four * gl.expand_dims(gl.convert_layout(w_two, gl.SliceLayout(1, less)), 1) * factor
        _scatter(three, to, D, targets, T, start, end, M)
        _scatter(four, to + 64, D, targets, T, start, end, M)


@gluon.jit
def _sums_part(up_scale, down_scale, hidden, out, ring, xs, ms, factors, targets, ready, free, box, told, heard, counts,
               flags, each, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, MORE: gl.constexpr,
               MINE: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = (I // 64 + 1) // 2
    DOWN: gl.constexpr = D // 256
    which = 0
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        expert = start // each
        factor = factors.index(which)
        target = targets.index(which)
        if at < ups:
            tile = at % UP * 2 + MINE
            scale = up_scale + expert * (2 * I) + tile * 64
            to = hidden + tile * 64
            if tile < I // 64:
                if MORE > 0:
                    if end - start > T:
                        _up_tile(scale, to, ring, xs, ms, factor, ready, free, start, end, place, D, I, MORE, MINE)
                    else:
                        _up_tile(scale, to, ring, xs, ms, factor, ready, free, start, end, place, D, I, 0, MINE)
                else:
                    _up_tile(scale, to, ring, xs, ms, factor, ready, free, start, end, place, D, I, 0, MINE)
            else:
                _pass_by(ready, free, place, D // BK)
            barrier()
            gl.atomic_add(flags + at // UP, 1, sem="acq_rel", scope="gpu")
        else:
            tile = (at - ups) % DOWN * 2 + MINE
            scale = down_scale + expert * D + tile * 128
            to = out + tile * 128
            if MORE > 0:
                if end - start > T:
                    _down_tile(scale, to, ring, xs, ms, factor, target, ready, free, start, end, place, D, I, MORE,
                               MINE)  # fmt: skip
                else:
                    _down_tile(scale, to, ring, xs, ms, factor, target, ready, free, start, end, place, D, I, 0, MINE)
            else:
                _down_tile(scale, to, ring, xs, ms, factor, target, ready, free, start, end, place, D, I, 0, MINE)
        which ^= 1
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)


@gluon.jit(do_not_specialize=["each"])
def wide_kernel(x, x_scale, w_up, up_scale, w_down, down_scale, hidden, rounded, h_rows, h_scale, out, order, share,
                counts, beyond, marks, each, D: gl.constexpr, I: gl.constexpr, APART: gl.constexpr,
                TOP_K: gl.constexpr, EXPERTS: gl.constexpr, MORE: gl.constexpr, B: gl.constexpr,
                REGISTERS: gl.constexpr, SOME: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    """x [N, D] times w_up [E 2 I, D] -> hidden [E N, I]; that times w_down [E D, I] -> out [N k, D]. The other
    arguments are those of `experts_gluon.experts_kernel`."""
    UP: gl.constexpr = (I // 64 + 1) // 2
    DOWN: gl.constexpr = D // 256
    WIDE: gl.constexpr = 2 * T if MORE > 0 else T  # a power of two
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flags = marks + 4
    ring = gl.allocate_shared_memory(w_up.dtype, [4 * STAGES, 64, BK], w_up.layout)
    xs = gl.allocate_shared_memory(w_up.dtype, [STAGES, T, BK], w_up.layout)
    ms = gl.allocate_shared_memory(w_up.dtype, [STAGES if MORE > 0 else 1, MORE if MORE > 0 else 8, BK], w_up.layout)
    # Of the rows of a unit, and of the one before: by what their sums are multiplied, and where they go. Who brings
    # rows writes them with the second stage: then a stage of the unit before has been given back, so all of the one
    # before that is stored, for units have more stages than the ring (`experts_triton.streams_wide`).
    factors = gl.allocate_shared_memory(gl.float32, [2, WIDE], flat)
    targets = gl.allocate_shared_memory(gl.int32, [2, WIDE], flat)
    ready, free = ring_barriers(STAGES, 32 * WARPS + 2, 2)  # filled by all threads that bring rows, and who asks
    box, told, heard = mailbox(MOST, 4)
    guess, guessed, unused = mailbox(1, 1)
    later, later_told, later_heard = mailbox(ROUNDS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_sums_part, (up_scale, down_scale, hidden, out, ring, xs, ms, factors, targets, ready, free, box, told, heard,
                      counts, flags, each, D, I, EXPERTS, MORE, 0)),
        (_sums_part, (up_scale, down_scale, hidden, out, ring, xs, ms, factors, targets, ready, free, box, told, heard,
                      counts, flags, each, D, I, EXPERTS, MORE, 1)),
        (rows_part, (x, x_scale, h_rows, h_scale, order, share, xs, ms, factors, targets, ready, free, box, told, heard,
                     counts, flags, D, I, EXPERTS, TOP_K, MORE, 3 * UP)),
        (round_part, (hidden, rounded, h_scale, later, later_told, later_heard, flags, I, APART, UP, 2 * UP, B)),
        (weights_part, (w_up, w_down, ring, ready, free, box, told, heard, guess, guessed, unused, counts, each, D, I,
                        EXPERTS)),
        (plan_part, (box, told, heard, guess, guessed, unused, later, later_told, later_heard, counts, beyond, marks,
                     None, each, UP, DOWN, D // BK, (I + BK - 1) // BK, EXPERTS, T + MORE, True)),
    ], [4, WARPS, 2, 1, 1], [REGISTERS, SOME, FEW, FEW, FEW])  # fmt: skip


def experts_wide(x: Rows, placed: Placed, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Tensor:
    """As `experts_triton.experts_pairs`, bit for bit: x [N, D] -> [N k, D], all in fp8. `placed.marks` must be zero
    long before: see `experts_gluon.experts_streamed`."""
    (experts, hidden_size, width), tokens = down.shape, len(x.values)
    assert x.values.dtype == up.dtype == FP8, f"{x.values.dtype} rows for {up.dtype} experts"
    assert x.scale is not None
    assert all(t.is_contiguous() for t in (x.values, x.scale, up, up_scale, down, down_scale))
    hidden = torch.empty(experts * tokens, width, dtype=torch.bfloat16, device=up.device)
    rounded = hidden.view(FP8)[:, :width]
    h_scale = torch.empty(experts * tokens, 1, device=up.device)
    out = torch.empty(tokens * placed.top_k, hidden_size, dtype=torch.bfloat16, device=up.device)
    launch(
        wide_kernel, multiprocessors(up.device),
        x.values, x.scale, tiles_of(up.view(-1, hidden_size), 64), up_scale,
        tiles_of(down.view(-1, width), 64), down_scale,
        hidden, rounded, tiles_of(rounded, PIECE.value), h_scale, out,
        placed.lists, placed.share, placed.counts, placed.beyond, placed.marks, tokens,
        D=hidden_size, I=width, APART=rounded.stride(0), TOP_K=placed.top_k, EXPERTS=experts, **NUMBERS[placed.block],
        num_warps=4, maxnreg=MOST_REGISTERS, **early(),
    )  # fmt: skip
    return out
