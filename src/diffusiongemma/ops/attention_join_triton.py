# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The end of attention: the parts of `attention_triton` put away, put together and rounded for the next product, and
the new tokens put into the cache.

All but the first in one launch. A ring as large as the window has no slot to spare: a new token goes where the oldest
token lies that its own query sees. So new tokens are stored here, when attention has read all that it will, and not
before it.

Legend: as in `attention_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.early_triton import SEPARATE, ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.rows_triton import fp8_scale, to_fp8

NOTHING = tl.constexpr(-1e30)  # the largest score of a query that has seen no key yet: finite, so that no NaN appears
PIECE = tl.constexpr(32)  # numbers of a head that a program with all parts stores at once
HELD = 4  # parts of a token that one program can put together quickly


@triton.jit
def _put_numbers(into, x, live, M: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """x [M, WIDTH] to `into` [M], a piece after another"""
    if WIDTH > PIECE:
        left, right = tl.split(tl.permute(tl.reshape(x, (M, 2, WIDTH // 2)), (0, 2, 1)))
        _put_numbers(into, left, live, M, WIDTH // 2, PIECE)
        _put_numbers(into + WIDTH // 2, right, live, M, WIDTH // 2, PIECE)
    else:
        tl.store(into[:, None] + tl.arange(0, WIDTH)[None, :], x, mask=live[:, None])


@triton.jit
def put(part, part_top, part_total, into, live, acc, top, total, M: tl.constexpr, DH: tl.constexpr,
        PIECE: tl.constexpr):  # fmt: skip
    """A part's mean, and what the join must know of it"""
    tl.store(part_top + into, top, mask=live)
    tl.store(part_total + into, total, mask=live)
    mean = acc * (1.0 / tl.maximum(total, 1e-30))[:, None]  # a part without keys gives zeros
    _put_numbers(part + into * DH, mean.to(part.dtype.element_ty), live, M, DH, PIECE)


@triton.jit
def next_part(tile, edge, each, part, part_top, part_total, into, lines, live, acc, top, total, M: tl.constexpr,
              DH: tl.constexpr):  # fmt: skip
    """Before a tile that is the first of another part: the part before is put away"""
    if tile == edge:
        # Numbers pass through shared memory when they are stored, and that is full of keys and values on their way.
        put(part, part_top, part_total, into, live, acc, top, total, M, DH, PIECE)
        into += lines
        edge += each
        acc = tl.zeros((M, DH), tl.float32)
        top = tl.full((M,), NOTHING, tl.float32)
        total = tl.zeros((M,), tl.float32)
    return edge, into, acc, top, total


@triton.jit
def joined(part, part_top, part_total, line, used, d, lines, LINES: tl.constexpr, BLOCK: tl.constexpr,
           DH: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The parts of some lines (heads of tokens) put together, some of their numbers [LINES, BLOCK], as they are kept;
    of each line so many parts as `used` [LINES] says, the others are empty"""
    if PARTS == 1:
        return tl.load(part + line[:, None] * DH + d[None, :], mask=(used > 0)[:, None], other=0.0)
    # Part after part: as one block [P, lines, numbers] its sum goes through shared memory, and took 50 microseconds.
    best = tl.full((LINES,), NOTHING, tl.float32)
    for p in tl.static_range(PARTS):
        best = tl.maximum(best, tl.load(part_top + p * lines + line, mask=used > p, other=NOTHING))
    total = tl.where(used > 0, 0.0, 1.0)
    acc = tl.zeros((LINES, BLOCK), tl.float32)
    for p in tl.static_range(PARTS):
        at, live = p * lines + line, used > p
        weight = tl.load(part_total + at, mask=live, other=0.0)
        weight *= tl.exp2(tl.load(part_top + at, mask=live, other=NOTHING) - best)
        mean = tl.load(part + at[:, None] * DH + d[None, :], mask=live[:, None], other=0.0)
        acc = tl.fma(mean.to(tl.float32), weight[:, None], acc)
        total += weight
    return (acc / total[:, None]).to(part.dtype.element_ty)


@triton.jit
def _keep(k, v, keys, values, rows, lengths, begin, token, slots, batch, row_stride, head_stride, slot_stride,
          K: tl.constexpr, DH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """One new token's keys and values into the cache, if it belongs to a row and is among its last"""
    b = tl.arange(0, ROWS)
    ends = tl.load(begin + 1 + b, mask=b < batch, other=0x7FFFFFFF)
    row = tl.sum((ends <= token).to(tl.int32))  # whose end is the first behind it
    end = tl.load(begin + 1 + tl.minimum(row, batch - 1))
    if (row < batch) & (token >= end - slots):
        slot = (tl.load(lengths + row) + token - tl.load(begin + row)) % slots
        at = tl.arange(0, BLOCK)  # over K Dh
        into = tl.load(rows + row).to(tl.int64) * row_stride + slot.to(tl.int64) * slot_stride
        into += at // DH * head_stride + at % DH
        live = at < K * DH
        tl.store(keys + into, tl.load(k + token.to(tl.int64) * K * DH + at, mask=live), mask=live)
        tl.store(values + into, tl.load(v + token.to(tl.int64) * K * DH + at, mask=live), mask=live)


@triton.jit(do_not_specialize=["joins", "lines", "slots", "batch"])
def _join_kernel(
    part, part_top, part_total, out, scale, joins, lines, k, v, keys, values, rows, lengths, begin, slots, batch,
    row_stride, head_stride, slot_stride, H: tl.constexpr, K: tl.constexpr, DH: tl.constexpr, BLOCK: tl.constexpr,
    LINES: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    """Programs below `joins`: parts -> out [N, H, Dh]; with a scale, those of a token, in fp8. The others put a new
    token each into the cache: all that is cached has been read by now."""
    ready(HOPPER)
    pid = tl.program_id(0)
    if pid < joins:
        if scale is not None:
            head = tl.arange(0, LINES)
            line, live = pid.to(tl.int64) * H + head, head < H
            used, d = tl.where(live, PARTS, 0), tl.arange(0, DH)
            mean = joined(part, part_top, part_total, line, used, d, lines, LINES, DH, DH, PARTS).to(tl.float32)
            s = fp8_scale(tl.max(tl.max(tl.abs(mean), axis=1), axis=0))
            tl.store(scale + pid, s)
            tl.store(out + line[:, None] * DH + d[None, :], to_fp8(mean, s, HOPPER), mask=live[:, None])
        else:
            line = (pid // (DH // BLOCK)).to(tl.int64) * LINES + tl.arange(0, LINES)
            live = line < lines
            d = pid % (DH // BLOCK) * BLOCK + tl.arange(0, BLOCK)
            used = tl.where(live, PARTS, 0)
            mean = joined(part, part_top, part_total, line, used, d, lines, LINES, BLOCK, DH, PARTS)
            tl.store(out + line[:, None] * DH + d[None, :], mean, mask=live[:, None])
    elif KEEP:
        _keep(k, v, keys, values, rows, lengths, begin, pid - joins, slots, batch, row_stride, head_stride, slot_stride,
              K, DH, WIDE, ROWS)  # fmt: skip


@triton.jit(do_not_specialize=["slots", "batch"])
def _store_kernel(
    k, v, keys, values, rows, lengths, begin, slots, batch, row_stride, head_stride, slot_stride,
    K: tl.constexpr, DH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    ready(HOPPER)
    _keep(k, v, keys, values, rows, lengths, begin, tl.program_id(0), slots, batch, row_stride, head_stride,
          slot_stride, K, DH, BLOCK, ROWS)  # fmt: skip


def join(
    part: Tensor, top: Tensor, total: Tensor, quant: torch.dtype | None, keep: tuple[Tensor, Tensor, Prefix, New] | None
) -> Rows:
    """Parts [P, N, H, Dh] -> [N, H Dh], in fp8 if one program can hold a token; `keep`: what goes into the cache"""
    parts, tokens, heads, head_dim = part.shape
    if parts == 1 and quant is None:
        if keep:
            store(*keep)
        return Rows(part.view(tokens, -1))
    if quant is not None and parts <= HELD:
        out, scale = part.new_empty(tokens, heads * head_dim, dtype=quant), total.new_empty(tokens, 1)
        joins, block, lines = tokens, head_dim, triton.next_power_of_2(heads)
        warps = min(16, max(1, lines * head_dim // 512))
    else:
        out, scale = part.new_empty(tokens, heads * head_dim), None
        # 4,096 numbers a program: enough loads in flight, and enough programs
        block = min(head_dim, max(16, 4096 // parts))
        lines = max(1, 4096 // (parts * block))
        joins, warps = triton.cdiv(tokens * heads, lines) * (head_dim // block), 4
    where, shape = _places(*keep) if keep else ((None,) * 7 + (0,) * 5, {"K": 1, "ROWS": 1})
    run(
        _join_kernel, joins + (tokens if keep else 0), part, top, total, out, scale, joins, tokens * heads, *where,
        **shape, H=heads, DH=head_dim, BLOCK=block, LINES=lines, PARTS=parts, KEEP=keep is not None,
        WIDE=triton.next_power_of_2(shape["K"] * head_dim), num_warps=warps, **SEPARATE,
    )  # fmt: skip
    return Rows(out, scale)


def _places(k: Tensor, v: Tensor, prefix: Prefix, new: New) -> tuple[tuple[Tensor | int, ...], dict[str, int]]:
    """Where new tokens lie and where they go, as `_keep` wants it"""
    rows, slots = prefix.row.shape[0], prefix.keys.shape[2]
    where = (k, v, prefix.keys, prefix.values, prefix.row, prefix.length, new.begin, slots, rows)
    return (*where, *prefix.keys.stride()[:3]), {"K": k.shape[1], "ROWS": triton.next_power_of_2(rows)}


def store(k: Tensor, v: Tensor, prefix: Prefix, new: New) -> None:
    """As `attention_cached.store`: the new tokens, k and v [N, K, Dh], go behind what is cached."""
    tokens, kv_heads, head_dim = k.shape
    where, shape = _places(k.contiguous(), v.contiguous(), prefix, new)
    wide = triton.next_power_of_2(kv_heads * head_dim)
    run(_store_kernel, tokens, *where, **shape, DH=head_dim, BLOCK=wide)
