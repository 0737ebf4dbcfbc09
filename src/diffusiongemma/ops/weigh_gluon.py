# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"
# ruff: noqa: RUF059  (a ring is taken apart as a whole, and not every part needs all of it)
"""The first stage of the vocabulary end on Hopper: as `weigh_triton._head_kernel`, bit for bit.

That kernel has two programs on a multiprocessor, of which one may multiply while the other makes its weights; chance
decides how well that goes. Here one program stays on its multiprocessor, and its warps have different work:

    bring    one warp asks for positions and tokens, stage by stage, as long as the ring has room: also for the next
             tile, and for the first tokens before the launch before has ended
    weigh    two groups of four warps take tiles of 128 positions and 128 tokens by turns: one multiplies, and meanwhile
             the other makes the weights of the two halves of its tile, 64 positions each, and stores them

A stage of the ring has 128 bytes along D of 128 positions and 128 tokens. It is `ready` when all bytes are there, and
`free` when it has been multiplied. A group may `go` when the other's last products have begun: the tensor cores have
work all the time, and nobody waits for a stage that is to be filled twice more before it is his.

Products, sums and the operations behind them are the same in both kernels, in the same order: a row gets the same bits
from either. Pins and bans are the other's; with them this one was the slower.

Legend: N positions, D hidden, V vocabulary, T tiles of 128 tokens.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diffusiongemma.ops import weigh_triton
from diffusiongemma.ops.early_triton import multiprocessors
from diffusiongemma.ops.kernels import early, launch
from diffusiongemma.ops.stream_gluon import barrier, bulk_copy, following, let_next, ring_barriers, wait_before

TILE = gl.constexpr(128)  # positions, and tokens
LINE = gl.constexpr(128)  # bytes along D of a stage
STAGES = gl.constexpr(6)  # 192 KB
MOST = 168  # registers of a thread at the launch,
REGISTERS = gl.constexpr(240)  # of one that weighs,
FEW = gl.constexpr(24)  # and of one that brings
NEVER = weigh_triton.NEVER
bulk_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
reference = gluon.jit(weigh_triton.reference.fn)


# ---- the ring ----------------------------------------------------------------------------------------------------


@gluon.jit
def _bring(w, x, ring, k, stage, token, row):
    """Ask for tokens (w given) and positions (x given) of one stage"""
    tokens, positions, ready, free = ring
    BK: gl.constexpr = LINE * 8 // tokens.dtype.primitive_bitwidth
    if w is not None:
        mbarrier.expect(ready.index(stage), 2 * TILE * LINE)
        bulk_copy(w, [token, k * BK], ready.index(stage), tokens.index(stage))
    if x is not None:
        bulk_copy(x, [row, k * BK], ready.index(stage), positions.index(stage))


@gluon.jit
def _bring_part(w, x, rows, vocab, ring, STEPS: gl.constexpr):
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS  # noqa: FURB136  (stages that are asked for at once)
    blocks = gl.cdiv(rows, TILE)
    first = gl.program_id(0)
    for k in gl.static_range(AHEAD):
        _bring(w, None, ring, k, k, first // blocks * TILE, 0)
    wait_before()
    for k in gl.static_range(AHEAD):
        _bring(None, x, ring, k, k, 0, first % blocks * TILE)
    k = gl.to_tensor(AHEAD)
    stage = gl.to_tensor(AHEAD % STAGES)
    phase = gl.to_tensor(0 if AHEAD == STAGES else 1)
    for item in range(first, gl.cdiv(vocab, TILE) * blocks, gl.num_programs(0)):
        while k < STEPS:
            mbarrier.wait(ring[3].index(stage), phase)
            _bring(w, x, ring, k, stage, item // blocks * TILE, item % blocks * TILE)
            stage, phase = following(stage, phase, STAGES)
            k += 1
        k = k * 0
    let_next()


@gluon.jit
def _before(stage):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _multiply(ring, other, stage, phase, mma: gl.constexpr, STEPS: gl.constexpr):
    """-> sums of the upper and the lower 64 positions. A stage is free when the products behind it have begun. `other`:
    tells the other group that it may go"""
    tokens, positions, ready, free = ring
    KIND: gl.constexpr = gl.int32 if tokens.dtype == gl.int8 else gl.float32
    one = gl.zeros((64, TILE), KIND, mma)
    two = gl.zeros((64, TILE), KIND, mma)
    for k in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        right = tokens.index(stage).permute((1, 0))
        left = positions.index(stage)
        one = warpgroup_mma(left.slice(0, 64), right, one, is_async=True)
        two = warpgroup_mma(left.slice(64, 64), right, two, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        mbarrier.arrive(free.index(_before(stage)), count=1, pred=k > 0)
        stage, phase = following(stage, phase, STAGES)
    mbarrier.arrive(other, count=1)
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    mbarrier.arrive(free.index(_before(stage)), count=1)
    return one, two


# ---- weights -----------------------------------------------------------------------------------------------------


@gluon.jit
def _exp(x):
    """As gl.exp, bit for bit where that is 2^-126 or more; else 0, for a third of its operations"""
    FLUSH: gl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(FLUSH, "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _capped(raw, inverse, CAP: gl.constexpr):
    """As `weigh_triton._capped`: what _exp leaves out is nothing beside 1"""
    root = gl.rsqrt(_exp(raw * (2 / CAP)) + 1.0)
    return (CAP - (2 * CAP) * (root * root)) * inverse


@gluon.jit
def _weigh(sums, x_scale, w_scale, temperature, weights, stats, staged, first, tile, rows, vocab, mma: gl.constexpr,
           CAP: gl.constexpr, FIXED: gl.constexpr):  # fmt: skip
    """Sums [64, 128] -> weights and four numbers a row, by the operations of `weigh_triton._head_kernel`"""
    peak, best, mass, tilt = stats
    row = first + gl.arange(0, 64, gl.SliceLayout(1, mma))
    token = gl.expand_dims(tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, mma)), 0)
    live = row < rows
    raw = sums.to(gl.float32)
    if x_scale is not None:
        raw *= gl.expand_dims(gl.load(x_scale + row, mask=live, other=0.0), 1)
        raw *= gl.expand_dims(gl.convert_layout(w_scale, gl.SliceLayout(0, mma)), 0)
    inverse = 1.0 / gl.expand_dims(gl.load(temperature + row, mask=live, other=1.0), 1)
    zero = reference(inverse, CAP, FIXED)
    z = _capped(raw, inverse, CAP)
    z = gl.where(token < vocab, z, NEVER)
    top = gl.max(z, 1)
    at = gl.min(gl.where(z == gl.expand_dims(top, 1), token, vocab), 1)
    if FIXED:  # such weights are exp(-86) or more, or 0
        e = _exp(z - zero)
        z -= gl.expand_dims(top, 1)
    else:
        z -= gl.expand_dims(top, 1)
        e = gl.exp(z)
    place = row.to(gl.int64) * gl.cdiv(vocab, TILE) + tile
    gl.store(peak + place, top, mask=live)
    gl.store(best + place, at, mask=live)
    gl.store(mass + place, gl.sum(e, 1), mask=live)
    gl.store(tilt + place, gl.sum(z * e, 1), mask=live)
    narrow = e.to(gl.bfloat16)
    tma.store_wait(0)
    barrier()  # who asked for the copy before this one has waited for all: until then it reads what is staged
    staged.store(narrow)
    fence_async_shared()
    bulk_store(weights, [first, tile * TILE], staged)  # which leaves out what lies outside of [N, V]


@gluon.jit
def _weigh_part(x_scale, w_scale, temperature, weights, stats, rows, vocab, ring, go, staged, STEPS: gl.constexpr,
                CAP: gl.constexpr, FIXED: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    """MINE: 0 or 1, every second tile is for this group"""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 256 // ring[0].dtype.primitive_bitwidth])
    lane = gl.arange(0, TILE, gl.BlockedLayout([1], [32], [4], [0]))
    blocks = gl.cdiv(rows, TILE)
    place = gl.to_tensor(MINE * STEPS)  # in the ring, as if it had no end
    may = gl.to_tensor(1 - MINE)
    wait_before()
    first = gl.program_id(0) + MINE * gl.num_programs(0)
    for item in range(first, gl.cdiv(vocab, TILE) * blocks, 2 * gl.num_programs(0)):
        tile, row = item // blocks, item % blocks * TILE
        token = tile * TILE + lane
        scale = None
        if w_scale is not None:
            scale = gl.load(w_scale + token, mask=token < vocab, other=0.0)
        mbarrier.wait(go.index(MINE), may)
        one, two = _multiply(ring, go.index(1 - MINE), place % STAGES, place // STAGES & 1, mma, STEPS)
        _weigh(one, x_scale, scale, temperature, weights, stats, staged.index(MINE), row, tile, rows, vocab, mma, CAP,
               FIXED)  # fmt: skip
        _weigh(two, x_scale, scale, temperature, weights, stats, staged.index(MINE), row + 64, tile, rows, vocab, mma,
               CAP, FIXED)  # fmt: skip
        place += 2 * STEPS
        may ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def head_kernel(w, x, x_scale, w_scale, temperature, weights, peak, best, mass, tilt, rows, vocab, D: gl.constexpr,
                CAP: gl.constexpr, FIXED: gl.constexpr):  # fmt: skip
    """x [N, D] times w [V, D], transposed -> weights [N, V]; peak, best, mass, tilt [N, T]"""
    BK: gl.constexpr = LINE * 8 // w.dtype.primitive_bitwidth
    STEPS: gl.constexpr = (D + BK - 1) // BK
    tokens = gl.allocate_shared_memory(w.dtype, [STAGES, TILE, BK], w.layout)
    positions = gl.allocate_shared_memory(x.dtype, [STAGES, TILE, BK], x.layout)
    staged = gl.allocate_shared_memory(weights.dtype, [2, 64, TILE], weights.layout)
    ready, free = ring_barriers(STAGES, 1, 1)
    go = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(go.index(n), count=1)
    fence_async_shared()
    stats = (peak, best, mass, tilt)
    ring = (tokens, positions, ready, free)
    gl.warp_specialize([
        (_weigh_part, (x_scale, w_scale, temperature, weights, stats, rows, vocab, ring, go, staged, STEPS, CAP, FIXED,
                       0)),
        (_weigh_part, (x_scale, w_scale, temperature, weights, stats, rows, vocab, ring, go, staged, STEPS, CAP, FIXED,
                       1)),
        (_bring_part, (w, x, rows, vocab, ring, STEPS)),
    ], [4, 1], [REGISTERS, FEW])  # fmt: skip


def _pieces(t: Tensor, rows: int, columns: int) -> Any:
    """A matrix as bulk copies see it"""
    return TensorDescriptor.from_tensor(t, [rows, columns], gl.NVMMASharedLayout(128, 8 * t.element_size(), 2))


def head_streamed(
    x: Tensor, x_scale: Tensor | None, table: Tensor, w_scale: Tensor | None, temperature: Tensor, weights: Tensor,
    stats: tuple[Tensor, ...], cap: float, fixed: bool,
) -> None:  # fmt: skip
    """x [N, D] and table [V, D] with a scale of each row if they are in 8 bits, temperatures of positions -> weights
    [N, V] in bfloat16 and stats [N, T], which are written"""
    (rows, width), vocab = x.shape, table.shape[0]
    items = triton.cdiv(rows, 128) * triton.cdiv(vocab, 128)
    launch(
        head_kernel, min(items, multiprocessors(x.device)),
        _pieces(table, TILE.value, LINE.value // table.element_size()),
        _pieces(x, TILE.value, LINE.value // x.element_size()), x_scale, w_scale, temperature,
        _pieces(weights, 64, TILE.value), *stats, rows, vocab,
        D=width, CAP=cap, FIXED=fixed, num_warps=4, maxnreg=MOST, **early(),
    )  # fmt: skip
