# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of a whole batch on a GPU: twin of `attention_cached`.

A program has some queries of one row and one K/V head (the heads of a group are more queries of it) and goes over the
row's cached slots, then over its new tokens, with a running softmax. Keys are split over several programs, because one
canvas has too few queries to fill the card; how they are split depends on the row's own length and not on the batch,
and the parts are put together in order: a row gets the same bits alone and in a batch.

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

from diffusiongemma.ops.attention_cached import New, Prefix, check
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.kernels import unavailable

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)  # the largest score of a query that has seen no key yet: finite, so that no NaN appears


class Blocks(NamedTuple):
    queries: int  # times heads of a group
    keys: int
    parts: int  # a power of two
    warps: int
    stages: int


def blocks_for(head_dim: int, one: bool, itemsize: int = 2) -> Blocks:
    """`one`: every row has one new token; then reading the cache is all there is, and many programs share it"""
    if one:
        return Blocks(16, 64, 16, 4, 3) if head_dim <= 256 else Blocks(16, 32, 64, 4, 3)
    # The sum of values, queries x head size in float32, must stay in registers: 128 KB of them.
    wide = head_dim * itemsize > 512
    return Blocks(64, 32, 2, 8, 2) if wide else Blocks(64, 64, 2, 4, 2)


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
    return None


@triton.jit
def _tile(q, k, v, seen, acc, top, total):
    """One tile of keys and values, k and v [n, Dh], taken into the running softmax"""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E
    s = tl.where(seen, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit(do_not_specialize=["batch", "slots", "tokens", "blocks", "window"])
def _attend_kernel(
    q, k, v, keys, values, out, part, part_top, part_total, rows, lengths, begin, batch, slots, tokens, blocks, window,
    row_stride, head_stride, slot_stride, H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    ready(HOPPER)
    G: tl.constexpr = H // K
    # Programs that read the same keys run side by side.
    pid, all_blocks = tl.program_id(0), blocks * batch
    row, block = pid % all_blocks // blocks, pid % blocks
    kv, which = pid // all_blocks % K, pid // all_blocks // K
    start = tl.load(begin + row)
    count = tl.load(begin + row + 1) - start
    first = block * (BLOCK_M // G)
    if first >= count:
        return
    length = tl.load(lengths + row)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, DH)
    token = first + m // G
    live = token < count
    line = (start + token).to(tl.int64) * H + kv * G + m % G  # of q [N H, Dh]
    queries = tl.load(q + line[:, None] * DH + d[None, :], mask=live[:, None], other=0.0)

    held = tl.minimum(length, slots)
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
    high = tl.minimum(low + each, tiles)

    acc = tl.zeros((BLOCK_M, DH), tl.float32)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    base = tl.load(rows + row).to(tl.int64) * row_stride + kv.to(tl.int64) * head_stride
    for tile in range(low, tl.minimum(high, old)):
        slot = tile * BLOCK_N + n
        at = base + slot.to(tl.int64)[:, None] * slot_stride + d[None, :]
        inside = slot < held
        kt = tl.load(keys + at, mask=inside[:, None], other=0.0)
        vt = tl.load(values + at, mask=inside[:, None], other=0.0)
        seen = inside[None, :]
        if WINDOW:
            ago = length - 1 - slot  # of the slot's token, counted back from the last cached one
            ago = tl.where(ago < 0, ago + slots, ago % slots)
            if CAUSAL:
                seen = seen & (ago[None, :] + 1 + token[:, None] < window)
            else:
                seen = seen & (ago < window)[None, :]
        acc, top, total = _tile(queries, kt, vt, seen, acc, top, total)
    for tile in range(tl.maximum(low, old), high):
        other = (tile - old + skipped) * BLOCK_N + n
        at = ((start + other).to(tl.int64) * K + kv)[:, None] * DH + d[None, :]
        inside = other < count
        kt = tl.load(k + at, mask=inside[:, None], other=0.0)
        vt = tl.load(v + at, mask=inside[:, None], other=0.0)
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (other[None, :] <= token[:, None])
            if WINDOW:
                seen = seen & (token[:, None] - other[None, :] < window)
        acc, top, total = _tile(queries, kt, vt, seen, acc, top, total)

    if PARTS == 1:
        mean = acc / total[:, None]
        tl.store(out + line[:, None] * DH + d[None, :], mean.to(out.dtype.element_ty), mask=live[:, None])
    else:
        line += which.to(tl.int64) * tokens * H
        tl.store(part_top + line, top, mask=live)
        tl.store(part_total + line, total, mask=live)
        if low < high:
            tl.store(part + line[:, None] * DH + d[None, :], acc, mask=live[:, None])


@triton.jit(do_not_specialize=["rows", "lines"])
def _join_kernel(
    part, part_top, part_total, out, begin, rows, lines, H: tl.constexpr, DH: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one token (a line), some of its numbers -> out [N, H, Dh]"""
    ready(HOPPER)
    line = (tl.program_id(0) // (DH // BLOCK)).to(tl.int64)
    if line >= tl.load(begin + rows).to(tl.int64) * H:
        return
    at = tl.arange(0, PARTS).to(tl.int64) * lines + line
    top, total = tl.load(part_top + at), tl.load(part_total + at)
    weight = tl.exp2(top - tl.max(top))
    d = tl.program_id(0) % (DH // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    # A part without keys was never written.
    acc = tl.load(part + at[:, None] * DH + d[None, :], mask=(total > 0)[:, None], other=0.0)
    mean = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight)
    tl.store(out + line * DH + d, mean.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["slots", "batch"])
def _store_kernel(
    k, v, keys, values, rows, lengths, begin, slots, batch, row_stride, head_stride, slot_stride,
    K: tl.constexpr, DH: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """One new token's keys and values into the cache"""
    ready(HOPPER)
    token, row = tl.program_id(0) // batch, tl.program_id(0) % batch
    start, end = tl.load(begin + row), tl.load(begin + row + 1)
    if token < start or token >= end or token < end - slots:
        return
    slot = (tl.load(lengths + row) + token - start) % slots
    at = tl.arange(0, BLOCK)  # over K Dh
    into = tl.load(rows + row).to(tl.int64) * row_stride + at // DH * head_stride + slot.to(tl.int64) * slot_stride
    into += at % DH
    live = at < K * DH
    tl.store(keys + into, tl.load(k + token.to(tl.int64) * K * DH + at, mask=live), mask=live)
    tl.store(values + into, tl.load(v + token.to(tl.int64) * K * DH + at, mask=live), mask=live)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    new: New,
    causal: bool,
    window: int | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """As `attention_cached.attend`: q [N, H, Dh], k and v [N, K, Dh] -> [N, H, Dh]; tokens behind the last row's end
    are left as they are found."""
    check(q, k, v, prefix, new)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    rows = prefix.row.shape[0]
    group = heads // kv_heads
    b = blocks or blocks_for(head_dim, new.most == 1, q.element_size())
    each = triton.cdiv(new.most * group, b.queries)  # blocks of queries a row
    out = torch.empty_like(q)
    part = top = total = out  # not touched where there is one part only
    if b.parts > 1:
        part = torch.empty(b.parts, tokens, heads, head_dim, dtype=torch.float32, device=q.device)
        top, total = torch.empty(2, b.parts, tokens, heads, dtype=torch.float32, device=q.device)
    run(
        _attend_kernel, rows * each * kv_heads * b.parts, q, k, v, prefix.keys, prefix.values, out, part, top, total,
        prefix.row, prefix.length, new.begin,
        rows, slots, tokens, each, window or 0, *prefix.keys.stride()[:3], H=heads, K=kv_heads, DH=head_dim,
        CAUSAL=causal, WINDOW=window is not None, PARTS=b.parts, BLOCK_M=b.queries, BLOCK_N=b.keys,
        num_warps=b.warps, num_stages=b.stages,
    )  # fmt: skip
    if b.parts > 1:
        block = min(head_dim, 8192 // b.parts)
        run(
            _join_kernel, tokens * heads * (head_dim // block), part, top, total, out, new.begin, rows, tokens * heads,
            H=heads, DH=head_dim, BLOCK=block, PARTS=b.parts, num_warps=max(1, b.parts * block // 1024),
        )  # fmt: skip
    return out


def store(k: Tensor, v: Tensor, prefix: Prefix, new: New) -> None:
    """As `attention_cached.store`: the new tokens, k and v [N, K, Dh], go behind what is cached."""
    tokens, kv_heads, head_dim = k.shape
    rows, slots = prefix.row.shape[0], prefix.keys.shape[2]
    run(
        _store_kernel, tokens * rows, k.contiguous(), v.contiguous(), prefix.keys, prefix.values,
        prefix.row, prefix.length, new.begin, slots, rows,
        *prefix.keys.stride()[:3], K=kv_heads, DH=head_dim, BLOCK=triton.next_power_of_2(kv_heads * head_dim),
    )  # fmt: skip
