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
    looks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="Looks of an attempt (4), of 96 steps each: while the board does not settle, it is turned and looked "
            "at again. With --steps or --no-early-stop there is one.",
        ),
    ] = None,
    settings: Settings,
) -> None:
    """Solve a Sudoku: the givens are pinned, the model fills in the rest.

    Other defaults than those below: 96 steps a look on a canvas of 96 tokens, --t-max 0.8, --t-min 0.4, --forget 8.

    The exit code is 0 if the board obeys the rules, 1 if not.
    """
    if wrong := [name for name in FIXED if name in settings.options]:
        raise InputError(f"{wrong[0]} has no effect here: the board decides it")
    refuse_looks(looks, settings.options)
    seed = settings.options.setdefault("seed", secrets.randbits(31))
    board = read_puzzle(puzzle, random, seed)
    with settings.load() as engine:
        solved = solve(engine, board, settings, attempts, looks)
    if solved is None:
        raise typer.Exit(INTERRUPTED)
    if not solved.solved:
        raise typer.Exit(UNSOLVED)


def refuse_looks(looks: int | None, options: dict[str, Any]) -> None:
    """Where there is one look anyway."""
    twin, all_steps = options.get("mode") == "ar", options.get("early_stop") is False
    why = {"--steps": "steps" in options, "--no-early-stop": all_steps, "--ar": twin}
    if looks is not None and (flag := next((name for name, given in why.items() if given), None)):
        raise InputError(f"--looks has no effect with {flag}: there is one look then")


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
    """How it went: the last attempt, and how many there were. Its steps and seconds are those of all its looks."""

    puzzle: str
    board: str
    solved: bool
    attempts: int
    seed: int
    steps: int
    ms_a_step: float
    tokens_per_forward: float  # cells decided a step; givens are not
    repaired: int  # cells that were accepted once with another digit, in its last look
    seconds: float
    looks: int = 1


def solve(
    engine: Engine, givens: Sequence[int], settings: Settings, attempts: int = 1, looks: int | None = None
) -> Solved | None:
    """Attempt after attempt until the rules hold, shown as the settings want it. None: interrupted."""
    from diffusiongemma.cli.board import Board
    from diffusiongemma.tasks.evaluation import Variant
    from diffusiongemma.tasks.sudoku import LOOKS, SudokuBoard, looks_of

    view = SudokuBoard.of(engine)
    options = dict(settings.options)
    seed = options.pop("seed", None)
    seed = secrets.randbits(31) if seed is None else int(seed)
    variant = Variant(
        options.pop("mode", "diffusion"), options.pop("steps", None), options.pop("early_stop", True), options
    )
    if variant.mode == "ar" and attempts > 1 and not options.get("temperature"):
        raise InputError("--attempts has no effect with --ar unless --temperature is above 0: it would say the same")
    result, most = None, looks_of(variant, looks or LOOKS)
    for tried in range(1, attempts + 1):
        mine = seed + tried - 1
        ends: list[End] = []  # of its looks
        attempt = f"attempt {tried} of {attempts}, " if attempts > 1 else ""
        while not ends or (len(ends) < most and not ends[-1].metrics.settled):
            board = Board(view, givens, look=len(ends))
            request = view.request(engine, givens, variant, mine, drafts=True, look=board.look)
            steps = request.params.steps if variant.mode == "diffusion" else request.params.max_new_tokens
            display = make_display(settings, f"{attempt}{board.told_look(most)}seed {mine}", steps)
            end = _follow(engine, request, board, display)
            if end is None:
                return None
            ends.append(end)
        result = _judge(board, ends, tried, mine, variant.mode)
        display.close(board, result)
        if result.solved:
            break
    return result


def _follow(engine: Engine, request: Any, board: Board, display: Plain) -> End | None:
    """The end of one look; None if it was cancelled."""
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


def _judge(board: Board, ends: Sequence[End], tried: int, seed: int, mode: str) -> Solved:
    """`ends`: of all looks; `board`: what the last one came to."""
    from diffusiongemma.tasks.sudoku_solver import is_solution, render

    parts = [end.metrics for end in ends]
    steps = sum(m.steps for m in parts)
    decided = parts[-1].new_tokens - (sum(value > 0 for value in board.givens) if mode == "diffusion" else 0)
    return Solved(
        puzzle=render(board.givens),
        board="".join(map(str, board.values)),
        solved=is_solution(board.values, board.givens),
        attempts=tried,
        seed=seed,
        steps=steps,
        ms_a_step=1e3 * sum(m.total_seconds - m.prefill_seconds for m in parts) / max(1, steps),
        tokens_per_forward=decided / max(1, steps),
        repaired=len(board.repaired),
        seconds=sum(m.total_seconds for m in parts),
        looks=len(ends),
    )


def verdict(result: Solved) -> str:
    parts = (
        "solved: every row, column and box holds 1 to 9" if result.solved else "not solved: the board breaks the rules",
        f"{result.steps} step{'s' * (result.steps != 1)} of {result.ms_a_step:.0f} ms"
        + (f" in {result.looks} looks" if result.looks > 1 else ""),
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
    """A line a step: what is settled. Then the board. A look that is not the first says so."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps = title, steps
        self._shown = 0

    def show(self, board: Board) -> None:
        if board.step > self._shown:
            self._shown = board.step
            self.step(board)

    def step(self, board: Board) -> None:
        if board.look and board.step == 1:
            print(self.title, flush=True)
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
        print(json.dumps({"kind": "draft", "look": board.look + 1, "step": board.step, **drawn}), flush=True)

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
