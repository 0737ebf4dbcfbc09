"""Sampling and evaluating while training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.tasks.sudoku_gen import generate as make_boards
from diffusiongemma.train import evaluate
from diffusiongemma.train.evaluate import evaluators, is_solved
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.infill import Infill
from diffusiongemma.train.objective import micro_loss
from diffusiongemma.train.optim import Optimizer
from diffusiongemma.train.recipe import ObjectiveConfig, OptimConfig, parse_recipe
from diffusiongemma.train.rows import Rows
from diffusiongemma.train.sample import Sampler, generate
from diffusiongemma.train.sources import Vocabulary


@pytest.fixture(scope="module")
def learned() -> tuple[TrainingForward, Tensor, Tensor]:
    """A network that knows two rows by heart: prefix [2, 6], canvas [2, 8]"""
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny", vocab_size=64, num_hidden_layers=2)
    model = DiffusionGemma(config).init_weights(0)
    forward = TrainingForward(model)
    prefix, canvas = torch.randint(64, (2, 6)), torch.randint(64, (2, 8))
    rows = Rows("x", prefix, canvas, torch.zeros(2, 8, dtype=torch.bool), torch.ones(2, 8), torch.ones(2, 14))
    optimizer = Optimizer(model, OptimConfig(lr=5e-3, matrix_lr=5e-3, muon=True, ema=0.0))
    for _ in range(150):
        micro_loss(forward, rows, ObjectiveConfig(), views=4).loss.backward()
        optimizer.step(1.0)
    return forward, prefix, canvas


def test_what_was_learned_is_sampled_and_pins_hold(learned: tuple[TrainingForward, Tensor, Tensor]) -> None:
    forward, prefix, canvas = learned
    torch.manual_seed(0)
    made, steps = generate(forward, prefix, 8, sampler=Sampler(steps=12))
    assert torch.equal(made, canvas)
    assert int(steps.max()) <= 12
    fixed = torch.full((2, 8), -1)
    fixed[:, 3] = 7
    made, _ = generate(forward, prefix, 8, fixed, Sampler(steps=3))
    assert made[:, 3].tolist() == [7, 7]


def test_rows_that_are_done_leave_and_nobody_notices(
    learned: tuple[TrainingForward, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, known, _ = learned
    torch.manual_seed(1)
    prefix = torch.cat([known, torch.randint(64, (3, 6)), known])  # what it does not know takes longer
    denoise = forward.denoise
    seen: list[tuple[int, bool]] = []

    def watch(canvas: Tensor, soft: Tensor | None, kept: list[Any]) -> Any:
        seen.append((len(canvas), soft is None))
        return denoise(canvas, soft, kept)

    monkeypatch.setattr(forward, "denoise", watch)
    outcomes = []
    for fewest in (1, len(prefix)):  # the second computes rows that are done to the end
        torch.manual_seed(2)
        outcomes.append(generate(forward, prefix, 8, sampler=Sampler(steps=24, forget=5), fewest=fewest))
    (fast, steps), (slow, all_steps) = outcomes
    assert torch.equal(fast, slow)
    assert torch.equal(steps, all_steps)
    first = len(seen) // 2
    widths, plain = [rows for rows, _ in seen[:first]], [rows for rows, _ in seen[first:]]
    assert widths[0] == 7
    assert min(widths) <= 3
    assert set(plain) == {7}
    assert [n for n, (_, forgot) in enumerate(seen[:first]) if forgot] == list(range(0, first, 5))


def test_is_solved() -> None:
    board = make_boards(0, np.array([30], np.uint8)).solution[0].astype(np.int64)
    assert is_solved(board)
    board[[0, 1]] = board[[1, 0]]
    assert not is_solved(board)


def test_evaluators_follow_the_recipe(tmp_path: Path) -> None:
    boards = make_boards(1, np.full(3, 40, np.uint8)).puzzle
    for name in ("mine", "qqwing_expert"):
        lines = ("".join(map(str, b)) + "\n" for b in boards.tolist())
        (tmp_path / f"sudoku_{name}.txt").write_text("".join(lines))
    vocabulary = Vocabulary("bytes")
    text = "".join(f"value{n} = {n}\n" for n in range(40))
    ids = [*vocabulary.encode(text), 1]
    np.save(tmp_path / "heldout.npy", np.array(ids, np.uint16))
    np.save(tmp_path / "heldout_offsets.npy", np.array([0, len(ids)]))
    tasks = [
        {"name": "s", "kind": "sudoku", "weight": 1, "prefix": 104, "canvas": 96},
        {"name": "i", "kind": "infill", "weight": 1, "prefix": 64, "canvas": 32, "source": "heldout"},
    ]
    table = {"name": "x", "run": {"total_steps": 1}, "task": tasks, "data": str(tmp_path), "evaluation": str(tmp_path)}
    recipe = parse_recipe({**table, "model": {"preset": "tiny", "sliding_window": 256, "num_hidden_layers": 2}})
    assert recipe.model is not None
    forward = TrainingForward(DiffusionGemma(recipe.model).init_weights(0))
    figures: dict[str, float] = {}
    for check in evaluators(recipe, vocabulary, 2):
        figures |= check(forward)
    assert figures["mine solved"] == 0.0  # a random network solves nothing
    assert figures["heldout line exact"] == 0.0
    assert 48 < figures["mine steps"] <= 192  # one long look, and its options
    assert figures["qqwing_expert steps"] > figures["qqwing_expert released steps"] > 1
    assert "mine released solved" not in figures


def test_held_out_holes_look_as_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, seen = Vocabulary("bytes"), list[Infill]()
    ids = [*vocabulary.encode("".join(f"value{n} = {n}\n" for n in range(40))), 1]
    np.save(tmp_path / "heldout.npy", np.array(ids, np.uint16))
    np.save(tmp_path / "heldout_offsets.npy", np.array([0, len(ids)]))
    monkeypatch.setattr(evaluate, "_infill", lambda task, count: seen.append(task))
    plain = {"name": "i", "kind": "infill", "weight": 1, "prefix": 96, "canvas": 32, "source": "heldout"}
    for options in ({}, {"far": 32}, {"far": 32, "suffix": 0.25, "kinds": [0.5, 0.5, 0.0]}):
        table = {"name": "x", "run": {"total_steps": 1}, "task": [plain | options], "data": str(tmp_path)}
        evaluators(parse_recipe({**table, "model": {"preset": "tiny"}}), vocabulary, 2)
    assert [(task.near, task.far, task.max_suffix) for task in seen] == [(96, 0, 38), (64, 32, 25), (64, 32, 16)]
    assert all(task.kinds == (1.0, 0.0, 0.0) for task in seen)  # whole lines, whatever is trained
