# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layers on a GPU with weights in 8 or 4 bits, and the dense MLP with GeGLU in the same kernel.

Signatures as in `ops/quantized.py`: q and scale of [O, K]; 4-bit weights as `ops/int4.py` packs them. fp8 goes to the
vendor's kernel (`torch._scaled_mm`, one scale a row on both sides) from `VENDOR_ROWS` rows on; on Hopper only, as other
cards have no such product (it is refused on 8.9 and on 12.0, pytorch/pytorch#192707).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import interpreted, untried
from diffusiongemma.ops.product_triton import product, supported
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.rows_triton import quantize_rows, rows_for
from diffusiongemma.ops.tiles import Tile

__all__ = ["geglu_linear", "linear", "linear_rows", "mlp", "quantize_rows", "supported"]

VENDOR_ROWS = 64


def linear_rows(x: Rows, q: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [N, K], weight of [O, K] -> [N, O] bfloat16"""
    x = rows_for(x, q)
    if q.dtype == FP8 and len(x.values) >= VENDOR_ROWS and not interpreted() and not untried(q.device):
        assert x.scale is not None
        assert scale is not None
        return torch._scaled_mm(x.values, q.t(), x.scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return product(x, q, scale).values


def linear(x: Tensor, q: Tensor, scale: Tensor | None = None) -> Tensor:
    """As `ops.quantized.LINEAR`: x [N, K] as it is."""
    return linear_rows(Rows(x.contiguous()), q, scale)


def geglu_linear(x: Rows, q: Tensor, scale: Tensor | None = None, tile: Tile | None = None) -> Rows:
    """x [N, K], weight of [2 O, K], gate first -> GeGLU of the product [N, O], in fp8 where x is or must be"""
    x = rows_for(x, q)
    return product(x, q, scale, gated=True, quantise=x.values.dtype == FP8, tile=tile)


def mlp(x: Rows, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor, down_scale: Tensor | None) -> Tensor:
    """The dense MLP: x [N, D], weights of [2 F, D] and [D, F] -> [N, D]"""
    return linear_rows(geglu_linear(x, up_q, up_scale), down_q, down_scale)
