# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of a whole batch on a GPU: twin of `attention_cached`.

A program has some queries of one row and one K/V head (the heads of a group are more queries of it) and goes over the
row's cached slots, then over its new tokens, with a running softmax. Keys are split over several programs, because one
canvas has too few queries to fill the card; how they are split depends on the row's own length and not on the batch,
and the parts are put together in order: a row gets the same bits alone and in a batch. Where canvases fill the
card as they are, one program has all parts, one after another, and puts them together while they lie in the cache.
Both ways are the same lines, and no product is fused with a sum unless it says so.

Everything that changes from step to step (lengths, which row, where tokens begin) is read on the device; the grid is
made for the most there may be, and programs without work end at once.

Legend: B rows, N new tokens, H query heads, K key/value heads, G = H / K, Dh head size, S slots, P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import kernels
from diffusiongemma.ops.attention_cached import New, Prefix, check
from diffusiongemma.ops.attention_join_triton import NOTHING, PIECE, join, joined, next_part, put
from diffusiongemma.ops.attention_wide_triton import WideBlocks, attend_wide, wide_blocks
from diffusiongemma.ops.copies_triton import apart, cached, described, tile_at
from diffusiongemma.ops.early_triton import SEPARATE, multiprocessors, ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import unavailable
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.rows_triton import quantize_rows

LOG2E = tl.constexpr(1.4426950408889634)
JOINED = tl.constexpr(64)  # numbers of a head that a program with all parts joins at once
SIDE_BY_SIDE = 2  # programs that a multiprocessor runs at once
FULL = 0.9  # of the places of all waves of programs: where so many are taken, keys are not split


class Blocks(NamedTuple):
    queries: int  # times heads of a group
    keys: int
    parts: int  # a power of two
    warps: int
    stages: int
    whole: bool = False  # a program has all parts of its queries


def blocks_for(head_dim: int, one: bool, itemsize: int = 2, small: bool = False) -> Blocks:
    """`one`: every row has one new token; then reading the cache is all there is, and many programs share it.
    `small`: for a card with less shared memory than Hopper (`Card.small`)"""
    if one:
        stages = 2 if small else 3
        return Blocks(16, 64, 16, 4, stages) if head_dim <= 256 else Blocks(16, 32, 64, 4, stages)
    # Small blocks, several on a multiprocessor: one multiplies while another waits for its keys. Two stages would not
    # do: the next tile is asked for only at the end of a step.
    wide = head_dim * itemsize > 512
    if small and not wide:  # queries lie in shared memory there, too, and sums in the registers of twice the threads
        return Blocks(64, 32, 4, 8, 2)
    return Blocks(32, 32, 4, 4, 2) if wide else Blocks(64, 32, 4, 4, 3)


def supported(q: Tensor, prefix: Prefix) -> str | None:
    """Why `attend` cannot run on these, or None."""
    if reason := unavailable(q.device):
        return reason
    head_dim, group = q.shape[2], q.shape[1] // prefix.keys.shape[1]
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 512:
        return f"the head size must be a power of two from 16 to 512, not {head_dim}"
    if group & (group - 1) or group > 16:
        return f"the query heads of a K/V head must be a power of two up to 16, not {group}"
    if q.dtype not in (torch.bfloat16, torch.float32) or prefix.keys.dtype != q.dtype:
        return f"queries of {q.dtype} and a cache of {prefix.keys.dtype} must both be bfloat16 or float32"
    if prefix.keys.stride(3) != 1 or prefix.keys.stride() != prefix.values.stride():
        return "keys and values must lie alike, with the numbers of a head side by side"
    if any(stride * prefix.keys.element_size() % 16 for stride in prefix.keys.stride()[:3]):
        return "heads of the cache must begin at multiples of 16 bytes"
    return None


@triton.jit
def _tile(q, k, v, seen, acc, top, total, CAUSAL: tl.constexpr):
    """One tile of keys and values, k and v [n, Dh], taken into the running softmax; seen [m, n], or [n] for a canvas"""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAUSAL:
        s = tl.where(seen, s * LOG2E, float("-inf"))
    else:
        s = tl.fma(s, LOG2E, tl.where(seen, 0.0, float("-inf"))[None, :])  # one operation a score
    higher = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    total = tl.fma(total, fade, tl.sum(p, axis=1))
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def _nth_block(at, begin, batch, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """The row and the place in it of a block of queries, blocks of all rows counted through; one beyond the last block
    is beyond the last row's"""
    b = tl.arange(0, ROWS)
    counts = tl.load(begin + b + 1, mask=b < batch, other=0) - tl.load(begin + b, mask=b < batch, other=0)
    own = tl.cdiv(counts, TOKENS)
    row = tl.minimum(tl.sum((tl.cumsum(own) <= at).to(tl.int32)), batch - 1)
    return row, at - tl.sum(tl.where(b < row, own, 0))


@triton.jit(do_not_specialize=["batch", "slots", "tokens", "blocks", "window"])
def _attend_kernel(
    q, q_block, k, v, keys, values, part, part_top, part_total, rows, lengths, begin, batch, slots, tokens,
    blocks, window, H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, SLOT: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """`blocks` of queries: of each row, or (`ROWS`, a power of two: no fewer than there are) of all rows. WHOLE: what
    is joined takes the place of the first part."""
    ready(HOPPER)
    G: tl.constexpr = H // K
    # Programs that read the same keys run side by side.
    pid, all_blocks = tl.program_id(0), blocks if ROWS else blocks * batch
    kv, which = pid // all_blocks % K, pid // all_blocks // K
    if ROWS:
        row, block = _nth_block(pid % blocks, begin, batch, BLOCK_M // G, ROWS)
    else:
        row, block = pid % all_blocks // blocks, pid % blocks
    start = tl.load(begin + row)
    count = tl.load(begin + row + 1) - start
    length, line = tl.load(lengths + row), tl.load(rows + row)
    first = block * (BLOCK_M // G)
    if first >= count:
        return
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    token = first + m // G
    live = token < count
    place = (start + token).to(tl.int64) * H + kv * G + m % G  # of q [N H, Dh]
    d = tl.arange(0, DH)
    if BLOCK_M >= 64 and q_block is not None:  # they stay in registers, and shared memory is for keys and values alone
        queries = tl.reshape(q_block.load([start + first, kv * G, 0]), (BLOCK_M, DH))
    else:
        queries = tl.load(q + place[:, None] * DH + d[None, :], mask=live[:, None], other=0.0)

    held = tl.minimum(length, slots)
    newest = (length - 1) % slots  # the slot that was written last
    old = tl.cdiv(held, BLOCK_N)  # tiles of cached tokens
    skipped = 0  # tiles of new tokens that no query of this block sees any more
    end = count
    if CAUSAL:
        end = tl.minimum(first + BLOCK_M // G, count)
        if WINDOW:
            oldest = first - window + 1
            skipped = tl.maximum(oldest, 0) // BLOCK_N
            old = tl.where(oldest >= 0, 0, old)
    tiles = old + tl.cdiv(end, BLOCK_N) - skipped
    each = tl.cdiv(tiles, PARTS)
    low = which * each
    high = tiles if WHOLE else tl.minimum(low + each, tiles)
    edge = low + each
    lines = tokens.to(tl.int64) * H
    into = place + which * lines

    acc = tl.zeros((BLOCK_M, DH), tl.float32)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # The last tile of either kind ends with the last token and overlaps the one before: what was never written is never
    # read (0 x NaN would be NaN). In front of the first slot the descriptor gives zeros.
    for tile in range(low, tl.minimum(high, old)):
        at = tl.minimum(tile * BLOCK_N, held - BLOCK_N)
        kt = cached(keys, line, kv, at, 0, BLOCK_N, DH, ROW, HEAD, SLOT)
        vt = cached(values, line, kv, at, 0, BLOCK_N, DH, ROW, HEAD, SLOT)
        slot = at + n
        seen = slot >= tile * BLOCK_N
        if WINDOW:
            ago = newest - slot  # of the slot's token, counted back from the last cached one
            ago = tl.where(ago < 0, ago + slots, ago)
            if not CAUSAL:
                seen = seen & (ago < window)
        if CAUSAL:
            seen = seen[None, :]
            if WINDOW:
                seen = seen & (ago[None, :] + 1 + token[:, None] < window)
        if WHOLE:
            edge, into, acc, top, total = next_part(
                tile, edge, each, part, part_top, part_total, into, lines, live, acc, top, total, BLOCK_M, DH
            )
        acc, top, total = _tile(queries, kt, vt, seen, acc, top, total, CAUSAL)
    for tile in range(tl.maximum(low, old), high):
        want = (tile - old + skipped) * BLOCK_N
        at = tl.minimum(want, count - BLOCK_N)
        kt = tile_at(k, start + at, kv * DH, None, None, K * DH, BLOCK_N, DH)
        vt = tile_at(v, start + at, kv * DH, None, None, K * DH, BLOCK_N, DH)
        other = at + n
        seen = other >= want
        if CAUSAL:
            seen = seen[None, :] & (other[None, :] <= token[:, None])
            if WINDOW:
                seen = seen & (token[:, None] - other[None, :] < window)
        if WHOLE:
            edge, into, acc, top, total = next_part(
                tile, edge, each, part, part_top, part_total, into, lines, live, acc, top, total, BLOCK_M, DH
            )
        acc, top, total = _tile(queries, kt, vt, seen, acc, top, total, CAUSAL)

    put(part, part_top, part_total, into, live, acc, top, total, BLOCK_M, DH, PIECE if WHOLE else DH)
    if WHOLE:
        tl.debug_barrier()  # other threads have written what is read now
        WIDTH: tl.constexpr = min(JOINED, DH)
        used = tl.where(live, tl.cdiv(tiles, each), 0)
        for piece in tl.static_range(0, DH, WIDTH):
            at = piece + tl.arange(0, WIDTH)
            mean = joined(part, part_top, part_total, place, used, at, lines, BLOCK_M, WIDTH, DH, PARTS)
            tl.store(part + place[:, None] * DH + at[None, :], mean, mask=live[:, None])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    new: New,
    causal: bool,
    window: int | None = None,
    blocks: Blocks | WideBlocks | None = None,
) -> Tensor:
    """As `attention_cached.attend`: q [N, H, Dh], k and v [N, K, Dh] -> [N, H, Dh]; tokens behind the last row's end
    are left as they are found."""
    return attend_rows(q, k, v, prefix, new, causal, window, blocks=blocks).values.view(q.shape)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    new: New,
    causal: bool,
    window: int | None = None,
    quant: torch.dtype | None = None,
    keep: bool = False,
    blocks: Blocks | WideBlocks | None = None,
) -> Rows:
    """As `attention_cached.attend_rows`; `quant`: fp8 or None. Where parts are joined, that kernel does the rest."""
    check(q, k, v, prefix, new)
    assert quant in (None, FP8), f"attention gives rows in fp8, not in {quant}"
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tokens, heads, head_dim = q.shape
    b = blocks or _blocks(q, prefix, new, causal, window)
    part = torch.empty(b.parts, tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    top, total = torch.empty(2, b.parts, tokens, heads, dtype=torch.float32, device=q.device)
    if isinstance(b, WideBlocks):
        assert window is None, "wide heads see everything"
        attend_wide(q, k, v, prefix, new, causal, b, (part, top, total))
    else:
        _attend(q, k, v, prefix, new, causal, window, b, (part, top, total))
        part = part[:1] if b.whole else part
    rows = join(part, top, total, quant, (k, v, prefix, new) if keep else None)
    return rows if quant is None or rows.scale is not None else quantize_rows(rows.values)


def _blocks(q: Tensor, prefix: Prefix, new: New, causal: bool, window: int | None) -> Blocks | WideBlocks:
    head_dim, one, small = q.shape[2], new.most == 1, kernels.card(q.device).small
    if head_dim > 256 and not one and window is None:
        return wide_blocks(head_dim, q.element_size(), small)
    b = blocks_for(head_dim, one, q.element_size(), small)
    programs = _launched(q, prefix, new, b)[0] * prefix.keys.shape[1]
    # Programs of a prompt see more or fewer keys and do not end together: split, they fill the card better.
    return b._replace(whole=not causal and not one and _fills(programs, SIDE_BY_SIDE * multiprocessors(q.device)))


def _fills(programs: int, places: int) -> bool:
    """Are all places taken nearly all of the time? A last wave that is half empty costs more than joining the parts:
    4, 8 and 16 canvases fill an H200, 5 and 6 do not."""
    return programs >= FULL * places * -(-programs // places)


def _launched(q: Tensor, prefix: Prefix, new: New, b: Blocks) -> tuple[int, bool]:
    """How many blocks of queries programs are launched for, and whether they are counted through all rows"""
    rows, group = prefix.row.shape[0], q.shape[1] // prefix.keys.shape[1]
    each = triton.cdiv(new.most * group, b.queries)  # a row
    # A few rows share the tokens of a prompt's pass, and each could have them all: most programs would find nothing.
    most = (q.shape[0] + rows * (b.queries // group - 1)) // (b.queries // group)  # of all rows
    return min(most, rows * each), most < rows * each


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    new: New,
    causal: bool,
    window: int | None,
    b: Blocks,
    into: tuple[Tensor, ...],
) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    rows, group = prefix.row.shape[0], heads // kv_heads
    launched, counted = _launched(q, prefix, new, b)
    block = None if kernels.card(q.device).small else described(q, [b.queries // group, group, head_dim])
    fresh = (described(t.view(tokens, -1), [b.keys, head_dim]) for t in (k, v))
    cache = (described(t, [1, 1, b.keys, head_dim]) for t in (prefix.keys, prefix.values))
    run(
        _attend_kernel, launched * kv_heads * (1 if b.whole else b.parts), q, block, *fresh, *cache, *into,
        prefix.row, prefix.length, new.begin, rows, slots, tokens,
        launched if counted else launched // rows, window or 0, H=heads, K=kv_heads, DH=head_dim, CAUSAL=causal,
        # A canvas sees all that a ring holds, if that is no more than the window.
        WINDOW=window is not None and (causal or slots > window),
        PARTS=b.parts, WHOLE=b.whole, BLOCK_M=b.queries, BLOCK_N=b.keys,
        ROWS=triton.next_power_of_2(rows) if counted else 0, num_warps=b.warps, num_stages=b.stages,
        **apart(prefix.keys), **SEPARATE,
    )  # fmt: skip
