# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The soft embedding: the weights of all tokens times their embeddings, which the next step is conditioned on.

The product sums over the vocabulary (262,144 terms for 256 x 2,816 numbers), so it is split along it: with six parts,
tiles of 128 x 256 fill the 132 multiprocessors of an H200 exactly, for any number of users. The parts are then
added in order, so the result does not change from run to run or with the batch.

Legend: N positions, D hidden, V vocabulary, T tiles of the weights (`vocab_triton`), S parts of the sum.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.vocab import Table

PARTS = 6
# fp8 holds 2^-9 … 448: the largest weight of a row, 1, is put at 256, so weights down to 2^-17 of it are kept.
FP8_TOP = tl.constexpr(256.0)
# Hopper sums fp8 products with about 14 bits; after so many steps the sum is put away and a new one begins.
FP8_STEPS = 64


class Blocks(NamedTuple):
    """The tile of one program of the product."""

    rows: int
    width: int
    depth: int
    warps: int
    stages: int


def soft_blocks(itemsize: int) -> Blocks:
    # float32 has no tensor cores: for tests
    return Blocks(32, 64, 64, 4, 2) if itemsize == 4 else Blocks(128, 256, 128 // itemsize, 8, 4)


@triton.jit
def _rescale_kernel(weights, factor, out, vocab, tiles, TILE: tl.constexpr, TILES: tl.constexpr, HOPPER: tl.constexpr):
    """weights [N, V], each relative to its tile's largest -> relative to the row's; in place, or as fp8"""
    ready(HOPPER)
    groups = tl.cdiv(tiles, TILES)
    row, tile = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = token < vocab
    factors = tl.load(factor + row * tiles + tile, mask=tile < tiles, other=0.0)[:, None]
    e = tl.load(weights + row * vocab + token, mask=inside, other=0.0).to(tl.float32) * factors
    if out.dtype.element_ty == tl.float8e4nv:
        e *= FP8_TOP
    tl.store(out + row * vocab + token, e.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _steps(p, w, factor, acc, first, last, row, column, rows, tiles,
           TILE: tl.constexpr, EIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """acc plus the product over these steps along the vocabulary"""
    at = row + tl.arange(0, BLOCK_N)
    for step in range(first, last):
        a = p.load([row, step * BLOCK_K])
        if EIGHT:
            b = tl.trans(w.load([column, step * BLOCK_K]))
        else:
            b = w.load([step * BLOCK_K, column])
            place = at.to(tl.int64) * tiles + step * BLOCK_K // TILE
            factors = tl.load(factor + place, mask=at < rows, other=0.0)
            a = (a.to(tl.float32) * factors[:, None]).to(b.dtype)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _soft_kernel(
    p, w, factor, part, rows, width, vocab, tiles, TILE: tl.constexpr, EIGHT: tl.constexpr, STEPS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """One part of weights [N, V] times embeddings: part [S, N, D] float32"""
    ready(HOPPER)
    blocks, columns = tl.cdiv(rows, BLOCK_N), tl.cdiv(width, BLOCK_D)
    pid = tl.program_id(0)
    # Programs that read the same embeddings run side by side.
    block, rest = pid % blocks, pid // blocks
    which, column = rest // columns, rest % columns * BLOCK_D
    steps = tl.cdiv(vocab, BLOCK_K)
    each = tl.cdiv(steps, PARTS)
    first = which * each
    last = tl.minimum(first + each, steps)
    row = block * BLOCK_N
    n, d = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_D)
    place = part + (which * rows + n).to(tl.int64)[:, None] * width + d[None, :]
    live = (n < rows)[:, None] & (d < width)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    acc = _steps(p, w, factor, acc, first, tl.minimum(first + STEPS, last), row, column, rows, tiles,
                 TILE, EIGHT, BLOCK_N, BLOCK_K)  # fmt: skip
    tl.store(place, acc, mask=live)
    if EIGHT:
        # Two sums do not fit into the registers: what is there already waits in memory (it stays in the L2 cache).
        for begin in range(first + STEPS, last, STEPS):
            acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            acc = _steps(p, w, factor, acc, begin, tl.minimum(begin + STEPS, last), row, column, rows, tiles,
                         TILE, EIGHT, BLOCK_N, BLOCK_K)  # fmt: skip
            tl.debug_barrier()  # other threads may have written what this one reads
            tl.store(place, acc + tl.load(place, mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(part, share, column_scale, out, rows, width, scale, PARTS: tl.constexpr, SCALED: tl.constexpr,
                BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    ready(HOPPER)
    groups = tl.cdiv(width, BLOCK)
    row, d = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    live = d < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(part + (i * rows + row) * width + d, mask=live, other=0.0).to(tl.float32)
    total *= tl.load(share + row) * scale
    if SCALED:
        total *= tl.load(column_scale + d, mask=live, other=0.0) / FP8_TOP
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=live)


def soft_embed(
    weights: Tensor,
    factor: Tensor,
    share: Tensor,
    tile: int,
    table: Table,
    scale: float,
    dtype: torch.dtype,
    how: Literal["fused", "library"] = "fused",
    blocks: Blocks | None = None,
) -> Tensor:
    """weights [N, V] relative to the largest of their tile, factor [N, T] of each tile, share [N]: 1 / their sum
    -> [N, D] in `dtype`. Overwrites the weights where a library makes the product."""
    eight = table.soft is not None
    if eight:
        part = _product(rescale(weights, factor, tile, FP8), factor, tile, table, blocks or soft_blocks(1))
    elif how == "library":
        part = torch.mm(rescale(weights, factor, tile, weights.dtype), table.weight)[None]
    else:
        part = _product(weights, factor, tile, table, blocks or soft_blocks(weights.element_size()))
    rows, width = part.shape[1:]
    out = torch.empty(rows, width, dtype=dtype, device=weights.device)
    run(
        _sum_kernel, rows * triton.cdiv(width, 1024), part, share, table.soft_scale, out, rows, width, scale,
        PARTS=part.shape[0], SCALED=eight, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


def rescale(weights: Tensor, factor: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """weights [N, V] -> relative to the row's largest; in place unless the dtype is fp8, where that is at 256"""
    rows, vocab = weights.shape
    out = weights if dtype == weights.dtype else torch.empty_like(weights, dtype=dtype)
    each = max(1, 8192 // tile)
    tiles = factor.shape[1]
    programs = rows * triton.cdiv(tiles, each)
    run(_rescale_kernel, programs, weights, factor, out, vocab, tiles, TILE=tile, TILES=each, num_warps=8)
    return out


def _product(weights: Tensor, factor: Tensor, tile: int, table: Table, b: Blocks) -> Tensor:
    """-> [S, N, D] float32"""
    rows, vocab = weights.shape
    width = table.weight.shape[1]
    eight = table.soft is not None
    depth = min(b.depth, tile)
    w = table.weight if table.soft is None else table.soft
    part = torch.empty(PARTS, rows, width, dtype=torch.float32, device=weights.device)
    run(
        _soft_kernel, PARTS * triton.cdiv(rows, b.rows) * triton.cdiv(width, b.width),
        TensorDescriptor.from_tensor(weights, [b.rows, depth]),
        TensorDescriptor.from_tensor(w, [b.width, depth] if eight else [depth, b.width]),
        factor, part, rows, width, vocab, factor.shape[1],
        TILE=tile, EIGHT=eight, STEPS=FP8_STEPS if eight else 1 << 30, PARTS=PARTS,
        BLOCK_N=b.rows, BLOCK_D=b.width, BLOCK_K=depth,
        num_warps=b.warps, num_stages=b.stages,
    )  # fmt: skip
    return part
