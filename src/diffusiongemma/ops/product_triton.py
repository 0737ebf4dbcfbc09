# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The Triton kernel behind every product with a weight: dense or grouped by expert, in four number formats.

One program makes a tile of T rows (tokens) × BO outputs. The operands are swapped, out^T = W x^T: the weight's rows are
the M side of the tensor cores, which is 64 wide on Hopper, and the few tokens the N side, which may be as narrow as 16.
So a tile of 16 or 32 tokens wastes little, and weights stream at the speed of memory.

Bits: the steps along K depend on format and K only, never on T, BO, warps or stages. A row's sum is made in the same
order in any batch and under any tuning.

Legend: K inputs, O outputs, T rows of a tile, BO outputs of a tile, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import product as product_reference
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.int4_triton import load, sums_int4
from diffusiongemma.ops.kernels import early, interpreted, launch, shared_memory, unavailable
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Routing
from diffusiongemma.ops.tiles import Shape, Tile, choose, format_of, step_of

AHEAD = 1024  # bytes
XBLOCK = tl.constexpr(product_reference.XBLOCK)


@triton.jit
def _sums(x_at, x_ok, xs_at, w, first, o, K: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr, BLOCKED: tl.constexpr,
          T: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The same for weights of one number a place: bfloat16, int8, fp8. BLOCKED: x has a scale for every BK numbers."""
    c = tl.arange(0, BK)
    w_at = w + (first + o)[:, None] * K + c[None, :]
    x_at = x_at[:, None] + c[None, :]
    gate = tl.zeros((BO, T), tl.float32)
    up = tl.zeros((BO, T), tl.float32)
    o_ok = o < O
    MASK_K: tl.constexpr = K % BK != 0
    MASK_O: tl.constexpr = O % BO != 0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        k_ok = c < K - k
        w0 = load(w_at + k, o_ok, k_ok, MASK_O, MASK_K)
        x = load(x_at + k, x_ok, k_ok, True, MASK_K)
        if BLOCKED:
            scale = tl.load(xs_at + k // BK, mask=x_ok, other=0.0)[None, :]
            gate += tl.dot(w0, tl.trans(x)) * scale
        else:
            gate = tl.dot(w0.to(x.dtype), tl.trans(x), gate)
        if GATED:
            w1 = load(w_at + k + O * K, o_ok, k_ok, MASK_O, MASK_K)
            up = tl.dot(w1.to(x.dtype), tl.trans(x), up)
    return gate, up


@triton.jit
def _prefetch(w, row, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Asks for the first BYTES of these rows of w [..., WIDTH] to be brought into the L2 cache."""
    size = tl.full(row.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [(w + row * WIDTH).to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows", "capacity"])
def product_kernel(x, x_scale, w, w_scale, out, out_scale, order, share, table, rows, capacity, K: tl.constexpr,
                   O: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                   GATED: tl.constexpr, PAIRED: tl.constexpr, ROUTED: tl.constexpr, BLOCKED: tl.constexpr,
                   T: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EXPERTS: tl.constexpr,
                   AHEAD: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """x [rows, K] times w [E, O or 2 O, K] -> out [rows, O].

    ROUTED "no": a dense product. "in": row r of `order` reads token order[r] // k and writes row r. "out": row r reads
    row r and writes row order[r], times share[order[r]]. x_scale, out_scale: float32 [rows] or [rows, width / XBLOCK].
    table [3, capacity]: expert, first row and end of each block of rows; expert -1 where there is no block.
    PAIRED: a program makes two tiles side by side in turns, which needs fewer registers than one twice as wide.
    HOPPER: not in the interpreter. A program may then start before the launch before it has ended: it asks for AHEAD
    bytes of each of its rows of the weight, and waits.
    """
    WIDE: tl.constexpr = 2 * BO if PAIRED else BO
    TILES: tl.constexpr = (O + WIDE - 1) // WIDE
    ROWS: tl.constexpr = 2 * O if GATED else O
    NEXT: tl.constexpr = O if GATED else BO if PAIRED else 0  # rows from a tile to the other one, where there are two
    if ROUTED == "no":  # neighbours share the weight's tile
        block = tl.program_id(0) % tl.cdiv(rows, T)
        tile = tl.program_id(0) // tl.cdiv(rows, T)
        expert = 0
    else:  # neighbours share the expert
        block = tl.program_id(0) // TILES
        tile = tl.program_id(0) % TILES
        # Until the launch before this one has ended, the table may not be there: what is read now only guides a guess.
        expert = tl.load(table + block) if ROUTED == "out" else block
        expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1)
    o = tile * WIDE + tl.arange(0, BO)
    WIDTH: tl.constexpr = K // 4 if FORMAT == "int4" else K
    if HOPPER:
        if AHEAD > 0:
            row = tl.full((), 0, tl.int64) + expert * ROWS
            _prefetch(w, row + tl.minimum(o, O - 1), WIDTH, AHEAD)
            if NEXT > 0:
                _prefetch(w, row + tl.minimum(o + NEXT, ROWS - 1), WIDTH, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED == "no":
        row = block * T + tl.arange(0, T)
        ok = row < rows
        first = tl.full((), 0, tl.int64)
        source = row.to(tl.int64)
        target = source
    else:
        expert = tl.load(table + block)
        if expert < 0:
            return
        row = tl.load(table + capacity + block) + tl.arange(0, T)
        ok = row < tl.load(table + 2 * capacity + block)
        first = expert.to(tl.int64) * ROWS
        pair = tl.load(order + row, mask=ok, other=0).to(tl.int64)
        source = pair // TOP_K if ROUTED == "in" else row.to(tl.int64)
        target = row.to(tl.int64) if ROUTED == "in" else pair
    if FORMAT == "int4":
        gate, up = sums_int4(
            x + source * K, ok, w, w_scale, first, o, K, O, ROWS, GROUP, NEXT, T, BO, STEP // 64, STAGES, HOPPER
        )
    else:
        xs_at = x_scale + source * (K // STEP) if BLOCKED else source
        gate, up = _sums(x + source * K, ok, xs_at, w, first, o, K, O, GATED, BLOCKED, T, BO, STEP, STAGES)
    if FORMAT == "fp8" or FORMAT == "int8":
        gate *= tl.load(w_scale + first + o, mask=o < O, other=0.0)[:, None]
        if GATED:
            up *= tl.load(w_scale + first + O + o, mask=o < O, other=0.0)[:, None]
    if FORMAT == "fp8" and not BLOCKED:
        scale = tl.load(x_scale + source, mask=ok, other=0.0)[None, :]
        gate *= scale
        up *= scale
    if FORMAT == "int4" and GATED and HOPPER:
        gate *= 256.0
        up *= 256.0
    if GATED:  # gelu in its tanh form, which is x sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    factor = tl.full((T,), 256.0 if FORMAT == "int4" and HOPPER and not GATED else 1.0, tl.float32)
    if ROUTED == "out":
        factor *= tl.load(share + pair, mask=ok, other=0.0)
    gate *= factor[None, :]
    if out_scale is not None:
        parts = tl.reshape(gate, (BO // XBLOCK, XBLOCK, T))
        scale = tl.max(tl.abs(parts), axis=1) / 448.0  # [BO / XBLOCK, T]
        scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
        part = tile * (BO // XBLOCK) + tl.arange(0, BO // XBLOCK)
        scale_at = out_scale + target[None, :] * (O // XBLOCK) + part[:, None]
        tl.store(scale_at, scale, mask=ok[None, :] & (part < O // XBLOCK)[:, None])
        gate = tl.reshape(tl.div_rn(parts, tl.broadcast_to(scale[:, None, :], parts.shape)), (BO, T))
    at = out + target[:, None] * O + o[None, :]
    tl.store(at, tl.trans(gate).to(out.dtype.element_ty), mask=ok[:, None] & (o < O)[None, :])
    if PAIRED:
        up *= factor[None, :]
        tl.store(at + BO, tl.trans(up).to(out.dtype.element_ty), mask=ok[:, None] & (o + BO < O)[None, :])


def supported(device: torch.device, w: Tensor, inputs: int, gated: bool = False) -> str | None:
    """Why `product` cannot run with this weight of [..., O, inputs], or None."""
    if reason := unavailable(device):
        return reason
    fmt = format_of(w)
    if fmt is None:
        return f"there is no kernel for weights of {w.dtype}"
    if inputs % (64 if fmt == "int4" else 16):
        return f"{fmt} weights need a multiple of {64 if fmt == 'int4' else 16} inputs, not {inputs}"
    if gated and fmt == "fp8" and w.shape[-2] // 2 % XBLOCK.value:
        return f"fp8 needs a multiple of {XBLOCK.value} outputs behind GeGLU, not {w.shape[-2] // 2}"
    return None


def product(
    x: Rows,
    w: Tensor,
    w_scale: Tensor | None = None,
    *,
    gated: bool = False,
    quantise: bool = False,
    routing: Routing | None = None,
    share: Tensor | None = None,
    tile: Tile | None = None,
) -> Rows:
    """As `ops.product.product`; float32 x and w are for the interpreter."""
    fmt = format_of(w)
    values = x.values
    assert fmt is not None, f"no kernel for weights of {w.dtype}"
    assert (values.dtype == FP8) == (fmt == "fp8"), f"no kernel for {values.dtype} times {w.dtype}"
    assert all(t is None or t.is_contiguous() for t in (values, x.scale, w, w_scale)), "kernels read contiguous tensors"
    inputs, width = values.shape[1], w.shape[-2] // (2 if gated else 1)
    blocked = x.scale is not None and x.scale.shape[1] > 1
    assert not (blocked and gated), "GeGLU takes rows with one scale"
    rows = values.shape[0] if routing is None else len(routing.order)
    experts, block = (0, rows) if routing is None else (w.shape[0], routing.block)
    tile = tile or choose(Shape(fmt, inputs, width, experts, gated, block), shared_memory(values.device))
    paired = fmt == "int4" and not gated and tile.outputs == 32 * tile.warps
    dtype = torch.bfloat16 if fmt == "fp8" else values.dtype
    out = torch.empty(rows, width, dtype=FP8 if quantise else dtype, device=values.device)
    out_scale = torch.empty(rows, width // XBLOCK.value, device=values.device) if quantise else None
    blocks = triton.cdiv(rows, tile.rows) if routing is None else routing.capacity
    launch(
        product_kernel, blocks * triton.cdiv(width, tile.outputs),
        values, x.scale, w, w_scale, out, out_scale,
        None if routing is None else routing.order, share, None if routing is None else routing.table, rows, blocks,
        K=inputs, O=width, TOP_K=1 if routing is None else routing.top_k, FORMAT=fmt,
        GROUP=inputs // w_scale.shape[-2] if fmt == "int4" and w_scale is not None else 0, GATED=gated, PAIRED=paired,
        ROUTED="no" if routing is None else "in" if share is None else "out", BLOCKED=blocked,
        T=tile.rows, BO=tile.outputs // (1 + paired), STEP=step_of(fmt, inputs, blocked), STAGES=tile.stages,
        EXPERTS=experts, AHEAD=min(AHEAD, w.shape[-1] * w.element_size()), HOPPER=not interpreted(),
        num_warps=tile.warps, maxnreg=tile.registers or None, **early(),
    )  # fmt: skip
    return Rows(out, out_scale)
