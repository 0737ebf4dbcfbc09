"""Icons from words as an evaluation: does what the model writes render to something visible?

Drawing needs a renderer, which a machine with a large GPU may lack. There answers can be kept ungraded in a file, and
graded where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffusiongemma.engine import Engine, Request
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format, svg
from diffusiongemma.tasks.evaluation import Graded, Report, Variant, Work
from diffusiongemma.tasks.sets import read_json_lines

RENDERER = ("resvg_py", "PIL")  # modules that the grader draws with


def missing_renderer() -> list[str]:
    return [name for name in RENDERER if find_spec(name) is None]


@dataclass(frozen=True)
class Attempt:
    """One answer to a wish."""

    seed: int
    text: str
    steps: int
    decided: int


@dataclass(frozen=True)
class GradedIcon(Graded):
    """`seed`, `steps` and `decided` are of the first attempt; `text` is of the best one."""

    text_seed: int = 0
    allowed: int = 1  # attempts: how many there could have been


def judge(case: str, tried: Sequence[Attempt], attempts: int) -> Graded:
    """The figures of the first attempt; beside them, where more were allowed, what the best of all is worth.

    As `dgemma svg` does it, the first sound answer ends the attempts: what may have come behind it does not count.
    """
    grades = [svg.grade(attempt.text) for attempt in tried]
    sound_at = next((i for i, grade in enumerate(grades) if grade.ok), len(grades) - 1)
    best = max(range(sound_at + 1), key=lambda i: grades[i].rank)  # of equals the first
    scores: dict[str, bool | float] = {
        "visible": grades[0].visible,
        "well-formed": grades[0].well_formed,
        "paths valid": grades[0].paths_valid,
        "all sound": grades[0].ok,
    }
    if attempts > 1:
        scores[f"visible within {attempts}"] = grades[best].visible
        scores[f"all sound within {attempts}"] = grades[best].ok
        scores["attempts"] = float(sound_at + 1)
    return _graded(case, tried, best, attempts, scores)


def _graded(
    case: str, tried: Sequence[Attempt], best: int, attempts: int, scores: dict[str, bool | float]
) -> GradedIcon:
    first, told = tried[0], [vars(attempt) for attempt in tried] if len(tried) > 1 else []
    text, seed = tried[best].text, tried[best].seed
    return GradedIcon(case, "", first.seed, text, scores, first.steps, first.decided, told, seed, attempts)


@dataclass(frozen=True)
class Icons:
    """`attempts`: how often a wish may be drawn, until an answer is sound; the figure for one attempt is always there.

    Not `graded`: there is no renderer here. An answer then counts as sound if all is right that can be said without
    drawing it; of 317 such answers two showed nothing.
    """

    attempts: int = 1
    graded: bool = True
    name: str = "svg"
    headline: str = "visible"

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= svg.MAX_ATTEMPTS:
            raise InputError(f"attempts must be from 1 to {svg.MAX_ATTEMPTS}, got {self.attempts}")

    def work(self, engine: Engine, case: svg.SvgCase, variant: Variant, seed: int) -> Work:
        options: dict[str, int] = {"max_new_tokens": format.SVG_CANVAS}
        if variant.mode == "diffusion":
            options["canvas"] = min(format.SVG_CANVAS, engine.model.config.canvas_length)
        params = variant.params(engine.params, **options)
        prompt, tried, sound = svg.prompt(engine, case.prompt), list[Attempt](), False
        # The twin takes its best token each time: asked again it would say the same.
        attempts = 1 if params.mode == "ar" and params.temperature == 0 else self.attempts
        while not sound and len(tried) < attempts:
            mine = replace(params, seed=seed + len(tried))
            (outcome,) = yield [Request(prompt, mine, drafts=False)]
            tried.append(Attempt(seed + len(tried), outcome.text, outcome.metrics.steps, len(outcome.tokens)))
            sound = len(tried) < attempts and self._is_sound(outcome.text)
        if self.graded:
            return judge(case.prompt, tried, attempts)
        return _graded(case.prompt, tried, len(tried) - 1, attempts, {})

    def _is_sound(self, text: str) -> bool:
        return svg.grade(text).ok if self.graded else svg.grade(text, drawn=False).readable


def grade_answers(path: Path) -> dict[str, list[Report]]:
    """The answers that an evaluation kept, graded now: set -> a report a variant."""
    answers: dict[tuple[str, str], list[tuple[str, list[Attempt]]]] = {}
    most: dict[tuple[str, str], int] = {}  # attempts that were allowed, or where that is not told, that any case took
    modes: dict[tuple[str, str], Variant] = {}
    for number, row in read_json_lines(path, ("task", "set", "variant", "mode", "case", "text")):
        tried = _tried(row)
        allowed = row.get("allowed", len(tried))
        if row["task"] != "svg" or not tried or type(allowed) is not int or allowed < len(tried):
            raise DataError(f"{path}, line {number} is no answer that `dgemma eval svg --output` wrote")
        key = row["set"], row["variant"]
        most[key] = max(allowed, most.get(key, 1))
        modes[key] = Variant(row["mode"], row.get("steps_limit"), row.get("early_stop") is not False)
        answers.setdefault(key, []).append((row["case"], tried))
    if not answers:
        raise DataError(f"{path} holds no answers")
    reports: dict[str, list[Report]] = {}
    for key, answered in answers.items():
        graded = [judge(case, tried, most[key]) for case, tried in answered]
        reports.setdefault(key[0], []).append(Report(modes[key], graded, None))
    return reports


def _tried(row: dict[str, Any]) -> list[Attempt]:
    """The attempts at a wish; none if one of them, or the row, is not what it should be."""
    rows = row.get("tried", [])
    if not isinstance(rows, list):
        return []
    tried = [_attempt(one) for one in rows or [row]]
    return [one for one in tried if one is not None] if None not in tried else []


def _attempt(row: Any) -> Attempt | None:
    """None: this is none."""
    kinds = {"seed": int, "text": str, "steps": int, "decided": int}
    if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return Attempt(**{name: row[name] for name in kinds})
