"""Steps against accuracy, from figures that `dgemma eval --steps 1,2,4,… --json` printed on another machine.

    python scripts/plot_steps.py sudoku-steps.json line-steps.json --out docs/nano_steps.png

One line a set and its first figure, the 95% interval shaded. `dgemma eval --plot` draws the same where it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusiongemma.cli.figures import draw_curve, import_pyplot, label_steps
from diffusiongemma.errors import DataError


def curves(files: list[Path]) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """label -> (steps at most, figure), in order of steps; answers that were not graded have no figures, and no line"""
    found: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        report: dict[str, Any] = json.loads(line)
        for run in report["runs"]:
            if run["steps_limit"] is None or not run["figures"]:
                continue
            name, figure = next(iter(run["figures"].items()))
            label = f"{report['task']}, {report['set']}: {name}" + ("" if run["early_stop"] else ", all steps")
            found.setdefault(label, []).append((run["steps_limit"], figure))
    if not found:
        raise DataError(
            "there is no graded run with a number of steps: dgemma eval … --steps 8,16,48 --json prints some"
        )
    return {label: sorted(points, key=lambda point: point[0]) for label, points in found.items()}


def main(
    files: Annotated[list[Path], typer.Argument(help="What `dgemma eval … --steps … --json` printed.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")],
) -> None:
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    lines = curves(files)
    for label, points in lines.items():
        draw_curve(axis, [(at, f["value"], f["low"], f["high"]) for at, f in points], label)
    label_steps(axis, {at for points in lines.values() for at, _ in points}, "% of cases")
    axis.set_ylim(0, 101)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
