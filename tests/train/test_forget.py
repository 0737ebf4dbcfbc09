"""Training with `forget`: rounds without a belief come as in the sampler, for each row by its own age."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion.acceptance import EntropyBound
from diffusiongemma.diffusion.canvas import Canvas
from diffusiongemma.diffusion.denoiser import Denoiser
from diffusiongemma.diffusion.schedule import LinearTemperature
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.held import Held
from diffusiongemma.train.loop import Trainer
from diffusiongemma.train.objective import micro_loss
from diffusiongemma.train.recipe import ObjectiveConfig, Recipe, TaskConfig, parse_recipe, read_recipe
from diffusiongemma.train.rows import Rows
from diffusiongemma.train.ship import CONTEXT

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig.preset("tiny")


def rows() -> Rows:
    torch.manual_seed(1)
    canvas, prefix = torch.randint(CONFIG.vocab_size, (4, 8)), torch.randint(CONFIG.vocab_size, (4, 12))
    return Rows("test", prefix, canvas, torch.zeros(4, 8, dtype=torch.bool), torch.ones(4, 8), torch.ones(4, 20))


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[TrainingForward, list[tuple[Tensor, Tensor | None]]]:
    """A network, and the canvas and belief of each of its passes"""
    forward = TrainingForward(DiffusionGemma(CONFIG).init_weights(0))
    denoise = forward.denoise
    seen: list[tuple[Tensor, Tensor | None]] = []

    def watch(canvas: Tensor, soft: Tensor | None, prefix: list[Any]) -> Any:
        seen.append((canvas.clone(), soft))
        return denoise(canvas, soft, prefix)

    monkeypatch.setattr(forward, "denoise", watch)
    return forward, seen


def believed(soft: Tensor | None) -> list[bool]:
    """For each row: is there any belief?"""
    assert soft is not None
    return (soft.view(4, -1) != 0).any(dim=1).tolist()


def test_the_same_rounds_as_in_the_sampler() -> None:
    held = Held.nobody(rows(), CONFIG.hidden_size, torch.float32, limit=40, forget=8)
    held.age.copy_(torch.tensor([0, 3, 8, 21]))
    denoiser = Denoiser(9, LinearTemperature(0.4, 0.8, 40), EntropyBound(0.1), None, forget=8)
    for n in range(20):
        for age, forgets in zip(held.age.tolist(), held.forgets(n).tolist(), strict=True):
            taken = Canvas(torch.zeros(2, dtype=torch.int64), age + n)
            assert forgets == (denoiser.forgets(taken) and age + n > 0)  # a canvas of noise has no belief to forget
    assert not replace(held, forget=0).forgets(8).any()


def test_rows_forget_by_their_own_age(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = watched(monkeypatch)
    held = Held.nobody(rows(), CONFIG.hidden_size, torch.float32, limit=100, forget=3)
    micro_loss(forward, rows(), ObjectiveConfig(), rounds=2, held=held)  # ages 0 and 1
    held.age[2:] -= 1  # two rows lag one round behind
    result = micro_loss(forward, rows(), ObjectiveConfig(), rounds=4, held=held)  # ages 2 to 5 and 1 to 4
    expected = [[False] * 4, [True] * 4, [True] * 4]
    expected += [[False, False, True, True], [True, True, False, False], [True] * 4]
    assert [believed(soft) for _, soft in seen] == expected
    result.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in forward.model.parameters())


def test_no_belief_is_a_belief_of_zeros() -> None:
    forward, batch = TrainingForward(DiffusionGemma(CONFIG).init_weights(0)), rows()
    _, kept, _ = forward.encode(batch.prefix, 12)
    zeros = torch.zeros(32, CONFIG.hidden_size)
    assert torch.equal(forward.denoise(batch.canvas, zeros, kept)[0], forward.denoise(batch.canvas, None, kept)[0])


def test_half_of_the_places_are_given_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = watched(monkeypatch)
    held = Held.nobody(rows(), CONFIG.hidden_size, torch.float32, limit=100, forget=2, trust=0.5)
    everything = ObjectiveConfig(accept=(1e9, 1e9))  # every position is accepted
    micro_loss(forward, rows(), everything, rounds=3, held=held)
    right = [(canvas == rows().canvas).float().mean(dim=1).tolist() for canvas, _ in seen]
    assert right[2][:2] == [1.0, 1.0]
    assert max(right[1] + right[2][2:]) < 0.5


def test_drop_leaves_out_the_belief_of_single_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = watched(monkeypatch)
    micro_loss(forward, rows(), ObjectiveConfig(), rounds=8, drop=0.4)
    assert seen[0][1] is None
    gone = torch.cat([(soft == 0).all(dim=1) for _, soft in seen if soft is not None])
    assert 0.25 < float(gone.float().mean()) < 0.55


TINY = read_recipe(ROOT / "recipes" / "tiny-cpu.toml")


def with_task(**own: Any) -> tuple[Recipe, TaskConfig]:
    made = replace(TINY, tasks=(replace(TINY.tasks[1], **own),))
    return made, made.tasks[0]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"hold": 0}, "forget must be"),
        ({"forget": 1}, "forget must be"),
        ({"forget": 6}, "forget must be"),
        ({"forget": 0}, "trust must be"),
        ({"trust": 1.5}, "trust must be"),
        ({"drop": 1.0}, "drop must be"),
        ({"rounds": 1}, "drop must be"),
        ({"temperature": (0.5, 0.1)}, "temperature must be"),
        ({"accept": (0.0, 0.1)}, "accept must be"),
        ({"unroll": 0.5}, "unroll needs self-conditioning, and one round"),
        ({"unroll": 0.0}, "unroll needs self-conditioning, and one round"),
    ],
)
def test_a_recipe_that_asks_for_nothing_is_refused(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_task(**own)


def test_a_task_has_ranges_of_its_own() -> None:
    made, task = with_task(temperature=(0.1, 0.2))
    assert made.objective_of(task) == replace(TINY.objective, temperature=(0.1, 0.2))
    assert made.objective_of(TINY.tasks[0]) == TINY.objective
    never = replace(TINY.objective, self_conditioning=0.0)
    with pytest.raises(ConfigError, match="accept needs rounds or self-conditioning"):
        replace(TINY, objective=never, tasks=(replace(TINY.tasks[0], accept=(0.1, 0.2)),))


def test_a_task_may_leave_the_path_alone(tmp_path: Path) -> None:
    table = tomllib.loads((ROOT / "recipes" / "tiny-cpu.toml").read_text())
    table["task"][0]["unroll"] = 0  # a whole number is a share as well
    made = parse_recipe(table)
    assert [made.objective_of(task).unroll for task in made.tasks] == [0.0, 0.5]
    for own, says in (
        ({"unroll": 1.5}, "unroll must be a share"),
        ({"unroll": 0.0, "accept": (0.1, 0.2)}, "on no path"),
    ):
        with pytest.raises(ConfigError, match=says):
            replace(TINY, tasks=(replace(TINY.tasks[0], **own),))
    with pytest.raises(ConfigError, match="unroll needs self-conditioning"):
        replace(made, objective=replace(TINY.objective, self_conditioning=0.0))
    table["task"][0]["unroll"] = "half"
    with pytest.raises(ConfigError, match="unroll must be of type float"):
        parse_recipe(table)
    trainer = Trainer(made, tmp_path, torch.device("cpu"), quiet=True)
    assert {name: own.unroll for name, own in trainer.objectives.items()} == {"arithmetic": 0.0, "sudoku": 0.5}


@pytest.mark.parametrize("wrong", ["[0.5]", "[0.1, 0.2, 0.3]", '["low", "high"]', "0.5"])
@pytest.mark.parametrize("name", ["noise", "temperature"])
def test_a_range_is_two_numbers(tmp_path: Path, name: str, wrong: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((ROOT / "recipes" / "tiny-cpu.toml").read_text() + f"{name} = {wrong}\n")
    with pytest.raises(ConfigError, match=f"{name} must be two numbers"):
        read_recipe(recipe)


def test_the_recipes_can_be_read() -> None:
    """Those of the embedded model; what they train on is not here."""
    for name in ("nano_third", "nano_fourth", "nano_fifth"):
        recipe = read_recipe(ROOT / "recipes" / f"{name}.toml")
        assert abs(sum(task.weight for task in recipe.tasks) - 1.0) < 1e-9
        assert {task.name: task.forget for task in recipe.tasks if task.hold} == {"sudoku": 8}
    sixth = read_recipe(ROOT / "recipes" / "nano_sixth.toml")
    holes = {task.name: task.prefix - task.options.get("far", 0) for task in sixth.tasks if task.kind == "infill"}
    assert holes == dict.fromkeys(("infill_near", "infill_block", "infill"), CONTEXT)  # as it is shipped
    assert max(task.prefix + task.canvas for task in sixth.tasks) <= sixth.sliding_window  # no layer misses a part


def test_the_fourth_recipe_has_a_path_only_where_one_answer_is_right() -> None:
    third, fourth = (read_recipe(ROOT / "recipes" / f"nano_{name}.toml") for name in ("third", "fourth"))
    paths = {task.name: task.rounds > 1 or fourth.objective_of(task).unroll > 0 for task in fourth.tasks}
    assert {name for name, path in paths.items() if path} == {"sudoku", "arithmetic"}
    boards = [next(task for task in recipe.tasks if task.name == "sudoku") for recipe in (third, fourth)]
    assert replace(boards[0], weight=boards[1].weight) == boards[1]  # the same but for their share
