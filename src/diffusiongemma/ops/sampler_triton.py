# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The sampler on a GPU: twins of `sampler`, three kernels where torch launches some sixty.

A canvas is one program's. Nothing is sorted: what is summed before a position are the entropies that are smaller, or
equal and further left, and all pairs of 256 positions are soon compared. Sums are of whole numbers, so they are those
of any order.

Legend: as in `sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import SEPARATE, ready, run
from diffusiongemma.ops.sampler import FINE as FINE_
from diffusiongemma.ops.sampler import LOST as LOST_
from diffusiongemma.ops.sampler import State
from diffusiongemma.ops.vocab import Reading
from diffusiongemma.ops.vocab_triton import chance

FINE, LOST = tl.constexpr(FINE_), tl.constexpr(LOST_)
OTHERS, PAIRS = 32, 8192  # positions that all are compared with at once, and pairs that fit in registers


@triton.jit(do_not_specialize=["count", "width", "rows"])
def _prepare_kernel(counts, reals, seed, temperature, uniform, noise, count, width, rows, vocab, BLOCK: tl.constexpr,
                    HOPPER: tl.constexpr):  # fmt: skip
    """`rows`: from one setting of a canvas to the next"""
    ready(HOPPER)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    row = at // width
    step = tl.load(counts + row, mask=live, other=0)
    steps = tl.load(counts + 3 * rows + row, mask=live, other=1)
    t_min, t_max = tl.load(reals + row, mask=live, other=0.0), tl.load(reals + rows + row, mask=live, other=0.0)
    left = tl.div_rn((steps - step).to(tl.float32), steps.to(tl.float32))
    tl.store(temperature + at, t_min + (t_max - t_min) * left, mask=live)
    drawn = tl.load(counts + rows + row, mask=live, other=0)
    number, token = chance(tl.load(seed + row, mask=live, other=0), drawn, at % width, vocab)
    tl.store(uniform + at, number, mask=live)
    tl.store(noise + at, token, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _believe_kernel(soft, counts, into, rows, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr):
    """soft [B, NUMBERS] -> what the canvases are conditioned on: zeros where a canvas forgets"""
    ready(HOPPER)
    pieces: tl.constexpr = (NUMBERS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // pieces
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    forget = tl.load(counts + 5 * rows + row)
    forgets = (forget > 0) & ((tl.load(counts + row) + 1) % tl.maximum(forget, 1) == 0)
    place = row.to(tl.int64) * NUMBERS + at
    belief = tl.load(soft + place, mask=at < NUMBERS, other=0.0)
    tl.store(into + place, tl.where(forgets, 0.0, belief), mask=at < NUMBERS)


@triton.jit
def _key(entropy):
    """Whole numbers in the order of these: NaN is last, and no zero is below another"""
    bits = (entropy + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(entropy != entropy, 0x7FFFFFFF, bits)


@triton.jit
def _whole(entropy):
    """As parts of a nat"""
    finite = tl.where((entropy != entropy) | (entropy == float("inf")), LOST, entropy)
    return (finite * FINE).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def _decide_kernel(
    argmax, sample, entropy, logprob, noise, tokens, previous, pin, counts, reals, out, rows, L: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """One canvas"""
    ready(HOPPER)
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    live = at < L
    place = row * L + at
    e = tl.load(entropy + place, mask=live, other=float("inf"))
    best = tl.load(argmax + place, mask=live, other=0)
    free = live & (tl.load(pin + place, mask=live, other=0) < 0)
    key = _key(e)
    # The entropies of all that come before, in the order of a stable sort
    each = tl.zeros((BLOCK, OTHERS), tl.int64)  # summed at the end: sums go through several threads
    for first in range(0, L, OTHERS):
        other = first + tl.arange(0, OTHERS)
        theirs = tl.load(entropy + row * L + other, mask=other < L, other=0.0)
        smaller = _key(theirs)[None, :] < key[:, None]
        earlier = (_key(theirs)[None, :] == key[:, None]) & (other[None, :] < at[:, None])
        counted = (smaller | earlier) & (other < L)[None, :]
        each += tl.where(counted, _whole(theirs)[None, :], 0)
    before = tl.sum(each, axis=1)
    bound = tl.load(reals + 2 * rows + row).to(tl.float64) * FINE
    threshold, confidence = tl.load(reals + 3 * rows + row), tl.load(reals + 4 * rows + row)
    sure = tl.where(live, tl.exp(tl.load(logprob + place, mask=live, other=0.0)), -1.0)
    lost = tl.max((sure != sure).to(tl.int32)) > 0  # as torch: with NaN among them none is the surest
    confident = (sure >= threshold) | ((sure == tl.max(sure)) & (lost == 0))
    accepted = tl.where(threshold < 0, before.to(tl.float64) <= bound, confident) & live
    # Pins are always accepted, and that is no progress: one free position at least, if there is any.
    some_free, some = tl.max(free.to(tl.int32)) > 0, tl.max((accepted & free).to(tl.int32)) > 0
    rank = tl.where(free, tl.where(e != e, -0x7FFFFFFF, key), 0x7FFFFFFF)
    least = tl.min(tl.where(rank == tl.min(rank), at, BLOCK))
    accepted = accepted | (some_free & (some == 0) & (at == least))
    total = tl.sum(tl.where(free, _whole(e), 0)).to(tl.float64) / FINE
    mean = (total / tl.maximum(tl.sum(free.to(tl.int32)), 1).to(tl.float64)).to(tl.float32)
    changed = tl.max((live & (best != tl.load(previous + place, mask=live, other=0))).to(tl.int32))
    step, drawn = tl.load(counts + row), tl.load(counts + rows + row)
    unchanged = tl.where(changed > 0, 0, tl.load(counts + 2 * rows + row) + 1)
    stopped = (mean < confidence) & (unchanged >= tl.load(counts + 4 * rows + row))
    done = stopped | (step + 1 >= tl.load(counts + 3 * rows + row))
    chosen = tl.load(sample + place, mask=live, other=0)
    tl.store(tokens + place, tl.where(accepted, chosen, tl.load(noise + place, mask=live, other=0)), mask=live)
    tl.store(previous + place, best, mask=live)
    tl.store(counts + row, step + 1)
    tl.store(counts + rows + row, drawn + 1)
    tl.store(counts + 2 * rows + row, unchanged)
    line = out + row * (3 * L + 2)
    tl.store(line + at, best.to(tl.int32), mask=live)
    tl.store(line + L + at, e.to(tl.int32, bitcast=True), mask=live)
    tl.store(line + 2 * L + at, accepted.to(tl.int32), mask=live)
    tl.store(line + 3 * L, mean.to(tl.int32, bitcast=True))
    tl.store(line + 3 * L + 1, done.to(tl.int32) + stopped.to(tl.int32))


def prepare(counts: Tensor, reals: Tensor, seed: Tensor, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `sampler.prepare`, to the bit."""
    count, rows = len(seed) * width, counts.stride(0)
    assert reals.stride(0) == rows, "settings of canvases lie alike"
    assert counts.stride(1) == reals.stride(1) == seed.stride(0) == 1, "kernels read from number to number"
    temperature, uniform = torch.empty(2, count, dtype=torch.float32, device=seed.device)
    noise = torch.empty(count, dtype=torch.int64, device=seed.device)
    run(
        _prepare_kernel, triton.cdiv(count, 256), counts, reals, seed, temperature, uniform, noise, count, width, rows,
        vocab, BLOCK=256, **SEPARATE,
    )  # fmt: skip
    return temperature, uniform, noise


def decide(state: State, reading: Reading, noise: Tensor) -> None:
    """As `sampler.decide`, to the bit (but for the rounding of a probability, by a rule that asks for it)."""
    canvases, width = state.tokens.shape
    rows = state.counts.stride(0)
    given = (reading.argmax, reading.sample, reading.entropy, reading.logprob, noise)
    own = (state.tokens, state.previous, state.pin, state.out)
    assert state.reals.stride(0) == rows, "settings of canvases lie alike"
    assert state.counts.stride(1) == state.reals.stride(1) == 1, "kernels read from number to number"
    assert all(t.is_contiguous() for t in (*given, *own)), "kernels read from number to number"
    if reading.soft is not None:  # first: it asks how many steps there were
        numbers = state.soft[0].numel()
        assert state.soft.is_contiguous(), "kernels read from number to number"
        run(
            _believe_kernel, canvases * triton.cdiv(numbers, 4096), reading.soft.contiguous(), state.counts, state.soft,
            rows, NUMBERS=numbers, BLOCK=4096, num_warps=4,
        )  # fmt: skip
    run(
        _decide_kernel, canvases, *given, state.tokens, state.previous, state.pin, state.counts, state.reals, state.out,
        rows, L=width, BLOCK=triton.next_power_of_2(width), OTHERS=others(width), num_warps=8, **SEPARATE,
    )  # fmt: skip


def others(width: int) -> int:
    """How many positions each is compared with at once: fewer where canvases are wide"""
    block: int = triton.next_power_of_2(width)
    return max(1, min(OTHERS, PAIRS // block))
