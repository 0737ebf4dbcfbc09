"""Where randomness comes from: one source a request, so that neighbours in a batch cannot change its text.

A step draws one uniform number a position (for the categorical sample) and one random token a position (for
renoising). Both are small, so they are drawn on the CPU and are the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """What a denoising step asks of chance. Tests feed recorded draws through the same door."""

    def tokens(self, count: int, vocab_size: int) -> Tensor:
        """[count] uniform token ids, int64"""

    def uniforms(self, count: int) -> Tensor:
        """[count] in [0, 1), float32"""


@dataclass(frozen=True)
class SeededDraws:
    seed: int
    _generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The generator reads 32 bits; a larger seed's upper half is folded in, so that it counts too.
        folded = (self.seed ^ ((self.seed >> 32) * 0x9E3779B1)) & 0xFFFFFFFF
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(folded))

    def tokens(self, count: int, vocab_size: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=self._generator)

    def uniforms(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator)
