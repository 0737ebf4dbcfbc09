"""Figures with the spread that chance alone would give them: 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # the normal distribution has 95% within so many standard deviations
RESAMPLES = 2_000


@dataclass(frozen=True)
class Figure:
    """A share or a mean over `count` cases, and its 95% confidence interval."""

    value: float
    low: float
    high: float
    count: int
    is_share: bool

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_dict(self) -> dict[str, float | int]:
        return {"value": self.value, "low": self.low, "high": self.high, "count": self.count}


def share(hits: Sequence[bool]) -> Figure:
    """Wilson's interval: honest also near 0 and 1, where these figures are."""
    count = len(hits)
    if not count:
        return Figure(math.nan, math.nan, math.nan, 0, True)
    p = sum(hits) / count
    scale = 1 + Z * Z / count
    centre = (p + Z * Z / (2 * count)) / scale
    half = Z * math.sqrt(p * (1 - p) / count + Z * Z / (4 * count * count)) / scale
    # At the ends the formula is exact; rounding must not leave the range or the value itself.
    return Figure(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), count, True)


def mean(values: Sequence[float]) -> Figure:
    """The bootstrap's percentiles, the same for the same values."""
    count = len(values)
    if not count:
        return Figure(math.nan, math.nan, math.nan, 0, False)
    data = np.asarray(values, np.float64)
    rng = np.random.default_rng(0)
    means = [data[rng.integers(0, count, count)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Figure(float(data.mean()), float(low), float(high), count, False)


def figure(values: Sequence[bool | float]) -> Figure:
    """Truth values make a share, numbers a mean."""
    if all(isinstance(value, bool) for value in values):
        return share([bool(value) for value in values])
    return mean([float(value) for value in values])


def paired_points(first: Sequence[bool], second: Sequence[bool]) -> Figure:
    """How many points of 100 `first` is above `second` on the same cases."""
    return mean([100.0 * (int(a) - int(b)) for a, b in zip(first, second, strict=True)])
