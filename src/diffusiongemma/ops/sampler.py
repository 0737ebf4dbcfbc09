"""The sampler of many canvases on tensors alone, around the network's pass: chance and temperature before the
vocabulary end, what is accepted and whether to stop after it. The definitions, in plain torch; `sampler_triton` has
their twins.

Legend: B canvases, L width, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.ops import vocab as vocabulary
from diffusiongemma.ops.vocab import Reading

# Entropies are summed as whole numbers of this part of a nat: such a sum is the same in any order, and the order that
# torch sums in depends on how many rows there are.
FINE = 2.0**36
LOST = 1e3  # nats that stand for NaN: such a canvas is never confident


class State(NamedTuple):
    """Canvases between two steps; `decide` writes all but the pins and the settings."""

    tokens: Tensor  # [B, L] int64: what the network reads next
    soft: Tensor  # [B, L, D] what it is conditioned on
    previous: Tensor  # [B, L] int64: the best tokens of the step before
    pin: Tensor  # [B, L] int32, -1 where free
    counts: (
        Tensor  # [6, B] int32: steps of the canvas, of the request, in a row without change; steps, stability, forget
    )
    reals: Tensor  # [5, B] float32: t_min, t_max, entropy bound, threshold (below 0: none), confidence
    out: Tensor  # [B, 3 L + 2] int32: best tokens, entropies (bits), accepted, mean entropy (bits), how it ended


def prepare(counts: Tensor, reals: Tensor, seed: Tensor, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """counts [6, B], reals [5, B], seed [B] -> temperature, uniform [B L] float32 and noise [B L] int64, each in memory
    of its own"""
    step, drawn, _, steps, _, _ = counts
    t_min, t_max = reals[0], reals[1]
    temperature = t_min + (t_max - t_min) * ((steps - step).float() / steps)
    position = torch.arange(width, dtype=torch.int32, device=counts.device).repeat(len(seed))
    uniform, noise = vocabulary.draws(_each(seed, width), _each(drawn, width), position, vocab)
    return _each(temperature, width), uniform, noise


def _each(values: Tensor, width: int) -> Tensor:
    """[B] -> [B L]; expanding a single row alone would give a view that kernels misread"""
    return values[:, None].expand(-1, width).contiguous().view(-1)


def decide(state: State, reading: Reading, noise: Tensor) -> None:
    """What was read of the logits, noise [B L] -> the next state"""
    shape = state.tokens.shape
    argmax, sample, noise = reading.argmax.view(shape), reading.sample.view(shape), noise.view(shape)
    entropy, logprob = reading.entropy.view(shape), reading.logprob.view(shape)
    _, _, bound, threshold, confidence = state.reals
    step, _, run, steps, stability, forget = state.counts
    free = state.pin < 0
    whole = (entropy.nan_to_num(nan=LOST, posinf=LOST) * FINE).long()
    accepted = _accept(entropy, whole, logprob, bound, threshold, free)
    total = torch.where(free, whole, 0).sum(dim=1).double() / FINE
    mean = (total / free.sum(dim=1).clamp_min(1)).float()
    same = (argmax == state.previous).all(dim=1)
    run.copy_(torch.where(same, run + 1, 0))
    stopped = (mean < confidence) & (run >= stability)
    done = stopped | (step + 1 >= steps)
    state.tokens.copy_(torch.where(accepted, sample, noise))
    state.previous.copy_(argmax)
    state.counts[:2].add_(1)
    parts = (
        argmax.int(), entropy.contiguous().view(torch.int32), accepted.int(), mean[:, None].view(torch.int32),
        (done.int() + stopped)[:, None],
    )  # fmt: skip
    torch.cat(parts, dim=1, out=state.out)
    if reading.soft is not None:
        forgets = (forget > 0) & (step % forget.clamp_min(1) == 0)
        soft = reading.soft.view(*shape, -1)
        state.soft.copy_(torch.where(forgets[:, None, None], torch.zeros_like(soft[:1]), soft))


def _accept(entropy: Tensor, whole: Tensor, logprob: Tensor, bound: Tensor, threshold: Tensor, free: Tensor) -> Tensor:
    """entropy, the same as whole numbers, logprob, free [B, L]; bound, threshold [B] -> [B, L] bool: by entropy bound,
    or by confidence"""
    order = entropy.argsort(dim=1, stable=True)  # of two that are equal the first, however many rows there are
    ordered = whole.gather(1, order)
    before = (ordered.cumsum(dim=1) - ordered).double()
    bounded = torch.zeros_like(free).scatter(1, order, before <= bound[:, None].double() * FINE)
    sure = logprob.exp()
    confident = (sure >= threshold[:, None]) | (sure == sure.amax(dim=1, keepdim=True))
    accepted = torch.where(threshold[:, None] < 0, bounded, confident)
    # Pins are always accepted, and that is no progress: one free position at least, if there is any.
    stuck = ~(accepted & free).any(dim=1) & free.any(dim=1)
    # Of free ones: no entropy is as large as what stands for a pin.
    best = torch.where(free, entropy.clamp_max(torch.finfo(entropy.dtype).max), torch.inf).argmin(dim=1)
    at = torch.arange(entropy.shape[1], device=entropy.device)
    return accepted | (stuck[:, None] & (at == best[:, None]))
