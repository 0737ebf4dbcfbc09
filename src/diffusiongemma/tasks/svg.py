"""Text to SVG icons: held-out names to ask for, and a grader that reads and draws the answer.

An answer is good if it is well-formed, holds nothing but plain shapes, every path follows the grammar, and something
can be seen when it is drawn: its ink, the mean opacity of the picture, lies between INK_LEAST and INK_MOST. Of 19,512
training icons the faintest has an ink of 0.49%, and of the fullest, apart from logos that fill everything, 98.9%.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusiongemma.engine import Engine
from diffusiongemma.errors import DataError, InputError, SvgError
from diffusiongemma.tasks.format import svg_request
from diffusiongemma.tasks.prompts import chat_tokens
from diffusiongemma.tasks.sets import BUILT_IN, read_lines, take
from diffusiongemma.tasks.svg_path import path_problem
from diffusiongemma.tasks.svg_render import coverage, render, render_drawing
from diffusiongemma.tasks.svg_safe import read, sanitise

__all__ = ["SvgCase", "SvgGrade", "cases", "document", "extract", "grade", "prompt", "render", "sanitise"]

NAMES = BUILT_IN / "svg_names.jsonl.gz"
INK_LEAST, INK_MOST = 0.002, 0.995
MAX_ATTEMPTS = 100
INK_SIZE = 64  # pixels of the picture that ink is measured on
_FENCED = re.compile(r"\s*```(?:svg|xml|html)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True)
class SvgCase:
    """A wish to draw; `id` says where it comes from."""

    prompt: str
    id: str


@dataclass(frozen=True)
class SvgGrade:
    """What an answer is worth. Each judgement stands alone: a faulty path may still show something."""

    well_formed: bool = False  # an SVG document that can be read at all; without it all else is False
    allowed: bool = False  # nothing but plain shapes with sound attributes
    paths_valid: bool = False  # every path follows the grammar to its end
    visible: bool = False  # something can be seen
    ink: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def readable(self) -> bool:
        """All that can be said without drawing it."""
        return self.well_formed and self.allowed and self.paths_valid

    @property
    def ok(self) -> bool:
        return self.readable and self.visible

    @property
    def rank(self) -> tuple[bool, int]:
        """Of several answers the greatest is kept: something to see first, then the fewest faults."""
        return self.visible, self.well_formed + self.allowed + self.paths_valid

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def prompt(engine: Engine, wish: str) -> tuple[int, ...]:
    """What to hand to the engine for a wish such as `bell, outline`. Names are learned in small letters."""
    wish = " ".join(wish.lower().split())
    if not wish:
        raise InputError("there is nothing to draw: say what, such as 'bell, outline'")
    return chat_tokens(engine, svg_request(wish))


def extract(text: str) -> str:
    """An answer without the code fence that chat models put around markup."""
    found = _FENCED.fullmatch(text)
    return text if found is None else found[1]


def document(text: str, size: int | None = None) -> str:
    """An answer as the text of an .svg file, sanitised; with a size, viewers show its longer side in so many pixels."""
    return read(extract(text)).markup(size) + "\n"


def grade(text: str, drawn: bool = True) -> SvgGrade:
    """Judge an answer; never raises for what a model may have written. Not `drawn`: without a look at the picture."""
    try:
        drawing = read(extract(text))
    except SvgError as error:
        return SvgGrade(problems=(str(error),))
    problems = [f"not allowed: {what}" for what in drawing.dropped]
    faults = [problem for data in drawing.paths if (problem := path_problem(data)) is not None]
    problems += [f"path: {fault}" for fault in faults]
    if not drawn:
        return SvgGrade(True, not drawing.dropped, not faults, problems=tuple(problems))
    try:
        ink = float(coverage(render_drawing(drawing, INK_SIZE)).mean())
    except SvgError as error:
        return SvgGrade(True, not drawing.dropped, not faults, problems=(*problems, str(error)))
    visible = INK_LEAST <= ink <= INK_MOST
    if not visible:
        problems.append(f"{'nothing' if ink < INK_LEAST else 'only one full area'} to be seen: ink {100 * ink:.2f}%")
    return SvgGrade(True, not drawing.dropped, not faults, visible, ink, tuple(problems))


def cases(file: Path | None = None, limit: int | None = None, seed: int = 0) -> list[SvgCase]:
    """The built-in held-out names, or a user's file: one wish a line, or JSON lines with `prompt` and perhaps `id`."""
    path = NAMES if file is None else file
    found = [_case(number, line.strip(), path) for number, line in read_lines(path)]
    if not found:
        raise DataError(f"{path} holds no wish: write one a line, such as 'bell, outline'")
    return take(found, limit, seed)


def _case(number: int, line: str, path: Path) -> SvgCase:
    row: Any = {"prompt": line}
    if line.startswith("{"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
    wish = row.get("prompt")
    if not isinstance(wish, str) or not wish.strip():
        raise DataError(f"{path}, line {number}: a `prompt` such as 'bell, outline' is needed")
    return SvgCase(wish.strip(), str(row.get("id", f"line {number}")))
