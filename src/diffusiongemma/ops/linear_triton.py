# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layers on a GPU with weights in 8 or 4 bits, GeGLU in the same kernel, and activations rounded to fp8.

Signatures as in `ops/quantized.py`: q and scale of [O, K]; 4-bit weights as `ops/int4.py` packs them. fp8 goes to the
vendor's kernel (`torch._scaled_mm`, one scale a row on both sides) from `VENDOR_ROWS` rows on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import early, interpreted, launch
from diffusiongemma.ops.product_triton import product, supported
from diffusiongemma.ops.quant import FP8

__all__ = ["geglu_linear", "linear", "linear_rows", "mlp", "quantize_rows", "supported"]

VENDOR_ROWS = 64


@triton.jit
def quantize_kernel(x, q, scale, D: tl.constexpr, WIDTH: tl.constexpr, HOPPER: tl.constexpr):
    if HOPPER:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    wide = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    s = tl.max(tl.abs(wide), axis=0) / 448.0
    s = tl.where(s < 1.1754943508222875e-38, 1.0, s)
    tl.store(scale + row, s)
    tl.store(q + row * D + at, tl.div_rn(wide, s).to(tl.float8e4nv), mask=at < D)


def quantize_rows(x: Tensor) -> Rows:
    """x [N, K] -> fp8 [N, K] with one scale a row, for where no norm before has done it"""
    rows, width = x.shape
    q = torch.empty(rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, device=x.device)
    launch(
        quantize_kernel, rows, x.contiguous(), q, scale, D=width, WIDTH=triton.next_power_of_2(width),
        HOPPER=not interpreted(), num_warps=4, **early(),
    )  # fmt: skip
    return Rows(q, scale)


def _rows(x: Tensor, q: Tensor) -> Rows:
    return quantize_rows(x) if q.dtype == FP8 else Rows(x.contiguous())


def linear_rows(x: Rows, q: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [N, K], fp8 where the weight of [O, K] is -> [N, O] bfloat16"""
    if q.dtype == FP8 and len(x.values) >= VENDOR_ROWS and not interpreted():
        assert x.scale is not None
        assert scale is not None
        if x.scale.shape[1] == 1:
            return torch._scaled_mm(x.values, q.t(), x.scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return product(x, q, scale).values


def linear(x: Tensor, q: Tensor, scale: Tensor | None = None) -> Tensor:
    """As `ops.quantized.LINEAR`: x [N, K] as it is."""
    return linear_rows(_rows(x, q), q, scale)


def geglu_linear(x: Rows, q: Tensor, scale: Tensor | None = None) -> Rows:
    """x [N, K], weight of [2 O, K], gate first -> GeGLU of the product [N, O], in fp8 where the weight is"""
    return product(x, q, scale, gated=True, quantise=q.dtype == FP8)


def mlp(x: Rows, up_q: Tensor, up_scale: Tensor | None, down_q: Tensor, down_scale: Tensor | None) -> Tensor:
    """The dense MLP: x [N, D], weights of [2 F, D] and [D, F] -> [N, D]"""
    return linear_rows(geglu_linear(x, up_q, up_scale), down_q, down_scale)
