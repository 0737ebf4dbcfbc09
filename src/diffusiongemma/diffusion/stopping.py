"""When a canvas is done before its steps run out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StableAndConfident:
    """Done when the best tokens are what they were on each of the last `stability` steps, and entropy is low."""

    stability: int
    confidence: float

    def done(self, argmax: Tensor, history: Sequence[Tensor], mean_entropy: float) -> bool:
        """argmax [L]; history: the argmax of earlier steps of this canvas, oldest first"""
        if mean_entropy >= self.confidence or len(history) < self.stability:
            return False
        recent = history[len(history) - self.stability :]
        return all(torch.equal(argmax, earlier) for earlier in recent)
