# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""RMS norms with what surrounds them: residual, scalar, the next norms, and the quantisation of what they give.

A row is read once, stays in registers as float32, and is written once for every result. Twins of `fused`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import unavailable
from diffusiongemma.ops.quant import FP8, FP8_MAX

WIDEST = 16384  # numbers of a row that stay in registers
LEAST = tl.constexpr(1.1754944e-38)  # a smaller scale is none


def supported(x: Tensor) -> str | None:
    """Why the functions of this module cannot run on rows like x [N, D], or None."""
    if reason := unavailable(x.device):
        return reason
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} numbers are too wide, {WIDEST} is the most"
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"rows must be bfloat16 or float32, not {x.dtype}"
    return None


@triton.jit
def _row(x, row, d, width):
    return tl.load(x + row * width + d, mask=d < width, other=0.0).to(tl.float32)


@triton.jit
def _normed(y, weight, d, width, eps):
    y *= 1.0 / tl.sqrt(tl.sum(y * y) / width + eps)
    return y * tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)


@triton.jit
def _put(out, scale, y, row, d, width, LIMIT: tl.constexpr):
    """Store a row, quantised if there is a LIMIT (the largest number of the format)."""
    if LIMIT > 0:
        s = tl.max(tl.abs(y)) / LIMIT
        s = tl.where(s < LEAST, 1.0, s)
        tl.store(scale + row, s)
        y = tl.minimum(tl.maximum(y / s, -LIMIT), LIMIT)
        if out.dtype.element_ty == tl.int8:
            y = (y + 12582912.0) - 12582912.0  # to the nearest, halves to the even one, as the definition does
    tl.store(out + row * width + d, y.to(out.dtype.element_ty), mask=d < width)


@triton.jit
def _rows_kernel(
    x,
    weight,
    out,
    scale,
    width,
    eps,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HOPPER: tl.constexpr,
):
    ready(HOPPER)
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = _row(x, row, d, width)
    if NORM:
        y *= 1.0 / tl.sqrt(tl.sum(y * y) / width + eps)
        if weight is not None:
            y *= tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    _put(out, scale, y, row, d, width, LIMIT)


@triton.jit
def _after_attention_kernel(
    x, branch, post, dense, sparse, x_out, dense_out, dense_scale, sparse_out, sparse_scale, width, eps,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    ready(HOPPER)
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = _row(x, row, d, width) + _normed(_row(branch, row, d, width), post, d, width, eps)
    # What follows reads the residual as it is stored.
    y = y.to(x_out.dtype.element_ty).to(tl.float32)
    _put(x_out, x_out, y, row, d, width, 0)
    y *= 1.0 / tl.sqrt(tl.sum(y * y) / width + eps)
    live = d < width
    _put(dense_out, dense_scale, y * tl.load(dense + d, mask=live, other=0.0).to(tl.float32), row, d, width, LIMIT)
    _put(sparse_out, sparse_scale, y * tl.load(sparse + d, mask=live, other=0.0).to(tl.float32), row, d, width, LIMIT)


@triton.jit
def _after_feed_forward_kernel(
    x, dense, sparse, after_dense, after_sparse, after_sum, scalar, following, x_out, out, scale, width, eps,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    ready(HOPPER)
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    both = _normed(_row(dense, row, d, width), after_dense, d, width, eps)
    both += _normed(_row(sparse, row, d, width), after_sparse, d, width, eps)
    y = _row(x, row, d, width) + _normed(both, after_sum, d, width, eps)
    y = (y * tl.load(scalar).to(tl.float32)).to(x_out.dtype.element_ty).to(tl.float32)
    _put(x_out, x_out, y, row, d, width, 0)
    _put(out, scale, _normed(y, following, d, width, eps), row, d, width, LIMIT)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `norm.rms_norm`: x [..., D] -> [..., D]"""
    return norm_rows(x.reshape(-1, x.shape[-1]), weight, eps).values.view(x.shape)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float, quant: torch.dtype | None = None) -> Rows:
    """As `fused.norm_rows`: x [N, D] -> [N, D], quantised to `quant` where that is given"""
    x = x.contiguous()
    out = _rows(x, quant)
    _launch(_rows_kernel, x, x, weight, out.values, out.scale, x.shape[1], eps, NORM=True, LIMIT=_limit(quant))
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `fused.quantize_rows`: x [N, D] -> int8 or fp8 [N, D], scale [N, 1] float32"""
    x = x.contiguous()
    out = _rows(x, dtype)
    assert out.scale is not None
    _launch(_rows_kernel, x, x, None, out.values, out.scale, x.shape[1], 0.0, NORM=False, LIMIT=_limit(dtype))
    return out.values, out.scale


def after_attention(
    x: Tensor, branch: Tensor, post: Tensor, dense: Tensor, sparse: Tensor, eps: float, quant: torch.dtype | None = None
) -> tuple[Tensor, Rows, Rows]:
    """As `fused.after_attention`."""
    x, branch = x.contiguous(), branch.contiguous()
    x_out, to_dense, to_sparse = torch.empty_like(x), _rows(x, quant), _rows(x, quant)
    _launch(
        _after_attention_kernel, x, x, branch, post, dense, sparse, x_out, to_dense.values, to_dense.scale,
        to_sparse.values, to_sparse.scale, x.shape[1], eps, LIMIT=_limit(quant),
    )  # fmt: skip
    return x_out, to_dense, to_sparse


def after_feed_forward(
    x: Tensor,
    dense: Tensor,
    sparse: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scalar: Tensor,
    following: Tensor,
    eps: float,
    quant: torch.dtype | None = None,
) -> tuple[Tensor, Rows]:
    """As `fused.after_feed_forward`."""
    x, dense, sparse = x.contiguous(), dense.contiguous(), sparse.contiguous()
    x_out, out = torch.empty_like(x), _rows(x, quant)
    _launch(
        _after_feed_forward_kernel, x, x, dense, sparse, *weights, scalar, following, x_out, out.values, out.scale,
        x.shape[1], eps, LIMIT=_limit(quant),
    )  # fmt: skip
    return x_out, out


def _launch(kernel, x: Tensor, *args, **constants) -> None:
    block = triton.next_power_of_2(x.shape[1])
    # 8 to 16 numbers a thread: enough loads in flight, few enough registers
    warps = min(16, max(1, block // 512))
    run(kernel, x.shape[0], *args, **constants, BLOCK=block, num_warps=warps)


def _rows(like: Tensor, quant: torch.dtype | None) -> Rows:
    if quant is None:
        return Rows(torch.empty_like(like))
    scale = torch.empty(like.shape[0], 1, dtype=torch.float32, device=like.device)
    return Rows(torch.empty_like(like, dtype=quant), scale)


def _limit(quant: torch.dtype | None) -> float:
    return 0.0 if quant is None else FP8_MAX if quant == FP8 else 127.0
