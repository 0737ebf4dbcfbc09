# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The soft embedding: the weights of all tokens times their embeddings, which the next step is conditioned on.

The product sums over the vocabulary (262,144 terms for 256 x 2,816 numbers), so it is split along it: with six parts,
tiles of 128 x 256 or 256 x 128 fill the 132 multiprocessors of an H200 exactly, for 256 positions or a multiple. The
parts are then added in order, so the result does not change from run to run or with the batch.

Legend: N positions, D hidden, V vocabulary, T tiles of the weights (`vocab_triton`), S parts of the sum.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import kernels
from diffusiongemma.ops.copies_triton import described, tile_at
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.kernels import gluon
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


class Parts(NamedTuple):
    """What the LM head has left of the probabilities."""

    weights: Tensor  # [N, V], overwritten where a library makes the product
    factor: Tensor  # [N, T]: brings a tile's weights to the row's largest logit
    share: Tensor  # [N]: brings them to probabilities
    mass: Tensor  # [N, T]: the sum of a tile's weights
    tile: int  # tokens
    fixed: bool  # the factors of all tiles of a row are equal


def soft_blocks(itemsize: int, small: bool = False) -> Blocks:
    """`small`: for a card with less shared memory than Hopper"""
    if itemsize == 4:  # no tensor cores: for tests
        return Blocks(32, 64, 64, 4, 2)
    if small:
        return Blocks(128, 128, 128 // itemsize, 8, 3)
    return Blocks(128, 256, 64, 8, 4) if itemsize == 2 else Blocks(256, 128, 128, 8, 4)


@triton.jit(do_not_specialize=["rows"])
def _need_kernel(mass, factor, share, need, rows, tiles, limit, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
                 HOPPER: tl.constexpr):  # fmt: skip
    """need [blocks, T]: 1 where a row of the block has more than `limit` of its probability in the tile"""
    ready(HOPPER)
    groups = tl.cdiv(tiles, TILES)
    block, tile = tl.program_id(0) // groups, tl.program_id(0) % groups * TILES + tl.arange(0, TILES)
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (tile < tiles)[None, :]
    place = row.to(tl.int64)[:, None] * tiles + tile[None, :]
    part = tl.load(mass + place, mask=inside, other=0.0) * tl.load(factor + place, mask=inside, other=0.0)
    part *= tl.load(share + row, mask=row < rows, other=0.0)[:, None]
    tl.store(need + block * tiles + tile, tl.max(tl.where(part > limit, 1, 0), axis=0), mask=tile < tiles)


@triton.jit
def _list_kernel(need, which, count, tiles, TILES: tl.constexpr, HOPPER: tl.constexpr):
    """One block's needed tiles, in order: which [blocks, T], count [blocks]"""
    ready(HOPPER)
    block, tile = tl.program_id(0), tl.arange(0, TILES)
    needed = tl.load(need + block * tiles + tile, mask=tile < tiles, other=0)
    tl.store(which + block * tiles + tl.cumsum(needed, axis=0) - 1, tile, mask=needed > 0)
    tl.store(count + block, tl.sum(needed))


@triton.jit
def _rescale_kernel(weights, factor, need, out, vocab, tiles, SKIP: tl.constexpr, TILE: tl.constexpr,
                    TILES: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """weights [N, V], each relative to its tile's largest -> relative to the row's; in place, or as fp8. Tiles that
    nobody needs are left out; SKIP: rows of a block that share a need, 0: all are needed"""
    ready(HOPPER)
    groups = tl.cdiv(tiles, TILES)
    row, tile = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = token < vocab
    if SKIP > 0:
        needed = tl.load(need + row // SKIP * tiles + tile, mask=tile < tiles, other=0)
        if tl.max(needed) == 0:
            return
        inside = inside & (needed > 0)[:, None]
    factors = tl.load(factor + row * tiles + tile, mask=tile < tiles, other=0.0)[:, None]
    e = tl.load(weights + row * vocab + token, mask=inside, other=0.0).to(tl.float32) * factors
    if out.dtype.element_ty == tl.float8e4nv:
        e *= FP8_TOP
    tl.store(out + row * vocab + token, e.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _soft_kernel(
    p, w, factor, which, count, part, rows, width, vocab, tiles, TILE: tl.constexpr, EIGHT: tl.constexpr,
    SCALED: tl.constexpr, SKIP: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """One part of weights [N, V] times embeddings: part [S, N, D] float32"""
    ready(HOPPER)
    blocks, columns = tl.cdiv(rows, BLOCK_N), tl.cdiv(width, BLOCK_D)
    pid = tl.program_id(0)
    # Programs that read the same embeddings run side by side.
    block, rest = pid % blocks, pid // blocks
    piece, column = rest // columns, rest % columns * BLOCK_D
    steps = tl.cdiv(vocab, BLOCK_K)
    if SKIP:
        steps = tl.load(count + block) * (TILE // BLOCK_K)
    each = tl.cdiv(steps, PARTS)
    first = piece * each
    last = tl.minimum(first + each, steps)
    row = block * BLOCK_N
    n, d = row + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_D)
    place = part + (piece * rows + n).to(tl.int64)[:, None] * width + d[None, :]
    live = (n < rows)[:, None] & (d < width)[None, :]
    if first >= last:
        tl.store(place, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), mask=live)
    # Two sums do not fit into the registers: what is there already waits in memory (it stays in the L2 cache).
    for begin in tl.range(first, last, STEPS, flatten=True):
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for i in range(begin, tl.minimum(begin + STEPS, last)):
            step = i
            if SKIP:
                at = tl.load(which + block * tiles + i // (TILE // BLOCK_K))
                step = at * (TILE // BLOCK_K) + i % (TILE // BLOCK_K)
            a = tile_at(p, row, step * BLOCK_K, rows, vocab, vocab, BLOCK_N, BLOCK_K)
            if EIGHT:
                b = tl.trans(tile_at(w, column, step * BLOCK_K, width, vocab, vocab, BLOCK_D, BLOCK_K))
            else:
                b = tile_at(w, step * BLOCK_K, column, vocab, width, width, BLOCK_K, BLOCK_D)
            if SCALED:
                factors = tl.load(factor + n.to(tl.int64) * tiles + step * BLOCK_K // TILE, mask=n < rows, other=0.0)
                a = (a.to(tl.float32) * factors[:, None]).to(b.dtype)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if EIGHT:
            tl.debug_barrier()  # other threads may have written what this one reads
            acc += tl.load(place, mask=live & (n * 0 + begin > first)[:, None], other=0.0)
        tl.store(place, acc, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(part, share, factor, column_scale, out, rows, width, tiles, scale, PARTS: tl.constexpr,
                RAW: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """part [S, N, D] -> out [N, D]; RAW: the weights were not rescaled"""
    ready(HOPPER)
    groups = tl.cdiv(width, BLOCK)
    row, d = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    live = d < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(part + (i * rows + row) * width + d, mask=live, other=0.0).to(tl.float32)
    share_of_row = tl.load(share + row) * scale
    if RAW:
        share_of_row *= tl.load(factor + row * tiles)
    total *= share_of_row
    if SCALED:
        total *= tl.load(column_scale + d, mask=live, other=0.0) / FP8_TOP
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=live)


class Needed(NamedTuple):
    """Which tiles a block of rows needs."""

    rows: int  # of a block
    need: Tensor  # [blocks, T] int32: 0 or 1
    which: Tensor  # [blocks, T] int32
    tiles: Tensor  # [blocks] int32: how many


def needed(p: Parts, skip: float, rows: int) -> Needed:
    """Tiles of which some row of a block has more than `skip` / T of its probability."""
    tiles = p.factor.shape[1]
    blocks = triton.cdiv(p.factor.shape[0], rows)
    need, which = torch.empty(2, blocks, tiles, dtype=torch.int32, device=p.factor.device)
    count = torch.empty(blocks, dtype=torch.int32, device=p.factor.device)
    run(
        _need_kernel, blocks * triton.cdiv(tiles, 32), p.mass, p.factor, p.share, need, p.factor.shape[0], tiles,
        skip / tiles, BLOCK_N=rows, TILES=32, num_warps=4,
    )  # fmt: skip
    run(_list_kernel, blocks, need, which, count, tiles, TILES=triton.next_power_of_2(tiles), num_warps=4)
    return Needed(rows, need, which, count)


def soft_embed(
    p: Parts,
    table: Table,
    scale: float,
    dtype: torch.dtype,
    how: Literal["fused", "library"] = "fused",
    skip: float = 0.0,
    blocks: Blocks | None = None,
) -> Tensor:
    """-> [N, D] in `dtype`; `skip`: so much of a row's probability may be left out, if no library makes the product.
    `blocks`: the tile of this module's own product"""
    eight = table.soft is not None
    raw = p.fixed and not eight
    b = blocks or soft_blocks(1 if eight else p.weights.element_size(), kernels.card(p.weights.device).small)
    if table.soft is not None and blocks is None and skip == 0 and gluon(table.soft.device):
        from diffusiongemma.ops import soft_gluon

        return soft_gluon.soft_embed(rescale(p, FP8), p.share, table, scale, dtype)
    some = needed(p, skip, b.rows) if skip > 0 and (eight or how == "fused") else None
    if eight:
        part = _product(rescale(p, FP8, some), p, table, b, some)
    elif how == "library":
        part = torch.mm(p.weights if raw else rescale(p, p.weights.dtype), table.weight)[None]
    else:
        part = _product(p.weights, p, table, b, some)
    rows, width = part.shape[1:]
    out = torch.empty(rows, width, dtype=dtype, device=part.device)
    run(
        _sum_kernel, rows * triton.cdiv(width, 1024), part, p.share, p.factor, table.soft_scale, out, rows, width,
        p.factor.shape[1], scale, PARTS=part.shape[0], RAW=raw, SCALED=eight, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


def rescale(p: Parts, dtype: torch.dtype, some: Needed | None = None) -> Tensor:
    """weights [N, V] -> relative to the row's largest; in place unless the dtype is fp8, where that is at 256"""
    rows, vocab = p.weights.shape
    out = p.weights if dtype == p.weights.dtype else torch.empty_like(p.weights, dtype=dtype)
    each = max(1, 8192 // p.tile)
    tiles = p.factor.shape[1]
    run(
        _rescale_kernel, rows * triton.cdiv(tiles, each), p.weights, p.factor, None if some is None else some.need, out,
        vocab, tiles, SKIP=0 if some is None else some.rows, TILE=p.tile, TILES=each, num_warps=8,
    )  # fmt: skip
    return out


def _product(weights: Tensor, p: Parts, table: Table, b: Blocks, some: Needed | None) -> Tensor:
    """-> [S, N, D] float32"""
    rows, vocab = weights.shape
    width = table.weight.shape[1]
    eight = table.soft is not None
    depth = min(b.depth, p.tile)
    w = table.weight if table.soft is None else table.soft
    part = torch.empty(PARTS, rows, width, dtype=torch.float32, device=weights.device)
    run(
        _soft_kernel, PARTS * triton.cdiv(rows, b.rows) * triton.cdiv(width, b.width),
        described(weights, [b.rows, depth]), described(w, [b.width, depth] if eight else [depth, b.width]),
        p.factor, None if some is None else some.which, None if some is None else some.tiles, part,
        rows, width, vocab, p.factor.shape[1], TILE=p.tile, EIGHT=eight, SCALED=not eight and not p.fixed,
        SKIP=some is not None, STEPS=FP8_STEPS if eight else 1 << 30, PARTS=PARTS,
        BLOCK_N=b.rows, BLOCK_D=b.width, BLOCK_K=depth, num_warps=b.warps,
        num_stages=b.stages if some is None else 2 * b.stages - 1,  # looking up the tile takes half of them
    )  # fmt: skip
    return part
