# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The first stage of the vocabulary end: logits become weights and four numbers a tile (see `vocab_triton`).

On Hopper, `weigh_gluon` does the same where no position has pins or bans: with the same bits, sooner.

Legend: N positions, D hidden, V vocabulary, T tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.errors import InputError
from diffusiongemma.ops.copies_triton import described, tile_at
from diffusiongemma.ops.early_triton import multiprocessors, ready, run
from diffusiongemma.ops.kernels import gluon
from diffusiongemma.ops.norm_triton import quantize_rows
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.vocab import WORD, Rules, Table

READ_TILE = 1024  # tokens a tile in the "library" way
READ_TILES = 8  # tiles a program
# exp(z - reference) stays within exp(-87) … exp(70), and a sum of 2^18 such numbers finite, for z within ± 78.
SPAN = tl.constexpr(70.0)
WIDEST = 78.0
NEVER = tl.constexpr(-1e30)  # a logit that no token has: its weight is 0, and no sum of it is NaN


class Blocks(NamedTuple):
    """The tile of one program of the fused product."""

    rows: int
    vocab: int
    depth: int
    warps: int
    stages: int
    resident: int = 1  # programs on a multiprocessor


def head_blocks(few: bool, dtype: torch.dtype, small: bool = False) -> Blocks:
    """For a table of this dtype; `small`: on a card with less shared memory than Hopper"""
    if dtype.itemsize == 4:  # no tensor cores: for tests
        return Blocks(32, 128, 64, 4, 2)
    if few:  # reading the table is all there is: many small programs keep more of it on its way
        return Blocks(16, 128, 256 // dtype.itemsize, 4, 3 if small else 5, 16)
    if small:
        return Blocks(128, 128, 128 // dtype.itemsize, 8, 3)
    # Two programs on a multiprocessor: one multiplies while the other makes its weights.
    return Blocks(128, 128, 128 // dtype.itemsize, 4, 3, 2)


@triton.jit
def _capped(raw, inverse, CAP: tl.constexpr):
    # tanh(u) = 1 - 2 / (exp(2 u) + 1): two special functions, and an absolute error of 1e-7. The root is a division
    # that costs two operations less.
    root = tl.rsqrt(tl.exp(raw * (2 / CAP)) + 1.0)
    return (CAP - (2 * CAP) * (root * root)) * inverse


@triton.jit
def reference(inverse, CAP: tl.constexpr, FIXED: tl.constexpr):
    """What is taken off a position's logits where that does not depend on them; `inverse`: 1 / temperature"""
    if FIXED:
        return tl.maximum(CAP * inverse - SPAN, 0.0)
    return inverse * 0.0


@triton.jit
def _bar(z, tokens, sets, banned, words):
    """NEVER where the position's set bans the token; tokens and sets broadcast to z"""
    held = (sets >= 0) & (tokens // 32 < words)
    bits = tl.load(banned + sets * words + tokens // 32, mask=held, other=0)
    return tl.where((bits >> (tokens % 32)) & 1 != 0, NEVER, z)


@triton.jit(do_not_specialize=["rows"])
def _head_kernel(
    x, w, x_scale, w_scale, temperature, pin, banned, banned_set, weights, peak, best, mass, tilt, rows, vocab, words,
    D: tl.constexpr, CAP: tl.constexpr, EIGHT: tl.constexpr, INT: tl.constexpr, PINS: tl.constexpr, BANS: tl.constexpr,
    FIXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """A tile of hidden [N, D] times table [V, D], transposed, and what is kept of it."""
    ready(HOPPER)
    WIDTH: tl.constexpr = D if D % BLOCK_K else None
    blocks = tl.cdiv(rows, BLOCK_N)
    tiles = tl.cdiv(vocab, BLOCK_V)
    # Each program has many tiles, as one loop: the next tile is on its way while this one's weights are made.
    for item in tl.range(tl.program_id(0), tiles * blocks, tl.num_programs(0), flatten=True):
        # Programs that share a tile of the table run side by side: it comes from memory once.
        tile, block = item // blocks, item % blocks
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.int32 if INT else tl.float32)
        for k in range(0, D, BLOCK_K):
            a = tile_at(x, block * BLOCK_N, k, rows, WIDTH, D, BLOCK_N, BLOCK_K)
            b = tile_at(w, tile * BLOCK_V, k, vocab, WIDTH, D, BLOCK_V, BLOCK_K)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee", out_dtype=acc.dtype)
        row = block * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        live = row < rows
        raw = acc.to(tl.float32)
        if EIGHT:
            raw *= tl.load(x_scale + row, mask=live, other=0.0)[:, None]
            raw *= tl.load(w_scale + token, mask=token < vocab, other=0.0)[None, :]
        inverse = 1.0 / tl.load(temperature + row, mask=live, other=1.0)[:, None]
        zero = reference(inverse, CAP, FIXED)
        z = _capped(raw, inverse, CAP)
        if BANS:
            sets = tl.load(banned_set + row, mask=live, other=-1)[:, None]
            word = tile * (BLOCK_V // 32) + tl.arange(0, BLOCK_V // 32)[None, :]
            some = tl.load(banned + sets * words + word, mask=(sets >= 0) & (word < words), other=0)
            if tl.max(tl.where(some != 0, 1, 0)) > 0:  # most tiles have no banned token
                # Not by `_bar`: a load for every number would have all sums made in an order that suits the load.
                bits = (some[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
                z = tl.where(tl.reshape(bits, z.shape) != 0, NEVER, z)
        if PINS:
            held = tl.load(pin + row, mask=live, other=-1)[:, None]
            z = tl.where(held >= 0, tl.where(token[None, :] == held, zero, NEVER), z)
        z = tl.where(token[None, :] < vocab, z, NEVER)
        top = tl.max(z, axis=1)
        at = tl.min(tl.where(z == top[:, None], token[None, :], vocab), axis=1)  # less than a maximum with its place
        e = tl.exp(z - (zero if FIXED else top[:, None]))
        z -= top[:, None]
        place = row.to(tl.int64) * tiles + tile
        tl.store(peak + place, top, mask=live)
        tl.store(best + place, at, mask=live)
        tl.store(mass + place, tl.sum(e, axis=1), mask=live)
        tl.store(tilt + place, tl.sum(z * e, axis=1), mask=live)
        inside = live[:, None] & (token[None, :] < vocab)
        into = weights + row.to(tl.int64)[:, None] * vocab + token[None, :]
        tl.store(into, e.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _weigh_kernel(
    logits, temperature, pin, banned, banned_set, peak, best, mass, tilt, vocab, words, tiles,
    CAP: tl.constexpr, PINS: tl.constexpr, BANS: tl.constexpr, FIXED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """The same for logits [N, V] that are there; their weights replace them."""
    ready(HOPPER)
    groups = tl.cdiv(tiles, TILES)
    row, tile = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = token < vocab
    raw = tl.load(logits + row * vocab + token, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.load(temperature + row)
    zero = reference(inverse, CAP, FIXED)
    z = _capped(raw, inverse, CAP)
    if BANS:
        sets = tl.load(banned_set + row + tl.zeros((1, 1), tl.int64))
        z = _bar(z, token, sets, banned, words)
    if PINS:
        held = tl.load(pin + row)
        if held >= 0:
            z = tl.where(token == held, zero, NEVER)
    z = tl.where(inside, z, NEVER)
    top, at = tl.max(z, axis=1, return_indices=True)
    e = tl.exp(z - (zero if FIXED else top[:, None]))
    z -= top[:, None]
    real = tile < tiles
    tl.store(peak + row * tiles + tile, top, mask=real)
    tl.store(best + row * tiles + tile, tile * TILE + at, mask=real)
    tl.store(mass + row * tiles + tile, tl.sum(e, axis=1), mask=real)
    tl.store(tilt + row * tiles + tile, tl.sum(z * e, axis=1), mask=real)
    tl.store(logits + row * vocab + token, e.to(logits.dtype.element_ty), mask=inside)


class Stats(NamedTuple):
    """What is kept of every tile, [N, T] each."""

    peak: Tensor
    best: Tensor  # int32
    mass: Tensor
    tilt: Tensor

    @classmethod
    def empty(cls, rows: int, tiles: int, device: torch.device) -> Stats:
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
        return cls(*(torch.empty(rows, tiles, dtype=kind, device=device) for kind in kinds))


def streams(table: Table, rules: Rules, b: Blocks, dtype: torch.dtype) -> bool:
    """Can `weigh_gluon` make these weights? It has tiles of 128 and 128 bytes, no pins and no bans, and stores rows of
    whole 16 bytes, in bfloat16."""
    lines = b.rows == b.vocab == b.depth * table.weight.element_size() == 128
    if not lines or any(_flags(rules).values()) or dtype != torch.bfloat16:
        return False
    return table.weight.shape[0] % 8 == 0 and gluon(table.weight.device)


def weigh_fused(
    hidden: Tensor, table: Table, rules: Rules, cap: float, b: Blocks, fixed: bool = False, stream: bool = True
) -> tuple[Tensor, Stats, int]:
    """hidden [N, D] -> weights [N, V], their statistics, tokens a tile; `fixed`: relative to `reference`; `stream`: by
    `weigh_gluon` where that can be, with the same bits"""
    rows, width = hidden.shape
    vocab = table.weight.shape[0]
    x, x_scale = hidden.contiguous(), None
    if table.scale is not None:
        x, x_scale = quantize_rows(x, table.weight.dtype)
    tiles = triton.cdiv(vocab, b.vocab)
    weights = torch.empty(rows, vocab, dtype=hidden.dtype, device=hidden.device)
    stats = Stats.empty(rows, tiles, hidden.device)
    if stream and streams(table, rules, b, weights.dtype):
        from diffusiongemma.ops.weigh_gluon import head_streamed

        head_streamed(x, x_scale, table.weight, table.scale, rules.temperature, weights, stats, cap, fixed)
        return weights, stats, b.vocab
    run(
        _head_kernel, min(tiles * triton.cdiv(rows, b.rows), b.resident * multiprocessors(x.device)),
        described(x, [b.rows, b.depth]), described(table.weight, [b.vocab, b.depth]), x_scale, table.scale,
        *_rules(rules), weights, *stats, rows, vocab, _words(rules),
        D=width, CAP=cap, EIGHT=table.scale is not None, INT=table.weight.dtype == torch.int8, **_flags(rules),
        FIXED=fixed, BLOCK_N=b.rows, BLOCK_V=b.vocab, BLOCK_K=b.depth, num_warps=b.warps, num_stages=b.stages,
    )  # fmt: skip
    return weights, stats, b.vocab


def weigh_library(
    hidden: Tensor, table: Table, rules: Rules, cap: float, fixed: bool = False
) -> tuple[Tensor, Stats, int]:
    """The same from the logits of a library's product, in bfloat16."""
    if table.scale is None:
        return weigh_logits(F.linear(hidden, table.weight), rules, cap, fixed)
    if table.weight.dtype != FP8:
        raise InputError("there is no library product for an int8 table: use how='fused'")
    return weigh_logits(library_fp8(hidden, table), rules, cap, fixed)


def library_fp8(hidden: Tensor, table: Table) -> Tensor:
    """hidden [N, D] -> logits [N, V] in bfloat16"""
    assert table.scale is not None
    x, scale = quantize_rows(hidden, FP8)
    weight, weight_scale = table.weight.t(), table.scale.view(1, -1)
    return torch._scaled_mm(x, weight, scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16)


def weigh_logits(logits: Tensor, rules: Rules, cap: float, fixed: bool = False) -> tuple[Tensor, Stats, int]:
    """Logits [N, V], not capped, overwritten by their weights -> weights, their statistics, tokens a tile"""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, READ_TILE)
    stats = Stats.empty(rows, tiles, logits.device)
    run(
        _weigh_kernel, rows * triton.cdiv(tiles, READ_TILES),
        logits, *_rules(rules), *stats, vocab, _words(rules), tiles,
        CAP=cap, **_flags(rules), FIXED=fixed, TILE=READ_TILE, TILES=READ_TILES, num_warps=8,
    )  # fmt: skip
    return logits, stats, READ_TILE


def _rules(rules: Rules) -> tuple[Tensor | None, ...]:
    return rules.temperature, rules.pin, rules.banned, rules.banned_set


def _words(rules: Rules) -> int:
    return 0 if rules.banned is None else rules.banned.shape[1]


def _flags(rules: Rules) -> dict[str, bool]:
    assert rules.banned is None or rules.banned.dtype == torch.int32, f"sets are words of {WORD} bits"
    return {"PINS": rules.pin is not None, "BANS": rules.banned is not None and rules.banned_set is not None}
