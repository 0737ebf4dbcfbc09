"""Intervals: known values, the right coverage, and nothing outside the range."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.tasks.statistics import figure, mean, paired_points, share


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    # Wilson's interval without continuity correction, as other programs print it.
    [(0, 10, 0.0, 0.27753), (1, 10, 0.01788, 0.40415), (8, 10, 0.49016, 0.94332), (995, 1000, 0.98835, 0.99786)],
)
def test_shares_have_wilsons_interval(hits: int, count: int, low: float, high: float) -> None:
    got = share([True] * hits + [False] * (count - hits))
    assert (got.low, got.high) == (pytest.approx(low, abs=2e-5), pytest.approx(high, abs=2e-5))
    assert (got.value, got.count, got.is_share) == (hits / count, count, True)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_share_lies_in_its_interval(hits: list[bool]) -> None:
    got = share(hits)
    assert 0 <= got.low <= got.value <= got.high <= 1
    assert got.low < got.high


def test_wilson_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    truth, covered = 0.9, 0
    for _ in range(400):
        got = share((rng.random(200) < truth).tolist())
        covered += got.low <= truth <= got.high
    assert 0.92 <= covered / 400 <= 0.98


def test_means_have_the_bootstraps_interval() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(5.0, 2.0, 400).tolist()
    got = mean(values)
    normal = 1.96 * np.std(values) / math.sqrt(400)
    assert got.value == pytest.approx(np.mean(values))
    assert got.high - got.value == pytest.approx(normal, rel=0.15)
    assert got.value - got.low == pytest.approx(normal, rel=0.15)
    assert mean(values) == got  # the same values, the same interval
    assert (mean([2.0] * 5).low, mean([2.0] * 5).high) == (2.0, 2.0)


def test_truth_values_are_shares_and_numbers_are_means() -> None:
    assert figure([True, False]).is_share
    assert not figure([1.0, 0.0]).is_share
    assert str(figure([True] * 10)) == "100.0% (72.2% to 100.0%)"
    assert math.isnan(figure([]).value)


def test_points_are_counted_on_the_same_cases() -> None:
    got = paired_points([True] * 10, [True] * 9 + [False])
    assert got.value == pytest.approx(10.0)
    assert got.low >= 0
    assert paired_points([True, False], [True, False]).value == 0
    with pytest.raises(ValueError):
        paired_points([True], [])
