"""The tasks: each makes micro-batches of rows with one prefix and one canvas length, from a random generator alone.

A prompt shorter than the prefix is preceded by the end of something else of the same kind, closed by eos: the model
learns that bos begins afresh, and attention needs no mask.

Legend: B rows, P prefix, L canvas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import torch

from diffusiongemma.errors import ConfigError, DataError
from diffusiongemma.tasks import arithmetic_gen, format
from diffusiongemma.tasks.format import BOS, EOS, PAD
from diffusiongemma.tasks.sudoku_gen import Puzzles, generate
from diffusiongemma.tasks.sudoku_symmetry import add_givens, augment
from diffusiongemma.train.infill import Infill
from diffusiongemma.train.recipe import Recipe, TaskConfig
from diffusiongemma.train.rows import Rows, to_rows
from diffusiongemma.train.sources import Documents, Ids, Vocabulary


class Task(Protocol):
    def rows(self, rng: np.random.Generator, count: int) -> Rows: ...


@dataclass
class Continuation:
    """Running text: a stretch of the corpus, the last part of it as canvas. Option: `source`, the arrays' name."""

    config: TaskConfig
    documents: Documents

    def rows(self, rng: np.random.Generator, count: int) -> Rows:
        c = self.config
        length = c.prefix + c.canvas - 1
        start = rng.integers(0, len(self.documents.tokens) - length, count)
        text = self.documents.tokens[start[:, None] + np.arange(length)].astype(np.int64)
        prefix = np.concatenate([np.full((count, 1), BOS), text[:, : c.prefix - 1]], axis=1)
        canvas = text[:, c.prefix - 1 :]
        ended = np.cumsum(canvas == EOS, axis=1) - (canvas == EOS) > 0  # after the first eos nothing follows
        canvas = np.where(ended, PAD, canvas)
        return to_rows(c, prefix, canvas, None, np.ones(prefix.shape, bool))


@dataclass
class Sudoku:
    """Boards in random symmetry. Options: `source` (an .npz) or the `count` of puzzles to make; shares of boards: with
    `pinned` givens, `hard` ones that need guessing, `easier` ones that get more givens."""

    config: TaskConfig
    puzzles: Puzzles
    digits: Ids  # [10]
    frame: tuple[list[int], list[int]]  # ids before and after the board
    pinned: float = 0.85
    hard: float = 0.0
    easier: float = 0.1

    def __post_init__(self) -> None:
        self.guessing = np.flatnonzero(self.puzzles.guesses > 0)

    def rows(self, rng: np.random.Generator, count: int) -> Rows:
        pick = rng.integers(0, len(self.puzzles), count)
        if self.hard and len(self.guessing):
            hard = self.guessing[rng.integers(0, len(self.guessing), count)]
            pick = np.where(rng.random(count) < self.hard, hard, pick)
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        boards = (torch.from_numpy(self.puzzles.puzzle[pick]), torch.from_numpy(self.puzzles.solution[pick]))
        puzzle, solution = augment(*boards, generator)
        wanted = torch.from_numpy(np.where(rng.random(count) < self.easier, rng.integers(24, 60, count), 0))
        puzzle = add_givens(puzzle, solution, wanted, generator)
        given = puzzle.numpy() > 0
        before, after = (np.tile(np.array(part), (count, 1)) for part in self.frame)
        prefix = np.concatenate([before, self.digits[puzzle.numpy()], after], axis=1)
        canvas = np.full((count, self.config.canvas), PAD)
        canvas[:, :81], canvas[:, 81] = self.digits[solution.numpy()], EOS
        pinned = np.zeros(canvas.shape, bool)
        by_pins = rng.random((count, 1)) < self.pinned
        pinned[:, :81], pinned[:, 81:] = given & by_pins, by_pins  # the end is known, as `dgemma sudoku` has it
        return to_rows(self.config, prefix, canvas, pinned, np.zeros(prefix.shape, bool))


SPARE = 8  # pairs drawn beyond the rows, to stand before them


class Pairs:
    """Requests and answers. The answer may span several canvases: one of them is drawn, those before it are prefix."""

    def __init__(self, config: TaskConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        open_turn = [BOS, format.TURN, *vocabulary.encode("user\n")]
        close_turn = [format.END_TURN, *vocabulary.encode("\n"), format.TURN, *vocabulary.encode("model\n")]
        self.frame = (open_turn, close_turn)

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
        """`count` requests (after `user\\n`) and answers, as ids"""
        raise NotImplementedError

    def rows(self, rng: np.random.Generator, count: int) -> Rows:
        c = self.config
        prefix, canvas = np.full((count, c.prefix), PAD), np.full((count, c.canvas), PAD)
        read = np.zeros((count, c.prefix), bool)
        drawn = self.draw(rng, count + SPARE)
        for i in range(count):
            request, answer = drawn[i][0], [*drawn[i][1], EOS]
            block = int(rng.integers(-(-len(answer) // c.canvas))) * c.canvas
            prompt = [*self._prompt(request), *answer[:block]][-c.prefix :]
            room = c.prefix - len(prompt)
            fill: list[int] = []
            other = i
            while len(fill) < room:
                other = (other + 1) % len(drawn)
                fill = [*self._prompt(drawn[other][0]), *drawn[other][1], EOS, *fill]
            prefix[i] = fill[len(fill) - room :] + prompt
            read[i, c.prefix - min(block, c.prefix) :] = True
            part = answer[block : block + c.canvas]
            canvas[i, : len(part)] = part
        return to_rows(c, prefix, canvas, None, read)

    def _prompt(self, request: list[int]) -> list[int]:
        return [*self.frame[0], *request, *self.frame[1]]


class Icons(Pairs):
    """Names to SVG. Options: `source`, the arrays' name; `bare`: only prompts of exactly `prefix` tokens, so that the
    model also learns what begins at bos."""

    def __init__(
        self, config: TaskConfig, vocabulary: Vocabulary, folder: str, source: str, bare: bool = False
    ) -> None:
        super().__init__(config, vocabulary)
        self.bodies = Documents.open(folder, source)
        self.prompts = Documents.open(folder, f"{source}_prompts")
        self.prompt_of = np.load(Path(folder) / f"{source}_prompt_of.npy")
        self.ask = vocabulary.encode(format.svg_request(""))
        room = config.prefix - len(self._prompt(self.ask))
        spare = room - (self.prompts.lengths - 1)
        fits = (self.bodies.lengths[self.prompt_of] <= config.canvas) & ((spare == 0) if bare else (spare >= 0))
        self.usable = np.flatnonzero(fits)
        if not len(self.usable):
            raise DataError(f"no icon of {source} fits into prefix {config.prefix} and canvas {config.canvas}")

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
        chosen = self.usable[rng.integers(0, len(self.usable), count)]
        return [
            ([*self.ask, *self.prompts[p][:-1].tolist()], self.bodies[int(self.prompt_of[p])][:-1].tolist())
            for p in chosen.tolist()
        ]


class Arithmetic(Pairs):
    """Option `bare`: as for icons."""

    TRIES = 1000  # problems drawn for one that has the wanted length

    def __init__(self, config: TaskConfig, vocabulary: Vocabulary, bare: bool = False) -> None:
        super().__init__(config, vocabulary)
        self.vocabulary = vocabulary
        self.length = config.prefix - len(self._prompt([])) if bare else None  # of a request

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
        dice, encode = Random(int(rng.integers(1 << 62))), self.vocabulary.encode
        found: list[tuple[list[int], list[int]]] = []
        for _ in range(self.TRIES * count):
            made = arithmetic_gen.problem(dice)
            request = encode(format.arithmetic_request(made.question))
            if self.length in (None, len(request)):
                found.append((request, encode(made.answer)))
            if len(found) == count:
                return found
        raise DataError(f"task {self.config.name}: hardly any problem makes a prompt of {self.config.prefix} tokens")


class JsonLines(Pairs):
    """A user's own pairs. Option: `file`, JSON lines with `prompt` and `response`."""

    def __init__(self, config: TaskConfig, vocabulary: Vocabulary, file: str) -> None:
        super().__init__(config, vocabulary)
        self.pairs: list[tuple[list[int], list[int]]] = []
        try:
            for line in Path(file).read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.pairs.append((vocabulary.encode(row["prompt"]), vocabulary.encode(row["response"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            at = f"line {len(self.pairs) + 1} of {file}"
            raise DataError(f"{at}: JSON lines with `prompt` and `response` are needed: {error!r}") from None
        if not self.pairs:
            raise DataError(f"{file} is empty")

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
        return [self.pairs[i] for i in rng.integers(0, len(self.pairs), count).tolist()]


def make_task(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary) -> Task:
    """The task that `config.kind` names; an option that it does not know is an error."""
    makers: dict[str, Callable[..., Task]] = {
        "continuation": _continuation,
        "infill": _infill,
        "sudoku": _sudoku,
        "icons": _icons,
        "arithmetic": _arithmetic,
        "pairs": _pairs,
    }
    if config.kind not in makers:
        raise ConfigError(f"task {config.name}: no kind {config.kind!r}; there are: {', '.join(makers)}")
    try:
        return makers[config.kind](config, recipe, vocabulary, **config.options)
    except TypeError as error:
        raise ConfigError(f"task {config.name}: {error}") from None


def _continuation(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, source: str) -> Task:
    documents = Documents.open(recipe.data, source)
    if len(documents.tokens) <= config.prefix + config.canvas:
        raise DataError(f"task {config.name}: {source} is shorter than one row")
    return Continuation(config, documents)


def _infill(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, source: str, **options: Any) -> Task:
    return Infill(config, Documents.open(recipe.data, source), vocabulary.line_starts, **options)


def _sudoku(
    config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, source: str = "", count: int = 256, **options: Any
) -> Task:
    if source:
        try:
            with np.load(Path(recipe.data) / source) as arrays:
                puzzles = Puzzles(arrays["puzzle"], arrays["solution"], arrays["guesses"])
        except (OSError, KeyError, ValueError) as error:
            raise DataError(f"cannot read the puzzles of {source}: {error}") from None
    else:
        puzzles = generate(recipe.run.seed, np.full(count, 30, np.uint8))
    board = vocabulary.encode("0123456789")
    prompt = format.chat_prompt(vocabulary.encode, format.sudoku_request("0" * 81))
    first = prompt.index(board[0])
    if len(board) != 10 or prompt[first : first + 81] != [board[0]] * 81 or config.canvas < 82:
        raise ConfigError(f"task {config.name}: needs digits as single tokens and a canvas of at least 82")
    if len(prompt) != config.prefix:
        raise ConfigError(f"task {config.name}: the prompt has {len(prompt)} tokens: set prefix = {len(prompt)}")
    return Sudoku(config, puzzles, np.array(board), (prompt[:first], prompt[first + 81 :]), **options)


def _icons(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, source: str, bare: bool = False) -> Task:
    return Icons(config, vocabulary, recipe.data, source, bare)


def _arithmetic(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, bare: bool = False) -> Task:
    return Arithmetic(config, vocabulary, bare)


def _pairs(config: TaskConfig, recipe: Recipe, vocabulary: Vocabulary, file: str) -> Task:
    return JsonLines(config, vocabulary, file)
