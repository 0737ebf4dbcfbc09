# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: RUF059  (a message has four numbers, and not every part needs them all)
"""The two warps that bring weights and rows to the stages of a kernel that streams experts (`experts_gluon.py`).

Legend: N tokens, k experts a token, E experts, D hidden, I width of an expert, T rows of a block, BK numbers a stage.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from diffusiongemma.ops.stream_gluon import (
    MOST,
    begin,
    bulk_copy,
    copy,
    fence_global,
    following,
    hear,
    let_next,
)


@gluon.jit
def _fetch(w, row, second, ring, ready, free, stage, phase, STEPS: gl.constexpr, BK: gl.constexpr,
           STAGES: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """Two times 64 rows of a weight, as many stages as K has"""
    for k in range(STEPS):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), BYTES)
        bulk_copy(w, [row, k * BK], ready.index(stage), ring.index(2 * stage))
        bulk_copy(w, [row + second, k * BK], ready.index(stage), ring.index(2 * stage + 1))
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def weights_part(w_up, w_down, ring, ready, free, box, told, heard, guess, guessed, unused, counts, each,
                 D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                 BYTES: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    UP_STEPS: gl.constexpr = (D + BK - 1) // BK
    DOWN_STEPS: gl.constexpr = (I + BK - 1) // BK
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    # The first tile is one of a first block for any routing: nothing has to be there but the weights.
    at, start, end, place, slot, turn = hear(guess, guessed, unused, slot, turn, 1)
    asked = at < EXPERTS * UP
    if asked:
        stage, phase = _fetch(w_up, at // UP * (2 * I) + at % UP * 64, I, ring, ready, free, stage, phase, UP_STEPS, BK,
                              STAGES, BYTES)  # fmt: skip
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        expert = start // each
        if not asked:
            if at < ups:
                stage, phase = _fetch(w_up, expert * (2 * I) + at % UP * 64, I, ring, ready, free, stage, phase,
                                      UP_STEPS, BK, STAGES, BYTES)  # fmt: skip
            else:
                stage, phase = _fetch(w_down, expert * D + (at - ups) % DOWN * 128, 64, ring, ready, free, stage,
                                      phase, DOWN_STEPS, BK, STAGES, BYTES)  # fmt: skip
        asked = False
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
    let_next()


@gluon.jit
def rows_part(x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D: gl.constexpr, I: gl.constexpr,
              EXPERTS: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
              SIZE: gl.constexpr, DONE: gl.constexpr):  # fmt: skip
    """DONE: what the flag of a block says when its rows are there"""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    lay: gl.constexpr = gl.BlockedLayout([1, 16 // SIZE], [4, 8], [1, 1], [1, 0])
    c = gl.arange(0, BK, gl.SliceLayout(0, lay))
    i = gl.arange(0, T, gl.SliceLayout(1, lay))
    stage = 0
    phase = 1
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        if at < ups:
            ok = start + i < end
            token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
            base = x + gl.expand_dims(token.to(gl.int64) * D, 1) + gl.expand_dims(c, 0)
            for k in range((D + BK - 1) // BK):
                mbarrier.wait(free.index(stage), phase)
                mask = gl.expand_dims(ok, 1) & gl.expand_dims(c < D - k * BK, 0)
                copy(xs.index(stage), base + k * BK, mask=mask)
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                stage, phase = following(stage, phase, STAGES)
        else:
            while gl.atomic_add(flags + (at - ups) // DOWN, 0, sem="acquire", scope="gpu") < DONE:
                pass
            fence_global()
            for k in range((I + BK - 1) // BK):
                mbarrier.wait(free.index(stage), phase)
                mbarrier.expect(ready.index(stage), T * BK * SIZE)
                mbarrier.arrive(ready.index(stage), count=31)  # as many as when all threads of this warp bring rows
                bulk_copy(h_rows, [start, k * BK], ready.index(stage), xs.index(stage))
                stage, phase = following(stage, phase, STAGES)
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
