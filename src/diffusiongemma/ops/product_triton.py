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

from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.int4 import PAIRS
from diffusiongemma.ops.int4_triton import sums_pairs
from diffusiongemma.ops.kernels import early, interpreted, launch, shared_memory, unavailable
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed, Routing
from diffusiongemma.ops.rows_triton import quantize_placed, quantize_rows, rows_for
from diffusiongemma.ops.tiles import Shape, Tile, choose, format_of, step_of

AHEAD = 1024  # bytes of a row
CACHED = 16 << 20  # bytes of a result of experts that are to stay in the L2 cache, though many weights go through it
FIRST = 2 * 132  # programs that a card runs at once, about: only these ask early, the others would wait for the answer


@triton.jit
def load(at, o_ok, k_ok, MASK_O: tl.constexpr, MASK_K: tl.constexpr):
    """A tile of a weight, with masks only along the sides where it can stick out: o_ok [BO], k_ok [width]"""
    if MASK_O and MASK_K:
        return tl.load(at, mask=o_ok[:, None] & k_ok[None, :], other=0.0)
    elif MASK_K:
        return tl.load(at, mask=k_ok[None, :], other=0.0)
    elif MASK_O:
        return tl.load(at, mask=o_ok[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _sums(x_at, x_ok, more_at, more_ok, w, first, o, K: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr,
          T: tl.constexpr, MORE: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """x_at: pointers to rows [T]; first: row of the weight where the expert begins -> sums [BO, T] of its rows o and,
    where gated, of those O further on; weights of one number a place: bfloat16, int8, fp8. The same of MORE rows
    (0: none), which are multiplied with the tile of the weight while it is here: sums [BO, MORE]"""
    c = tl.arange(0, BK)
    w_at = w + (first + o)[:, None] * K + c[None, :]
    x_at = x_at[:, None] + c[None, :]
    more_at = more_at[:, None] + c[None, :]
    gate = tl.zeros((BO, T), tl.float32)
    up = tl.zeros((BO, T), tl.float32)
    more_gate = tl.zeros((BO, MORE if MORE > 0 else 1), tl.float32)
    more_up = more_gate
    o_ok = o < O
    MASK_K: tl.constexpr = K % BK != 0
    MASK_O: tl.constexpr = O % BO != 0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        k_ok = c < K - k
        w0 = load(w_at + k, o_ok, k_ok, MASK_O, MASK_K)
        x = load(x_at + k, x_ok, k_ok, True, MASK_K)
        gate = tl.dot(w0.to(x.dtype), tl.trans(x), gate)
        if GATED:
            w1 = load(w_at + k + O * K, o_ok, k_ok, MASK_O, MASK_K)
            up = tl.dot(w1.to(x.dtype), tl.trans(x), up)
        if MORE > 0:
            more = load(more_at + k, more_ok, k_ok, True, MASK_K)
            more_gate = tl.dot(w0.to(x.dtype), tl.trans(more), more_gate)
            if GATED:
                more_up = tl.dot(w1.to(x.dtype), tl.trans(more), more_up)
    return gate, up, more_gate, more_up


PREFETCH = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.u32 some, $2, 0;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def _prefetch(at, size):
    """Asks for these many bytes from each of these addresses to be brought into the L2 cache; 0: for none."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [at.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _rows(x_scale, order, share, row, end, TOP_K: tl.constexpr, ROUTED: tl.constexpr, PLACED: tl.constexpr):
    """For these rows of `order`: whether they are there, the row of x, the row of the result, and the two numbers that
    sums are multiplied with. All are asked for before the sums are made, and are there when they are. Nothing is made
    of them here, for that would wait, and the loads of x and weights behind it; where an address comes from another
    load ("in", and the shares of pairs that were sorted), it does."""
    ok = row < end
    scale = tl.full(row.shape, 1.0, tl.float32)
    part = scale
    source = row
    target = row
    if ROUTED != "no":
        pair = tl.load(order + row, mask=ok, other=0)
        if ROUTED == "in":
            source = pair // TOP_K
        else:
            target = pair
            part = tl.load(share + (row if PLACED else pair), mask=ok, other=0.0)
    if x_scale is not None:
        scale = tl.load(x_scale + source, mask=ok, other=0.0)
    return ok, source.to(tl.int64), target, scale, part


@triton.jit
def _finish(gate, up, w_gate, w_up, scale, part, ok, target, out, o, O: tl.constexpr, GATED: tl.constexpr,
            PAIRED: tl.constexpr, UNIT: tl.constexpr, BO: tl.constexpr, STAY: tl.constexpr):  # fmt: skip
    """Sums [BO, T] of each row of the weight, times their scales -> rows of the result"""
    factor = UNIT * scale * part
    gate = gate * w_gate[:, None] * factor[None, :]
    up = up * w_up[:, None] * factor[None, :]
    if GATED:  # gelu in its tanh form, which is x sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    at = out + target.to(tl.int64)[:, None] * O + o[None, :]
    ok = ok[:, None] & (o < O)[None, :]
    tl.store(at, tl.trans(gate).to(out.dtype.element_ty), mask=ok, eviction_policy=STAY)
    if PAIRED:
        tl.store(at + BO, tl.trans(up).to(out.dtype.element_ty), mask=ok, eviction_policy=STAY)


@triton.jit
def _tile(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K: tl.constexpr, O: tl.constexpr,
          APART: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
          ROUTED: tl.constexpr, PLACED: tl.constexpr, T: tl.constexpr, MORE: tl.constexpr, BO: tl.constexpr,
          STEP: tl.constexpr, STAGES: tl.constexpr, STAY: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """Rows start … end of `order`, at most T + MORE, times one tile of an expert's outputs"""
    PAIRED: tl.constexpr = FORMAT == "pairs" and not GATED
    WIDE: tl.constexpr = 2 * BO if PAIRED else BO
    o = tile * WIDE + tl.arange(0, BO)
    UNIT: tl.constexpr = 512.0 if FORMAT == "pairs" else 1.0
    ok, source, target, scale, part = _rows(x_scale, order, share, start + tl.arange(0, T), end, TOP_K, ROUTED, PLACED)
    w_gate = tl.full((BO,), 1.0, tl.float32)
    w_up = w_gate
    first = tl.full((), 0, tl.int64) + expert
    if FORMAT == "pairs":
        which = first * (O // WIDE) + tile
        gate, up = sums_pairs(x + source * APART, ok, w, w_scale, which, K, GROUP, T, STEP // GROUP, STAGES, HOPPER)
    else:
        first *= 2 * O if GATED else O
        if w_scale is not None:
            w_gate = tl.load(w_scale + first + o, mask=o < O, other=0.0)
            if GATED:
                w_up = tl.load(w_scale + first + O + o, mask=o < O, other=0.0)
        later = start + T + tl.arange(0, MORE if MORE > 0 else 1)
        more_ok, more_source, more_target, more_scale, more_part = _rows(
            x_scale, order, share, later, end, TOP_K, ROUTED, PLACED
        )
        gate, up, more_gate, more_up = _sums(x + source * APART, ok, x + more_source * APART, more_ok, w, first, o, K,
                                             O, GATED, T, MORE, BO, STEP, STAGES)  # fmt: skip
        if MORE > 0:
            _finish(more_gate, more_up, w_gate, w_up, more_scale, more_part, more_ok, more_target, out, o, O, GATED,
                    PAIRED, UNIT, BO, STAY)  # fmt: skip
    _finish(gate, up, w_gate, w_up, scale, part, ok, target, out, o, O, GATED, PAIRED, UNIT, BO, STAY)


@triton.jit(do_not_specialize=["rows", "capacity"])
def product_kernel(x, x_scale, w, w_scale, out, order, share, table, beyond, rows, capacity, K: tl.constexpr,
                   O: tl.constexpr, APART: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                   GATED: tl.constexpr, ROUTED: tl.constexpr, T: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr,
                   STAGES: tl.constexpr, EXPERTS: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr,
                   MORE: tl.constexpr, SMALL: tl.constexpr, STAY: tl.constexpr,
                   HOPPER: tl.constexpr):  # fmt: skip
    """x [rows, K] times w [E, O or 2 O, K] -> out [rows, O].

    ROUTED "no": a dense product. "in": row r of `order` reads token order[r] // k and writes row r. "out": row r reads
    row r and writes row order[r], times share[order[r]]. x_scale: float32 [rows].
    table [3, capacity]: expert, first row and end of each block of rows; expert -1 where there is no block.
    With `beyond`, order, table and beyond are lists, counts and beyond of `Placed`, and what lies between the two
    products lies as the lists do, as does `share`. First come the first blocks of all experts, then those beyond, of
    which few are there. rows: P.
    APART: numbers from a row of x to the next.
    Of pairs, a program makes BO = 64 gates with their ups, or two tiles of BO outputs side by side.
    STAY: "evict_last", if the result is to stay in the L2 cache.
    MORE, SMALL: rows beside the T, and up to how many an expert takes a smaller tile (0: always the whole).
    HOPPER: not in the interpreter. A program may then start before the launch before it has ended: it asks for AHEAD
    bytes of each of its rows of the weight, and waits.
    """
    PLACED: tl.constexpr = beyond is not None
    WIDE: tl.constexpr = 2 * BO if FORMAT == "pairs" and not GATED else BO
    TILES: tl.constexpr = (O + WIDE - 1) // WIDE
    ROWS: tl.constexpr = 2 * O if GATED else O
    if ROUTED == "no":  # neighbours share the weight's tile
        block = tl.program_id(0) % tl.cdiv(rows, T)
        tile = tl.program_id(0) // tl.cdiv(rows, T)
    else:  # neighbours share the expert
        block = tl.program_id(0) // TILES
        tile = tl.program_id(0) % TILES
    if HOPPER:
        if AHEAD > 0 and tl.program_id(0) < FIRST:
            expert = 0
            if ROUTED != "no":
                # Until the launch before has ended, the table may not be there: what is read only guides a guess.
                expert = tl.load(table + block) if ROUTED == "out" and not PLACED else block
                expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1)
            line = tl.full((), 0, tl.int64) + expert * ROWS + tl.minimum(tile * WIDE + tl.arange(0, BO), O - 1)
            _prefetch(w + line * K, tl.full((BO,), AHEAD, tl.int32))
            if GATED:
                _prefetch(w + (line + O) * K, tl.full((BO,), AHEAD, tl.int32))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED == "no":
        expert = 0
        start = block * T
        end = rows
    elif PLACED:
        each = rows // TOP_K  # places of a list
        expert = block
        start = block * each
        if block >= EXPERTS:
            there = block - EXPERTS < tl.load(table + EXPERTS)
            start = tl.load(beyond + block - EXPERTS, mask=there, other=-1)
            expert = start // each
        if start < 0:
            return
        end = expert * each + tl.load(table + expert)
        if start >= end:
            return
    else:
        expert = tl.load(table + block)
        if expert < 0:
            return
        start = tl.load(table + capacity + block)
        end = tl.load(table + 2 * capacity + block)
    if SMALL > 0:  # noqa: SIM102  (few rows cost less; what Triton knows and what it does not stay apart)
        if end - start <= SMALL:
            _tile(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT,
                  GROUP, GATED, ROUTED, PLACED, SMALL, 0, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip
            return
    if MORE > 16:  # noqa: SIM102
        if end - start <= T + MORE // 2:
            _tile(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT,
                  GROUP, GATED, ROUTED, PLACED, T, MORE // 2, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip
            return
    _tile(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT, GROUP, GATED,
          ROUTED, PLACED, T, MORE, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip


def supported(device: torch.device, w: Tensor, inputs: int, gated: bool = False) -> str | None:
    """Why `product` cannot run with this weight of [..., O, inputs], or None; 4-bit ones must be packed as pairs."""
    if reason := unavailable(device):
        return reason
    fmt = format_of(w)
    if fmt is None:
        return f"there is no kernel for weights of {w.dtype}"
    return f"{fmt} weights need a multiple of 16 inputs, not {inputs}" if inputs % 16 else None


def runs_in(dtype: torch.dtype) -> str | None:
    """Why a network that computes in this dtype cannot use the kernels, or None."""
    if dtype == torch.bfloat16 or interpreted():
        return None
    return f"the kernels compute in bfloat16, the model in {str(dtype).removeprefix('torch.')}"


def outputs_of(w: Tensor, gated: bool) -> int:
    """The width of a product with this weight."""
    rows = w.shape[-4] * 2 * PAIRS if format_of(w) == "pairs" else w.shape[-2]
    return rows // (2 if gated else 1)


def _small(tile: Tile) -> int:
    """Up to how many rows an expert takes a smaller tile; 0: always the whole."""
    return tile.rows // 2 if tile.half else tile.rows if tile.more else 0


def _lists(routing: Routing | Placed | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """What the kernel reads of a routing, and for how many blocks there is room"""
    if routing is None:
        return None, None, None, 0
    if isinstance(routing, Routing):
        return routing.order, routing.table, None, routing.capacity
    return routing.lists, routing.counts, routing.beyond, len(routing.lists) + len(routing.beyond)


def _sizes(given: int, routing: Routing | Placed | None, share: Tensor | None) -> tuple[int, int]:
    """For how many rows of x: how many rows or pairs are multiplied, and how many rows the result has"""
    if routing is None:
        return given, given
    if isinstance(routing, Routing):
        pairs = given * (routing.top_k if share is None else 1)
        return pairs, pairs
    experts, tokens = routing.lists.shape
    assert given == (tokens if share is None else experts * tokens), f"{given} rows of {tokens} placed tokens"
    assert share is None or share.numel() == experts * tokens, "shares lie as the lists do"
    pairs = tokens * routing.top_k
    return pairs, experts * tokens if share is None else pairs


def product(
    x: Rows,
    w: Tensor,
    w_scale: Tensor | None = None,
    *,
    gated: bool = False,
    quantise: bool = False,
    routing: Routing | Placed | None = None,
    share: Tensor | None = None,
    tile: Tile | None = None,
) -> Rows:
    """As `ops.product.product`; x is rounded to fp8 where the weight wants that. float32 is for the interpreter."""
    fmt = format_of(w)
    assert fmt is not None, f"no kernel for weights of {w.dtype}"
    x = rows_for(x, w)
    values = x.values
    assert (values.dtype == FP8) == (fmt in ("fp8", "pairs")), f"no kernel for {values.dtype} times {w.dtype}"
    assert values.is_contiguous() or values.stride(1) == 1, "kernels read rows whose numbers lie together"
    assert all(t is None or t.is_contiguous() for t in (x.scale, w, w_scale, share)), "kernels read contiguous tensors"
    inputs, width = values.shape[1], outputs_of(w, gated)
    order, table, beyond, room = _lists(routing)
    rows, made = _sizes(len(values), routing, share)
    experts, block = (0, rows) if routing is None else (w.shape[0], routing.block)
    tile = tile or choose(Shape(fmt, inputs, width, experts, gated, block), shared_memory(values.device))
    assert tile.more == 0 or (routing is not None and fmt != "pairs"), "only blocks of an expert have rows more"
    assert routing is None or tile.rows + tile.more == block, f"a tile of {tile.rows} + {tile.more} rows, not {block}"
    apart = inputs if values.is_contiguous() else values.stride(0)
    paired = fmt == "pairs" and not gated
    step = step_of(fmt, inputs)
    if fmt == "pairs":
        step = w.shape[-1] * (tile.turns if w.shape[-3] % tile.turns == 0 else 1)
    out = torch.empty(made, width, dtype=torch.bfloat16 if values.dtype == FP8 else values.dtype, device=values.device)
    blocks = room or triton.cdiv(rows, tile.rows)
    # Which experts a few tokens take cannot be guessed. 4-bit weights gained nothing.
    ahead = 0 if fmt == "pairs" or blocks < experts else min(AHEAD, inputs * w.element_size())
    launch(
        product_kernel, blocks * triton.cdiv(width, tile.outputs),
        values, x.scale, w, w_scale, out,
        order, share, table, beyond, rows, blocks,
        K=inputs, O=width, APART=apart, TOP_K=1 if routing is None else routing.top_k, FORMAT=fmt,
        GROUP=w.shape[-1] if fmt == "pairs" else 0, GATED=gated,
        ROUTED="no" if routing is None else "in" if share is None else "out",
        T=tile.rows, BO=tile.outputs // (1 + paired), STEP=step, STAGES=tile.stages,
        EXPERTS=experts, AHEAD=ahead, FIRST=FIRST, MORE=tile.more, SMALL=_small(tile) if routing is not None else 0,
        STAY="evict_last" if routing is not None and 2 * rows * width <= CACHED else "",
        HOPPER=not interpreted(), num_warps=tile.warps, maxnreg=tile.registers or None, **early(),
    )  # fmt: skip
    if not quantise:
        return Rows(out)
    return quantize_placed(out, routing.place) if isinstance(routing, Placed) else quantize_rows(out)
