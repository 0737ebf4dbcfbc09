"""Each small object of a step, alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.diffusion import (
    Beliefs,
    ConfidenceThreshold,
    Denoiser,
    EntropyBound,
    LinearTemperature,
    Pins,
    SeededDraws,
    StableAndConfident,
    read_logits,
)
from diffusiongemma.diffusion import beliefs as beliefs_module
from diffusiongemma.diffusion.beliefs import read_logits_plainly


def beliefs_of(entropy: list[float], confidence: list[float] | None = None) -> Beliefs:
    none = torch.zeros(len(entropy), dtype=torch.int64)
    logprob = torch.tensor(confidence or [1.0] * len(entropy)).log()
    return Beliefs(torch.zeros(len(entropy), 1), none, none, torch.tensor(entropy), logprob)


def random_logits(length: int, vocab: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn(length, vocab, generator=torch.Generator().manual_seed(seed))


# ---- schedule ----------------------------------------------------------------------------------------------------


def test_temperature_falls_linearly_from_t_max() -> None:
    schedule = LinearTemperature(0.4, 0.8, 48)
    assert schedule.at(48) == pytest.approx(0.8)
    assert schedule.at(24) == pytest.approx(0.6)
    assert schedule.at(1) == pytest.approx(0.4 + 0.4 / 48)


# ---- beliefs -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 999), st.floats(0.1, 3.0), st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_one_pass_equals_five(length: int, vocab: int, seed: int, temperature: float, block_bytes: int) -> None:
    logits = random_logits(length, vocab, seed)
    uniforms = torch.rand(length, generator=torch.Generator().manual_seed(seed))
    slow = read_logits_plainly(logits, temperature, uniforms)
    before, beliefs_module.BLOCK_BYTES = beliefs_module.BLOCK_BYTES, block_bytes
    try:
        fast = read_logits(logits.clone(), temperature, uniforms)
    finally:
        beliefs_module.BLOCK_BYTES = before
    torch.testing.assert_close(fast.probs, slow.probs, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(fast.entropy, slow.entropy, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fast.logprob, slow.logprob, atol=1e-5, rtol=1e-4)
    assert torch.equal(fast.argmax, slow.argmax)
    assert (fast.sample == slow.sample).float().mean() > 0.95  # a uniform on the very edge may fall either way


def test_samples_follow_the_distribution() -> None:
    count = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf]).repeat(count, 1)
    seen = read_logits(logits, 0.5, SeededDraws(1).uniforms(count)).sample.bincount(minlength=4) / count
    expected = torch.tensor([0.0, 2.0, 4.0, -math.inf]).softmax(0)
    assert torch.allclose(seen, expected, atol=0.01)
    assert seen[3] == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24])
def test_extreme_draws_never_pick_a_forbidden_token(uniform: float) -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 3:5] = torch.tensor([1.0, 2.0])
    assert int(read_logits(logits, 1.0, torch.tensor([uniform])).sample) in (3, 4)


def test_certain_and_uniform_positions() -> None:
    logits = torch.stack([torch.tensor([0.0, -math.inf, -math.inf, -math.inf]), torch.zeros(4)])
    beliefs = read_logits(logits, 0.7, torch.tensor([0.9, 0.9]))
    assert beliefs.entropy.tolist() == pytest.approx([0.0, math.log(4)])
    assert beliefs.logprob.tolist() == pytest.approx([0.0, -math.log(4)])


# ---- acceptance --------------------------------------------------------------------------------------------------


def test_entropy_bound_by_hand() -> None:
    # sorted: 0.01 0.02 0.06 0.2 1.0; sums before each: 0 0.01 0.03 0.09 0.29
    accepted = EntropyBound(0.1).accept(beliefs_of([1.0, 0.02, 0.2, 0.01, 0.06]))
    assert accepted.tolist() == [False, True, True, True, True]
    assert EntropyBound(0.1).accept(beliefs_of([5.0, 6.0])).tolist() == [True, False]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.floats(0.001, 5))
def test_entropy_bound_accepts_the_most_certain_and_at_least_one(hundredths: list[int], bound: float) -> None:
    entropy = [n / 100 for n in hundredths]
    accepted = EntropyBound(bound).accept(beliefs_of(entropy))
    values = torch.tensor(entropy)
    assert accepted.any()
    if not accepted.all():
        assert values[accepted].max() <= values[~accepted].min()


def test_confidence_threshold() -> None:
    rule = ConfidenceThreshold(0.9)
    assert rule.accept(beliefs_of([0] * 3, [0.95, 0.5, 0.91])).tolist() == [True, False, True]
    assert rule.accept(beliefs_of([0] * 3, [0.2, 0.5, 0.1])).tolist() == [False, True, False]


# ---- stopping ----------------------------------------------------------------------------------------------------


def test_stop_needs_both_stability_and_confidence() -> None:
    a, b = torch.tensor([1, 2]), torch.tensor([1, 3])
    rule = StableAndConfident(2, 0.01)
    assert rule.done(a, (a, a), 0.001)
    assert not rule.done(a, (a,), 0.001)
    assert not rule.done(a, (b, a), 0.001)
    assert not rule.done(a, (a, a), 0.01)
    assert StableAndConfident(0, 0.01).done(a, (), 0.001)


# ---- draws -------------------------------------------------------------------------------------------------------


def test_draws_depend_on_the_seed_alone() -> None:
    a, b, c = SeededDraws(5), SeededDraws(5), SeededDraws(6)
    assert torch.equal(a.tokens(50, 1000), b.tokens(50, 1000))
    assert torch.equal(a.uniforms(50), b.uniforms(50))
    assert not torch.equal(SeededDraws(5).tokens(50, 1000), c.tokens(50, 1000))
    assert int(a.tokens(10_000, 7).max()) == 6
    assert not torch.equal(SeededDraws(5).uniforms(9), SeededDraws(5 + 2**32).uniforms(9))
    assert torch.equal(SeededDraws(5).uniforms(9), torch.rand(9, generator=torch.Generator().manual_seed(5)))


# ---- the whole step ----------------------------------------------------------------------------------------------


def denoiser(steps: int = 8, stop: StableAndConfident | None = None, pins: dict[int, int] | None = None) -> Denoiser:
    constraints = [Pins(pins)] if pins else []
    return Denoiser(50, LinearTemperature(0.4, 0.8, steps), EntropyBound(0.1), stop, constraints)


@given(st.dictionaries(st.integers(0, 19), st.integers(0, 49), max_size=20), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_pins_hold_in_every_step(pins: dict[int, int], seed: int) -> None:
    rule, draws = denoiser(pins=pins), SeededDraws(seed)
    canvas = rule.start(20, draws)
    while not canvas.done:
        for at, token in pins.items():
            assert canvas.tokens[at] == token
        canvas = rule.step(canvas, random_logits(20, 50, seed + canvas.step), draws)
        for at, token in pins.items():
            assert canvas.argmax[at] == canvas.tokens[at] == token
            assert canvas.accepted[at]
            assert canvas.entropy[at] == 0
    assert canvas.step == 8


def test_rejected_positions_become_noise_and_accepted_ones_take_the_sample() -> None:
    rule, draws = denoiser(), SeededDraws(1)
    canvas = rule.start(400, draws)
    logits = torch.zeros(400, 50)
    logits[:200, 7] = 100.0  # certain
    after = rule.step(canvas, logits, draws)
    assert after.accepted[:200].all()
    assert (after.tokens[:200] == 7).all()
    assert after.accepted[200:].sum() == 1  # the first uncertain one still passes: the sum before it is 0
    assert after.tokens[200:].bincount(minlength=50).max() < 20


def test_it_stops_early_when_stable_and_confident_and_counts_free_positions_only() -> None:
    sure = torch.zeros(4, 50)
    sure[:, 3] = 60.0
    rule, draws = denoiser(48, StableAndConfident(1, 0.005)), SeededDraws(0)
    canvas = rule.step(rule.start(4, draws), sure.clone(), draws)
    assert not canvas.done
    assert rule.step(canvas, sure.clone(), draws).done
    # 3 of 4 pinned, the free one undecided between two tokens: not done, though the mean over all would be small
    half = torch.full((4, 50), -math.inf)
    half[:, :2] = 0.0
    rule = denoiser(48, StableAndConfident(1, 0.2), pins={0: 1, 1: 1, 2: 1})
    canvas = rule.start(4, draws)
    for _ in range(4):
        canvas = rule.step(canvas, half.clone(), draws)
    assert not canvas.done
    assert canvas.mean_entropy == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("steps", "stop", "says"),
    [
        (48, StableAndConfident(1, 0.005), True),
        (2, StableAndConfident(1, 0.005), True),  # with its last step
        (1, StableAndConfident(1, 0.005), False),  # it was given no second one to be the same in
        (2, None, False),  # nobody asked
    ],
)
def test_a_canvas_that_runs_out_of_steps_has_not_settled(
    steps: int, stop: StableAndConfident | None, says: bool
) -> None:
    sure = torch.zeros(4, 50)
    sure[:, 3] = 60.0
    rule, draws = denoiser(steps, stop), SeededDraws(0)
    canvas = rule.start(4, draws)
    while not canvas.done:
        assert not canvas.settled
        canvas = rule.step(canvas, sure.clone(), draws)
    assert (canvas.settled, canvas.step) == (says, min(steps, 2))


def test_cut_keeps_the_beginning() -> None:
    rule, draws = denoiser(stop=StableAndConfident(1, 0.005), pins={1: 4, 15: 5}), SeededDraws(0)
    canvas = rule.step(rule.start(20, draws), random_logits(20, 50, 0), draws)
    short = rule.cut(canvas, 8)
    assert len(short) == 8
    assert torch.equal(short.argmax, canvas.argmax[:8])
    again = rule.step(short, random_logits(8, 50, 1), draws)
    assert len(again) == 8
    assert again.argmax[1] == 4
