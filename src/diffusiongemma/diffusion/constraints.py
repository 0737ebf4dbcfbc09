"""What a canvas may hold. One hook: change the logits before they are read.

A constraint that leaves a position only one token gives it probability 1 and entropy 0, so sampling, acceptance,
self-conditioning and the result all honour it without knowing of it. A grammar fits the same hook: it forbids
tokens by setting their logits to -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Constraint(Protocol):
    def start(self, canvas: Tensor) -> Tensor:
        """canvas [L] of noise -> the canvas that denoising starts from"""

    def constrain(self, logits: Tensor, canvas: Tensor) -> Tensor:
        """logits [L, V] of this canvas [L] -> the logits to read (may be changed in place)"""

    def free(self, length: int) -> Tensor:
        """-> [L] bool: the positions that are not decided beforehand"""


@dataclass(frozen=True)
class Pins:
    """Positions that hold a given token in every step and in the result."""

    tokens: Mapping[int, int]
    _at: Tensor = field(init=False, repr=False, compare=False)
    _value: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_at", torch.tensor(list(self.tokens.keys()), dtype=torch.int64))
        object.__setattr__(self, "_value", torch.tensor(list(self.tokens.values()), dtype=torch.int64))

    def start(self, canvas: Tensor) -> Tensor:
        at, value = self._within(canvas)
        return canvas.index_put((at,), value)

    def constrain(self, logits: Tensor, canvas: Tensor) -> Tensor:
        at, value = self._within(canvas)
        logits[at] = -torch.inf
        logits[at, value] = 0.0
        return logits

    def free(self, length: int) -> Tensor:
        mask = torch.ones(length, dtype=torch.bool)
        mask[self._at[self._at < length]] = False
        return mask

    def _within(self, canvas: Tensor) -> tuple[Tensor, Tensor]:
        inside = self._at < canvas.shape[0]  # a canvas that was cut short keeps the pins it still has
        return self._at[inside].to(canvas.device), self._value[inside].to(canvas.device)


@dataclass(frozen=True)
class Forbidden:
    """Tokens that may not stand on the canvas, or not before position `until`."""

    tokens: tuple[int, ...]
    until: int | None = None

    def start(self, canvas: Tensor) -> Tensor:
        return canvas

    def constrain(self, logits: Tensor, canvas: Tensor) -> Tensor:
        logits[: self.until, list(self.tokens)] = -torch.inf
        return logits

    def free(self, length: int) -> Tensor:
        return torch.ones(length, dtype=torch.bool)
