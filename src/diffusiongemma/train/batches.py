"""Which rows a step sees: a function of the recipe and the step alone, so that a resumed run sees the same ones.

A step is `accumulate` micro-batches; each belongs to one task. Tasks take turns in proportion to their weights, as
evenly as possible, in a cycle that repeats.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from diffusiongemma.train.mixtures import make_task
from diffusiongemma.train.recipe import Recipe, TaskConfig
from diffusiongemma.train.rows import Rows
from diffusiongemma.train.sources import Vocabulary, check_tokenizer

CYCLE = 200  # micro-batches after which the turns repeat


def turns(weights: list[float], length: int = CYCLE) -> list[int]:
    """Whose turn it is, `length` times: always the one that is furthest behind its share."""
    shares = np.array(weights) / sum(weights)
    taken = np.zeros(len(shares))
    out = []
    for n in range(1, length + 1):
        chosen = int(np.argmax(n * shares - taken))
        taken[chosen] += 1
        out.append(chosen)
    return out


def rows_of(task: TaskConfig, micro_tokens: int) -> int:
    """How many rows make a micro-batch: even, so that halves exist."""
    per_row = task.prefix + task.canvas * (1 + task.views * task.rounds)
    rows = max(2, micro_tokens // per_row)
    return rows // 8 * 8 if rows >= 16 else rows // 2 * 2


class Batches(Dataset[list[Rows]]):
    """Step -> its micro-batches."""

    def __init__(self, recipe: Recipe, vocabulary: Vocabulary) -> None:
        self.recipe = recipe
        check_tokenizer(recipe.data, recipe.tokenizer)
        self.tasks = [make_task(config, recipe, vocabulary) for config in recipe.tasks]
        self.cycle = turns([config.weight for config in recipe.tasks])
        self.counts = [rows_of(config, recipe.run.micro_tokens) for config in recipe.tasks]

    def __getitem__(self, step: int) -> list[Rows]:
        accumulate = self.recipe.run.accumulate
        return [self.micro(step * accumulate + i) for i in range(accumulate)]

    def micro(self, number: int) -> Rows:
        task = self.cycle[number % len(self.cycle)]
        return self.draw(task, number)

    def draw(self, task: int, number: int, count: int | None = None) -> Rows:
        rng = np.random.default_rng([self.recipe.run.seed, task, number])
        return self.tasks[task].rows(rng, count or self.counts[task])

    def stream(self, start: int, pin: bool) -> Iterator[list[Rows]]:
        """The steps from `start` on, made ahead by worker processes when the recipe has some."""
        workers = self.recipe.run.workers
        steps = range(start, 1 << 40)
        if workers == 0:
            yield from (self[step] for step in steps)
            return
        loader: DataLoader[list[Rows]] = DataLoader(
            self, batch_size=None, sampler=steps, num_workers=workers, prefetch_factor=2, pin_memory=pin,
            worker_init_fn=_start_worker,
        )  # fmt: skip
        yield from loader


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
