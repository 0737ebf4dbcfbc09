"""How warm a step is: the temperature falls as the steps run out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearTemperature:
    """From t_max on the first step towards t_min, which the step after the last would have."""

    t_min: float
    t_max: float
    steps: int

    def at(self, remaining: int) -> float:
        """`remaining` counts down from `steps` to 1."""
        return self.t_min + (self.t_max - self.t_min) * (remaining / self.steps)
