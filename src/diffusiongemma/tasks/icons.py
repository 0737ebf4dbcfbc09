"""Icons from words as an evaluation: does what the model writes render to something visible?

Drawing needs a renderer, which a machine with a large GPU may lack. There answers can be kept ungraded in a file, and
graded where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from diffusiongemma.engine import Engine, Request
from diffusiongemma.errors import DataError
from diffusiongemma.tasks import format, svg
from diffusiongemma.tasks.evaluation import Graded, Report, Variant, Work
from diffusiongemma.tasks.sets import read_json_lines

RENDERER = ("resvg_py", "PIL")  # modules that the grader draws with


def missing_renderer() -> list[str]:
    return [name for name in RENDERER if find_spec(name) is None]


def scores_of(text: str) -> dict[str, bool | float]:
    grade = svg.grade(text)
    return {
        "visible": grade.visible,
        "well-formed": grade.well_formed,
        "paths valid": grade.paths_valid,
        "all sound": grade.ok,
    }


@dataclass(frozen=True)
class Icons:
    graded: bool = True
    name: str = "svg"
    headline: str = "visible"

    def work(self, engine: Engine, case: svg.SvgCase, variant: Variant, seed: int) -> Work:
        options: dict[str, int] = {"max_new_tokens": format.SVG_CANVAS, "seed": seed}
        if variant.mode == "diffusion":
            options["canvas"] = min(format.SVG_CANVAS, engine.model.config.canvas_length)
        params = variant.params(engine.params, **options)
        (outcome,) = yield [Request(svg.prompt(engine, case.prompt), params, drafts=False)]
        scores = scores_of(outcome.text) if self.graded else {}
        text, metrics = outcome.text, outcome.metrics
        return Graded(case.prompt, "", seed, text, scores, metrics.steps, len(outcome.tokens))


def grade_answers(path: Path) -> dict[str, list[Report]]:
    """The answers that an evaluation kept, graded now: set -> a report a variant."""
    found: dict[tuple[str, str], list[Graded]] = {}
    modes: dict[tuple[str, str], Variant] = {}
    for number, row in read_json_lines(path, ("task", "set", "variant", "mode", "case", "text")):
        counts = [value for name in ("seed", "steps", "decided") if type(value := row.get(name)) is int]
        if row["task"] != "svg" or len(counts) != 3:
            raise DataError(f"{path}, line {number} is no answer that `dgemma eval svg --output` wrote")
        seed, steps, decided = counts
        key = row["set"], row["variant"]
        modes[key] = Variant(row["mode"], row.get("steps_limit"), row.get("early_stop") is not False)
        found.setdefault(key, []).append(
            Graded(row["case"], "", seed, row["text"], scores_of(row["text"]), steps, decided)
        )
    if not found:
        raise DataError(f"{path} holds no answers")
    reports: dict[str, list[Report]] = {}
    for key, graded in found.items():
        reports.setdefault(key[0], []).append(Report(modes[key], graded, None))
    return reports
