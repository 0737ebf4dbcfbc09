"""The sampler over whole batches of equal rows, for evaluation while training: what the engine computes, without it.

Rows that are done leave the batch when half of it is. Random numbers are drawn for all rows in every step, so that who
has left changes nothing for the others.

Legend: B rows, b rows still at work, P prefix, L canvas, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.objective import sampler_step


@dataclass(frozen=True)
class Sampler:
    steps: int = 48
    t_max: float = 0.8
    t_min: float = 0.4
    bound: float = 0.1
    confidence: float = 0.005
    forget: int = 0  # every so many steps the belief is dropped; 0: never


@torch.no_grad()
def generate(
    forward: TrainingForward,
    prefix: Tensor,
    length: int,
    fixed: Tensor | None = None,
    sampler: Sampler | None = None,
    fewest: int = 16,
) -> tuple[Tensor, Tensor]:
    """prefix [B, P] -> argmax canvas [B, L], number of steps [B]. `fixed` [B, L]: pinned tokens, -1 elsewhere;
    a batch of `fewest` rows is not made smaller, because that would save no time."""
    sampler = sampler or Sampler()
    model, (rows, start) = forward.model, prefix.shape
    vocabulary, device = model.config.vocab_size, prefix.device
    pins = torch.full((rows, length), -1, device=device) if fixed is None else fixed
    _, kept, _ = forward.encode(prefix, start)
    canvas = torch.where(pins >= 0, pins, torch.randint(vocabulary, (rows, length), device=device))
    result, steps = torch.full_like(canvas, -1), torch.zeros(rows, dtype=torch.int64, device=device)
    at, live = torch.arange(rows, device=device), torch.ones(rows, dtype=torch.bool, device=device)  # [b]
    soft = None
    for n in range(sampler.steps):
        luck = torch.rand(rows, length, device=device)[at]
        fresh = torch.randint(vocabulary, (rows, length), device=device)[at]
        if sampler.forget and n % sampler.forget == 0:
            soft = None
        hidden, _ = forward.denoise(canvas, soft, kept)
        heat = sampler.t_min + (sampler.t_max - sampler.t_min) * (sampler.steps - n) / sampler.steps
        log_p = torch.log_softmax(model.logits(hidden) / heat, dim=-1)  # [b L, V]
        p = log_p.exp()
        pinned = pins >= 0
        entropy = torch.where(pinned, 0.0, -(p * log_p).sum(dim=-1).view(canvas.shape))
        best = torch.where(pinned, pins, log_p.argmax(dim=-1).view(canvas.shape))
        mean = entropy.sum(dim=1) / (~pinned).sum(dim=1).clamp(min=1)
        settled = (best == result[at]).all(dim=1) & (mean < sampler.confidence)
        result[at] = torch.where(live[:, None], best, result[at])
        steps[at] += live.long()
        live = live & ~settled
        left = int(live.sum())
        if left == 0:
            break
        soft = torch.where(pinned.flatten()[:, None], model.embed(pins.clamp(min=0).flatten()), model.mean_embed(p))
        bound = torch.full((len(at), 1), sampler.bound, device=device)
        canvas = sampler_step(_draw(p, luck), entropy, bound, fresh)
        canvas = torch.where(pinned, pins, canvas)
        if left <= len(at) // 2 and len(at) > fewest:
            soft = soft.view(*canvas.shape, -1)[live].flatten(0, 1)
            kept = [(keys[live], values[live]) for keys, values in kept]
            at, canvas, pins, live = (t[live] for t in (at, canvas, pins, live))
    return result, steps


def _draw(p: Tensor, luck: Tensor) -> Tensor:
    """p [b L, V], luck [b, L] uniform -> a token a position [b, L]: the first whose probabilities sum to more"""
    below = p.cumsum(dim=-1) <= luck.flatten()[:, None]
    return below.sum(dim=-1).clamp(max=p.shape[1] - 1).view(luck.shape)
