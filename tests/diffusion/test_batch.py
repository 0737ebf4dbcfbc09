"""A board of canvases against one `Denoiser` a canvas, fed the same chance."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusion.margins import slack, tolerance
from diffusiongemma.diffusion import (
    Canvas,
    ConfidenceThreshold,
    Denoiser,
    EntropyBound,
    Forbidden,
    LinearTemperature,
    Pins,
    SeededDraws,
    StableAndConfident,
)
from diffusiongemma.diffusion.batch import Board, Outcome, unfit
from diffusiongemma.ops import vocab

WIDTH, VOCAB, HIDDEN = 12, 40, 4
TABLE = vocab.Table(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)))


@dataclass
class Given:
    """Chance as somebody else has drawn it."""

    uniform: Tensor
    noise: Tensor

    def uniforms(self, count: int) -> Tensor:
        return self.uniform[:count]

    def tokens(self, count: int, vocab_size: int) -> Tensor:
        return self.noise[:count]


rules = st.one_of(st.floats(0.01, 8.0).map(EntropyBound), st.floats(0.05, 1.0).map(ConfidenceThreshold))
stops = st.none() | st.builds(StableAndConfident, st.integers(0, 3), st.floats(0.01, 3.0))
pins = st.dictionaries(st.integers(0, WIDTH - 1), st.integers(0, VOCAB - 1), min_size=1).map(Pins)
forbidden = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=9).map(lambda t: Forbidden(tuple(t)))
early = st.builds(Forbidden, st.just((1, 2)), st.integers(1, WIDTH))
constraints = st.tuples(st.none() | forbidden, st.none() | early, st.none() | pins).map(
    lambda found: [c for c in found if c is not None]
)
schedules = st.builds(LinearTemperature, st.floats(0.1, 0.5), st.floats(0.5, 2.0), st.integers(1, 7))
denoisers = st.builds(Denoiser, st.just(VOCAB), schedules, rules, stops, constraints, st.integers(0, 3))


def logits_at(seed: int, step: int, scale: float) -> Tensor:
    """They settle as steps go on, so that canvases stop for every reason."""
    torch.manual_seed(seed)
    settled = torch.randn(WIDTH, VOCAB)
    torch.manual_seed(seed + step)
    return scale * (settled * (1 + step) + torch.randn(WIDTH, VOCAB) / (1 + step))


def step_all(board: Board, rows: int, logits: list[Tensor]) -> Given:
    temperature, uniform, noise = board.draws(rows, VOCAB)
    reading = vocab.read(torch.cat(logits), TABLE, board.rules(rows, temperature, uniform), 2.0, torch.float32)
    board.decide(rows, reading, noise)
    return Given(uniform.view(rows, -1), noise.view(rows, -1))


@given(
    st.lists(st.tuples(denoisers, st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0])), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_board_goes_the_way_of_its_denoisers(asked: list[tuple[Denoiser, int, float]], moved: bool) -> None:
    rows = len(asked)
    board = Board.empty(rows + 1, WIDTH, HIDDEN, VOCAB, torch.float32)
    canvases: list[Canvas] = []
    for row, (denoiser, seed, _) in enumerate(asked):
        assert unfit(denoiser) is None
        canvases.append(denoiser.start(WIDTH, SeededDraws(seed)))
        first = rows if moved and row == 0 else row  # it comes from another row, with all that belongs to it
        board.put(first, denoiser, canvases[row], None, seed, drawn=0)
    if moved:
        board.swap_in(rows, 0)
    for step in range(max(denoiser.schedule.steps for denoiser, _, _ in asked)):
        logits = [logits_at(seed, step, scale) for _, seed, scale in asked]
        chance = step_all(board, rows, logits)
        for row, (denoiser, _, _) in enumerate(asked):
            if canvases[row].done:
                continue
            draws = Given(chance.uniform[row], chance.noise[row])
            # Where a decision is as close as rounding, either way is right, and the two may part: no example.
            within = tolerance(logits[row], denoiser.schedule.at(denoiser.schedule.steps - step))
            assume(slack(denoiser, canvases[row], logits[row], draws.uniform) > within)
            canvas = canvases[row] = denoiser.step(canvases[row], logits[row].clone(), draws)
            outcome = Outcome.read(board.out[row])
            assert torch.equal(outcome.argmax, canvas.argmax)
            assert torch.equal(outcome.accepted, canvas.accepted)
            assert torch.equal(board.tokens[row], canvas.tokens)
            torch.testing.assert_close(outcome.entropy, canvas.entropy, atol=within, rtol=0)
            assert outcome.mean_entropy == pytest.approx(canvas.mean_entropy, abs=within, rel=0)
            assert (outcome.done, outcome.settled) == (canvas.done, canvas.settled)
            assert bool((board.soft[row] == 0).all()) == denoiser.forgets(canvas)


def test_chance_is_a_rows_own() -> None:
    denoiser = Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 9), EntropyBound(0.1), None)
    boards = [Board.empty(rows, WIDTH, HIDDEN, VOCAB, torch.float32) for rows in (1, 3)]
    canvas = denoiser.start(WIDTH, SeededDraws(5))
    for row, seed in enumerate((7, 8, 9)):
        boards[1].put(row, denoiser, canvas, None, seed, drawn=4)
    boards[0].put(0, denoiser, canvas, None, 9, drawn=4)
    alone, together = (board.draws(board.rows, VOCAB)[1:] for board in boards)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b.view(3, -1)[2])
        assert not torch.equal(a, b.view(3, -1)[1])
    boards[0].counts[1] += 1
    assert not torch.equal(alone[0], boards[0].draws(1, VOCAB)[1])


@pytest.mark.parametrize("stability", [1, 2, 3])
def test_a_canvas_goes_on_where_another_way_has_brought_it(stability: int) -> None:
    """Three steps by the denoiser, the rest on a board: it stops when it would have stopped."""
    denoiser = Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 12), EntropyBound(0.5), StableAndConfident(stability, 0.5))
    canvas = denoiser.start(WIDTH, SeededDraws(1))
    soft = torch.randn(WIDTH, HIDDEN)
    board = Board.empty(1, WIDTH, HIDDEN, VOCAB, torch.float32)
    ends = []
    for step in range(12):
        logits = logits_at(3, step, 1.0)
        if step == 3:
            board.put(0, denoiser, canvas, soft, 1, drawn=step)
            assert torch.equal(board.take(0)[1], soft)
        if step >= 3:
            chance = step_all(board, 1, [logits])
            draws: object = Given(chance.uniform[0], chance.noise[0])
            outcome = Outcome.read(board.out[0])
            ends.append((outcome.done, outcome.settled))
        canvas = denoiser.step(canvas, logits.clone(), draws if step >= 3 else SeededDraws(step))  # type: ignore[arg-type]
        if step >= 3:
            assert ends[-1] == (canvas.done, canvas.settled)
            assert torch.equal(board.take(0)[0], canvas.tokens)
        if canvas.done:
            break
    assert 3 < step < 11  # it did stop early, and on the board
    assert canvas.settled


def test_a_belief_is_forgotten_row_by_row() -> None:
    """As `Denoiser.forgets` says it; after its step, a row's soft embeddings are zeros."""
    board = Board.empty(3, WIDTH, HIDDEN, VOCAB, torch.float32)
    asked = [Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 9), EntropyBound(0.1), None, forget=n) for n in (0, 2, 3)]
    canvases = [denoiser.start(WIDTH, SeededDraws(1)) for denoiser in asked]
    for row, denoiser in enumerate(asked):
        board.put(row, denoiser, canvases[row], None, row, drawn=0)
    for step in range(7):
        logits = logits_at(1, step, 1.0)
        chance = step_all(board, 3, [logits] * 3)
        for row, denoiser in enumerate(asked):
            draws = Given(chance.uniform[row], chance.noise[row])
            canvases[row] = denoiser.step(canvases[row], logits.clone(), draws)
            assert bool((board.soft[row] == 0).all()) == denoiser.forgets(canvases[row])


def read_as(entropy: Tensor) -> vocab.Reading:
    tokens = torch.arange(entropy.numel()) % VOCAB
    return vocab.Reading(tokens, tokens, entropy.flatten(), -entropy.flatten(), -entropy.flatten(), None)


@pytest.mark.parametrize("seed", range(8))
def test_sums_do_not_depend_on_their_order(seed: int) -> None:
    """On a card, torch sums one row in another order than several. Here the positions are in another order."""
    width = 256
    generator = torch.Generator().manual_seed(seed)
    entropy = 10 ** (6 * torch.rand(width, generator=generator) - 5)
    order = torch.randperm(width, generator=generator)
    exact = entropy.double().sort().values.cumsum(0)
    denoiser = Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 9), EntropyBound(float(exact[100].float())), None)
    board = Board.empty(2, width, HIDDEN, VOCAB, torch.float32)
    for row in range(2):
        board.put(row, denoiser, denoiser.start(width, SeededDraws(1)), None, 1, drawn=0)
    board.decide(2, read_as(torch.stack((entropy, entropy[order]))), torch.zeros(2 * width, dtype=torch.int64))
    one, two = (Outcome.read(row) for row in board.out)
    assert one.mean_entropy == two.mean_entropy
    assert one.mean_entropy == pytest.approx(float(entropy.double().mean()), rel=1e-7)
    assert torch.equal(one.accepted[order], two.accepted)
    assert int(one.accepted.sum()) in (101, 102)  # the bound itself is rounded


def test_a_canvas_without_numbers_is_never_done_early() -> None:
    denoiser = Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 9), EntropyBound(1.0), StableAndConfident(0, 5.0))
    board = Board.empty(2, WIDTH, HIDDEN, VOCAB, torch.float32)
    for row in range(2):
        board.put(row, denoiser, denoiser.start(WIDTH, SeededDraws(1)), None, 1, drawn=0)
    entropy = torch.stack((torch.full((WIDTH,), torch.nan), torch.zeros(WIDTH)))
    board.decide(2, read_as(entropy), torch.zeros(2 * WIDTH, dtype=torch.int64))
    assert [Outcome.read(row).done for row in board.out] == [False, True]
    assert Outcome.read(board.out[0]).mean_entropy == 1e3


def test_what_a_board_cannot_hold() -> None:
    class Other:
        pass

    schedule = LinearTemperature(0.4, 0.8, 2)
    assert unfit(Denoiser(VOCAB, schedule, EntropyBound(1.0), None, [Pins({0: 1})])) is None
    assert "Other" in str(unfit(Denoiser(VOCAB, schedule, EntropyBound(1.0), None, [Other()])))  # type: ignore[list-item]
    several = [Forbidden((1,), 3), Forbidden((2,), 5)]
    assert "several" in str(unfit(Denoiser(VOCAB, schedule, EntropyBound(1.0), None, several)))
    assert "Other" in str(unfit(Denoiser(VOCAB, schedule, Other(), None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_are_handed_memory_that_they_can_read(rows: int) -> None:
    """Expanding one row gave a view of stride 0: a kernel then read the seeds and temperatures of nobody."""
    board = Board.empty(3, WIDTH, HIDDEN, VOCAB, torch.float32)
    denoiser = Denoiser(VOCAB, LinearTemperature(0.4, 0.8, 5), EntropyBound(0.1), None)
    for row in range(3):
        board.put(row, denoiser, denoiser.start(WIDTH, SeededDraws(row)), None, row + 7, row)
    made = board.draws(rows, VOCAB)
    for tensor in made:
        assert tensor.is_contiguous()
        assert tensor.shape == (rows * WIDTH,)
    seeds, steps, where = torch.arange(7, 7 + rows), torch.arange(rows, dtype=torch.int32), torch.arange(WIDTH)
    each = (seeds.repeat_interleave(WIDTH), steps.repeat_interleave(WIDTH), where.int().repeat(rows))
    for got, want in zip(made[1:], vocab.draws(*each, VOCAB), strict=True):
        assert torch.equal(got, want)
