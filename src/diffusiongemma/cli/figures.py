"""The figures of an evaluation as tables, as JSON, as a plot, and case by case in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusiongemma.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from diffusiongemma.engine import Engine
    from diffusiongemma.tasks.evaluation import Report, Task
    from diffusiongemma.tasks.statistics import Figure

SIDE_BY_SIDE = 4  # runs that a terminal has room for beside each other


@dataclass(frozen=True)
class CaseSet:
    """Cases under one name, and what must be said about them."""

    name: str
    cases: Sequence[Any]
    remarks: Sequence[str] = ()


def early_stop_costs(task: Task[Any], reports: Sequence[Report]) -> dict[str, Figure]:
    """Points of the headline lost by stopping early, on the same cases, for each number of steps run both ways."""
    from diffusiongemma.tasks.statistics import paired_points

    reports = [report for report in reports if report.figures()]  # answers may be graded elsewhere
    full = {r.variant.steps: r for r in reports if r.variant.mode == "diffusion" and not r.variant.early_stop}
    costs = {}
    for report in reports:
        v = report.variant
        if v.mode == "diffusion" and v.early_stop and v.steps in full:
            pair = [[bool(g.scores[task.headline]) for g in r.graded] for r in (full[v.steps], report)]
            costs[v.label] = paired_points(*pair)
    return costs


def where(engine: Engine) -> dict[str, Any]:
    """What figures depend on beside the model's weights and the seed."""
    runner = engine.scheduler.runner
    return {
        "model": engine.name,
        "device": str(runner.device),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "batch": engine.scheduler.limits.max_rows,
    }


def settings(task: Task[Any]) -> dict[str, Any]:
    """What a task was told, such as its attempts or candidates."""
    told = {name: value for name, value in vars(task).items() if name not in ("name", "headline")}
    return {name: vars(value) if is_dataclass(value) else value for name, value in told.items()}


def to_json(task: Task[Any], one: CaseSet, reports: Sequence[Report], about: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": task.name,
        "set": one.name,
        **about,
        "remarks": list(one.remarks),
        "runs": [report.to_dict() for report in reports],
        "early_stop_cost_points": {label: cost.to_dict() for label, cost in early_stop_costs(task, reports).items()},
    }


def save_cases(path: Path, task: Task[Any], one: CaseSet, reports: Sequence[Report]) -> None:
    """Append a JSON object a case and run."""
    about = {"task": task.name, "set": one.name, "settings": settings(task)}
    with path.open("a", encoding="utf-8") as out:
        for report in reports:
            for graded in report.graded:
                v = report.variant
                how = {"variant": v.label, "mode": v.mode, "steps_limit": v.steps, "early_stop": v.early_stop}
                out.write(json.dumps(about | how | graded.to_dict()) + "\n")


# ---- tables ----------------------------------------------------------------------------------------------------------


def print_reports(task: Task[Any], one: CaseSet, reports: Sequence[Report], model: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    about = ", ".join([f"{len(one.cases):,} cases", model, *_special(task)])
    console.print(f"[bold]{task.name}, {one.name}[/bold]: {about}", soft_wrap=True)
    if not reports[0].figures():
        console.print("not graded here")
    elif len(reports) <= SIDE_BY_SIDE:
        console.print(compare_table(reports))
        if len(reports[0].kinds) > 1:
            console.print(kinds_table(task, reports))
    else:
        console.print(runs_table(task, reports))
    for label, cost in early_stop_costs(task, reports).items():
        between = f"({cost.low:+.2f} to {cost.high:+.2f})"
        console.print(f"the early stop of '{label}' costs {cost.value:+.2f} points of '{task.headline}' {between}")
    console.print()


def _special(task: Task[Any]) -> list[str]:
    """The settings that are not the usual ones: figures of eight candidates must not pass for those of one."""
    mine, usual = (_flat(settings(one)) for one in (task, type(task)()))
    return [f"{name} {value}" for name, value in mine.items() if value is not False and value != usual[name]]


def _flat(told: dict[str, Any]) -> dict[str, Any]:
    parts = [value if isinstance(value, dict) else {name: value} for name, value in told.items()]
    return {name: value for part in parts for name, value in part.items()}


def compare_table(reports: Sequence[Report]) -> Table:
    """A run a column; below each figure its 95% confidence interval."""
    table = _table(["", *(report.variant.label for report in reports)])
    found = [report.figures() for report in reports]
    for name in dict.fromkeys(name for figures in found for name in figures):
        table.add_row(name, *(_cell(figures.get(name)) for figures in found))
    for name, values in _costs(reports).items():
        table.add_row(name, *values)
    return table


def kinds_table(task: Task[Any], reports: Sequence[Report]) -> Table:
    """A kind of case a row, the headline of each run beside it."""
    table = _table([f"{task.headline} by kind", "cases", *(report.variant.label for report in reports)])
    for kind in reports[0].kinds:
        figures = [report.figures(kind)[task.headline] for report in reports]
        table.add_row(kind, str(figures[0].count), *map(_cell, figures))
    return table


def runs_table(task: Task[Any], reports: Sequence[Report]) -> Table:
    """A run a row, with the headline alone: for many runs."""
    costs = _costs(reports)
    table = _table(["run", task.headline, *costs])
    for i, report in enumerate(reports):
        cells = [values[i] for values in costs.values()]
        table.add_row(report.variant.label, _cell(report.figures()[task.headline]), *cells)
    return table


def _costs(reports: Sequence[Report]) -> dict[str, list[str]]:
    return {
        "steps": [f"{report.mean_steps.value:.1f}" for report in reports],
        "tokens per forward": [f"{report.tokens_per_forward:.2f}" for report in reports],
        "seconds": ["" if report.seconds is None else f"{report.seconds:.1f}" for report in reports],
    }


def _table(columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for i, name in enumerate(columns):
        # A name may take two lines; a figure is never broken.
        table.add_column(name.replace(", ", ",\n").replace(" per ", "\nper "), justify="right" if i else "left")
    return table


def _cell(figure: Figure | None) -> Text:
    from rich.text import Text

    if figure is None:
        return Text("")
    scale, digits = (100, 1) if figure.is_share else (1, 3 if figure.value < 1 else 2)
    value, low, high = (f"{scale * number:.{digits}f}" for number in (figure.value, figure.low, figure.high))
    return Text.assemble(value, "%" if figure.is_share else "", "\n", (f"{low}–{high}", "dim"), no_wrap=True)


# ---- the plot --------------------------------------------------------------------------------------------------------


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'diffusiongemma[train]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_plot(path: Path, headline: str, curves: dict[str, list[Report]]) -> None:
    """The most steps a case may take against the share of good answers: a line a set, its intervals shaded."""
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, reports in curves.items():
        for early in (True, False):
            points = [(r.variant.steps, r.figures()[headline]) for r in reports if r.variant.early_stop == early]
            if not points:
                continue
            shares = [(steps or 0, f.value, f.low, f.high) for steps, f in points]
            draw_curve(axis, shares, name if early else f"{name}, all steps", "o-" if early else "s--")
    ticks = {r.variant.steps or 0 for reports in curves.values() for r in reports}
    label_steps(axis, ticks, f"{headline}, % of cases")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_curve(axis: Any, points: Sequence[tuple[int, float, float, float]], label: str, style: str = "o-") -> None:
    """points: steps, then share, low and high of a figure; the interval is shaded"""
    steps, share, low, high = zip(*points, strict=True)
    (line,) = axis.plot(steps, [100 * value for value in share], style, ms=4, label=label)
    bounds = ([100 * value for value in end] for end in (low, high))
    axis.fill_between(steps, *bounds, color=line.get_color(), alpha=0.15, linewidth=0)


def label_steps(axis: Any, ticks: Iterable[int], ylabel: str) -> None:
    """Axes of steps against a share, once all curves are there"""
    axis.set(xscale="log", xlabel="denoising steps at most", ylabel=ylabel)
    ordered = sorted(ticks)
    axis.set_xticks(ordered, [str(n) for n in ordered])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
