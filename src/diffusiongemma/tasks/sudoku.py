"""Sudoku: the givens are pinned in the canvas, the network fills in the rest, and the rules alone decide.

A look is one canvas, the same as the API's form of a board (engine/form.py), so a seed gives the same board by either
way: the end behind the 81 cells is pinned, too, and control tokens are no cells. Which of its other tokens a cell holds
is the network's own affair; nothing checks or steers it.

A canvas that does not settle hangs in what it believes. So an attempt has several looks: one that ran out of steps is
followed by another at the same board turned by 90 degrees, and the answer is turned back. Only the sampler's stop rule
decides on that; a look that settled is final, right or wrong. With more attempts, a board that breaks the rules is
tried again with the next seed. The rules are all that looks at it: no solver takes part.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from diffusiongemma.engine import Engine, Request
from diffusiongemma.engine.candidates import forbidden_tokens
from diffusiongemma.engine.form import ending
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.evaluation import Graded, Outcome, Variant, Work
from diffusiongemma.tasks.prompts import chat_tokens
from diffusiongemma.tasks.sets import BUILT_IN, read_lines
from diffusiongemma.tasks.sudoku_gen import solve_all
from diffusiongemma.tasks.sudoku_solver import is_solution, parse

CELLS = 81
PREFIX = "sudoku_"
MAX_ATTEMPTS = 100
TURNS = 4  # of a square, until it is upright again
MAX_LOOKS = 2 * TURNS  # … and as many of its mirror image
T = TypeVar("T")

# Hotter than the embedded model writes text: on hard boards 0.3 to 0.5 solved five in a hundred fewer. Hard boards hang
# in what they believe; forgetting it now and then is what solves them, if they have the steps for it (docs/log.md).
HEAT = {"t_min": 0.4, "t_max": 0.8, "forget": 8}
STEPS = 96  # of a look
LOOKS = 4


@dataclass(frozen=True)
class SudokuCase:
    name: str
    board: tuple[int, ...]  # 81 digits, 0 for empty

    @property
    def givens(self) -> int:
        return sum(value > 0 for value in self.board)


def _cells(look: int) -> tuple[int, ...]:
    """[81] which cell of the upright board each place of the canvas holds in this look, from 0 on"""
    grid = np.arange(CELLS).reshape(9, 9)
    return tuple(np.rot90(grid if look < TURNS else grid.T, look % TURNS).ravel().tolist())


SEEN = tuple(_cells(look) for look in range(MAX_LOOKS))


def turn(board: Sequence[T], look: int) -> list[T]:
    """The board as this look has it; the first, 0, has it upright. Other cells come first, the rules stay the same."""
    return [board[cell] for cell in SEEN[look]]


def turn_back(seen: Sequence[T], look: int) -> list[T]:
    upright = list(seen)
    for value, cell in zip(seen, SEEN[look], strict=True):
        upright[cell] = value
    return upright


def looks_of(variant: Variant, looks: int = LOOKS) -> int:
    """How many looks an attempt may have. One where the steps are given, for that is then the budget; where all are
    taken, for nothing says then whether a board has settled; and for the twin, which has no canvas."""
    given = variant.steps is not None or "steps" in variant.options
    stops = variant.early_stop and variant.options.get("early_stop", True)
    return looks if variant.mode == "diffusion" and stops and not given else 1


def built_in_sets() -> dict[str, Path]:
    """Name -> file of every set that comes with the package."""
    return {path.stem.removeprefix(PREFIX): path for path in sorted(BUILT_IN.glob(f"{PREFIX}*.txt"))}


def read_puzzles(path: Path) -> list[SudokuCase]:
    """One puzzle a line, 81 characters, `.` or `0` for an empty cell."""
    cases, problems = [], []
    for number, line in read_lines(path):
        try:
            cases.append(SudokuCase(f"line {number}", tuple(parse(line))))
        except DataError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = [f"… and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise DataError(f"{path} has lines that are no Sudoku", [*problems[:10], *more])
    if not cases:
        raise DataError(f"{path} holds no puzzle")
    return cases


def solution_counts(boards: Sequence[Sequence[int]]) -> list[int]:
    """0, 1, or 2 for several, of each board."""
    return [int(n) for n in solve_all(np.array(boards, np.uint8), limit=2)[0]]


def remarks(cases: Sequence[SudokuCase]) -> list[str]:
    """What is wrong with puzzles that do not have exactly one solution."""
    counts = solution_counts([case.board for case in cases])
    said = {0: "has no solution: it cannot be solved", 2: "has several solutions: any that obeys the rules counts"}
    return [f"{case.name} {said[n]}" for case, n in zip(cases, counts, strict=True) if n in said]


@dataclass(frozen=True)
class SudokuBoard:
    """What of a tokenizer Sudoku needs: a token a digit."""

    digits: tuple[int, ...]  # [10]

    @classmethod
    def of(cls, engine: Engine) -> SudokuBoard:
        ids = engine.tokenizer.encode("0123456789")
        if len(ids) != 10 or engine.tokenizer.encode("00") != [ids[0]] * 2:
            raise InputError(f"{engine.name} does not write every digit as one token: Sudoku needs that")
        return cls(tuple(ids))

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Up to 81 tokens -> 81 values; what is no digit, or missing, is 0."""
        value = {token: digit for digit, token in enumerate(self.digits)}
        found = [value.get(token, 0) for token in tokens[:CELLS]]
        return found + [0] * (CELLS - len(found))

    def request(
        self, engine: Engine, board: Sequence[int], variant: Variant, seed: int, drafts: bool = False, look: int = 0
    ) -> Request:
        """`board` is upright, the answer is as this look has it. The causal twin cannot be pinned: it gets the puzzle
        in its prompt alone, as the other does."""
        board = turn(board, look)
        prompt = chat_tokens(engine, format.sudoku_request("".join(map(str, board))))
        if variant.mode == "ar":
            return Request(prompt, variant.params(engine.params, seed=seed, max_new_tokens=CELLS), drafts=drafts)
        canvas = min(format.SUDOKU_CANVAS, engine.model.config.canvas_length)
        heat = {name: value for name, value in HEAT.items() if name not in variant.options}
        if variant.steps is None and "steps" not in variant.options:
            heat["steps"] = STEPS
        pins = {cell: self.digits[value] for cell, value in enumerate(board) if value}
        if canvas > CELLS:  # a narrower one takes several blocks, and has no room for the end
            pins |= dict(enumerate(ending(engine, canvas - CELLS), CELLS))
        tokens = max(CELLS, canvas)
        params = variant.params(engine.params, seed=seed, max_new_tokens=tokens, canvas=canvas, **heat)
        return Request(prompt, params, pins, forbidden=forbidden_tokens(engine), drafts=drafts)


@dataclass(frozen=True)
class Attempt:
    """What one attempt came to: the board of its last look, upright, and the work of all its looks."""

    values: list[int]
    looks: int
    steps: int
    tokens: int  # of the answer


@dataclass(frozen=True)
class Sudoku:
    """`attempts`: how often a board may be tried; the figure for one attempt is always there. `looks`: how many an
    attempt may have, where it may have several (`looks_of`)."""

    attempts: int = 1
    looks: int = LOOKS
    name: str = "sudoku"
    headline: str = "solved"

    def __post_init__(self) -> None:
        for name, most in (("attempts", MAX_ATTEMPTS), ("looks", MAX_LOOKS)):
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"{name} must be from 1 to {most}, got {getattr(self, name)}")

    def work(self, engine: Engine, case: SudokuCase, variant: Variant, seed: int) -> Work:
        tried: list[Attempt] = []
        solved = False
        # The twin takes its best token each time: asked again it would say the same.
        attempts = 1 if variant.params(engine.params, seed=seed).temperature == 0 else self.attempts
        while not solved and len(tried) < attempts:
            tried.append((yield from self._attempt(engine, case, variant, seed + len(tried))))
            solved = is_solution(tried[-1].values, case.board)
        first = tried[0]
        scores: dict[str, bool | float] = {"solved": solved and len(tried) == 1}
        if attempts > 1:
            scores[f"solved within {attempts}"] = solved
            scores["attempts"] = float(len(tried))
        if looks_of(variant, self.looks) > 1:
            scores["looks"] = float(first.looks)
        pinned = case.givens if variant.mode == "diffusion" else 0
        kind = f"{case.givens // 5 * 5:02d} to {case.givens // 5 * 5 + 4:02d} givens"
        text = "".join(map(str, tried[-1].values))
        return Graded(case.name, kind, seed, text, scores, first.steps, first.tokens - pinned)

    def _attempt(
        self, engine: Engine, case: SudokuCase, variant: Variant, seed: int
    ) -> Generator[list[Request], list[Outcome], Attempt]:
        view, most, steps = SudokuBoard.of(engine), looks_of(variant, self.looks), 0
        for look in range(most):
            (outcome,) = yield [view.request(engine, case.board, variant, seed, look=look)]
            steps += outcome.metrics.steps
            if outcome.metrics.settled:
                break
        values = turn_back(view.read(outcome.tokens), look)
        return Attempt(values, look + 1, steps, len(outcome.tokens))
