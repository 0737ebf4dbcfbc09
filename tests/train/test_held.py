"""Rows that are still wrong come back, where they stood; solved ones and old ones make room."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.held import Held
from diffusiongemma.train.loop import Trainer
from diffusiongemma.train.objective import micro_loss
from diffusiongemma.train.recipe import ObjectiveConfig, read_recipe
from diffusiongemma.train.report import Window
from diffusiongemma.train.rows import Rows

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig.preset("tiny")


def rows(seed: int) -> Rows:
    torch.manual_seed(seed)
    canvas, prefix = torch.randint(CONFIG.vocab_size, (4, 8)), torch.randint(CONFIG.vocab_size, (4, 12))
    return Rows("test", prefix, canvas, torch.zeros(4, 8, dtype=torch.bool), torch.ones(4, 8), torch.ones(4, 20))


def nobody(limit: int) -> Held:
    return Held.nobody(rows(0), CONFIG.hidden_size, torch.float32, limit)


def test_who_is_wrong_stays_until_the_limit() -> None:
    held, first, second = nobody(6), rows(1), rows(2)
    assert torch.equal(held.admit(first).canvas, first.canvas)
    noisy, soft = torch.full((4, 8), 7), torch.ones(32, CONFIG.hidden_size)
    held.keep(first, noisy, soft, torch.tensor([True, False, False, True]), 3)
    mixed = held.admit(second)
    assert torch.equal(mixed.canvas[1:3], first.canvas[1:3])
    assert torch.equal(mixed.prefix[[0, 3]], second.prefix[[0, 3]])
    canvas, belief = held.state(torch.zeros(4, 8, dtype=torch.int64))
    assert canvas.amax(dim=1).tolist() == [0, 7, 7, 0]
    assert belief.view(4, 8, -1).amax(dim=(1, 2)).tolist() == [0, 1, 1, 0]
    held.keep(mixed, noisy, soft, torch.zeros(4, dtype=torch.bool), 3)
    assert held.age.tolist() == [3, 0, 0, 3]  # two have had their six rounds


def test_a_held_row_goes_on_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    held, forward = nobody(9), TrainingForward(DiffusionGemma(CONFIG).init_weights(0))
    denoise, seen = forward.denoise, []

    def watch(canvas: Tensor, soft: Tensor | None, prefix: list) -> tuple:  # type: ignore[type-arg]
        seen.append((canvas.clone(), soft))
        return denoise(canvas, soft, prefix)

    monkeypatch.setattr(forward, "denoise", watch)
    first = micro_loss(forward, rows(1), ObjectiveConfig(), rounds=2, held=held)
    assert float(first.metrics["held"]) == 1.0  # a random network solves nothing
    left, belief = held.noisy.clone(), held.soft.clone()
    again = micro_loss(forward, rows(2), ObjectiveConfig(), rounds=2, held=held)
    assert torch.equal(seen[2][0], left)
    assert torch.equal(seen[2][1], belief)
    assert torch.equal(held.rows.canvas, rows(1).canvas)
    again.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in forward.model.parameters())


def test_what_is_held_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    recipe = read_recipe(ROOT / "recipes" / "tiny-cpu.toml", total_steps=8)
    device = torch.device("cpu")

    def go_on(trainer: Trainer, steps: int) -> list[float]:
        losses = []
        for step in range(trainer.step, trainer.step + steps):
            window = Window()
            trainer.train_step(trainer.batches[step], window)
            losses += [value for task in window.means().values() for value in task.values()]
        return losses

    whole = Trainer(recipe, tmp_path / "whole", device, quiet=True)
    assert whole.held
    expected = go_on(whole, 5)[-1:], go_on(whole, 3)
    broken = Trainer(recipe, tmp_path / "broken", device, quiet=True)
    before = go_on(broken, 5)[-1:]
    broken.save()
    resumed = Trainer(recipe, tmp_path / "broken", device, quiet=True)
    assert any(int(held.age.sum()) for held in resumed.held.values())
    assert (before, go_on(resumed, 3)) == expected


def test_hold_needs_more_than_one_micro_batch() -> None:
    recipe = read_recipe(ROOT / "recipes" / "tiny-cpu.toml", total_steps=8)
    with pytest.raises(ConfigError, match="hold must be more"):
        replace(recipe, tasks=(replace(recipe.tasks[0], rounds=5, hold=5),))
