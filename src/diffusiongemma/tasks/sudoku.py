"""Sudoku: the givens are pinned in the canvas, the network fills in the rest, and the rules alone decide.

One attempt is one canvas, the same as the API's form of a board (engine/form.py), so a seed gives the same board by
either way: the end behind the 81 cells is pinned, too, and control tokens are no cells. Which of its other tokens a
cell holds is the network's own affair; nothing checks or steers it. With more attempts, a board that breaks the rules
is tried again with the next seed. The rules are all that looks at it: no solver takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


# Hotter than the embedded model writes text: on hard boards 0.3 to 0.5 solved five in a hundred fewer. Hard boards hang
# in what they believe; forgetting it now and then is what solves them, if they have the steps for it (docs/log.md).
HEAT = {"t_min": 0.4, "t_max": 0.8, "forget": 8}
STEPS = 192


@dataclass(frozen=True)
class SudokuCase:
    name: str
    board: tuple[int, ...]  # 81 digits, 0 for empty

    @property
    def givens(self) -> int:
        return sum(value > 0 for value in self.board)


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
        self, engine: Engine, board: Sequence[int], variant: Variant, seed: int, drafts: bool = False
    ) -> Request:
        """The causal twin cannot be pinned: it gets the puzzle in its prompt alone, as the other does."""
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
class Sudoku:
    """`attempts`: how often a board may be tried; the figure for one attempt is always there."""

    attempts: int = 1
    name: str = "sudoku"
    headline: str = "solved"

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= MAX_ATTEMPTS:
            raise InputError(f"attempts must be from 1 to {MAX_ATTEMPTS}, got {self.attempts}")

    def work(self, engine: Engine, case: SudokuCase, variant: Variant, seed: int) -> Work:
        view = SudokuBoard.of(engine)
        first: Outcome | None = None
        solved_at = tried = 0
        values: list[int] = []
        # The twin takes its best token each time: asked again it would say the same.
        attempts = 1 if variant.params(engine.params, seed=seed).temperature == 0 else self.attempts
        while not solved_at and tried < attempts:
            (outcome,) = yield [view.request(engine, case.board, variant, seed + tried)]
            tried += 1
            first = first or outcome
            values = view.read(outcome.tokens)
            solved_at = tried if is_solution(values, case.board) else 0
        assert first is not None
        scores: dict[str, bool | float] = {"solved": solved_at == 1}
        if attempts > 1:
            scores[f"solved within {attempts}"] = solved_at > 0
            scores["attempts"] = float(tried)
        pinned = case.givens if variant.mode == "diffusion" else 0
        kind = f"{case.givens // 5 * 5:02d} to {case.givens // 5 * 5 + 4:02d} givens"
        text = "".join(map(str, values))
        return Graded(case.name, kind, seed, text, scores, first.metrics.steps, len(first.tokens) - pinned)
