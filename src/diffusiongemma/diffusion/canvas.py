"""The state of one canvas between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Canvas:
    """L positions on their way from noise to text."""

    tokens: Tensor  # [L] what the network reads next: accepted samples, and noise elsewhere
    step: int  # steps taken so far
    done: bool = False
    settled: bool = False  # the stop rule held at the last step taken: it did not just run out of steps
    argmax: Tensor | None = None  # [L] the draft, and at the end the result
    entropy: Tensor | None = None  # [L]
    accepted: Tensor | None = None  # [L] bool
    logprob: Tensor | None = None  # [L] of the argmax tokens
    mean_entropy: float = float("inf")  # over the free positions
    history: tuple[Tensor, ...] = ()  # the argmax of earlier steps, as many as the stop rule looks at

    def __len__(self) -> int:
        return self.tokens.shape[0]
