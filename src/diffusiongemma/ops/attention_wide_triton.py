# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention with wide heads (512 numbers) on a GPU, as two matrix products with the weights of all keys between them.

The sums of a flash kernel are queries x head size: of wide heads only 64 queries fit into the registers, tensor cores
then wait for the cache (64 operations a byte), and both halves of the card's warps compute the same scores. As
products, 128 queries meet 256 keys and 128 queries meet 256 numbers of the values, as in any large product. The
weights between them, e = exp(score - the tile's largest) in bfloat16, cost 2 bytes a query and key, which is little
beside the 2 Dh bytes that a key has; blocks of queries take turns where that is too much.

Legend: as in `attention_triton`; a block is some queries of one row and K/V head, a tile some keys, T tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import kernels
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.copies_triton import apart, cached, described, tile_at
from diffusiongemma.ops.early_triton import multiprocessors, ready, run

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
ROOM = 288 << 20  # bytes of weights that are kept at once: a canvas over 32k tokens


class WideBlocks(NamedTuple):
    queries: int  # times heads of a group
    keys: int  # a tile
    width: int  # numbers of the values that a program has
    parts: int
    depth: int = 64  # of a step, along the head and along the keys
    score_warps: int = 8
    score_stages: int = 4
    resident: int = 1  # programs of the scores on a multiprocessor
    warps: int = 8
    stages: int = 4


def wide_blocks(head_dim: int, itemsize: int, small: bool = False) -> WideBlocks:
    """`small`: for a card with less shared memory than Hopper"""
    if itemsize == 4:  # no tensor cores: for tests
        return WideBlocks(32, 32, min(32, head_dim), 2, 16, 4, 2, 1, 4, 2)
    if small:  # with three stages of values Triton 3.6 reads what is being overwritten (seen on an H200)
        return WideBlocks(128, 128, min(128, head_dim), 2, score_warps=8, score_stages=3, stages=2)
    return WideBlocks(128, 128, min(256, head_dim), 2, score_warps=4, score_stages=3, resident=2)


@triton.jit
def _reach(begin, lengths, row, block, slots, CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> where the row's tokens start, how many, how many slots it holds, tiles of those, tiles that a block sees"""
    start = tl.load(begin + row)
    count = tl.load(begin + row + 1) - start
    held = tl.minimum(tl.load(lengths + row), slots)
    old = tl.cdiv(held, BLOCK_N)
    end = count
    if CAUSAL:
        end = tl.minimum((block + 1) * TOKENS, count)
    return start, count, held, old, old + tl.cdiv(end, BLOCK_N)


@triton.jit
def _keep(s, seen, e, width, tops, sums, first, tile, lines, m, BLOCK_N: tl.constexpr):
    """Scores [M, n] of a tile -> its weights and what is kept of it; seen [M, n] or [1, n]"""
    s = s * LOG2E + tl.where(seen, 0.0, float("-inf"))
    top = tl.maximum(tl.max(s, axis=1), NOTHING)
    s = tl.exp2(s - top[:, None])
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(e + (first + m).to(tl.int64)[:, None] * width + column[None, :], s.to(e.dtype.element_ty))
    place = tile.to(tl.int64) * lines + first + m
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(s, axis=1))


@triton.jit
def _next_turn(turn, items):
    """The next item of this program, counted from behind these items"""
    turn = (turn - items) % tl.num_programs(0)
    return tl.where(turn < 0, turn + tl.num_programs(0), turn)


@triton.jit(do_not_specialize=["batch", "slots", "blocks", "skip"])
def _scores_kernel(
    q, k, keys, e, tops, sums, rows, lengths, begin, batch, slots, blocks, skip, width,
    H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    SLOT: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Weights e [B K blocks M, T n] of all tiles, and of each its largest score and their sum, [T, B K blocks M]"""
    ready(HOPPER)
    G: tl.constexpr = H // K
    TOKENS: tl.constexpr = BLOCK_M // G
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    lines = batch * K * blocks * BLOCK_M
    turn = tl.program_id(0)
    for row in range(batch):
        start, count, held, old, most = _reach(begin, lengths, row, skip + blocks - 1, slots, CAUSAL, TOKENS, BLOCK_N)
        line = tl.load(rows + row)
        here = tl.maximum(tl.minimum(tl.cdiv(count, TOKENS) - skip, blocks), 0)
        own = q + start.to(tl.int64) * H * DH
        # The last tile of either kind ends with the last token and overlaps the one before, so that what was never
        # written is never read. In front of the first slot the descriptor gives zeros. Programs that read the same
        # keys run side by side.
        for item in range(turn, here * K * old, tl.num_programs(0)):
            block, kv, tile = item % here, item // here % K, item // here // K
            token = (skip + block) * TOKENS + m // G
            at_q = own + (token * H + kv * G + m % G)[:, None] * DH + d[None, :]
            at = tl.minimum(tile * BLOCK_N, held - BLOCK_N)
            s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for c in range(0, DH, BLOCK_K):
                kt = cached(keys, line, kv, at, c, BLOCK_N, BLOCK_K, ROW, HEAD, SLOT)
                qt = tl.load(at_q + c, mask=(token < count)[:, None], other=0.0)
                s = tl.dot(qt, tl.trans(kt), s, input_precision="ieee")
            first = ((row * K + kv) * blocks + block) * BLOCK_M
            _keep(s, (at + n >= tile * BLOCK_N)[None, :], e, width, tops, sums, first, tile, lines, m, BLOCK_N)
        turn = _next_turn(turn, here * K * old)
        for item in range(turn, here * K * (most - old), tl.num_programs(0)):
            block, kv, tile = item % here, item // here % K, item // here // K
            token = (skip + block) * TOKENS + m // G
            at_q = own + (token * H + kv * G + m % G)[:, None] * DH + d[None, :]
            at = tl.minimum(tile * BLOCK_N, count - BLOCK_N)
            s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for c in range(0, DH, BLOCK_K):
                kt = tile_at(k, start + at, kv * DH + c, None, None, K * DH, BLOCK_N, BLOCK_K)
                qt = tl.load(at_q + c, mask=(token < count)[:, None], other=0.0)
                s = tl.dot(qt, tl.trans(kt), s, input_precision="ieee")
            seen = (at + n >= tile * BLOCK_N)[None, :]
            if CAUSAL:
                seen = seen & ((at + n)[None, :] <= token[:, None])
            first = ((row * K + kv) * blocks + block) * BLOCK_M
            _keep(s, seen, e, width, tops, sums, first, old + tile, lines, m, BLOCK_N)
        turn = _next_turn(turn, here * K * (most - old))


@triton.jit
def _scaled(e, width, tops, place, top, first, column, tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights of some keys, relative to the largest score of the whole part"""
    a = tile_at(e, first, column, None, None, width, BLOCK_M, BLOCK_K)
    return (a.to(tl.float32) * tl.exp2(tl.load(tops + place + tile) - top)[:, None]).to(a.dtype)


@triton.jit(do_not_specialize=["batch", "slots", "tokens", "blocks", "skip"])
def _values_kernel(
    e, v, values, tops, sums, part, part_top, part_total, rows, lengths, begin, batch, slots, tokens, blocks, skip,
    width, H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, MANY: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, SLOT: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """The weights of one part of the tiles times the values, some numbers of the head; `width`: of e, if that is no
    descriptor"""
    ready(HOPPER)
    G: tl.constexpr = H // K
    TOKENS: tl.constexpr = BLOCK_M // G
    STEPS: tl.constexpr = BLOCK_N // BLOCK_K
    pid = tl.program_id(0)
    # Programs that read the same values run side by side.
    block, rest = pid % blocks, pid // blocks
    column, rest = rest % (DH // BLOCK_D) * BLOCK_D, rest // (DH // BLOCK_D)
    row, rest = rest % batch, rest // batch
    kv, which = rest % K, rest // K
    start, count, held, old, most = _reach(begin, lengths, row, skip + block, slots, CAUSAL, TOKENS, BLOCK_N)
    line = tl.load(rows + row)
    if (skip + block) * TOKENS >= count:
        return
    each = tl.cdiv(most, PARTS)
    low = which * each
    high = tl.minimum(low + each, most)
    m = tl.arange(0, BLOCK_M)
    lines = (batch * K * blocks * BLOCK_M).to(tl.int64)
    first = ((row * K + kv) * blocks + block) * BLOCK_M
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    for t in range(low, high, MANY):
        at = t + tl.arange(0, MANY)
        place = at.to(tl.int64)[:, None] * lines + first + m[None, :]
        top = tl.maximum(top, tl.max(tl.load(tops + place, mask=(at < high)[:, None], other=NOTHING), axis=0))
    total = tl.zeros((BLOCK_M,), tl.float32)
    for t in range(low, high, MANY):
        at = t + tl.arange(0, MANY)
        place = at.to(tl.int64)[:, None] * lines + first + m[None, :]
        faded = tl.exp2(tl.load(tops + place, mask=(at < high)[:, None], other=NOTHING) - top[None, :])
        total += tl.sum(faded * tl.load(sums + place, mask=(at < high)[:, None], other=0.0), axis=0)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for step in range(low * STEPS, tl.minimum(high, old) * STEPS):
        tile = step // STEPS
        at = tl.minimum(tile * BLOCK_N, held - BLOCK_N) + step % STEPS * BLOCK_K
        vt = cached(values, line, kv, at, column, BLOCK_K, BLOCK_D, ROW, HEAD, SLOT)
        a = _scaled(e, width, tops, first + m, top, first, step * BLOCK_K, tile * lines, BLOCK_M, BLOCK_K)
        acc = tl.dot(a, vt, acc, input_precision="ieee")
    for step in range(tl.maximum(low, old) * STEPS, high * STEPS):
        tile = step // STEPS
        at = tl.minimum((tile - old) * BLOCK_N, count - BLOCK_N) + step % STEPS * BLOCK_K
        vt = tile_at(v, start + at, kv * DH + column, None, None, K * DH, BLOCK_K, BLOCK_D)
        a = _scaled(e, width, tops, first + m, top, first, step * BLOCK_K, tile * lines, BLOCK_M, BLOCK_K)
        acc = tl.dot(a, vt, acc, input_precision="ieee")

    token = (skip + block) * TOKENS + m // G
    live = token < count
    place = (start + token).to(tl.int64) * H + kv * G + m % G  # of q [N H, Dh]
    place += which.to(tl.int64) * tokens * H
    if column == 0:
        tl.store(part_top + place, top, mask=live)
        tl.store(part_total + place, total, mask=live)
    mean = acc * (1.0 / tl.maximum(total, 1e-30))[:, None]  # a part without keys gives zeros
    d = column + tl.arange(0, BLOCK_D)
    tl.store(part + place[:, None] * DH + d[None, :], mean.to(part.dtype.element_ty), mask=live[:, None])


def attend_wide(
    q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, new: New, causal: bool, b: WideBlocks, into: tuple[Tensor, ...]
) -> None:
    """As `attention_triton.attend` without a window, up to the join of the parts; `into`: parts, tops, totals"""
    tokens, heads, head_dim = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    rows, group = prefix.row.shape[0], heads // kv_heads
    each = triton.cdiv(new.most * group, b.queries)  # blocks of queries a row
    tiles = triton.cdiv(slots, b.keys) + triton.cdiv(new.most, b.keys)
    one = rows * kv_heads * b.queries * tiles * b.keys * q.element_size()  # bytes of the weights of one block each
    turn = min(each, max(1, ROOM // one))
    lines = rows * kv_heads * turn * b.queries
    e = torch.empty(lines, tiles * b.keys, dtype=q.dtype, device=q.device)
    tops, sums = torch.empty(2, tiles, lines, dtype=torch.float32, device=q.device)
    where = (prefix.row, prefix.length, new.begin)
    shape = {"H": heads, "K": kv_heads, "DH": head_dim, "CAUSAL": causal, "BLOCK_M": b.queries, "BLOCK_N": b.keys}
    shape |= apart(prefix.keys)
    for skip in range(0, each, turn):
        blocks = min(turn, each - skip)
        run(
            _scores_kernel, min(b.resident * multiprocessors(q.device), rows * kv_heads * blocks * tiles),
            q, described(k.view(tokens, -1), [b.keys, b.depth]), described(prefix.keys, [1, 1, b.keys, b.depth]),
            e, tops, sums, *where, rows, slots, blocks, skip, tiles * b.keys,
            **shape, BLOCK_K=b.depth, num_warps=b.score_warps, num_stages=b.score_stages,
        )  # fmt: skip
        run(
            _values_kernel, rows * kv_heads * blocks * b.parts * (head_dim // b.width),
            described(e, [b.queries, b.depth]), described(v.view(tokens, -1), [b.depth, b.width]),
            described(prefix.values, [1, 1, b.depth, b.width]), tops, sums, *into, *where, rows, slots, tokens, blocks,
            skip, None if kernels.card(q.device).early else tiles * b.keys,
            **shape, PARTS=b.parts, BLOCK_K=b.depth, BLOCK_D=b.width, MANY=16, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
