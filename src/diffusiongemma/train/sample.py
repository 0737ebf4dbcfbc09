"""The released sampler over whole batches of equal rows, for evaluation while training.

Legend: B rows, P prefix, L canvas, V vocabulary.
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


@torch.no_grad()
def generate(
    forward: TrainingForward, prefix: Tensor, length: int, fixed: Tensor | None = None, sampler: Sampler | None = None
) -> tuple[Tensor, Tensor]:
    """prefix [B, P] -> argmax canvas [B, L], number of steps [B]. `fixed` [B, L]: pinned tokens, -1 elsewhere."""
    sampler = sampler or Sampler()
    model, (rows, start) = forward.model, prefix.shape
    vocabulary, device = model.config.vocab_size, prefix.device
    if fixed is None:
        fixed = torch.full((rows, length), -1, device=device)
    _, kept, _ = forward.encode(prefix, start)
    canvas = torch.where(fixed >= 0, fixed, torch.randint(vocabulary, (rows, length), device=device))
    result, steps = torch.full_like(canvas, -1), torch.zeros(rows, dtype=torch.int64, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    soft = None
    bound = torch.full((rows, 1), sampler.bound, device=device)
    for n in range(sampler.steps, 0, -1):
        hidden, _ = forward.denoise(canvas, soft, kept)
        heat = sampler.t_min + (sampler.t_max - sampler.t_min) * n / sampler.steps
        log_p = torch.log_softmax(model.logits(hidden) / heat, dim=-1)  # [B L, V]
        p = log_p.exp()
        entropy = -(p * log_p).sum(dim=-1).view(rows, length)
        best = torch.where(fixed >= 0, fixed, log_p.argmax(dim=-1).view(rows, length))
        candidate = (p / torch.empty_like(p).exponential_()).argmax(dim=-1).view(rows, length)
        soft = model.soft_embed(log_p)
        entropy = torch.where(fixed >= 0, 0.0, entropy)
        settled = (best == result).all(dim=1) & (entropy.mean(dim=1) < sampler.confidence)
        result = torch.where(done[:, None], result, best)
        steps += (~done).long()
        done = done | settled
        if bool(done.all()):
            break
        canvas = sampler_step(candidate, entropy, bound, vocabulary)
        canvas = torch.where(fixed >= 0, fixed, canvas)
    return result, steps
