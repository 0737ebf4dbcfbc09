"""Holes in Python code: whole lines, several lines, or part of a line, of a length that the model must find itself.

Four scores. White space at the end of a filling is no difference, an indent is.

exact       the filling is the text that was there
similarity  how near it is, strictly: one minus the edit distance over the length of the longer (as RepoCoder has it)
ratio       … leniently: twice the longest common subsequence over the sum of the lengths (the "edit similarity" of
            CodeXGLUE, RepoBench and CrossCodeEval; all but RepoBench take indents off, which makes it lower again)
parses      Python parses the whole file with the filling in it

docs/nano.md has what each gives for the embedded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusiongemma.engine import Candidate, Engine
from diffusiongemma.engine.candidates import Try, judge
from diffusiongemma.engine.choice import Choice
from diffusiongemma.engine.events import End
from diffusiongemma.engine.infill import plan_infill
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.evaluation import Graded, Outcome, Report, Variant, Work
from diffusiongemma.tasks.sets import BUILT_IN, read_json_lines
from diffusiongemma.text.exact import partial_tokens
from diffusiongemma.text.fim import FimTokens
from diffusiongemma.text.python import parses
from diffusiongemma.text.similar import ratio, similarity

KINDS = ("line", "lines", "inside")
FILE = BUILT_IN / "infill.jsonl.gz"
LIKELIEST = Choice()
CANVAS = {"line": format.INFILL_CANVAS, "inside": format.INFILL_CANVAS, "lines": format.BLOCK_CANVAS}


@dataclass(frozen=True)
class InfillCase:
    name: str
    kind: str
    prefix: str
    suffix: str
    target: str

    @property
    def whole(self) -> str:
        return self.prefix + self.target + self.suffix


def built_in(kind: str) -> list[InfillCase]:
    """The held-out holes of one kind: the file keeps each document once, and the places of the holes in it."""
    if kind not in KINDS:
        raise InputError(f"there is no infill set {kind!r}; there are: {', '.join(KINDS)}")
    if not FILE.is_file():
        raise DataError(
            f"{FILE.name} is not part of this build: make it with `python -m diffusiongemma.train.data infill`"
        )
    cases = []
    for _, row in read_json_lines(FILE, ("package", "path", "text")):
        text = row["text"]
        for hole in row["holes"]:
            first, end = hole["first"], hole["end"]
            if hole["kind"] == kind:
                name = f"{row['package']}/{row['path']}:{text.count(chr(10), 0, first) + 1}"
                cases.append(InfillCase(name, kind, text[:first], text[end:], text[first:end]))
    return cases


def read_cases(path: Path) -> list[InfillCase]:
    """JSON lines with `prefix`, `suffix`, `target`; `kind` (line, lines, inside; else line) chooses the canvas."""
    cases = []
    for number, row in read_json_lines(path, ("prefix", "suffix", "target")):
        kind = row.get("kind", "line")
        if kind not in KINDS:
            raise DataError(f"{path}, line {number}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        cases.append(InfillCase(f"line {number}", kind, row["prefix"], row["suffix"], row["target"]))
    if not cases:
        raise DataError(f"{path} holds no case")
    return cases


# ---- grading ---------------------------------------------------------------------------------------------------------


def grade(case: InfillCase, text: str) -> dict[str, bool | float]:
    """`parses` is asked only where the original does."""
    got, wanted = text.rstrip(), case.target.rstrip()
    scores: dict[str, bool | float] = {"exact": got == wanted}
    scores |= {"similarity": similarity(got, wanted), "ratio": ratio(got, wanted)}
    if parses(case.whole):
        scores["parses"] = parses(case.prefix + text + case.suffix)
    return scores


# ---- asking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Infill:
    """`candidates`: fillings to try, of which the best by `choice` counts (None: 1 for a model that ends holes itself).
    `context`: tokens around a hole at most, `far`: tokens for passages from elsewhere in the file (both None: what the
    model was trained with)."""

    candidates: int | None = None
    context: int | None = None
    far: int | None = None
    canvas: int | None = None
    choice: Choice = LIKELIEST
    name: str = "infill"
    headline: str = "exact"

    def work(self, engine: Engine, case: InfillCase, variant: Variant, seed: int) -> Work:
        tries = self.plan(engine, case, variant, seed)
        outcomes = yield [one.request for one in tries]
        steps = sum(outcome.metrics.steps for outcome in outcomes)
        found = _judge(engine, tries, outcomes)
        if all(candidate.texts is None for candidate in found):  # as the engine does it
            parts = {*tries[0].request.forbidden, *partial_tokens(engine.tokenizer)}
            whole = [replace(one.request, forbidden=tuple(sorted(parts))) for one in tries]
            outcomes = yield whole
            steps += sum(outcome.metrics.steps for outcome in outcomes)
            found = _judge(engine, tries, outcomes)
        best = self.choice.order(found, (case.prefix, case.suffix))[0]
        text = best.texts[0] if best.texts is not None else ""
        scores = grade(case, text) | {"finished": best.finish_reason == "stop"}
        told = [_tell(case, candidate) for candidate in found] if len(found) > 1 else []
        return Graded(case.name, case.kind, seed, text, scores, steps, len(best.fillings[0]), told)

    def plan(self, engine: Engine, case: InfillCase, variant: Variant, seed: int) -> list[Try]:
        width = min(self.canvas or CANVAS[case.kind], engine.model.config.canvas_length)
        ends_itself = FimTokens.of(engine.tokenizer) is not None
        options = {"max_new_tokens": width - 2 if ends_itself else width}  # the line break before and eos behind
        if ends_itself and variant.mode == "diffusion":
            options["canvas"] = width
        params = variant.params(engine.hole.sampling(engine.params), seed=seed, **options)
        candidates = self.candidates or (1 if ends_itself else None)
        text = (case.prefix, case.suffix)
        tries = plan_infill(engine, *text, params, candidates, drafts=False, context=self.context, far=self.far)
        self.choice.refuse_without_effect(len(tries), variant.mode)
        if len(tries) == 1:  # nothing to compare: the pass that would score it is spared
            return [replace(tries[0], request=replace(tries[0].request, score=False))]
        return tries


def _judge(engine: Engine, tries: Sequence[Try], outcomes: Sequence[Outcome]) -> list[Candidate]:
    return [
        judge(engine, one, outcome.tokens, End(outcome.finish_reason, outcome.metrics), outcome.score)
        for one, outcome in zip(tries, outcomes, strict=True)
    ]


def _tell(case: InfillCase, candidate: Candidate) -> dict[str, Any]:
    """All that choices between candidates go by, and what each would be worth (scripts/compare_choices.py)."""
    text = None if candidate.texts is None else candidate.texts[0]
    about = {"seed": candidate.seed, "text": text, "score": candidate.score, "opens": candidate.opens}
    sound = text is not None and parses(case.prefix + text + case.suffix)  # asked also where the original does not
    return about | {"parses": sound, "finish_reason": candidate.finish_reason, "scores": grade(case, text or "")}


# ---- answers that were kept ------------------------------------------------------------------------------------------


def grade_answers(path: Path, own: Path | None = None) -> dict[str, tuple[Infill, list[Report]]]:
    """The answers that an evaluation kept, graded now, candidates too: set -> how they were asked for, and a report a
    variant. `own`: the file with the cases, if they were none of the built-in ones."""
    cases: dict[str, dict[str, InfillCase]] = {}
    tasks: dict[str, Infill] = {}
    reports: dict[str, dict[str, Report]] = {}
    for number, row in read_json_lines(path, ("task", "set", "variant", "mode", "case", "text")):
        name, label = row["set"], row["variant"]
        if name not in cases:
            if own is not None and own.name != name:
                raise DataError(f"{path}, line {number} is of the set {name!r}, whose cases {own} does not hold")
            cases[name] = {case.name: case for case in (built_in(name) if own is None else read_cases(own))}
        if row["case"] not in cases[name]:
            raise DataError(f"{path}, line {number}: there is no case {row['case']!r} in the set {name!r}")
        wrong = DataError(f"{path}, line {number} is no answer of one run of `dgemma eval infill --output`")
        try:
            graded = _graded_again(cases[name][row["case"]], row)
            variant, told = Variant(row["mode"], row["steps_limit"], row["early_stop"]), row["settings"]
            seen = (told["context"], told.get("far"))  # older answers were asked for when there was no `far`
            task = Infill(told["candidates"], *seen, told["canvas"], Choice(**told["choice"]))
        except (KeyError, TypeError, AttributeError):
            raise wrong from None
        if row["task"] != "infill" or task != tasks.setdefault(name, task):
            raise wrong
        reports.setdefault(name, {}).setdefault(label, Report(variant, [], None)).graded.append(graded)
    if not reports:
        raise DataError(f"{path} holds no answers")
    return {name: (tasks[name], list(found.values())) for name, found in reports.items()}


def _graded_again(case: InfillCase, row: dict[str, Any]) -> Graded:
    """A row that is not what it should be raises KeyError, TypeError or AttributeError."""
    scores = grade(case, row["text"]) | {"finished": row["scores"]["finished"] is True}
    tried = [one | {"scores": grade(case, one["text"] or "")} for one in row["tried"]]
    seed, steps, decided = (row[name] + 0 for name in ("seed", "steps", "decided"))
    return Graded(case.name, case.kind, seed, row["text"], scores, steps, decided, tried)
