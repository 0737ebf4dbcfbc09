"""`dgemma sudoku`: a puzzle, solved before your eyes. The rules decide at the end whether it is; no solver helps."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.cli.options import INTERRUPTED, Settings, with_settings
from diffusiongemma.errors import DiffusionGemmaError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from diffusiongemma.cli.board import Board
    from diffusiongemma.engine import End, Engine

UNSOLVED = 1  # exit code
FIXED = ("max_new_tokens", "canvas", "stop", "stop_tokens", "logprobs")  # what the board itself decides


@with_settings
def sudoku(
    puzzle: Annotated[
        str | None, typer.Argument(help="81 characters, row by row, '.' or '0' for empty; '-' reads them from stdin.")
    ] = None,
    *,
    random: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="A puzzle made by the seed: easy, medium, hard or expert.")
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, max=100, help="If the board breaks the rules, try again with the next seed.")
    ] = 1,
    settings: Settings,
) -> None:
    """Solve a Sudoku: the givens are pinned, the model fills in the rest.

    The exit code is 0 if the board obeys the rules, 1 if not.
    """
    if wrong := [name for name in FIXED if name in settings.options]:
        raise InputError(f"{wrong[0]} has no effect here: the board decides it")
    seed = settings.options.setdefault("seed", secrets.randbits(31))
    board = read_puzzle(puzzle, random, seed)
    with settings.load() as engine:
        solved = solve(engine, board, settings, attempts)
    if solved is None:
        raise typer.Exit(INTERRUPTED)
    if not solved.solved:
        raise typer.Exit(UNSOLVED)


def read_puzzle(puzzle: str | None, level: str | None, seed: int) -> list[int]:
    """The board to solve; one that cannot be solved is refused before a model is loaded. That is all a solver does."""
    from diffusiongemma.tasks.sudoku_levels import random_puzzle
    from diffusiongemma.tasks.sudoku_solver import parse, solutions

    if (puzzle is None) == (level is None):
        raise InputError("give a puzzle of 81 characters, or --random easy, medium, hard or expert")
    if level is not None:
        return random_puzzle(level, seed)
    if puzzle == "-":
        from diffusiongemma.cli.run import read_stdin

        puzzle = read_stdin()
    board = parse(puzzle or "")
    found = solutions(board, 2)
    if not found:
        raise InputError("this puzzle has no solution: its givens contradict each other or leave a cell no digit")
    if len(found) > 1:
        from diffusiongemma.cli.show import tell

        tell("this puzzle has several solutions: any board that obeys the rules will do")
    return board


@dataclass(frozen=True)
class Solved:
    """How it went: the last attempt, and how many there were."""

    puzzle: str
    board: str
    solved: bool
    attempts: int
    seed: int
    steps: int
    ms_a_step: float
    tokens_per_forward: float  # cells decided a step; givens are not
    repaired: int  # cells that were accepted once with another digit
    seconds: float


def solve(engine: Engine, givens: Sequence[int], settings: Settings, attempts: int = 1) -> Solved | None:
    """Attempt after attempt until the rules hold, shown as the settings want it. None: interrupted."""
    from diffusiongemma.cli.board import Board
    from diffusiongemma.tasks.evaluation import Variant
    from diffusiongemma.tasks.sudoku import SudokuBoard

    view = SudokuBoard.of(engine)
    options = dict(settings.options)
    seed = options.pop("seed", None)
    seed = secrets.randbits(31) if seed is None else int(seed)
    variant = Variant(
        options.pop("mode", "diffusion"), options.pop("steps", None), options.pop("early_stop", True), options
    )
    if variant.mode == "ar" and attempts > 1 and not options.get("temperature"):
        raise InputError("--attempts has no effect with --ar unless --temperature is above 0: it would say the same")
    result = None
    for tried in range(1, attempts + 1):
        request = view.request(engine, givens, variant, seed + tried - 1, drafts=True)
        board = Board(view, givens)
        title = f"attempt {tried} of {attempts}, " if attempts > 1 else ""
        steps = request.params.steps if variant.mode == "diffusion" else request.params.max_new_tokens
        display = make_display(settings, f"{title}seed {seed + tried - 1}", steps)
        end = _follow(engine, request, board, display)
        if end is None:
            return None
        result = _judge(board, end, tried, seed + tried - 1, variant.mode)
        display.close(board, result)
        if result.solved:
            break
    return result


def _follow(engine: Engine, request: Any, board: Board, display: Plain) -> End | None:
    """The end of one attempt; None if it was cancelled."""
    from diffusiongemma.cli.show import cancel_on_interrupt
    from diffusiongemma.engine import End

    handle = engine.submit(request)
    end = None
    try:
        with cancel_on_interrupt(handle.cancel), display:
            for event in handle:
                board.take(event)
                display.show(board)
                if isinstance(event, End):
                    end = event
    except BaseException:
        handle.cancel()
        raise
    assert end is not None
    if end.finish_reason == "error":
        raise DiffusionGemmaError(f"the request failed: {end.error}")
    return None if end.finish_reason == "cancelled" else end


def _judge(board: Board, end: End, tried: int, seed: int, mode: str) -> Solved:
    from diffusiongemma.tasks.sudoku_solver import is_solution, render

    m = end.metrics
    decided = m.new_tokens - (sum(value > 0 for value in board.givens) if mode == "diffusion" else 0)
    return Solved(
        puzzle=render(board.givens),
        board="".join(map(str, board.values)),
        solved=is_solution(board.values, board.givens),
        attempts=tried,
        seed=seed,
        steps=m.steps,
        ms_a_step=1e3 * (m.total_seconds - m.prefill_seconds) / max(1, m.steps),
        tokens_per_forward=decided / max(1, m.steps),
        repaired=len(board.repaired),
        seconds=m.total_seconds,
    )


def verdict(result: Solved) -> str:
    parts = (
        "solved: every row, column and box holds 1 to 9" if result.solved else "not solved: the board breaks the rules",
        f"{result.steps} step{'s' * (result.steps != 1)} of {result.ms_a_step:.0f} ms",
        f"{result.tokens_per_forward:.1f} cells a forward",
        f"{result.repaired} cell{'s' * (result.repaired != 1)} taken back and changed",
        f"seed {result.seed}",
    )
    return " · ".join(parts)


# ---- showing ---------------------------------------------------------------------------------------------------------


def make_display(settings: Settings, title: str, steps: int) -> Plain:
    if settings.as_json:
        return Json(title, steps)
    from rich.console import Console

    console = Console(highlight=False)
    if settings.plain or not sys.stdout.isatty() or console.is_dumb_terminal:
        return Plain(title, steps)
    return LiveBoard(title, steps, console)


class Plain:
    """A line a step: what is settled. Then the board."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps = title, steps
        self._shown = 0

    def show(self, board: Board) -> None:
        if board.step > self._shown:
            self._shown = board.step
            self.step(board)

    def step(self, board: Board) -> None:
        print(f"step {board.step:2d} {board.line()}", flush=True)

    def close(self, board: Board, result: Solved) -> None:
        from diffusiongemma.cli.show import tell

        print(f"board   {result.board}", flush=True)
        tell(verdict(result))

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Json(Plain):
    """A JSON object a step, and one for the result."""

    def step(self, board: Board) -> None:
        drawn = {"board": "".join(map(str, board.values)), "settled": board.line(), "repaired": sorted(board.repaired)}
        print(json.dumps({"kind": "draft", "step": board.step, **drawn}), flush=True)

    def close(self, board: Board, result: Solved) -> None:
        print(json.dumps({"kind": "end", **asdict(result)}), flush=True)


class LiveBoard(Plain):
    """The board in place, while it settles."""

    def __init__(self, title: str, steps: int, console: Console) -> None:
        from rich.live import Live

        super().__init__(title, steps)
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, board: Board) -> None:
        from rich.console import Group
        from rich.text import Text

        from diffusiongemma.cli.board import legend

        status = (
            f"step {board.step}/{self.steps} · {board.settled}/81 settled · entropy {board.entropy:.2f}"
            f" · {len(board.repaired)} taken back · {self.title}"
        )
        self._live.update(Group(board.render(), legend(), Text(status, style="dim")), refresh=True)

    def close(self, board: Board, result: Solved) -> None:
        from diffusiongemma.cli.show import tell

        self._console.print(board.render(final=True))
        tell(verdict(result))

    def __enter__(self) -> LiveBoard:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
