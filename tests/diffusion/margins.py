"""How far a step is from deciding otherwise. Two ways that round differently agree only where no decision is close."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusiongemma.diffusion import Canvas, Denoiser, EntropyBound

ROUNDING = 4e-7  # of a logit's size, by which the two ways may differ; float32 itself has 6e-8


def tolerance(logits: Tensor, temperature: float) -> float:
    """What rounding may do to probabilities, entropies and the sums of a canvas. logits [L, V]"""
    return 4e-6 + ROUNDING * float(logits.abs().max()) / temperature


def slack(denoiser: Denoiser, canvas: Canvas, logits: Tensor, uniforms: Tensor) -> float:
    """The distance of the closest decision of this step, computed in float64. logits [L, V], uniforms [L]"""
    length, remaining = len(canvas), denoiser.schedule.steps - canvas.step
    z, free = logits.double(), torch.ones(length, dtype=torch.bool)
    for constraint in denoiser.constraints:
        z, free = constraint.constrain(z, canvas.tokens), free & constraint.free(length)
    z = z / denoiser.schedule.at(remaining)
    if not bool(free.any()):
        return torch.inf
    probs = z.softmax(dim=-1)
    entropy = torch.special.entr(probs).sum(dim=-1)
    best = z.topk(2, dim=-1).values
    gaps = [best[:, 0] - best[:, 1], (probs.cumsum(dim=-1) - uniforms.double()[:, None])[free].abs()]
    if denoiser.stop is not None:
        gaps.append(entropy[free].mean() - denoiser.stop.confidence)
    found, accepted = accepting(denoiser, entropy, probs.amax(dim=-1), free)
    gaps += found
    if not bool(accepted[free].any()):  # the most certain one that is free is taken
        gaps.append(between_the_first(entropy[free]))
    return min(float(gap.abs().min()) for gap in gaps if gap.numel())


def accepting(denoiser: Denoiser, entropy: Tensor, sure: Tensor, free: Tensor) -> tuple[list[Tensor], Tensor]:
    """entropy, sure (the best probability), free [L] -> gaps of the rule, and what it accepts [L] bool"""
    rule = denoiser.acceptance
    if isinstance(rule, EntropyBound):
        ordered, order = entropy.sort()
        before = ordered.cumsum(dim=0) - ordered
        count = int((before <= rule.bound).sum())
        gaps = [before - rule.bound, ordered[count : count + 1] - ordered[count - 1]]  # the second: who is the last
        return gaps, torch.zeros_like(free).scatter(0, order, before <= rule.bound)
    accepted = (sure >= rule.threshold) | (sure == sure.max())
    gaps = [(sure - rule.threshold)[free], sure.max() - sure[free & (sure < rule.threshold) & (sure < sure.max())]]
    return gaps, accepted


def between_the_first(values: Tensor) -> Tensor:
    """The gap between the two smallest"""
    return values.sort().values.diff()[:1]
