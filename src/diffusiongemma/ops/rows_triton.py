# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Activations rounded to fp8, one scale a row, for where no norm before has done it.

A row a program. Many narrow rows are a warp's work each, so that nothing waits for other warps; few rows are spread
over many warps, because then the time is that of one thread. A division is a product with the scale's reciprocal and
one correction, which rounds as a division does (Markstein) in 3 instructions instead of some 10.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8

MANY = 512  # rows


@triton.jit
def fp8_scale(top):
    """The scale of numbers of which the largest is `top`"""
    s = top / 448.0
    return tl.where(s < 1.1754943508222875e-38, 1.0, s)


@triton.jit
def to_fp8(wide, s, HOPPER: tl.constexpr):
    """float32 numbers / s as fp8"""
    if HOPPER:
        back = tl.div_rn(1.0, s)
        near = wide * back
        near = tl.fma(tl.fma(-near, s, wide), back, near)
    else:  # the interpreter's fma rounds twice
        near = tl.div_rn(wide, s)
    return near.to(tl.float8e4nv)


@triton.jit
def quantize_kernel(x, q, scale, place, D: tl.constexpr, APART: tl.constexpr, WIDTH: tl.constexpr,
                    HOPPER: tl.constexpr):  # fmt: skip
    """x [N, D] -> q [N, D], whose rows begin APART numbers from each other, scale [N]; `place`: of which rows, or None.
    q may lie in x: a row has been read, all of it, before its largest number is known."""
    ready(HOPPER)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    if place is not None:
        row = tl.load(place + row).to(tl.int64)
    wide = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    s = fp8_scale(tl.max(tl.abs(wide)))
    tl.store(scale + row, s)
    tl.store(q + row * APART + at, to_fp8(wide, s, HOPPER), mask=at < D)


def quantize_rows(x: Tensor, warps: int | None = None) -> Rows:
    """x [N, K] -> fp8 [N, K] with one scale a row"""
    rows = Rows(torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), _scales(x))
    _quantize(x.contiguous(), rows, None, warps)
    return rows


def quantize_placed(x: Tensor, place: Tensor) -> Rows:
    """x bfloat16 [R, K], place int32 [P] -> the same as fp8 in the first half of each row's bytes, with one scale a
    row: no second buffer. Only of these rows; what the others hold means nothing."""
    rows = Rows(x.view(FP8)[:, : x.shape[1]], _scales(x))
    _quantize(x, rows, place, None)
    return rows


def _scales(x: Tensor) -> Tensor:
    return torch.empty(len(x), 1, device=x.device)


def _quantize(x: Tensor, to: Rows, place: Tensor | None, warps: int | None) -> None:
    width, rows = x.shape[1], len(x) if place is None else len(place)
    wide = triton.next_power_of_2(width)
    warps = warps or max(1, min(16, wide // (1024 if rows >= MANY else 256)))
    run(
        quantize_kernel, rows, x, to.values, to.scale, place, D=width, APART=to.values.stride(0), WIDTH=wide,
        num_warps=warps,
    )  # fmt: skip


def rows_for(x: Rows, w: Tensor) -> Rows:
    """x as products with this weight take it: fp8 and pairs of 4-bit weights are multiplied with fp8 numbers"""
    if x.values.dtype == FP8 or w.dtype not in (FP8, torch.uint8):
        return x
    return quantize_rows(x.values)
