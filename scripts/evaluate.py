"""Many evaluations of a model in one process with one engine, most important first: compiling kernels and starting
costs 10 to 40 s each time, and a GPU may be lent by the minute. What each is called stands in EVALUATIONS.

    python scripts/evaluate.py --out evals                                   # all of them
    python scripts/evaluate.py --out evals --only svg,line-8 --limit 100     # these, with at most so many cases each
    python scripts/evaluate.py --out $OUT --model FOLDER --budget 540        # ends after 540 s, loading included

The folder gets two files, because such a machine gives back few: summary.jsonl (the figures) and evals.tar.gz, which
holds NAME.jsonl (every answer) and NAME.json (what `dgemma eval --json` prints) of each evaluation. Both are whole
after every evaluation, so a run that is killed keeps what it has. When the budget is spent, an evaluation is cut off,
and its line says of how many cases its figures are (`cases`, `of`). Cases run in slices, drawn from all of the set,
every variant on a slice before the next: what a cut leaves is a fair sample, and the same for each variant. A slice
that was cut counts for nothing: its quick cases alone would be the easy ones.

Icons are graded later where there is no renderer. Then, at home:

    tar xzf evals.tar.gz; dgemma eval svg --answers evals/svg.jsonl          # the same for svg-*.jsonl
    python scripts/compare_choices.py evals/line-8.jsonl
    python scripts/plot_steps.py evals/sudoku-steps.json evals/line-steps.json --out docs/nano_steps.png
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from diffusiongemma.cli.eval import plan_arithmetic, plan_infill, plan_sudoku, plan_svg
from diffusiongemma.cli.evaluation import EvalOptions
from diffusiongemma.cli.figures import CaseSet, save_cases, settings, to_json, where
from diffusiongemma.engine import Engine
from diffusiongemma.errors import DiffusionGemmaError, InputError
from diffusiongemma.tasks.evaluation import Graded, Report, Task, Variant, evaluate

SUMMARY, TAR = "summary.jsonl", "evals.tar.gz"


@dataclass(frozen=True)
class Evaluation:
    """`own`: what its task is told; `how`: flags that all tasks share, as EvalOptions names them."""

    plan: Callable[..., tuple[Task[Any], list[CaseSet]]]
    own: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)


LINE, BLOCKS = {"sets": ["line"]}, {"sets": ["lines", "inside"]}
BOARDS = {"sets": ["qqwing_expert", "gymnasium_sudoku"]}
FOUR, EIGHT = ({"candidates": count, "check": "python"} for count in (4, 8))
EVALUATIONS = {
    "svg-ar": Evaluation(plan_svg, how={"mode": "ar"}),  # how nano draws
    "sudoku": Evaluation(plan_sudoku, {"sets": [*BOARDS["sets"], "own_36_46"], "attempts": 5}),
    "svg": Evaluation(plan_svg, {"attempts": 6}),
    "line": Evaluation(plan_infill, LINE),
    "line-4": Evaluation(plan_infill, LINE | FOUR),  # as many as `dgemma infill` tries by itself
    "line-8": Evaluation(plan_infill, LINE | EIGHT),
    "svg-careful": Evaluation(plan_svg, how={"limit": 200, "steps": "96", "option": ["entropy_bound=0.05"]}),
    "blocks": Evaluation(plan_infill, BLOCKS, {"limit": 250}),
    "line-ar": Evaluation(plan_infill, LINE, {"mode": "ar"}),
    "blocks-ar": Evaluation(plan_infill, BLOCKS, {"limit": 250, "mode": "ar"}),
    "sudoku-ar": Evaluation(plan_sudoku, BOARDS, {"mode": "ar"}),
    "line-all": Evaluation(plan_infill, LINE, {"all_steps": True}),
    "sudoku-all": Evaluation(plan_sudoku, BOARDS, {"all_steps": True}),
    "svg-all": Evaluation(plan_svg, how={"all_steps": True}),
    "sudoku-steps": Evaluation(plan_sudoku, BOARDS, {"steps": "1,2,4,8,16,32,48,96,192"}),
    "line-steps": Evaluation(plan_infill, LINE, {"limit": 500, "steps": "1,2,4,8,16,24,32,48"}),
    "svg-steps": Evaluation(plan_svg, how={"limit": 200, "steps": "8,16,24,32,48,96"}),
    "line-careful": Evaluation(plan_infill, LINE, {"option": ["entropy_bound=0.05"]}),
    "blocks-8": Evaluation(plan_infill, BLOCKS | EIGHT, {"limit": 250}),
    "arithmetic": Evaluation(plan_arithmetic, how={"mode": "both"}),
    "sudoku-gen": Evaluation(plan_sudoku, {"sets": ["npm_sudoku_gen"], "attempts": 5}),
}


class TimeUp(Exception):
    """The budget is spent."""


class Clock:
    """Seconds since the program began, and how many it may have."""

    def __init__(self, budget: float | None) -> None:
        self.began, self.budget = time.monotonic(), budget

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def up(self) -> bool:
        return self.budget is not None and self.seconds >= self.budget

    def check(self, *_: int) -> None:
        """Also the progress of an evaluation: it is called between two cases, and what it raises cancels the rest."""
        if self.up:
            raise TimeUp


def slices(count: int, size: int) -> list[list[int]]:
    """Which cases run together, each once: a slice is drawn from the whole set, where neighbours are alike."""
    order = list(range(count))
    Random(0).shuffle(order)
    return [sorted(order[first : first + size]) for first in range(0, count, size)]


def run_set(
    engine: Engine, task: Task[Any], cases: Sequence[Any], variants: Sequence[Variant], seed: int, clock: Clock
) -> list[Report]:
    """A report a variant, all over the same cases: those of the slices that were done before the time was up."""
    done: list[dict[int, Graded]] = [{} for _ in variants]
    seconds = [0.0] * len(variants)
    for places in slices(len(cases), engine.scheduler.limits.max_rows):
        some = [cases[i] for i in places]
        try:
            clock.check()
            reports = [evaluate(engine, task, some, v, seed, clock.check, places) for v in variants]
        except TimeUp:
            break
        for number, report in enumerate(reports):
            done[number] |= dict(zip(places, report.graded, strict=True))
            seconds[number] += report.seconds or 0.0
    found = zip(variants, done, seconds, strict=True)
    return [Report(variant, [graded[i] for i in sorted(graded)], took) for variant, graded, took in found]


def told(run: dict[str, Any]) -> dict[str, Any]:
    """What of a run's figures the summary has."""
    shares = {name: [round(f[k], 4) for k in ("value", "low", "high")] for name, f in run["figures"].items()}
    rest = {"steps": round(run["steps"]["value"], 2), "tokens_per_forward": round(run["tokens_per_forward"], 2)}
    return {"run": run["variant"], "options": run["options"], **rest, "seconds": round(run["seconds"], 1), **shares}


def run_one(name: str, engine: Engine, options: EvalOptions, folder: Path, clock: Clock) -> list[dict[str, Any]]:
    """One evaluation, its answers and figures into the folder -> its lines of the summary, one a set and variant."""
    task, sets = EVALUATIONS[name].plan(options, **EVALUATIONS[name].own)
    about = where(engine) | {"seed": options.seed, "settings": settings(task)}
    lines: list[dict[str, Any]] = []
    for one in sets:
        reports = run_set(engine, task, one.cases, options.variants(engine), options.seed, clock)
        line = {"name": name, "set": one.name, "cases": len(reports[0].graded), "of": len(one.cases)}
        if not reports[0].graded:
            lines.append(line)
            continue
        save_cases(folder / f"{name}.jsonl", task, one, reports)
        figures = to_json(task, one, reports, about)
        with (folder / f"{name}.json").open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        lines += [line | {"settings": about["settings"]} | told(run) for run in figures["runs"]]
        for label, cost in figures["early_stop_cost_points"].items():
            points = [round(cost[k], 2) for k in ("value", "low", "high")]
            lines.append(line | {"early_stop_costs_points": {label: points}})
    return lines


def chosen(only: str | None) -> list[str]:
    """Names in the order of the table, which is that of their importance."""
    wanted = list(EVALUATIONS) if only is None else [name.strip() for name in only.split(",")]
    if wrong := [name for name in wanted if name not in EVALUATIONS]:
        raise InputError(f"there is no evaluation {wrong[0]!r}; there are: {', '.join(EVALUATIONS)}")
    return [name for name in EVALUATIONS if name in wanted]


def plan_options(name: str, common: EvalOptions, folder: Path) -> EvalOptions:
    how = EVALUATIONS[name].how
    limits = [limit for limit in (common.limit, how.get("limit")) if limit is not None]
    options = replace(common, **how | {"limit": min(limits, default=None), "output": folder / f"{name}.jsonl"})
    options.check()
    return options


def save(out: Path, folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Summary and archive, each replaced at once: a kill in between leaves the last whole one."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    with tarfile.open(out / f"{TAR}.new", "w:gz") as tar:
        tar.add(folder, "evals")
    os.replace(out / f"{TAR}.new", out / TAR)
    (out / SUMMARY).write_text(text, encoding="utf-8")


def main(
    out: Annotated[Path, typer.Option(help="The folder that gets summary.jsonl and evals.tar.gz.")],
    model: Annotated[str, typer.Option(help="As for dgemma eval.")] = "nano",
    device: Annotated[str, typer.Option(help="As for dgemma eval.")] = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="As for dgemma eval; a slice has as many cases.")] = None,
    only: Annotated[str | None, typer.Option(help="Names, such as svg,line-8 (all).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many cases of a set at most.")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds after which it ends, loading included.")
    ] = None,
) -> None:
    """Run them one after another. The exit code is 1 if one of them failed; the next is run all the same."""
    clock, names = Clock(budget), chosen(only)
    common = EvalOptions(model=model, device=device, batch=batch, limit=limit)
    out.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    failed, left = False, []
    with tempfile.TemporaryDirectory() as scratch, common.load() as engine:
        folder = Path(scratch)
        for name in names:
            if clock.up:
                left.append(name)
                continue
            try:
                found = run_one(name, engine, plan_options(name, common, folder), folder, clock)
            except DiffusionGemmaError as error:
                failed, found = True, [{"name": name, "error": str(error)}]
            for line in found:
                print(json.dumps(line), flush=True)
            lines += found
            save(out, folder, lines)
            print(f"== {name}: {clock.seconds:.0f} s are gone", flush=True)
        if left:
            lines.append({"not_begun": left})
            print(json.dumps(lines[-1]), flush=True)
            save(out, folder, lines)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
