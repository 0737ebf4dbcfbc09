"""`dgemma demo`: a Sudoku, a hole in Python code and an icon, by the embedded model. What `make run` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusiongemma.cli.options import INTERRUPTED, Settings

if TYPE_CHECKING:
    from diffusiongemma.engine import Engine

PREFIX = '''class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
'''
SUFFIX = """

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""
OUT = Path("demo.svg")
WISH = "clock, outline"
SEED = 5
ATTEMPTS = 3  # of the board and of the icon; the first usually does


def run(
    level: Annotated[str, typer.Option(help="Of the Sudoku: easy, medium, hard or expert.")] = "hard",
    wish: Annotated[str, typer.Option(help="The icon to draw.")] = WISH,
    out: Annotated[Path, typer.Option(help="The .svg to write, with a .png beside it; replaced if there.")] = OUT,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same puzzle, text and picture.")] = SEED,
    plain: Annotated[bool, typer.Option("--plain", help="No live pictures, as in a pipe.")] = False,
) -> None:
    """Solve a Sudoku, fill a hole in Python code and draw an icon with the embedded model, on any CPU."""
    from diffusiongemma.cli.show import tell
    from diffusiongemma.cli.sudoku import solve
    from diffusiongemma.cli.svg import check_target, check_wish, draw
    from diffusiongemma.tasks.sudoku_levels import random_puzzle

    check_wish(wish)
    target, puzzle = check_target(out), random_puzzle(level, seed)
    settings = Settings(plain=plain, options={"seed": seed})
    with settings.load() as engine:
        tell(f"1 of 3 · a {level} Sudoku: every empty cell at once, out of noise")
        done = solve(engine, puzzle, settings, ATTEMPTS) is not None
        tell("\n2 of 3 · a hole in Python code, from both of its sides")
        done = done and _fill(engine, settings)
        how = ", one token after another, for so it draws best" if engine.svg_mode == "ar" else ""
        tell(f"\n3 of 3 · an icon: {wish}{how}")
        hot = replace(settings, options={**settings.options, "max_new_tokens": 256})
        done = done and draw(engine, wish, hot, target, attempts=ATTEMPTS) is not None
    if not done:
        raise typer.Exit(INTERRUPTED)


def _fill(engine: Engine, settings: Settings) -> bool:
    """Shows the text around the hole and the line that goes in; False: interrupted."""
    from diffusiongemma.cli.infill import fill_between

    print(PREFIX, end="", flush=True)
    behind = SUFFIX.removeprefix("\n").rstrip("\n")  # the line's own break is shown with it
    answer = fill_between(engine, PREFIX, SUFFIX, settings, behind=behind, check="python")
    return not answer.cancelled
