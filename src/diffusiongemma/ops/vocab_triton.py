# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The vocabulary end on a GPU: `vocab.vocab_end` without float32 logits in memory.

Three stages, none of which synchronises with the host:

1. weights (`weigh_triton.py`): every tile of logits becomes e = exp(z - its largest z) in bfloat16, and four numbers
   are kept of it: that largest z and where it is, the sum of e, and the sum of (z - largest) e. Either inside the LM
   head's product ("fused"), or over the bfloat16 logits that a library's product has written ("library").
2. result: the tiles' numbers together give argmax, entropy and log-probabilities; the uniform number picks a tile by
   its share, then a token in it.
3. soft embedding (`soft_triton.py`): the product of the weights with the embeddings.

The order of every sum is fixed and does not depend on N, so a row gets the same bits alone and in a batch. `few` lays
the product out for up to 16 rows (one token a user); as it changes the order of the sum, the caller says it.

Legend: N positions, D hidden, V vocabulary, T tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops import kernels
from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.kernels import unavailable
from diffusiongemma.ops.soft_triton import Parts, soft_embed
from diffusiongemma.ops.vocab import Reading, Rules, Table
from diffusiongemma.ops.weigh_triton import NEVER, WIDEST, Stats, head_blocks, reference, weigh_fused, weigh_library

How = Literal["fused", "library"]
CHUNK = 1024  # positions that are read at once unless told otherwise: 0.5 GB of weights (as fp8, 0.3 more)


def supported(hidden: Tensor, table: Table, soft: bool) -> str | None:
    """Why `vocab_end` cannot run on these, or None."""
    if reason := unavailable(hidden.device):
        return reason
    vocab, width = table.weight.shape
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        return f"hidden states must be bfloat16 or float32, not {hidden.dtype}"
    if table.scale is None and table.weight.dtype != hidden.dtype:
        return f"a table of {table.weight.dtype} for hidden states of {hidden.dtype}"
    if width % 16 or not table.weight.is_contiguous():
        return f"the table must be contiguous and its width a multiple of 16, not {width}"
    if soft and table.soft is None and table.scale is not None:
        return "an 8-bit table needs its fp8 copy for the soft embedding: Table.with_soft()"
    if soft and vocab % 16:
        return f"the soft embedding needs a vocabulary that is a multiple of 16, not {vocab}"
    return None


# ---- kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _passing(mass, target, index, size: tl.constexpr):
    """The first index at which the running sum of the masses passes the target, and the sum before it"""
    below = tl.cumsum(mass, axis=0)
    at = tl.min(tl.where((below > target) & (mass > 0), index, size))
    at = tl.minimum(at, tl.max(tl.where(mass > 0, index, 0)))  # rounding may not run past the last
    return at, tl.sum(tl.where(index == at, below - mass, 0.0))


@triton.jit
def _result_kernel(
    weights, uniform, temperature, peak, best, mass, tilt, factor, share, argmax, sample, entropy, logprob,
    sample_logprob, vocab, tiles, CAP: tl.constexpr, FIXED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    """One row: its tiles' numbers together. `factor` [N, T] brings a tile's weights to the row's largest logit, and
    `share` those to probabilities."""
    ready(HOPPER)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    real, place = tile < tiles, row * tiles + tile
    peaks = tl.load(peak + place, mask=real, other=NEVER)
    top = tl.max(peaks)
    if FIXED:
        zero = reference(1.0 / tl.load(temperature + row), CAP, FIXED)
        factors = tl.exp(zero - top) + tl.zeros((TILES,), tl.float32)
    else:
        factors = tl.exp(peaks - top)
    masses = tl.load(mass + place, mask=real, other=0.0)
    tilts = tl.load(tilt + place, mask=real, other=0.0)
    # A tile without any allowed token has a factor of 0, and nothing of it may count.
    tilts = tl.where(masses * factors > 0, factors * (tilts + (peaks - top) * masses), 0.0)
    masses *= factors
    total = tl.sum(masses)
    tl.store(factor + place, factors, mask=real)
    tl.store(share + row, 1.0 / total)
    first = tl.load(best + place, mask=real & (peaks == top), other=vocab)
    tl.store(argmax + row, tl.minimum(tl.min(first), vocab - 1).to(tl.int64))  # NaN must not lead astray
    tl.store(entropy + row, tl.maximum(tl.log(total) - tl.sum(tilts) / total, 0.0))
    tl.store(logprob + row, -tl.log(total))
    target = tl.load(uniform + row) * total
    chosen, before = _passing(masses, target, tile, TILES)
    inner = tl.arange(0, TILE)
    token = chosen * TILE + inner
    e = tl.load(weights + row * vocab + token, mask=token < vocab, other=0.0).to(tl.float32)
    # What is left of the target, as a share of this tile (whose weights were rounded after they were summed).
    rest = (target - before) / tl.sum(tl.where(tile == chosen, masses, 0.0)) * tl.sum(e)
    inside, _ = _passing(e, rest, inner, TILE)
    tl.store(sample + row, (chosen * TILE + inside).to(tl.int64))
    picked = tl.sum(tl.where(inner == inside, e, 0.0)) * tl.sum(tl.where(tile == chosen, factors, 0.0))
    tl.store(sample_logprob + row, tl.log(picked) - tl.log(total))


@triton.jit
def chance(seed, step, position, vocab):
    """Of each: a number from 0 on and below 1, and a token"""
    zero = (position * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), step.to(tl.uint32), zero, zero)
    number = (first >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24))
    return number, (second.to(tl.uint64) * vocab >> 32).to(tl.int64)


@triton.jit
def _draws_kernel(seed, step, position, uniform, token, count, vocab, BLOCK: tl.constexpr, HOPPER: tl.constexpr):
    ready(HOPPER)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    where, when = tl.load(position + at, mask=live, other=0), tl.load(step + at, mask=live, other=0)
    number, drawn = chance(tl.load(seed + at, mask=live, other=0), when, where, vocab)
    tl.store(uniform + at, number, mask=live)
    tl.store(token + at, drawn, mask=live)


# ---- what is called ----------------------------------------------------------------------------------------------


def vocab_end(
    hidden: Tensor,
    table: Table,
    rules: Rules,
    cap: float,
    embed_scale: float | None,
    how: How = "fused",
    soft_how: How = "fused",
    few: bool = False,
    coldest: float | None = None,
    skip: float = 0.0,
    at_once: int = CHUNK,
) -> Reading:
    """As `vocab.vocab_end`; `how` chooses whose matrix product makes the logits, `soft_how` the soft embedding.

    `coldest`: no temperature is below it. From cap / 78 on (0.39 for a cap of 30) weights then need no rescaling.
    `skip`: so much of a position's probability may be missing from its soft embedding, whose relative error is then at
    most that times the ratio of the embeddings' norms; tiles in which no position of a block has more than its share
    of it are not read. A row's bits then depend on its neighbours.
    `at_once`: positions for which the table is read once; their weights lie in memory meanwhile.
    """
    fixed = coldest is not None and cap / coldest <= WIDEST
    blocks = head_blocks(few, table.weight.dtype, kernels.card(hidden.device).small)
    parts = []
    for first in range(0, hidden.shape[0], at_once):
        x = hidden[first : first + at_once]
        part = rules.rows(first, first + at_once).contiguous()
        if how == "fused":
            weights, stats, tile = weigh_fused(x, table, part, cap, blocks, fixed)
        else:
            weights, stats, tile = weigh_library(x, table, part, cap, fixed)
        weighed = Weighed(weights, stats, tile, cap, fixed)
        parts.append(_finish(x, table, part, weighed, embed_scale, soft_how, skip))
    if len(parts) == 1:
        return parts[0]
    softs = [p.soft for p in parts if p.soft is not None]
    return Reading(
        torch.cat([p.argmax for p in parts]),
        torch.cat([p.sample for p in parts]),
        torch.cat([p.entropy for p in parts]),
        torch.cat([p.logprob for p in parts]),
        torch.cat([p.sample_logprob for p in parts]),
        torch.cat(softs) if softs else None,
    )


class Weighed(NamedTuple):
    weights: Tensor  # [N, V]
    stats: Stats
    tile: int  # tokens
    cap: float
    fixed: bool


def result(rules: Rules, w: Weighed) -> tuple[Tensor, Tensor, Reading]:
    """-> factor [N, T], share [N], and all but the soft embedding"""
    rows, tiles = w.stats.mass.shape
    device = w.weights.device
    factor = torch.empty_like(w.stats.mass)
    share, entropy, logprob, sample_logprob = torch.empty(4, rows, dtype=torch.float32, device=device)
    argmax, sample = torch.empty(2, rows, dtype=torch.int64, device=device)
    run(
        _result_kernel, rows, w.weights, rules.uniform, rules.temperature, *w.stats, factor, share,
        argmax, sample, entropy, logprob, sample_logprob, w.weights.shape[1], tiles, CAP=w.cap, FIXED=w.fixed,
        TILE=w.tile, TILES=triton.next_power_of_2(tiles), num_warps=4,
    )  # fmt: skip
    return factor, share, Reading(argmax, sample, entropy, logprob, sample_logprob, None)


def _finish(
    hidden: Tensor, table: Table, rules: Rules, w: Weighed, scale: float | None, how: How, skip: float
) -> Reading:
    factor, share, reading = result(rules, w)
    if scale is None:
        return reading
    parts = Parts(w.weights, factor, share, w.stats.mass, w.tile, w.fixed)
    return replace(reading, soft=soft_embed(parts, table, scale, hidden.dtype, how, skip))


def draws(seed: Tensor, step: Tensor, position: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """As `vocab.draws`, to the bit."""
    count = seed.shape[0]
    uniform = torch.empty(count, dtype=torch.float32, device=seed.device)
    token = torch.empty(count, dtype=torch.int64, device=seed.device)
    given = (t.contiguous() for t in (seed, step, position))
    run(_draws_kernel, triton.cdiv(count, 256), *given, uniform, token, count, vocab, BLOCK=256)
    return uniform, token
