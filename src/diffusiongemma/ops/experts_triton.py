# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The mixture of experts on a GPU: route, gate/up with GeGLU, down with the router's weights, sum over a token's pairs.

The signatures are those of the references (`ops/experts.py`, `ops/quantized.py`), but 4-bit weights come as
`ops/int4.py` packs them, and are multiplied with activations in fp8. Sums stay float32 until a result is stored.
No float is added in an order that chance decides: every pair is stored, and a token's k pairs are summed in order.

Legend: N tokens, k experts a token, P = N k pairs, E experts, D hidden, I width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import few_triton, product_triton
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import gluon
from diffusiongemma.ops.packed import Packed
from diffusiongemma.ops.product_triton import product
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed, Routing
from diffusiongemma.ops.routing_triton import route
from diffusiongemma.ops.rows_triton import rows_for
from diffusiongemma.ops.tiles import block_rows, format_of

WIDEST = 896  # of an expert that is streamed: a block's tiles of the first product fit `stream_gluon.ROUNDS`


def supported(device: torch.device, up: Tensor, down: Tensor) -> str | None:
    """Why the experts with these weights, of [E, 2 I, D] and [E, D, I], cannot run here, or None."""
    hidden, width = product_triton.outputs_of(down, False), product_triton.outputs_of(up, True)
    return product_triton.supported(device, up, hidden, gated=True) or product_triton.supported(device, down, width)


def streams(block: int, up: Tensor, down: Tensor) -> bool:
    """Can these experts, of [E, 2 I, D] and [E, D, I], be streamed for pairs in blocks of so many rows? (Those that
    `experts_gluon.STAGES` and `pairs_gluon.ROWS` know, which may not be importable here.)"""
    if up.dtype != down.dtype:
        return False
    if up.dtype == torch.uint8:  # as `int4.pack_pairs` has them: of whole tiles
        fits, width = block == 32 and up.shape[-1] == down.shape[-1] == 64, 64 * up.shape[1]
    else:
        (hidden, width), known = down.shape[1:3], up.dtype in (torch.bfloat16, FP8)
        fits = known and block in (32, 64) and hidden % 128 == 0 and width % 64 == 0
    return fits and width <= WIDEST and gluon(up.device)


def streams_wide(block: int, up: Tensor, down: Tensor) -> bool:
    """The same for blocks of many rows (`wide_gluon.NUMBERS`), of tiles in pairs and with more stages than
    `wide_copies_gluon.STAGES`. Nothing has room beside them: who leaves room for those of `streams` need not here."""
    if not up.dtype == down.dtype == FP8 or block not in (128, 160):
        return False
    hidden, width = down.shape[1:3]
    fits = hidden % 256 == width % 64 == 0 and hidden > 4 * 128 and 4 * 128 < width <= 2 * WIDEST
    return fits and gluon(up.device)


@triton.jit
def combine_kernel(pairs, out, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HOPPER: tl.constexpr):
    ready(HOPPER)
    token = tl.program_id(0) // tl.cdiv(D, WIDTH)
    at = tl.program_id(0) % tl.cdiv(D, WIDTH) * WIDTH + tl.arange(0, WIDTH)
    first = pairs + token.to(tl.int64) * (K * D) + at
    total = tl.zeros((WIDTH,), tl.float32)
    for slot in tl.static_range(K):
        total += tl.load(first + slot * D, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * D + at, total.to(out.dtype.element_ty), mask=at < D)


def combine(pairs: Tensor, k: int) -> Tensor:
    """pairs [N k, D] -> their sums [N, D], slot after slot in float32"""
    tokens, hidden = pairs.shape[0] // k, pairs.shape[1]
    out = torch.empty(tokens, hidden, dtype=pairs.dtype, device=pairs.device)
    width = min(1024, triton.next_power_of_2(hidden))
    run(combine_kernel, tokens * triton.cdiv(hidden, width), pairs, out, K=k, D=hidden, WIDTH=width, num_warps=4)
    return out


def gate_up(x: Rows, routing: Routing | Placed, w: Tensor, scale: Tensor | None) -> Rows:
    """x [N, D], w of [E, 2 I, D] -> hidden [P, I] by expert, or as in the lists, [E N, I], where pairs were placed; in
    fp8 where x is. Of the E N rows only P are touched, the others are memory that the allocator sets aside: 46 MB for
    256 tokens of the 26B, 369 for 2,048. (Numbers are rounded where they lie, so there is one such buffer.)"""
    return product(x, w, scale, gated=True, quantise=x.values.dtype == FP8, routing=routing)


def down(hidden: Rows, routing: Routing | Placed, share: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
    """hidden of `gate_up`, share [N, k] float32, or [E, N] as in the lists, w of [E, D, I] -> weighted [P, D] in the
    pairs' own order"""
    return product(hidden, w, scale, routing=routing, share=share.flatten()).values


def experts_pairs(x: Rows, index: Tensor, weight: Tensor, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor,
                  down_scale: Tensor | None, few: bool = False, placed: Placed | None = None,
                  stream: bool = True, packed: Packed | None = None) -> Tensor:  # fmt: skip
    """x [N, D], index and weight [N, k] -> [N k, D]: a row for each of a token's experts, which who reads it sums.
    `few`: a few tokens take another way, with other bits, and get their sums [N, D]. `placed`: where the pairs are, and
    their weights; if nobody knows, they are sorted. `stream`: both products in one launch where that can be; that one
    reads the weights as they are `packed`, if they are"""
    if few and len(index) <= few_triton.FEW:
        return few_triton.experts_few(x, index, weight, up_q, up_scale, down_q, down_scale)
    if stream and placed is not None:
        if streams(placed.block, up_q, down_q):
            return _streamed(rows_for(x, up_q), placed, packed, up_q, up_scale, down_q, down_scale)
        if streams_wide(placed.block, up_q, down_q):
            from diffusiongemma.ops.wide_gluon import experts_wide

            assert up_scale is not None
            assert down_scale is not None
            return experts_wide(rows_for(x, up_q), placed, up_q, up_scale, down_q, down_scale)
    experts = up_q.shape[0]
    routing = placed or route(index, experts, block_rows(index.numel(), experts, format_of(up_q)))
    hidden = gate_up(rows_for(x, up_q), routing, up_q, up_scale)
    share = weight.float() if placed is None else placed.share
    return down(hidden, routing, share, down_q, down_scale)


def _streamed(
    x: Rows, placed: Placed, packed: Packed | None, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor,
    down_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    if packed is not None and packed.packing is not None:
        from diffusiongemma.ops.packed_gluon import packed_streamed

        return packed_streamed(x, placed, packed)
    if up_q.dtype != torch.uint8:
        from diffusiongemma.ops.experts_gluon import experts_streamed

        return experts_streamed(x, placed, up_q, up_scale, down_q, down_scale)
    from diffusiongemma.ops.pairs_gluon import pairs_streamed

    assert up_scale is not None
    assert down_scale is not None
    return pairs_streamed(x, placed, up_q, up_scale, down_q, down_scale, packed)


def experts_rows(x: Rows, index: Tensor, weight: Tensor, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor,
                 down_scale: Tensor | None, few: bool = False) -> Tensor:  # fmt: skip
    """As `experts_pairs`, summed: -> [N, D]"""
    pairs = experts_pairs(x, index, weight, up_q, up_scale, down_q, down_scale, few)
    return pairs if len(pairs) == len(index) else combine(pairs, index.shape[1])


def experts_quantised(x: Tensor, index: Tensor, weight: Tensor, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor,
                      down_scale: Tensor | None) -> Tensor:  # fmt: skip
    """As `ops.quantized.EXPERTS`: x [N, D] as it is."""
    return experts_rows(Rows(x.contiguous()), index, weight, up_q, up_scale, down_q, down_scale)


def experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `ops.experts.experts_reference`."""
    return experts_rows(Rows(x.contiguous()), index, weight, gate_up, None, down, None)
