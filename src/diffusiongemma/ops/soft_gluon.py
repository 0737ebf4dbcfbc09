# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: RUF059  (a unit has six numbers, and not every part needs them all)
"""The product of the soft embedding in fp8 on Hopper: as that of `soft_triton`, with less traffic to multiprocessors.

A program multiplies 256 positions with 192 columns of the table: a byte from the L2 cache is used in 110 products (85
in tiles of 256 x 128). Three groups of four warps have 64 columns each, and a further warp asks for both matrices,
stage by stage, as long as the ring has room: also for the next unit's, while this one is put away.

A unit is a tile's sum over a part of the vocabulary. Columns of 192 have nine parts; what is left over has one group or
two, and three parts a group: so all units take the same time, and of 2,816 columns and 256 positions there are
14 x 9 + 6 = 132, one a multiprocessor of an H200. They are numbered by part, then by column, then by positions:
programs that run together read the same places of both matrices. No part depends on the number of rows, so a row gets
the same bits in any batch.

Hopper sums fp8 products with about 14 bits. After FP8_STEPS steps a group puts its sum away, to be added by the L2
cache to what it has put there before (each number by one thread: in order), and the three do so at different times: the
tensor cores have work meanwhile. Sums lie as the tensor cores leave them: eight positions side by side.

Legend: N positions, D hidden, V vocabulary, S parts, BK numbers a stage.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

from diffusiongemma.ops.early_triton import multiprocessors, ready, run
from diffusiongemma.ops.kernels import early, launch
from diffusiongemma.ops.soft_triton import FP8_STEPS, FP8_TOP
from diffusiongemma.ops.stream_gluon import barrier, bulk_copy, following, let_next, ring_barriers, wait_before
from diffusiongemma.ops.vocab import Table

ROWS = gl.constexpr(256)  # of a tile
BK = gl.constexpr(128)
RUN = gl.constexpr(FP8_STEPS)
PARTS = 9  # of a full column
STAGES = 4
APART = 14  # steps between the groups' first puttings away: 64 - 2 x 14 + 3 x 64 = 228, the steps of a unit
OPTIONS = {"REGISTERS": 160, "FEW": 24, "num_warps": 4, "maxnreg": 128}  # 16 warps share 65,536 registers


class Cut:
    """How columns and vocabulary are cut into units (`_unit`)"""

    def __init__(self, width: int, vocab: int, parts: int = PARTS) -> None:
        assert parts % 3 == 0, f"{parts} parts for three groups"
        self.parts = parts
        self.full = (width + 63) // 192  # columns of three groups
        self.rest = max(0, -(-(width - 192 * self.full) // 64))  # groups of the last column
        self.few = parts // 3 * self.rest  # its parts
        self.edge = min(width, 192 * self.full)  # where it begins
        self.steps = -(-vocab // BK.value)
        self.units = self.full * parts + self.few  # of 256 rows


@gluon.jit
def _unit(at, blocks, D: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr):
    """-> first row and column of a unit, its groups (none: there is no such unit), its part, first step and the end"""
    FULL: gl.constexpr = (D + 63) // 192
    REST: gl.constexpr = (D - 192 * FULL + 63) // 64 if D > 192 * FULL else 0
    which = at // blocks
    column = which % FULL if FULL > 0 else 0
    part = which // FULL if FULL > 0 else which
    groups = 3
    parts = PARTS
    if which >= FULL * PARTS:
        column = FULL
        part = which - FULL * PARTS
        parts = PARTS // 3 * REST if REST > 0 else 1
        groups = REST if part < PARTS // 3 * REST else 0
    return at % blocks * ROWS, column * 192, groups, part, part * STEPS // parts, (part + 1) * STEPS // parts


@gluon.jit
def _ask_table(w, ring, ready, column, step, groups, stage, there):
    """Both matrices' bytes are expected, the table's asked for"""
    for g in gl.static_range(3):
        mbarrier.expect(ready.index(stage), (ROWS + 64 * g + 64) * BK, pred=there & (groups == g + 1))
    for g in gl.static_range(3):
        to = ring.index(3 * stage + g)
        bulk_copy(w, [column + 64 * g, step * BK], ready.index(stage), to, pred=there & (groups > g))


@gluon.jit
def _ask_part(p, w, ring, ps, ready, free, rows, D: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """The warp that asks. The first stages of the table are there when the launch before has ended."""
    blocks = (rows + ROWS - 1) // ROWS
    at = gl.program_id(0)
    row, column, groups, part, begin, end = _unit(at, blocks, D, STEPS, PARTS)
    for k in gl.static_range(STAGES):
        _ask_table(w, ring, ready, column, begin + k, groups, k, begin + k < end)
    wait_before()
    for k in gl.static_range(STAGES):
        bulk_copy(p, [row, (begin + k) * BK], ready.index(k), ps.index(k), pred=begin + k < end)
    asked = gl.minimum(end - begin, STAGES)
    stage = asked % STAGES
    phase = 1 - asked // STAGES
    while groups > 0:
        for step in range(begin + asked, end):
            mbarrier.wait(free.index(stage), phase)
            _ask_table(w, ring, ready, column, step, groups, stage, True)
            bulk_copy(p, [row, step * BK], ready.index(stage), ps.index(stage))
            stage, phase = following(stage, phase, STAGES)
        at += gl.num_programs(0)
        asked = 0
        row, column, groups, part, begin, end = _unit(at, blocks, D, STEPS, PARTS)
    let_next()


@gluon.jit
def _multiply(ring, ps, ready, free, stage, phase, steps, mma: gl.constexpr, MINE: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """-> the sum [64, 256] of so many steps. A stage is free when the products behind it have begun."""
    acc = gl.zeros((64, ROWS), gl.float32, mma)
    for k in range(steps):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(ring.index(3 * stage + MINE), ps.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index((stage + STAGES - 1) % STAGES), count=1, pred=k > 0)
        stage, phase = following(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index((stage + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def _sums_part(part, ring, ps, ready, free, rows, D: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
               APART: gl.constexpr, STAGES: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    """MINE: 0, 1 or 2, which 64 columns of a tile are for this group"""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    i = gl.arange(0, 64, gl.SliceLayout(1, mma))
    n = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
    blocks = (rows + ROWS - 1) // ROWS
    eights = (rows + 7) // 8
    stage = 0
    phase = 0
    at = gl.program_id(0)
    row, column, groups, piece, begin, end = _unit(at, blocks, D, STEPS, PARTS)
    wait_before()
    while groups > 0:
        if groups > MINE:
            d = column + 64 * MINE + i
            base = part + (piece * eights + row // 8).to(gl.int64) * (8 * D)
            to = base + gl.expand_dims(d * 8, 1) + gl.expand_dims(n // 8 * (8 * D) + n % 8, 0)
            live = gl.expand_dims(d < D, 1) & gl.expand_dims(n // 8 < eights - row // 8, 0)
            stop = gl.minimum(begin + RUN - APART * MINE, end)
            acc, stage, phase = _multiply(ring, ps, ready, free, stage, phase, stop - begin, mma, MINE, STAGES)
            gl.store(to, acc, mask=live, eviction_policy="evict_last")
            while stop < end:
                more = gl.minimum(RUN, end - stop)
                acc, stage, phase = _multiply(ring, ps, ready, free, stage, phase, more, mma, MINE, STAGES)
                gl.atomic_add(to, acc, mask=live, sem="relaxed", scope="gpu")
                stop += more
        else:  # there is nothing for this group, but the stages are counted for all
            for _ in range(begin, end):
                mbarrier.wait(ready.index(stage), phase)
                barrier()
                mbarrier.arrive(free.index(stage), count=1)
                stage, phase = following(stage, phase, STAGES)
        at += gl.num_programs(0)
        row, column, groups, piece, begin, end = _unit(at, blocks, D, STEPS, PARTS)


@gluon.jit(do_not_specialize=["rows"])
def soft_product_kernel(p, w, part, rows, D: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr,
                        APART: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
                        FEW: gl.constexpr):  # fmt: skip
    """p [N, V] times w [D, V], both along V -> part [S, N/8, D, 8] float32. STEPS: of V; APART: between the groups.

    REGISTERS, FEW: of a thread of the second and third group, and of the warp that asks; the first has the rest.
    """
    ring = gl.allocate_shared_memory(w.dtype, [3 * STAGES, 64, BK], w.layout)
    ps = gl.allocate_shared_memory(p.dtype, [STAGES, ROWS, BK], p.layout)
    ready, free = ring_barriers(STAGES, 1, 3)
    fence_async_shared()
    gl.warp_specialize([
        (_sums_part, (part, ring, ps, ready, free, rows, D, STEPS, PARTS, APART, STAGES, 0)),
        (_sums_part, (part, ring, ps, ready, free, rows, D, STEPS, PARTS, APART, STAGES, 1)),
        (_sums_part, (part, ring, ps, ready, free, rows, D, STEPS, PARTS, APART, STAGES, 2)),
        (_ask_part, (p, w, ring, ps, ready, free, rows, D, STEPS, PARTS, STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, FEW])  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(part, share, column_scale, out, rows, width, edge, scale, PARTS: tl.constexpr, FEW: tl.constexpr,
               BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """part [S, N/8, D, 8] -> out [N, D]; columns from `edge` on have FEW parts"""
    ready(HOPPER)
    groups, eights = tl.cdiv(width, BLOCK), tl.cdiv(rows, 8)
    eight, d = tl.program_id(0) // groups, tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    row = eight * 8 + tl.arange(0, 8)
    place = part + eight.to(tl.int64) * width * 8 + d[:, None] * 8 + tl.arange(0, 8)[None, :]
    total = tl.zeros((BLOCK, 8), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(place, mask=(d < tl.where(i < FEW, width, edge))[:, None], other=0.0)
        place += eights.to(tl.int64) * width * 8
    total *= (tl.load(share + row, mask=row < rows, other=0.0) * scale)[None, :]
    total *= (tl.load(column_scale + d, mask=d < width, other=0.0) / FP8_TOP)[:, None]
    to = out + row.to(tl.int64)[None, :] * width + d[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(d < width)[:, None] & (row < rows)[None, :])


def product(p: Tensor, table: Tensor, cut: Cut) -> Tensor:
    """p [N, V] and table [D, V] in fp8 -> [S, N/8, D, 8] float32; parts that a column has not stay as they were"""
    rows, width = len(p), len(table)
    part = torch.empty(cut.parts, -(-rows // 8), width, 8, dtype=torch.float32, device=p.device)
    lines = gl.NVMMASharedLayout(128, 8, 2)
    launch(
        soft_product_kernel, min(multiprocessors(p.device), cut.units * -(-rows // ROWS.value)),
        TensorDescriptor.from_tensor(p, [ROWS.value, BK.value], lines),
        TensorDescriptor.from_tensor(table, [64, BK.value], lines), part, rows, D=width, STEPS=cut.steps,
        PARTS=cut.parts, APART=APART, STAGES=STAGES, **OPTIONS, **early(),
    )  # fmt: skip
    return part


def total(part: Tensor, share: Tensor, table: Table, scale: float, dtype: torch.dtype, cut: Cut) -> Tensor:
    """part [S, N/8, D, 8], share [N] -> [N, D] in `dtype`"""
    rows, width = len(share), part.shape[2]
    out = torch.empty(rows, width, dtype=dtype, device=part.device)
    run(
        _sum_kernel, part.shape[1] * triton.cdiv(width, 128), part, share, table.soft_scale, out, rows, width, cut.edge,
        scale, PARTS=cut.parts, FEW=cut.few, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return out


def soft_embed(weights: Tensor, share: Tensor, table: Table, scale: float, dtype: torch.dtype) -> Tensor:
    """weights [N, V] in fp8, each relative to its row's largest, share [N] -> [N, D] in `dtype`"""
    assert table.soft is not None
    cut = Cut(*table.soft.shape)
    return total(product(weights, table.soft, cut), share, table, scale, dtype, cut)
