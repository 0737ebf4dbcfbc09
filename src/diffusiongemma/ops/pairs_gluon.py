# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""4-bit experts in one launch that never stops reading weights, as `experts_gluon.py` has those of 8 and 16 bits.

Here the tensor cores are not the only ones to work: what comes as bytes of two weights (`ops/int4.py`) becomes fp8 in
registers, and every group's sum is scaled. So two programs stay on a multiprocessor, and one unpacks while the other
waits. The parts of each are those of `experts_gluon.py`, but for one group of warps that multiplies instead of two:

    plan, round    as there (`stream_gluon.py`)
    weights        asks for weights, two groups a stage, and brings their scales; where weights are laid out by side
                   (`ops/sides.py`), those that are near
    rows           brings rows, waits for them some stages later, and makes the tensor cores see them
    sums           unpacks, multiplies, scales and adds, group by group; blocks with at most half of the rows that they
                   may have take half as many columns

Sums are those of `product_triton` with `int4_triton.sums_pairs`, bit for bit.

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
from diffusiongemma.ops.int4_triton import HALVES
from diffusiongemma.ops.kernels import early, launch
from diffusiongemma.ops.packed import Packed
from diffusiongemma.ops.pairs_copies_gluon import rows_part, weights_part
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
    round_part,
    store_rows,
)

PROGRAMS = 2  # of a multiprocessor
ROWS = 32  # of a block. With 64, sums need so many registers that the dense MLP has no room beside them
STAGES = 5  # 67 KB a program, so that it has room
REGISTERS, FEW = 96, 40  # of a thread, before parts give back what they do not need, and of the single warps
LAG = 3  # stages


@gluon.jit
def _group(ring, xs, sc, stage, one, two, mma: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    """Adds the sums of the H-th group of a stage; when this returns, the tensor cores have read it"""
    packed = ring.index(2 * stage + H).reshape([64, 64]).load(gl.DotOperandLayout(0, mma, 4))
    s = sc.index(stage).slice(H * 64, 64).load(gl.SliceLayout(1, mma))
    low, high = gl.inline_asm_elementwise(
        HALVES, "=&r,=&r,r", [packed], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    zero = gl.zeros((64, T), gl.float32, mma)
    rows = xs.index(2 * stage + H).slice(0, T).permute((1, 0))
    first = warpgroup_mma(low.to(gl.float8e4nv, bitcast=True), rows, zero, use_acc=False, is_async=True)
    second = warpgroup_mma(high.to(gl.float8e4nv, bitcast=True), rows, zero, use_acc=False, is_async=True)
    first, second = warpgroup_mma_wait(0, deps=(first, second))
    one += first * gl.expand_dims((s << 16).to(gl.float32, bitcast=True), 1)
    two += second * gl.expand_dims((s & -65536).to(gl.float32, bitcast=True), 1)
    return one, two


@gluon.jit
def _multiply(ring, xs, sc, ready, free, place, mma: gl.constexpr, GROUPS: gl.constexpr, T: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """-> two sums [64, T], times 2^-8"""
    one = gl.zeros((64, T), gl.float32, mma)
    two = gl.zeros((64, T), gl.float32, mma)
    stage = place % STAGES
    phase = (place // STAGES) & 1
    for _ in range(GROUPS // 2):
        mbarrier.wait(ready.index(stage), phase)
        one, two = _group(ring, xs, sc, stage, one, two, mma, T, 0)
        one, two = _group(ring, xs, sc, stage, one, two, mma, T, 1)
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    if GROUPS % 2 == 1:
        mbarrier.wait(ready.index(stage), phase)
        one, two = _group(ring, xs, sc, stage, one, two, mma, T, 0)
        mbarrier.arrive(free.index(stage), count=1)
    return one, two


@gluon.jit
def _up_tile(x_scale, hidden, order, ring, xs, sc, ready, free, flags, at, start, end, place, D: gl.constexpr,
             I: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    UP: gl.constexpr = I // 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, T, gl.SliceLayout(0, mma))
    row = gl.arange(0, T, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    ok = start + i < end
    token = gl.load(order + start + i, mask=ok, other=0) // TOP_K
    factor = 256.0 * gl.load(x_scale + token, mask=ok, other=0.0)
    one, two = _multiply(ring, xs, sc, ready, free, place, mma, D // 64, T, STAGES)
    one = one * gl.expand_dims(factor, 0)
    two = two * gl.expand_dims(factor, 0)
    one = gated(one, two)
    to = hidden + gl.expand_dims((start + row).to(gl.int64) * I, 1) + (at % UP * 64 + column)
    store_rows(one, to, gl.expand_dims(start + row < end, 1) & (column < 64), wide)
    barrier()
    gl.atomic_add(flags + at // UP, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _down_tile(h_scale, out, order, share, ring, xs, sc, ready, free, at, start, end, place, D: gl.constexpr,
               I: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """at: counted from the first tile of the second product"""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, T, gl.SliceLayout(0, mma))
    row = gl.arange(0, T, gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, wide)), 0)
    ok = start + i < end
    factor = gl.load(share + start + i, mask=ok, other=0.0)
    target = gl.load(order + start + row, mask=start + row < end, other=0)
    mbarrier.wait(ready.index(place % STAGES), (place // STAGES) & 1)  # the scales of the rows are there when they are
    factor = 256.0 * gl.load(h_scale + start + i, mask=ok, other=0.0, cache_modifier=".cg") * factor
    one, two = _multiply(ring, xs, sc, ready, free, place, mma, I // 64, T, STAGES)
    to = out + gl.expand_dims(target.to(gl.int64) * D, 1) + (at % (D // 128) * 128 + column)
    store = gl.expand_dims(start + row < end, 1) & (column < 64)
    store_rows(one * gl.expand_dims(factor, 0), to, store, wide)
    store_rows(two * gl.expand_dims(factor, 0), to + 64, store, wide)


@gluon.jit
def _sums_part(x_scale, hidden, h_scale, out, order, share, ring, xs, sc, ready, free, box, told, heard, counts, flags,
               D: gl.constexpr, I: gl.constexpr, EXPERTS: gl.constexpr, TOP_K: gl.constexpr, T: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = T // 2
    ups, at, start, end, place, slot, turn = begin(box, told, heard, counts, EXPERTS, I // 64)
    while at >= 0:
        if at < ups:
            if end - start <= HALF:
                _up_tile(x_scale, hidden, order, ring, xs, sc, ready, free, flags, at, start, end, place, D, I, TOP_K,
                         HALF, STAGES)  # fmt: skip
            else:
                _up_tile(x_scale, hidden, order, ring, xs, sc, ready, free, flags, at, start, end, place, D, I, TOP_K,
                         T, STAGES)  # fmt: skip
        else:
            if end - start <= HALF:
                _down_tile(h_scale, out, order, share, ring, xs, sc, ready, free, at - ups, start, end, place, D, I,
                           HALF, STAGES)  # fmt: skip
            else:
                _down_tile(h_scale, out, order, share, ring, xs, sc, ready, free, at - ups, start, end, place, D, I, T,
                           STAGES)  # fmt: skip
        at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)


@gluon.jit(do_not_specialize=["each", "mask"])
def pairs_kernel(x, x_scale, w_up, up_scale, w_down, down_scale, up_pages, down_pages, processors, mask, hidden,
                 rounded, h_rows, h_scale, out, order, share, counts, beyond, marks, each, D: gl.constexpr,
                 I: gl.constexpr, APART: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, T: gl.constexpr,
                 STAGES: gl.constexpr, LAG: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    """x [N, D] times w_up, the tiles of `int4.pack_pairs` as lines of 128 bytes -> hidden [E N, I]; that times w_down
    -> out [N k, D]. The other arguments are those of `experts_gluon.experts_kernel`."""
    UP: gl.constexpr = I // 64
    DOWN: gl.constexpr = D // 128
    flags = marks + 4
    ring = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 32, 128], w_up.layout)
    xs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, T, 64], h_rows.layout)
    sc = gl.allocate_shared_memory(gl.int32, [STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, free = ring_barriers(STAGES, 65, 1)  # filled by the warp that asks, its thread, and who brings rows
    box, told, heard = mailbox(MOST, 3)
    guess, guessed, unused = mailbox(1, 1)
    later, later_told, later_heard = mailbox(ROUNDS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_sums_part, (x_scale, hidden, h_scale, out, order, share, ring, xs, sc, ready, free, box, told, heard, counts,
                      flags, D, I, EXPERTS, TOP_K, T, STAGES)),
        (weights_part, (w_up, w_down, up_scale, down_scale, up_pages, down_pages, mask, ring, sc, ready, free, box,
                        told, heard, guess, guessed, unused, counts, each, D, I, EXPERTS, STAGES)),
        (rows_part, (x, h_rows, order, xs, ready, free, box, told, heard, counts, flags, D, I, EXPERTS, TOP_K, T,
                     STAGES, LAG, 2 * UP)),
        (plan_part, (box, told, heard, guess, guessed, unused, later, later_told, later_heard, counts, beyond, marks,
                     processors, each, UP, DOWN, D // 128, (I // 64 + 1) // 2, EXPERTS, T, True)),
        (round_part, (hidden, rounded, h_scale, later, later_told, later_heard, flags, I, APART, 256, UP)),
    ], [1, 1, 1, 1], [FEW, FEW, FEW, FEW])  # fmt: skip


def _lines(tiles: Tensor) -> Any:
    """Tiles of 4,096 bytes as bulk copies read them"""
    return TensorDescriptor.from_tensor(tiles.view(-1, 128), [32, 128], gl.NVMMASharedLayout(128, 8, 2))


def pairs_streamed(
    x: Rows, placed: Placed, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor,
    sided: Packed | None = None,
) -> Tensor:  # fmt: skip
    """As `experts_triton.experts_pairs`, bit for bit, for 4-bit weights in groups of 64 as `int4.pack_pairs` has them:
    x [N, D] in fp8 -> [N k, D]. `placed.marks` must be zero long before: see `experts_gluon.experts_streamed`.
    `sided`: the same once more, laid out by side"""
    experts, tokens = up.shape[0], len(x.values)
    width, hidden_size = up.shape[1] * 64, down.shape[1] * 128
    assert x.values.dtype == FP8, f"{x.values.dtype} rows for 4-bit experts"
    assert x.scale is not None
    assert placed.block == ROWS, f"blocks of {placed.block} rows"
    assert all(t.is_contiguous() for t in (x.values, x.scale, up, up_scale, down, down_scale))
    hidden = torch.empty(experts * tokens, width, dtype=torch.bfloat16, device=up.device)
    rounded = hidden.view(FP8)[:, :width]
    where: tuple[Tensor | int | None, ...] = (None, None, None, 0)
    if sided is not None:
        up, down = sided.up.lines, sided.down.lines
        where = (sided.up.pages, sided.down.pages, sided.up.sides.processors, sided.up.sides.mask)
    h_rows = TensorDescriptor.from_tensor(rounded, [ROWS // 2, 64], gl.NVMMASharedLayout(64, 8, 2))
    h_scale = torch.empty(experts * tokens, 1, device=up.device)
    out = torch.empty(tokens * placed.top_k, hidden_size, dtype=torch.bfloat16, device=up.device)
    launch(
        pairs_kernel, PROGRAMS * multiprocessors(up.device),
        x.values, x.scale, _lines(up), up_scale, _lines(down), down_scale, *where,
        hidden, rounded, h_rows, h_scale, out,
        placed.lists, placed.share, placed.counts, placed.beyond, placed.marks, tokens,
        D=hidden_size, I=width, APART=rounded.stride(0), TOP_K=placed.top_k, EXPERTS=experts, T=ROWS,
        STAGES=STAGES, LAG=LAG, FEW=FEW, num_warps=4, maxnreg=REGISTERS, **early(),
    )  # fmt: skip
    return out
