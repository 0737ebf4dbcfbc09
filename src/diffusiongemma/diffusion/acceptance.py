"""Which positions of a step are kept and which go back to noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diffusiongemma.diffusion.beliefs import Beliefs


class Acceptance(Protocol):
    def accept(self, beliefs: Beliefs) -> Tensor:
        """-> [L] bool; at least one position is accepted, or a canvas could stand still for ever"""


@dataclass(frozen=True)
class EntropyBound:
    """The released rule: the most certain positions, as long as the entropies of those before sum to `bound` at most.

    That sum bounds how much the accepted tokens can say about each other, so they may be drawn independently.
    """

    bound: float

    def accept(self, beliefs: Beliefs) -> Tensor:
        ordered, order = beliefs.entropy.sort()
        before = ordered.cumsum(dim=0) - ordered
        return torch.zeros_like(order, dtype=torch.bool).scatter(0, order, before <= self.bound)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Positions whose best token has at least this probability, and always the best position."""

    threshold: float

    def accept(self, beliefs: Beliefs) -> Tensor:
        confidence = beliefs.logprob.exp()
        return (confidence >= self.threshold) | (confidence == confidence.max())
