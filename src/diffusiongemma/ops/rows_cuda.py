"""Norms behind attention and behind the experts in CUDA C++, with what surrounds them: twins of those in `norm_triton`.

`rows.cu` holds the kernels and says how they work. They take bfloat16 and give bfloat16 or fp8; other formats, and rows
that are wider, are Triton's. How many rows there are changes nothing: neither who makes a row nor its bits.

Legend: N tokens, D hidden, m rows of a token's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from diffusiongemma.ops import kernels, nvrtc
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.norm_triton import KEPT, rows_like
from diffusiongemma.ops.quant import FP8

EACH = 8  # numbers of a row that a thread holds: 16 bytes
MOST = 8  # rows of a token's experts, which are all on their way at once
WIDEST = EACH * 1024  # numbers of a row, for so many threads


@cache
def kernel_of(width: int, many: int, quant: bool, keep: bool = False, eager: bool = False) -> nvrtc.Kernel:
    """`many`: rows of a token's experts, of the kernel behind them; 0 is the one behind attention"""
    names: dict[str, int | str] = {"D": width, "M": many, "FP8": int(quant), "KEEP": int(keep), "EAGER": int(eager)}
    function = "after_feed_forward_cuda_kernel" if many else "after_attention_cuda_kernel"
    return nvrtc.Kernel(function, nvrtc.source("rows.cu"), names)


def threads_for(width: int) -> int:
    """Of a program, which are whole warps"""
    return -(-width // (32 * EACH)) * 32


def unfit(
    x: Tensor, branches: Sequence[Tensor], weights: Sequence[Tensor], quant: torch.dtype | None = None
) -> str | None:
    """Why the kernels cannot take rows x [N, D], what is added to them [N or N m, D], weights and scalars, or None"""
    if not kernels.cpp(x.device):
        return "there are no kernels in CUDA C++ here"
    if quant not in (None, FP8):
        return f"no kernel rounds rows to {quant}"
    if other := next((t.dtype for t in (x, *branches, *weights) if t.dtype != torch.bfloat16), None):
        return f"rows and weights are bfloat16, not {other}"
    if x.shape[1] % EACH:
        return f"a thread has {EACH} numbers of a row"
    if x.shape[1] > WIDEST:
        return f"rows of {x.shape[1]} numbers are too wide, {WIDEST} is the most"
    if any(len(t) > MOST * len(x) for t in branches):
        return f"a token has {MOST} rows of experts at most"
    if any(not t.is_contiguous() for t in weights):
        return "the numbers of a weight lie together"
    wide = (t for t in (x, *branches, *weights) if t.numel() > 1 and t.is_contiguous())  # others are copied, or scalars
    return "rows and weights begin at multiples of 16 bytes" if any(t.data_ptr() % 16 for t in wide) else None


def after_attention(
    x: Tensor,
    branch: Tensor,
    post: Tensor,
    dense: Tensor,
    sparse: Tensor,
    eps: float,
    quant: torch.dtype | None = None,
    eager: bool = False,
) -> tuple[Tensor, Rows, Rows]:
    """As `fused.after_attention`; `eager`: as in `early_triton.run`"""
    reason = unfit(x, (branch,), (post, dense, sparse), quant)
    assert reason is None, reason
    x, branch = x.contiguous(), branch.contiguous()
    x_out, to_dense, to_sparse = torch.empty_like(x), rows_like(x, quant), rows_like(x, quant)
    kernel = kernel_of(x.shape[1], 0, quant is not None, keep=len(x) <= KEPT, eager=eager)
    _launch(
        kernel, x, x, branch, post, dense, sparse, x_out, to_dense.values, to_dense.scale, to_sparse.values,
        to_sparse.scale, float(eps),
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
    behind: tuple[int, Tensor] | None = None,
) -> tuple[Tensor, Rows]:
    """As `fused.after_feed_forward`."""
    first, other = behind or (0, None)
    scalars = (scalar,) if other is None else (scalar, other)
    reason = unfit(x, (dense, sparse), (*weights, following, *scalars), quant)
    assert reason is None, reason
    x, dense, sparse = x.contiguous(), dense.contiguous(), sparse.contiguous()
    x_out, out = torch.empty_like(x), rows_like(x, quant)
    kernel = kernel_of(x.shape[1], max(1, len(sparse) // max(1, len(x))), quant is not None)
    _launch(
        kernel, x, x, dense, sparse, *weights, scalar, first, other, following, x_out, out.values, out.scale,
        float(eps),
    )  # fmt: skip
    return x_out, out


def _launch(kernel: nvrtc.Kernel, x: Tensor, *args: nvrtc.Argument) -> None:
    if len(x):
        kernel.run(len(x), threads_for(x.shape[1]), *args)
