# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of one new token a row, from the product that makes its heads to the cache that keeps it, in one kernel.
Twin of `one.attend`.

A program has one row, one K/V head and one part of the row's cached keys. It norms and turns its group's queries and
the new key by itself, which is cheap; the last part has the new token too. The program of a row and head that comes
last joins the parts, in order, and puts the token into the cache: a ring has no slot to spare, so that must wait until
all have read (`attention_join_triton`). Parts depend on the row's own length: a row has the same bits in any batch.

What is cached was written by the pass before, which ended long ago: the first tile is asked for while the kernel ahead
still multiplies.

Legend: B rows, H query heads, K key/value heads, G = H / K, Dh head size, S slots, P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.attention_triton import NOTHING, taken
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.last_triton import is_last
from diffusiongemma.ops.rope import Rope

LOG2E = tl.constexpr(1.4426950408889634)
QUERIES = tl.constexpr(16)  # the least that tensor cores take
AT_ONCE = tl.constexpr(8)  # parts that are read together when they are joined


class Split(NamedTuple):
    keys: int  # of a tile
    parts: int  # the most, a power of two
    alone: int  # up to so many tiles, each is a part; beyond, a part has two at least, for parts cost time to join
    warps: int
    stages: int


def split_for(head_dim: int) -> Split:
    return Split(64, 16, 16, 4, 2) if head_dim <= 256 else Split(32, 64, 16, 8, 2)


@triton.jit
def _turned(at, live, weight, cos, sin, eps, DH: tl.constexpr):
    """Heads [M, Dh] that begin at [M, 1], normed and turned; in float32"""
    HALF: tl.constexpr = DH // 2
    c = tl.arange(0, DH)[None, :]
    other = (c + HALF) % DH  # the number that it is turned with
    a = tl.load(at + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + other, mask=live, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(a * a, axis=1) / DH + eps)[:, None]
    a = a * inverse * tl.load(weight + c).to(tl.float32)
    b = b * inverse * tl.load(weight + other).to(tl.float32)
    cosine, sine = tl.load(cos + c % HALF).to(tl.float32), tl.load(sin + c % HALF).to(tl.float32)
    return a * cosine + tl.where(c < HALF, -b, b) * sine


@triton.jit
def _cached(keys, values, tile, held, slot_stride, DH: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile of cached keys and values, [n, Dh] each; what was never written is not read (0 x NaN would be NaN)"""
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = slot.to(tl.int64)[:, None] * slot_stride + tl.arange(0, DH)[None, :]
    ok = (slot < held)[:, None]
    return tl.load(keys + at, mask=ok, other=0.0), tl.load(values + at, mask=ok, other=0.0)


@triton.jit
def _seen(tile, held, newest, slots, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """[n]: which slots of a tile the new token sees"""
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = slot < held
    if WINDOW:
        ago = newest - slot  # of the slot's token, counted back from the last cached one
        seen = seen & (tl.where(ago < 0, ago + slots, ago) + 1 < window)
    return seen


@triton.jit
def _joined(part, part_top, part_total, first, works, G: tl.constexpr, DH: tl.constexpr, PARTS: tl.constexpr):
    """The parts from line `first` on put together, part after part: [G, Dh]"""
    g, d, p = tl.arange(0, G), tl.arange(0, DH), tl.arange(0, PARTS)
    tops = tl.load(part_top + first + p[:, None] * G + g[None, :], mask=(p < works)[:, None], other=NOTHING,
                   cache_modifier=".cg")  # fmt: skip
    best = tl.max(tops, axis=0)
    acc = tl.zeros((G, DH), tl.float32)
    total = tl.zeros((G,), tl.float32)
    for begin in range(0, works, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            at = (begin + i) * G + g
            line, ok = first + at, at < works * G
            weight = tl.load(part_total + line, mask=ok, other=0.0, cache_modifier=".cg")
            weight *= tl.exp2(tl.load(part_top + line, mask=ok, other=NOTHING, cache_modifier=".cg") - best)
            mean = tl.load(part + line[:, None] * DH + d[None, :], mask=ok[:, None], other=0.0, cache_modifier=".cg")
            acc += mean.to(tl.float32) * weight[:, None]
            total += weight
    return acc / total[:, None]


@triton.jit(do_not_specialize=["slots", "window"])
def attend_one_kernel(
    qkv, q_weight, k_weight, cos, sin, keys, values, rows, lengths, begin, part, part_top, part_total, counters, out,
    slots, window, row_stride, head_stride, slot_stride, eps, H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr,
    SHARED: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, ALONE: tl.constexpr, BLOCK_N: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // K
    HEADS: tl.constexpr = H + K if SHARED else H + 2 * K  # of qkv
    pair, which = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row, kv = pair // K, pair % K
    # No kernel of this pass writes what is read before `ready`: lengths, places, and what is cached.
    token, end = tl.load(begin + row), tl.load(begin + row + 1)
    length = tl.load(lengths + row)
    place = tl.load(rows + row).to(tl.int64) * row_stride + kv * head_stride
    held = tl.where(token < end, tl.minimum(length, slots), 0)
    tiles = tl.cdiv(held, BLOCK_N)
    each = tl.maximum(tl.cdiv(tiles, PARTS), tl.where(tiles > ALONE, 2, 1))
    works = tl.maximum(tl.cdiv(tiles, each), 1)  # parts that there are
    low = which * each
    high = tl.minimum(low + each, tiles)
    newest = (length - 1) % slots  # the slot that was written last
    kt, vt = _cached(keys + place, values + place, low, held, slot_stride, DH, BLOCK_N)
    ready(HOPPER)
    if (token >= end) | (which >= works):  # a row without a new token changes nothing
        return
    kind: tl.constexpr = out.dtype.element_ty
    m, d = tl.arange(0, QUERIES), tl.arange(0, DH)
    heads = qkv + token.to(tl.int64) * (HEADS * DH)
    cos += token * (DH // 2)
    sin += token * (DH // 2)
    live = (m < G)[:, None]
    q = _turned(heads + (kv * G + m)[:, None] * DH, live, q_weight, cos, sin, eps, DH).to(kind)
    own = tl.arange(0, 1)[:, None] + H + kv  # the head of the new key
    k = _turned(heads + own * DH, own >= 0, k_weight, cos, sin, eps, DH).to(kind)
    v = tl.load(heads + (H + kv if SHARED else H + K + kv) * DH + d).to(tl.float32)
    v = (v * (1.0 / tl.sqrt(tl.sum(v * v) / DH + eps))).to(kind)

    # The last part begins with the new token, the others with nothing.
    last = which == works - 1
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * LOG2E
    top = tl.where(last, score, NOTHING)
    total = tl.where(last, 1.0, 0.0) + tl.zeros((QUERIES,), tl.float32)
    acc = tl.where(last, v.to(tl.float32), 0.0)[None, :] + tl.zeros((QUERIES, DH), tl.float32)
    seen = _seen(low, held, newest, slots, window, WINDOW, BLOCK_N)
    acc, top, total = taken(q, kt, vt, seen, acc, top, total, False)
    for tile in range(low + 1, high):
        kt, vt = _cached(keys + place, values + place, tile, held, slot_stride, DH, BLOCK_N)
        seen = _seen(tile, held, newest, slots, window, WINDOW, BLOCK_N)
        acc, top, total = taken(q, kt, vt, seen, acc, top, total, False)

    first = pair * (PARTS * G)
    line = first + which * G + m
    tl.store(part_top + line, top, mask=m < G)
    tl.store(part_total + line, total, mask=m < G)
    mean = acc * (1.0 / tl.maximum(total, 1e-30))[:, None]  # a part without keys gives zeros
    tl.store(part + line[:, None] * DH + d[None, :], mean.to(kind), mask=live)
    if is_last(counters + pair, works):
        mixed = _joined(part, part_top, part_total, first, works, G, DH, PARTS)
        head = token.to(tl.int64) * H + kv * G + tl.arange(0, G)
        tl.store(out + head[:, None] * DH + d[None, :], mixed.to(kind))
        into = place + (length % slots).to(tl.int64) * slot_stride
        tl.store(keys + into + d[None, :], k)
        tl.store(values + into + d, v)


def attend(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Rope, heads: int, kv_heads: int, eps: float, prefix: Prefix,
    new: New, window: int | None, counters: Tensor, split: Split | None = None,
) -> Tensor:  # fmt: skip
    """As `one.attend`; counters: B K zeros at least"""
    tokens, head_dim, rows = len(qkv), q_weight.shape[0], len(prefix.row)
    total, slots = qkv.shape[1] // head_dim, prefix.keys.shape[2]
    assert new.most == 1, "one token a row"
    assert counters.numel() >= rows * kv_heads, f"{rows} x {kv_heads} counters are needed, not {counters.numel()}"
    assert total in (heads + kv_heads, heads + 2 * kv_heads), f"{total} heads are not {heads} and {kv_heads}"
    assert prefix.keys.stride() == prefix.values.stride()
    assert prefix.keys.stride(3) == 1
    s = split or split_for(head_dim)
    cos, sin = (t.contiguous() for t in rope)
    parts = rows * kv_heads * s.parts
    part = torch.empty(parts, heads // kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    top, whole = torch.empty(2, parts, heads // kv_heads, dtype=torch.float32, device=qkv.device)
    out = torch.empty(tokens, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    run(
        attend_one_kernel, parts, qkv.contiguous(), q_weight, k_weight, cos, sin, prefix.keys, prefix.values,
        prefix.row, prefix.length, new.begin, part, top, whole, counters, out, slots, window or 0,
        *prefix.keys.stride()[:3], eps, H=heads, K=kv_heads, DH=head_dim, SHARED=total == heads + kv_heads,
        WINDOW=window is not None, PARTS=s.parts, ALONE=s.alone, BLOCK_N=s.keys, num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
    return out
