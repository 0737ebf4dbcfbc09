"""Products of activations with a weight in any format, dense or by expert: the definition, in plain torch.

`product_triton` holds the twin. Weights are what their dtype says: bfloat16 (or float32) as they are, float8 and int8
with a scale a row [..., O, 1], int32 words of 4-bit weights as stored (`ops/quant.py`), bytes as pairs of them
(`ops/int4.py`).

Legend: K inputs, O outputs, E experts, k experts a token, P pairs of token and expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops import int4, quant
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8, quantize_tokens
from diffusiongemma.ops.routing import Placed, Routing

Weight = tuple[Tensor, Tensor | None]  # its numbers, and their scale if they have one


def product(
    x: Rows,
    w: Tensor,
    w_scale: Tensor | None = None,
    *,
    gated: bool = False,
    quantise: bool = False,
    routing: Routing | Placed | None = None,
    share: Tensor | None = None,
) -> Rows:
    """x [rows, K], w of [O, K], or of [E, O, K] with a routing -> [rows, O] in x's dtype, or bfloat16 where x is fp8

    gated: w has 2 O rows, gate first, and the result is GeGLU of the product. quantise: the result is fp8 with one
    scale a row. With a routing, x are the tokens and the result the pairs by expert; with `share` too, x are the pairs
    by expert and the result the pairs in their own order, each times its share. Pairs that were sorted are P rows by
    expert, and their shares [P] are in the pairs' own order. Pairs that were placed lie as in the lists, in some of
    E N rows, and so do their shares [E N]; the other rows mean nothing.
    """
    wide = x.wide().float()
    if routing is None:
        out = F.linear(wide, weights(w, w_scale, gated))
        return _finish(out, x, gated, quantise)
    if isinstance(routing, Placed):
        return _finish(_placed(wide, w, w_scale, gated, routing, share), x, gated, quantise)
    order = routing.order.long()
    if share is None:
        wide = wide[order // routing.top_k]
    out = wide.new_empty(len(order), len(_weights_of(0, w, w_scale, gated)))
    for expert, first, end in routing.table.t().tolist():
        if expert >= 0:
            block = slice(first, min(end, first + routing.block))
            out[block] = F.linear(wide[block], _weights_of(expert, w, w_scale, gated))
    if share is not None:
        back = torch.empty_like(out)
        back[order] = out * share.float()[order, None]
        out = back
    return _finish(out, x, gated, quantise)


def _placed(
    wide: Tensor, w: Tensor, w_scale: Tensor | None, gated: bool, routing: Placed, share: Tensor | None
) -> Tensor:
    """Tokens [N, K] -> pairs [E N, O]; with a share [E N], pairs [E N, K] -> pairs [P, O]"""
    k, (experts, each) = routing.top_k, routing.lists.shape
    out = wide.new_zeros(experts * each if share is None else each * k, len(_weights_of(0, w, w_scale, gated)))
    for expert, count in enumerate(routing.counts[:experts].tolist()):
        here, pairs = slice(expert * each, expert * each + count), routing.lists[expert, :count].long()
        matrix = _weights_of(expert, w, w_scale, gated)
        if share is None:
            out[here] = F.linear(wide[pairs // k], matrix)
        else:
            out[pairs] = F.linear(wide[here], matrix) * share[here, None].float()
    return out


def _weights_of(expert: int, w: Tensor, scale: Tensor | None, gated: bool) -> Tensor:
    return weights(w[expert], None if scale is None else scale[expert], gated)


def _finish(out: Tensor, x: Rows, gated: bool, quantise: bool) -> Rows:
    out = (geglu(out) if gated else out).to(torch.bfloat16 if x.values.dtype == FP8 else x.values.dtype)
    return Rows(*quantize_tokens(out)) if quantise else Rows(out)


def weights(w: Tensor, scale: Tensor | None, gated: bool = False) -> Tensor:
    """A stored weight -> float32 [..., O, K]"""
    if scale is None:
        return w.float()
    if w.dtype == torch.uint8:
        return int4.dequantize_pairs(w, scale, gated)
    return quant.dequantize(w, scale)
