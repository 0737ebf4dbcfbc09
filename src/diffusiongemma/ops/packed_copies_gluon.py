# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: RUF059  (a message has four numbers, and not every part needs them all)
"""The two warps that bring packed weights, and rows, to the stages of the kernel in `packed_gluon.py`.

A stage has SLOTS pieces of weights, and rows in four steps along K of 32 bytes each. Where K ends with half a stage,
the last one of a tile has LEFT pieces and two steps.

Legend: D hidden, I width of an expert, T rows of a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from diffusiongemma.ops.sides_gluon import line_of, pages_of
from diffusiongemma.ops.stream_gluon import (
    MOST,
    begin,
    brought,
    bulk_copy,
    copy,
    fence_global,
    following,
    hear,
    let_next,
)


@gluon.jit
def _stage_of(w, where, tile, piece, mask, ring, ready, free, stage, phase, PIECES: gl.constexpr, SLOTS: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    first, one, two = where
    mbarrier.wait(free.index(stage), phase)
    mbarrier.expect(ready.index(stage), PIECES * 2048)
    for n in gl.static_range(PIECES):
        line = line_of(first, one, two, tile, (piece + n) // 2, mask) + (piece + n) % 2 * 16
        bulk_copy(w, [line, 0], ready.index(stage), ring.index(stage * SLOTS + n))
    return following(stage, phase, STAGES)


@gluon.jit
def _fetch(w, pages, mask, tile, ring, ready, free, stage, phase, HALVES: gl.constexpr, SLOTS: gl.constexpr,
           LEFT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A tile of so many half stages"""
    PIECES: gl.constexpr = HALVES // 2 * SLOTS + HALVES % 2 * LEFT
    where = pages_of(pages, tile, (PIECES + 1) // 2)
    for k in range(HALVES // 2):
        stage, phase = _stage_of(w, where, tile, k * SLOTS, mask, ring, ready, free, stage, phase, SLOTS, SLOTS,
                                 STAGES)  # fmt: skip
    if HALVES % 2 == 1:
        stage, phase = _stage_of(w, where, tile, HALVES // 2 * SLOTS, mask, ring, ready, free, stage, phase, LEFT,
                                 SLOTS, STAGES)  # fmt: skip
    return stage, phase


@gluon.jit
def weights_part(w_up, w_down, up_pages, down_pages, mask, ring, ready, free, box, told, heard, guess, guessed, unused,
                 counts, each, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, SLOTS: gl.constexpr,
                 LEFT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    SIZE: gl.constexpr = ring.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    # The first tile is one of a first block for any routing: nothing has to be there but the weights.
    at, start, end, place, slot, turn = hear(guess, guessed, unused, slot, turn, 1)
    asked = at < EXPERTS * UP
    if asked:
        stage, phase = _fetch(w_up, up_pages, mask, at, ring, ready, free, stage, phase, D * SIZE // 64, SLOTS, LEFT,
                              STAGES)  # fmt: skip
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        expert = start // each
        if not asked:
            if at < ups:
                stage, phase = _fetch(w_up, up_pages, mask, expert * UP + at % UP, ring, ready, free, stage, phase,
                                      D * SIZE // 64, SLOTS, LEFT, STAGES)  # fmt: skip
            else:
                stage, phase = _fetch(w_down, down_pages, mask, expert * DOWN + (at - ups) % DOWN, ring, ready, free,
                                      stage, phase, I * SIZE // 64, SLOTS, LEFT, STAGES)  # fmt: skip
        asked = False
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
    let_next()


@gluon.jit
def _hidden_stage(h_rows, xs, ready, free, stage, phase, start, column, T: gl.constexpr, COUNT: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    mbarrier.wait(free.index(stage), phase)
    mbarrier.expect(ready.index(stage), COUNT * T * 32)
    for n in gl.static_range(COUNT):
        to = xs.index(4 * stage + n)
        bulk_copy(h_rows, [start, column + n * h_rows.block_shape[1]], ready.index(stage), to)
    mbarrier.arrive(ready.index(stage), count=31)  # as many as when all threads of this warp bring rows
    return following(stage, phase, STAGES)


@gluon.jit
def rows_part(x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D: gl.constexpr, I: gl.constexpr,
              EXPERTS: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
              DONE: gl.constexpr):  # fmt: skip
    """LAG: so many stages later this warp waits for its copies, and makes the tensor cores see them. DONE: what the
    flag of a block says when its rows are there"""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    SIZE: gl.constexpr = xs.dtype.primitive_bitwidth // 8
    STEP: gl.constexpr = 32 // SIZE
    STEPS: gl.constexpr = D // (4 * STEP)
    lay: gl.constexpr = gl.BlockedLayout([1, 16 // SIZE], [16, 2], [1, 1], [1, 0])
    c = gl.arange(0, STEP, gl.SliceLayout(0, lay))
    i = gl.arange(0, T, gl.SliceLayout(1, lay))
    stage = 0
    phase = 1
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        if at < ups:
            ok = start + i < end
            token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
            base = x + gl.expand_dims(token.to(gl.int64) * D, 1) + gl.expand_dims(c, 0)
            mask = gl.expand_dims(ok, 1) & gl.expand_dims(c < STEP, 0)
            done = place % STAGES
            for k in range(STEPS):
                mbarrier.wait(free.index(stage), phase)
                for n in gl.static_range(4):
                    copy(xs.index(4 * stage + n), base + (4 * k + n) * STEP, mask=mask)
                stage, phase = following(stage, phase, STAGES)
                async_copy.commit_group()
                if k >= LAG:
                    done = brought(ready, done, LAG, STAGES)
            for left in gl.static_range(LAG):
                done = brought(ready, done, LAG - 1 - left, STAGES)
        else:
            while gl.atomic_add(flags + (at - ups) // DOWN, 0, sem="acquire", scope="gpu") < DONE:
                pass
            fence_global()
            for k in range(I // (4 * STEP)):
                stage, phase = _hidden_stage(h_rows, xs, ready, free, stage, phase, start, k * (4 * STEP), T, 4,
                                             STAGES)  # fmt: skip
            if I % (4 * STEP) > 0:
                last: gl.constexpr = I // (4 * STEP) * (4 * STEP)
                stage, phase = _hidden_stage(h_rows, xs, ready, free, stage, phase, start, last, T, 2, STAGES)
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
