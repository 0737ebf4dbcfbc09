# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"
# ruff: noqa: RUF059  (a message has four numbers, and not every part needs them all)
"""The parts of the kernel in `wide_gluon.py` that do not multiply: who asks for weights, who brings rows, who rounds.

A stage has 128 columns of two neighbouring tiles, one for each group that multiplies, and of a block's rows: T, and
MORE beside them. Who brings rows also says by what their sums are multiplied, and where they go.

Legend: D hidden, I width of an expert.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from diffusiongemma.ops.stream_gluon import (
    MOST,
    ROUNDS,
    as_shape,
    barrier,
    begin,
    bulk_copy,
    copy,
    fence_global,
    following,
    hear,
    let_next,
    wait_before,
)

T = gl.constexpr(128)  # rows of a block, without those beside them
BK = gl.constexpr(128)  # columns of a stage
STAGES = gl.constexpr(4)  # 32 KB of weights and 16 or 20 of rows each
WARPS = gl.constexpr(4)  # that bring rows
PIECE = gl.constexpr(32)  # rows that one bulk copy brings


# ---- weights -----------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch(w, row, second, ring, ready, free, stage, phase, STEPS: gl.constexpr, NEXT: gl.constexpr,
           TILES: gl.constexpr):  # fmt: skip
    """TILES tiles, NEXT rows apart, of two times 64 rows, `second` rows apart"""
    for k in range(STEPS):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), TILES * 128 * BK)
        for n in gl.static_range(TILES):
            bulk_copy(w, [row + n * NEXT, k * BK], ready.index(stage), ring.index(4 * stage + 2 * n))
            bulk_copy(w, [row + n * NEXT + second, k * BK], ready.index(stage), ring.index(4 * stage + 2 * n + 1))
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _fetch_up(w, expert, unit, ring, ready, free, stage, phase, D: gl.constexpr, I: gl.constexpr):
    """Where there is an odd number of tiles, the last unit has one."""
    COUNT: gl.constexpr = I // 64
    row = expert * (2 * I) + unit * 128
    if COUNT % 2 == 0:
        stage, phase = _fetch(w, row, I, ring, ready, free, stage, phase, D // BK, 64, 2)
    else:
        if unit == COUNT // 2:
            stage, phase = _fetch(w, row, I, ring, ready, free, stage, phase, D // BK, 64, 1)
        else:
            stage, phase = _fetch(w, row, I, ring, ready, free, stage, phase, D // BK, 64, 2)
    return stage, phase


@gluon.jit
def weights_part(w_up, w_down, ring, ready, free, box, told, heard, guess, guessed, unused, counts, each,
                 D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = (I // 64 + 1) // 2
    DOWN: gl.constexpr = D // 256
    STEPS: gl.constexpr = (I + BK - 1) // BK
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    # The first unit is one of a first block for any routing: nothing has to be there but the weights.
    at, start, end, place, slot, turn = hear(guess, guessed, unused, slot, turn, 1)
    asked = at < EXPERTS * UP
    if asked:
        stage, phase = _fetch_up(w_up, at // UP, at % UP, ring, ready, free, stage, phase, D, I)
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        expert = start // each
        if not asked:
            if at < ups:
                stage, phase = _fetch_up(w_up, expert, at % UP, ring, ready, free, stage, phase, D, I)
            else:
                row = expert * D + (at - ups) % DOWN * 256
                stage, phase = _fetch(w_down, row, 64, ring, ready, free, stage, phase, STEPS, 128, 2)
        asked = False
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
    let_next()


# ---- rows --------------------------------------------------------------------------------------------------------


@gluon.jit
def _bring_hidden(h_rows, pieces, ms, factor, target, factors, targets, ready, free, stage, phase, start,
                  I: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """PIECES: those of a block that have rows"""
    for k in range((I + BK - 1) // BK):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), PIECES * PIECE * BK)
        if k == 1:
            factors.store(factor)
            targets.store(target)
        mbarrier.arrive(ready.index(stage), count=32 * WARPS)  # as many as when all threads of these warps bring rows
        for n in gl.static_range(PIECES):
            if n < T // PIECE:
                to = pieces.index(stage * (T // PIECE) + n)
                bulk_copy(h_rows, [start + n * PIECE, k * BK], ready.index(stage), to)
            else:
                bulk_copy(h_rows, [start + n * PIECE, k * BK], ready.index(stage), ms.index(stage))
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def rows_part(x, x_scale, h_rows, h_scale, order, share, xs, ms, factors, targets, ready, free, box, told, heard,
              counts, flags, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, TOP_K: gl.constexpr,
              MORE: gl.constexpr, DONE: gl.constexpr):  # fmt: skip
    """DONE: what the flag of a block says when its rows are there"""
    UP: gl.constexpr = (I // 64 + 1) // 2
    DOWN: gl.constexpr = D // 256
    lay: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pieces = as_shape(xs, [STAGES * (T // PIECE), PIECE, BK])
    c = gl.arange(0, BK, gl.SliceLayout(0, lay))
    i = gl.arange(0, T, gl.SliceLayout(1, lay))
    j = gl.arange(0, factors.shape[1], flat)
    stage = 0
    phase = 1
    which = 0
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        there = start + j < end
        target = gl.load(order + start + j, mask=there, other=0)
        if at < ups:
            ok = start + i < end
            token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
            factor = gl.load(x_scale + target // TOP_K, mask=there, other=0.0)
            base = gl.expand_dims(token * D, 1) + gl.expand_dims(c, 0)
            mask = gl.expand_dims(ok, 1) & gl.expand_dims(c < BK, 0)
            if MORE > 0:
                beside = start + T + gl.arange(0, MORE, gl.SliceLayout(1, lay))
                more_token = gl.load(order + beside, mask=beside < end, other=0) // TOP_K
                more_base = gl.expand_dims(more_token * D, 1) + gl.expand_dims(c, 0)
                more_mask = gl.expand_dims(beside < end, 1) & gl.expand_dims(c < BK, 0)
            for k in range(D // BK):
                mbarrier.wait(free.index(stage), phase)
                copy(xs.index(stage), x + k * BK + base, mask=mask)
                if MORE > 0:
                    copy(ms.index(stage), x + k * BK + more_base, mask=more_mask)
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                if k == 1:
                    factors.index(which).store(factor)
                mbarrier.arrive(ready.index(stage), count=1)
                stage, phase = following(stage, phase, STAGES)
        else:
            part = gl.load(share + start + j, mask=there, other=0.0)
            while gl.atomic_add(flags + (at - ups) // DOWN, 0, sem="acquire", scope="gpu") < DONE:
                pass
            fence_global()
            factor = gl.load(h_scale + start + j, mask=there, other=0.0, cache_modifier=".cg") * part
            rows = end - start
            if rows <= PIECE:
                stage, phase = _bring_hidden(h_rows, pieces, ms, factor, target, factors.index(which),
                                             targets.index(which), ready, free, stage, phase, start, I, 1)  # fmt: skip
            elif rows <= 2 * PIECE:
                stage, phase = _bring_hidden(h_rows, pieces, ms, factor, target, factors.index(which),
                                             targets.index(which), ready, free, stage, phase, start, I, 2)  # fmt: skip
            elif rows <= 3 * PIECE:
                stage, phase = _bring_hidden(h_rows, pieces, ms, factor, target, factors.index(which),
                                             targets.index(which), ready, free, stage, phase, start, I, 3)  # fmt: skip
            elif (rows <= T) | (MORE == 0):
                stage, phase = _bring_hidden(h_rows, pieces, ms, factor, target, factors.index(which),
                                             targets.index(which), ready, free, stage, phase, start, I, 4)  # fmt: skip
            else:
                if MORE > 0:
                    stage, phase = _bring_hidden(h_rows, pieces, ms, factor, target, factors.index(which),
                                                 targets.index(which), ready, free, stage, phase, start, I,
                                                 5)  # fmt: skip
        which ^= 1
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)


# ---- rounding ----------------------------------------------------------------------------------------------------


@gluon.jit
def round_part(hidden, rounded, h_scale, later, told, heard, flags, I: gl.constexpr, APART: gl.constexpr,
               UP: gl.constexpr, MADE: gl.constexpr, B: gl.constexpr):  # fmt: skip
    """As `stream_gluon.round_part`, but B rows at once, each one warp's, in pieces of 256. MADE: what the flag of a
    block says when all of it is made"""
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    slot = 0
    phase = 0
    c = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, lay)), 0)
    r = gl.arange(0, B, gl.SliceLayout(1, lay))
    zero = gl.zeros([B, 256], gl.float32, lay)
    wait_before()
    at, start, end, place, slot, phase = hear(later, told, heard, slot, phase, ROUNDS)
    while at >= 0:
        if start < end:
            block = at // UP
            while gl.atomic_add(flags + block, 0, sem="acquire", scope="gpu") < MADE:
                pass
            for first in range(start + at % UP, end, UP * B):
                row = first + r * UP
                ok = row < end
                some = gl.expand_dims(ok, 1)
                line = hidden + gl.expand_dims(row.to(gl.int64) * I, 1)
                to = rounded + gl.expand_dims(row.to(gl.int64) * APART, 1)
                top = zero
                for n in gl.static_range(0, I, 256):
                    mask = some & (n + c < I)
                    wide = gl.load(line + (n + c), mask=mask, other=0.0, cache_modifier=".cg").to(gl.float32)
                    top = gl.maximum(top, gl.abs(wide))
                s = gl.max(top, 1) / 448.0
                s = gl.where(s < 1.1754943508222875e-38, 1.0, s)
                back = gl.div_rn(1.0, s)
                gl.store(h_scale + row, s, mask=ok)
                s_wide = gl.expand_dims(s, 1) + zero
                back_wide = gl.expand_dims(back, 1) + zero
                # Later pieces lie behind what is overwritten; but of the same piece, a lane's numbers lie where another
                # lane's rounded ones go.
                for n in gl.static_range(0, I, 256):
                    mask = some & (n + c < I)
                    wide = gl.load(line + (n + c), mask=mask, other=0.0, cache_modifier=".cg").to(gl.float32)
                    barrier()
                    near = wide * back_wide
                    near = gl.fma(gl.fma(-near, s_wide, wide), back_wide, near)
                    gl.store(to + (n + c), near.to(gl.float8e4nv), mask=mask)
            barrier()
            gl.atomic_add(flags + block, 1, sem="acq_rel", scope="gpu")
        at, start, end, place, slot, phase = hear(later, told, heard, slot, phase, ROUNDS)
