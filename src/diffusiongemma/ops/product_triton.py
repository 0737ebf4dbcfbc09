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

from diffusiongemma.ops import kernels
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.int4 import PAIRS
from diffusiongemma.ops.kernels import begins_early, interpreted, unavailable
from diffusiongemma.ops.product_tile_triton import prefetch, tile_of
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed, Routing
from diffusiongemma.ops.rows_triton import quantize_placed, quantize_rows, rows_for
from diffusiongemma.ops.tiles import Shape, Tile, choose, format_of, step_of

AHEAD = 1024  # bytes of a row
CACHED = 16 << 20  # bytes of a result of experts that are to stay in the L2 cache, though many weights go through it
FIRST = 2 * 132  # programs that a card runs at once, about: only these ask early, the others would wait for the answer


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
    HOPPER: as in `ready`. Where a program may start before the launch before it has ended, it asks for AHEAD bytes of
    each of its rows of the weight (0: for none), and waits.
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
    if AHEAD > 0:  # noqa: SIM102
        if tl.program_id(0) < FIRST:
            expert = 0
            if ROUTED != "no":
                # Until the launch before has ended, the table may not be there: what is read only guides a guess.
                expert = tl.load(table + block) if ROUTED == "out" and not PLACED else block
                expert = tl.minimum(tl.maximum(expert, 0), EXPERTS - 1)
            line = tl.full((), 0, tl.int64) + expert * ROWS + tl.minimum(tile * WIDE + tl.arange(0, BO), O - 1)
            prefetch(w + line * K, tl.full((BO,), AHEAD, tl.int32))
            if GATED:
                prefetch(w + (line + O) * K, tl.full((BO,), AHEAD, tl.int32))
    ready(HOPPER)
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
            tile_of(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT,
                    GROUP, GATED, ROUTED, PLACED, SMALL, 0, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip
            return
    if MORE > 16:  # noqa: SIM102
        if end - start <= T + MORE // 2:
            tile_of(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT,
                    GROUP, GATED, ROUTED, PLACED, T, MORE // 2, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip
            return
    tile_of(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K, O, APART, TOP_K, FORMAT, GROUP,
            GATED, ROUTED, PLACED, T, MORE, BO, STEP, STAGES, STAY, HOPPER)  # fmt: skip


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
    tile = tile or choose(Shape(fmt, inputs, width, experts, gated, block), kernels.card(values.device).shared)
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
    ahead = min(AHEAD, inputs * w.element_size()) if begins_early() and fmt != "pairs" and blocks >= experts else 0
    run(
        product_kernel, blocks * triton.cdiv(width, tile.outputs),
        values, x.scale, w, w_scale, out,
        order, share, table, beyond, rows, blocks,
        K=inputs, O=width, APART=apart, TOP_K=1 if routing is None else routing.top_k, FORMAT=fmt,
        GROUP=w.shape[-1] if fmt == "pairs" else 0, GATED=gated,
        ROUTED="no" if routing is None else "in" if share is None else "out",
        T=tile.rows, BO=tile.outputs // (1 + paired), STEP=step, STAGES=tile.stages,
        EXPERTS=experts, AHEAD=ahead, FIRST=FIRST, MORE=tile.more, SMALL=_small(tile) if routing is not None else 0,
        STAY="evict_last" if routing is not None and 2 * rows * width <= CACHED else "",
        num_warps=tile.warps, maxnreg=tile.registers or None,
    )  # fmt: skip
    if not quantise:
        return Rows(out)
    return quantize_placed(out, routing.place) if isinstance(routing, Placed) else quantize_rows(out)
