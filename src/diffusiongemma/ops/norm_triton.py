# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""RMS norms with what surrounds them: residual, scalar, the next norms, and the quantisation of what they give.

A row is read once, stays in registers, and is written once for every result. Twins of `fused`.

A row is held in three pieces, because a block is a power of two long: 2,816 numbers then take the room of 3,072 and
not of 4,096. A piece is 8 numbers a thread, in bfloat16 and in fp8, so nothing has to change hands. Weights are
constants, so they are asked for before the kernel waits for the one before it (nothing on the card may have just
written them); all that is read is asked for before the first sum.
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
from diffusiongemma.ops.rows_triton import fp8_scale, to_fp8

WIDEST = 16384  # numbers of a row that stay in registers
KEPT = 512  # rows: of so many, what attention left is to stay in the L2 cache until the experts are done
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
def load_row(x, width, PIECE: tl.constexpr):
    """A row, [PIECE] three times, as it is stored"""
    d = tl.arange(0, PIECE)
    return (
        tl.load(x + d, mask=d < width, other=0.0),
        tl.load(x + PIECE + d, mask=PIECE + d < width, other=0.0),
        tl.load(x + 2 * PIECE + d, mask=2 * PIECE + d < width, other=0.0),
    )


@triton.jit
def store_row(out, y, width, PIECE: tl.constexpr, KEEP: tl.constexpr = False):
    """KEEP: it is read after much else went through the L2 cache, and is to stay there until then"""
    d = tl.arange(0, PIECE)
    kind: tl.constexpr = out.dtype.element_ty
    stay: tl.constexpr = "evict_last" if KEEP else ""
    tl.store(out + d, y[0].to(kind), mask=d < width, eviction_policy=stay)
    tl.store(out + PIECE + d, y[1].to(kind), mask=PIECE + d < width, eviction_policy=stay)
    tl.store(out + 2 * PIECE + d, y[2].to(kind), mask=2 * PIECE + d < width, eviction_policy=stay)


@triton.jit
def wide(y):
    return y[0].to(tl.float32), y[1].to(tl.float32), y[2].to(tl.float32)


@triton.jit
def added(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


@triton.jit
def _times(y, factor):
    return y[0] * factor, y[1] * factor, y[2] * factor


@triton.jit
def weighed(y, weight):
    w = wide(weight)
    return y[0] * w[0], y[1] * w[1], y[2] * w[2]


@triton.jit
def normed(y, width, eps):
    squares = y[0] * y[0] + y[1] * y[1] + y[2] * y[2]
    return _times(y, 1.0 / tl.sqrt(tl.sum(squares) / width + eps))


@triton.jit
def stored(y, out):
    """As who reads it from there finds it"""
    kind: tl.constexpr = out.dtype.element_ty
    return wide((y[0].to(kind), y[1].to(kind), y[2].to(kind)))


@triton.jit
def put_row(out, scale, y, row, width, PIECE: tl.constexpr, LIMIT: tl.constexpr, HOPPER: tl.constexpr):
    """Store a row, quantised if there is a LIMIT (the largest number of the format)."""
    if LIMIT > 0:
        top = tl.max(tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.abs(y[2])))
        if out.dtype.element_ty == tl.int8:
            s = top / LIMIT
            s = tl.where(s < LEAST, 1.0, s)
            # to the nearest, halves to the even one, as the definition does
            y = (_nearest(y[0] / s), _nearest(y[1] / s), _nearest(y[2] / s))
        else:
            s = fp8_scale(top)
            y = (to_fp8(y[0], s, HOPPER), to_fp8(y[1], s, HOPPER), to_fp8(y[2], s, HOPPER))
        tl.store(scale + row, s)
    store_row(out + row * width, y, width, PIECE)


@triton.jit
def _nearest(y):
    return (y + 12582912.0) - 12582912.0


@triton.jit
def _rows_kernel(
    x, weight, out, scale, width, eps, NORM: tl.constexpr, LIMIT: tl.constexpr, PIECE: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if weight is not None:
        w = load_row(weight, width, PIECE)
    ready(HOPPER)
    y = wide(load_row(x + row * width, width, PIECE))
    if NORM:
        y = normed(y, width, eps)
    if weight is not None:
        y = weighed(y, w)
    put_row(out, scale, y, row, width, PIECE, LIMIT, HOPPER)


@triton.jit
def _after_attention_kernel(
    x, branch, post, dense, sparse, x_out, dense_out, dense_scale, sparse_out, sparse_scale, width, eps,
    LIMIT: tl.constexpr, KEEP: tl.constexpr, PIECE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    w_post = load_row(post, width, PIECE)
    w_dense, w_sparse = load_row(dense, width, PIECE), load_row(sparse, width, PIECE)
    ready(HOPPER)
    z = load_row(branch + row * width, width, PIECE)
    y = load_row(x + row * width, width, PIECE)
    y = added(wide(y), weighed(normed(wide(z), width, eps), w_post))
    y = stored(y, x_out)
    store_row(x_out + row * width, y, width, PIECE, KEEP)
    y = normed(y, width, eps)
    put_row(dense_out, dense_scale, weighed(y, w_dense), row, width, PIECE, LIMIT, HOPPER)
    put_row(sparse_out, sparse_scale, weighed(y, w_sparse), row, width, PIECE, LIMIT, HOPPER)


@triton.jit(do_not_specialize=["first"])
def _after_feed_forward_kernel(
    x, dense, sparse, after_dense, after_sparse, after_sum, scalar, first, other, following, x_out, out, scale, width,
    eps, M: tl.constexpr, LIMIT: tl.constexpr, PIECE: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    w_dense, w_sparse = load_row(after_dense, width, PIECE), load_row(after_sparse, width, PIECE)
    w_sum, w_next = load_row(after_sum, width, PIECE), load_row(following, width, PIECE)
    factor = tl.load(scalar).to(tl.float32)
    if other is not None:
        factor = tl.where(row < first, factor, tl.load(other).to(tl.float32))
    ready(HOPPER)
    d = load_row(dense + row * width, width, PIECE)
    y = load_row(x + row * width, width, PIECE)
    s = load_row(sparse + row * M * width, width, PIECE)
    if M > 1:  # the token's experts, in order; their sum is rounded as if it had been stored
        total = wide(s)
        for slot in tl.static_range(1, M):
            total = added(total, wide(load_row(sparse + (row * M + slot) * width, width, PIECE)))
        s = stored(total, x_out)
    both = weighed(normed(wide(d), width, eps), w_dense)
    both = added(both, weighed(normed(wide(s), width, eps), w_sparse))
    y = added(wide(y), weighed(normed(both, width, eps), w_sum))
    y = stored(_times(y, factor), x_out)
    store_row(x_out + row * width, y, width, PIECE)
    put_row(out, scale, weighed(normed(y, width, eps), w_next), row, width, PIECE, LIMIT, HOPPER)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `norm.rms_norm`: x [..., D] -> [..., D]"""
    return norm_rows(x.reshape(-1, x.shape[-1]), weight, eps).values.view(x.shape)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float, quant: torch.dtype | None = None) -> Rows:
    """As `fused.norm_rows`: x [N, D] -> [N, D], quantised to `quant` where that is given"""
    x = x.contiguous()
    out = rows_like(x, quant)
    _launch(_rows_kernel, x, x, weight, out.values, out.scale, x.shape[1], eps, NORM=True, LIMIT=limit_of(quant))
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `fused.quantize_rows`: x [N, D] -> int8 or fp8 [N, D], scale [N, 1] float32"""
    x = x.contiguous()
    out = rows_like(x, dtype)
    assert out.scale is not None
    _launch(_rows_kernel, x, x, None, out.values, out.scale, x.shape[1], 0.0, NORM=False, LIMIT=limit_of(dtype))
    return out.values, out.scale


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
    x, branch = x.contiguous(), branch.contiguous()
    x_out, to_dense, to_sparse = torch.empty_like(x), rows_like(x, quant), rows_like(x, quant)
    _launch(
        _after_attention_kernel, x, x, branch, post, dense, sparse, x_out, to_dense.values, to_dense.scale,
        to_sparse.values, to_sparse.scale, x.shape[1], eps, LIMIT=limit_of(quant), KEEP=len(x) <= KEPT, eager=eager,
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
    x, dense, sparse = x.contiguous(), dense.contiguous(), sparse.contiguous()
    x_out, out = torch.empty_like(x), rows_like(x, quant)
    _launch(
        _after_feed_forward_kernel, x, x, dense, sparse, *weights, scalar, *(behind or (0, None)), following, x_out,
        out.values, out.scale, x.shape[1], eps, M=len(sparse) // max(1, len(x)), LIMIT=limit_of(quant),
    )  # fmt: skip
    return x_out, out


def warps_for(piece: int) -> int:
    """16 bytes a load; sums through few warps are cheap. The same for any number of rows, and so are the bits."""
    return min(16, max(1, piece // 256))


def piece_for(width: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(width, 3)))


def _launch(kernel, x: Tensor, *args, **constants) -> None:
    piece = piece_for(x.shape[1])
    # Of 128 registers a thread, four rows of 2,816 fit on a multiprocessor.
    run(kernel, x.shape[0], *args, **constants, PIECE=piece, num_warps=warps_for(piece), maxnreg=128)


def rows_like(like: Tensor, quant: torch.dtype | None) -> Rows:
    if quant is None:
        return Rows(torch.empty_like(like))
    scale = torch.empty(like.shape[0], 1, dtype=torch.float32, device=like.device)
    return Rows(torch.empty_like(like, dtype=quant), scale)


def limit_of(quant: torch.dtype | None) -> float:
    return 0.0 if quant is None else FP8_MAX if quant == FP8 else 127.0
