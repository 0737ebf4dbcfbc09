# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"
# ruff: noqa: RUF059  (a message has four numbers, and not every part needs them all)
"""The two warps that bring 4-bit weights with their scales, and rows, to the stages of the kernel in `pairs_gluon.py`.

A stage has two groups of 64 columns; where K has an odd number of them, the last stage of a tile has one.

Legend: D hidden, I width of an expert, T rows of a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from diffusiongemma.ops.sides_gluon import line_of, pages_of
from diffusiongemma.ops.stream_gluon import (
    MOST,
    as_shape,
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
def _stage_of(w, scales, pages, mask, tile, where, k, ring, sc, ready, free, stage, phase, GROUPS: gl.constexpr,
              COUNT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The k-th stage of a tile, of COUNT groups; a group is a chunk of a tile that is laid out by side"""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    f = gl.arange(0, 128, flat)
    mbarrier.wait(free.index(stage), phase)
    mbarrier.expect(ready.index(stage), COUNT * 4096)
    for h in gl.static_range(COUNT):
        if pages is not None:
            first, one, two = where
            row = line_of(first, one, two, tile, 2 * k + h, mask)
        else:
            row = (tile * GROUPS + 2 * k + h) * w.block_shape[0]
        bulk_copy(w, [row, 0], ready.index(stage), ring.index(2 * stage + h))
    # By all threads of this warp, and who multiplies alone waits for them.
    copy(sc.index(stage), scales + tile * (GROUPS * 64) + k * 128 + f, mask=k * 128 + f < GROUPS * 64)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    return following(stage, phase, STAGES)


@gluon.jit
def _fetch(w, scales, pages, mask, tile, ring, sc, ready, free, stage, phase, GROUPS: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    where = None
    if pages is not None:
        where = pages_of(pages, tile, GROUPS)
    for k in range(GROUPS // 2):
        stage, phase = _stage_of(w, scales, pages, mask, tile, where, k, ring, sc, ready, free, stage, phase, GROUPS, 2,
                                 STAGES)  # fmt: skip
    if GROUPS % 2 == 1:
        stage, phase = _stage_of(w, scales, pages, mask, tile, where, GROUPS // 2, ring, sc, ready, free, stage, phase,
                                 GROUPS, 1, STAGES)  # fmt: skip
    return stage, phase


@gluon.jit
def weights_part(w_up, w_down, up_scale, down_scale, up_pages, down_pages, mask, ring, sc, ready, free, box, told,
                 heard, guess, guessed, unused, counts, each, D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    # The first tile is one of a first block for any routing: nothing has to be there but the weights.
    at, start, end, place, slot, turn = hear(guess, guessed, unused, slot, turn, 1)
    asked = at < EXPERTS * UP
    if asked:
        stage, phase = _fetch(w_up, up_scale, up_pages, mask, at, ring, sc, ready, free, stage, phase, D // 64,
                              STAGES)  # fmt: skip
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        expert = start // each
        if not asked:
            if at < ups:
                stage, phase = _fetch(w_up, up_scale, up_pages, mask, expert * UP + at % UP, ring, sc, ready, free,
                                      stage, phase, D // 64, STAGES)  # fmt: skip
            else:
                stage, phase = _fetch(w_down, down_scale, down_pages, mask, expert * DOWN + (at - ups) % DOWN, ring, sc,
                                      ready, free, stage, phase, I // 64, STAGES)  # fmt: skip
        asked = False
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
    let_next()


@gluon.jit
def _hidden_stage(h_rows, halves, ready, free, stage, phase, start, k, T: gl.constexpr, PARTS: gl.constexpr,
                  COUNT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    mbarrier.wait(free.index(stage), phase)
    mbarrier.expect(ready.index(stage), PARTS * COUNT * T * 32)
    for h in gl.static_range(COUNT):
        for n in gl.static_range(PARTS):
            to = halves.index((2 * stage + h) * 2 + n)
            bulk_copy(h_rows, [start + n * (T // 2), (2 * k + h) * 64], ready.index(stage), to)
    mbarrier.arrive(ready.index(stage), count=31)  # as many as when all threads of this warp bring rows
    return following(stage, phase, STAGES)


@gluon.jit
def _bring_hidden(h_rows, halves, ready, free, stage, phase, start, I: gl.constexpr, T: gl.constexpr,
                  PARTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """PARTS: halves of a block that have rows"""
    for k in range(I // 64 // 2):
        stage, phase = _hidden_stage(h_rows, halves, ready, free, stage, phase, start, k, T, PARTS, 2, STAGES)
    if I // 64 % 2 == 1:
        last: gl.constexpr = I // 64 // 2
        stage, phase = _hidden_stage(h_rows, halves, ready, free, stage, phase, start, last, T, PARTS, 1, STAGES)
    return stage, phase


@gluon.jit
def rows_part(x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D: gl.constexpr, I: gl.constexpr,
              EXPERTS: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
              DONE: gl.constexpr):  # fmt: skip
    """LAG: so many stages later this warp waits for its copies, and makes the tensor cores see them. DONE: what the
    flag of a block says when its rows are there"""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    STEPS: gl.constexpr = D // 128
    lay: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0])
    halves = as_shape(xs, [4 * STAGES, T // 2, 64])
    c = gl.arange(0, 64, gl.SliceLayout(0, lay))
    i = gl.arange(0, T, gl.SliceLayout(1, lay))
    stage = 0
    phase = 1
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, UP)
    while at >= 0:
        if at < ups:
            ok = start + i < end
            token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
            base = x + gl.expand_dims(token.to(gl.int64) * D, 1) + gl.expand_dims(c, 0)
            mask = gl.expand_dims(ok, 1) & gl.expand_dims(c < 64, 0)
            done = place % STAGES
            for k in range(STEPS):
                mbarrier.wait(free.index(stage), phase)
                for h in gl.static_range(2):
                    copy(xs.index(2 * stage + h), base + (2 * k + h) * 64, mask=mask)
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
            if end - start <= T // 2:
                stage, phase = _bring_hidden(h_rows, halves, ready, free, stage, phase, start, I, T, 1, STAGES)
            else:
                stage, phase = _bring_hidden(h_rows, halves, ready, free, stage, phase, start, I, T, 2, STAGES)
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
