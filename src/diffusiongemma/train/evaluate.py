"""Quick figures while training: Sudoku boards solved and held-out lines filled exactly.

Boards are solved by the sampler that `dgemma sudoku` uses (forgetting, many steps), yet in one look; hard ones also by
the released sampler. These are for watching a run; `dgemma eval` measures properly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from diffusiongemma.tasks import format
from diffusiongemma.tasks.format import EOS, PAD
from diffusiongemma.tasks.sudoku import HEAT
from diffusiongemma.tasks.sudoku_solver import parse
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.infill import Infill
from diffusiongemma.train.recipe import Recipe
from diffusiongemma.train.sample import Sampler, generate
from diffusiongemma.train.sources import Documents, Ids, Vocabulary

Evaluator = Callable[[TrainingForward], dict[str, float]]
BATCH = 256
BOARD_STEPS = 192  # one long look, not several at turned boards: so were the figures of all runs so far
HARD = "qqwing_expert"  # the set for which the released sampler's figure stands beside


def evaluators(recipe: Recipe, vocabulary: Vocabulary, count: int) -> list[Evaluator]:
    """Those for which the recipe has a task and there is data."""
    found: list[Evaluator] = []
    kinds = {task.kind: task for task in recipe.tasks}
    folder = Path(recipe.evaluation)
    if "sudoku" in kinds and recipe.evaluation:
        for path in sorted(folder.glob("sudoku_*.txt")):
            found.append(_sudoku(path, vocabulary, kinds["sudoku"].canvas, count))
    if "infill" in kinds and (Path(recipe.data) / "heldout.npy").is_file():
        task = replace(kinds["infill"], name="heldout", canvas=format.INFILL_CANVAS)
        documents = Documents.open(recipe.data, "heldout")
        prompt = {name: task.options[name] for name in ("suffix", "far") if name in task.options}
        holes = Infill(task, documents, vocabulary.line_starts, kinds=(1.0, 0.0, 0.0), **prompt)
        found.append(_infill(holes, count))
    return found


def _batches(
    forward: TrainingForward, prefix: Ids, length: int, fixed: Ids | None, sampler: Sampler
) -> tuple[Ids, float]:
    """All rows through the sampler -> canvases [n, L] and the mean number of steps"""
    device = forward.model.embed_tokens.weight.device
    outs, steps = [], []
    torch.manual_seed(0)
    for i in range(0, len(prefix), BATCH):
        part = None if fixed is None else torch.from_numpy(fixed[i : i + BATCH]).to(device)
        canvas, taken = generate(forward, torch.from_numpy(prefix[i : i + BATCH]).to(device), length, part, sampler)
        outs.append(canvas.cpu().numpy())
        steps.append(taken.float().mean().item() * len(canvas))
    return np.concatenate(outs), sum(steps) / len(prefix)


def _sudoku(path: Path, vocabulary: Vocabulary, length: int, count: int) -> Evaluator:
    boards = np.array([parse(line) for line in path.read_text().split()[:count]])
    digits = np.array(vocabulary.encode("0123456789"))
    name = path.stem.removeprefix("sudoku_")
    prompts = np.array(
        [format.chat_prompt(vocabulary.encode, format.sudoku_request("".join(map(str, b)))) for b in boards.tolist()]
    )
    fixed = np.full((len(boards), length), -1)
    fixed[:, :81] = np.where(boards > 0, digits[boards], -1)
    fixed[:, 81], fixed[:, 82:] = EOS, PAD
    samplers = {"": _inference()} | ({" released": Sampler()} if name == HARD else {})
    value = np.zeros(1 << 16, np.int64)
    value[digits] = np.arange(10)

    def run(forward: TrainingForward) -> dict[str, float]:
        figures: dict[str, float] = {}
        for kind, sampler in samplers.items():
            canvas, steps = _batches(forward, prompts, length, fixed, sampler)
            solved = [is_solved(value[row[:81]]) for row in canvas]
            figures |= {f"{name}{kind} solved": float(np.mean(solved)), f"{name}{kind} steps": steps}
        return figures

    return run


def _inference() -> Sampler:
    return Sampler(BOARD_STEPS, HEAT["t_max"], HEAT["t_min"], forget=int(HEAT["forget"]))


def is_solved(board: Ids) -> bool:
    """Whether 81 digits obey all rules; givens are pinned, so they need no check."""
    grid = board.reshape(9, 9)
    boxes = grid.reshape(3, 3, 3, 3).transpose(0, 2, 1, 3).reshape(9, 9)
    return all(set(line) == set(range(1, 10)) for unit in (grid, grid.T, boxes) for line in unit.tolist())


def _infill(task: Infill, count: int) -> Evaluator:
    rows = task.rows(np.random.default_rng(0), count)
    prefix, truth = rows.prefix.long().numpy(), rows.canvas.long().numpy()

    def answer(row: Ids) -> list[int]:
        ids: list[int] = row.tolist()
        return ids[: ids.index(EOS)] if EOS in ids else ids

    def run(forward: TrainingForward) -> dict[str, float]:
        canvas, steps = _batches(forward, prefix, truth.shape[1], None, Sampler())
        same = [answer(a) == answer(b) for a, b in zip(canvas, truth, strict=True)]
        return {"heldout line exact": float(np.mean(same)), "heldout line steps": steps}

    return run
