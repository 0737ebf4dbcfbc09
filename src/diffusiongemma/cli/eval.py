"""`dgemma eval`: how good a model is at a task, with confidence intervals. One command a task.

Each command makes a plan (the task as it was told, and its cases) and runs it. The plans stand alone, so that
scripts/evaluate.py can run many of them with one engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.cli.evaluation import EvalOptions, run_sets, start_file, with_eval_options
from diffusiongemma.cli.figures import CaseSet, print_reports, save_cases, settings, to_json
from diffusiongemma.errors import InputError

if TYPE_CHECKING:
    from diffusiongemma.tasks.evaluation import Report, Task

app = typer.Typer(no_args_is_help=True, help="Measure a model: sudoku, infill, svg or arithmetic.")

_SETS = Annotated[list[str] | None, typer.Option("--set", help="One of the built-in sets; may be repeated.")]


@app.command("sudoku")
@with_eval_options
def sudoku(
    *,
    sets: _SETS = None,
    attempts: Annotated[
        int, typer.Option(min=1, max=100, help="Also: try a board that breaks the rules again, so often in all.")
    ] = 1,
    looks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="Looks of an attempt (4), of 96 steps each: while a board does not settle, it is turned and looked at "
            "again. With --steps, --all-steps or --plot there is one.",
        ),
    ] = None,
    options: EvalOptions,
) -> None:
    """Boards solved, one attempt, givens pinned; `--file` has a puzzle a line, `.` or `0` for empty."""
    run_sets(*plan_sudoku(options, sets, attempts, looks), options)


def plan_sudoku(
    options: EvalOptions, sets: list[str] | None = None, attempts: int = 1, looks: int | None = None
) -> tuple[Task[Any], list[CaseSet]]:
    from diffusiongemma.tasks import sudoku as task
    from diffusiongemma.tasks.sets import take

    options.refuse_attempts(attempts)
    one_look = options.one_canvas()
    if looks is not None and one_look:
        raise InputError(f"--looks has no effect with {one_look}: there is one look then")
    files = task.built_in_sets()
    if options.file is not None:
        _no_sets(sets)
        found = [(options.file.name, options.file)]
    else:
        found = [(name, files[name]) for name in _chosen(sets, list(files))]
    made = []
    for name, path in found:
        cases = take(task.read_puzzles(path), options.limit, options.seed)
        made.append(CaseSet(name, cases, task.remarks(cases) if options.file is not None else ()))
    return task.Sudoku(attempts, 1 if one_look else looks or task.LOOKS), made


@app.command("infill")
@with_eval_options
def infill(
    *,
    sets: _SETS = None,
    candidates: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Fillings to try, the best counts (1, or what a model needs)."),
    ] = None,
    check: Annotated[str, typer.Option(help="python: those that make the file parse come first; or none.")] = "none",
    choose: Annotated[
        str, typer.Option(help="likeliest, or middle: the one most like all others, weighed by likelihood.")
    ] = "likeliest",
    context: Annotated[
        int | None, typer.Option(min=8, help="Tokens around a hole at most (what the model was trained with).")
    ] = None,
    far: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens for passages from elsewhere in the file, 0 for none (as it was trained)."),
    ] = None,
    canvas: Annotated[int | None, typer.Option(min=8, help="Width of the canvas (64; for several lines 128).")] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Run nothing: grade again what --output kept; --output gets it with new scores.")
    ] = None,
    options: EvalOptions,
) -> None:
    """Holes in held-out Python: line, lines, inside; `--file` has JSON lines with `prefix`, `suffix`, `target`.

    similarity: 1 - edit distance / length of the longer.

    ratio: 2 * longest common subsequence / sum of the lengths; never lower.

    Benchmarks call either "edit similarity", most of them the ratio. Indents count in both here.
    """
    if answers is not None:
        from diffusiongemma.tasks.infill import grade_answers

        asked = (candidates, check, choose, context, far, canvas)
        usual = not sets and asked == (None, "none", "likeliest", None, None, None)
        _only_beside_answers(usual, options, "--file", "--output", "--json")
        _show_answers(grade_answers(answers, options.file), answers, options)
        return
    run_sets(*plan_infill(options, sets, candidates, check, choose, context, far, canvas), options)


def plan_infill(
    options: EvalOptions,
    sets: list[str] | None = None,
    candidates: int | None = None,
    check: str = "none",
    choose: str = "likeliest",
    context: int | None = None,
    far: int | None = None,
    canvas: int | None = None,
) -> tuple[Task[Any], list[CaseSet]]:
    from diffusiongemma.engine.choice import Choice
    from diffusiongemma.tasks import infill as task
    from diffusiongemma.tasks.sets import take

    choice = Choice(check, choose)  # type: ignore[arg-type]  # it says what is wrong with them
    if options.mode != "diffusion" and (candidates or 1) > 1:
        raise InputError(f"--candidates {candidates} has no effect in mode 'ar': it writes one; use --mode diffusion")
    choice.refuse_without_effect(candidates, "ar" if options.mode == "both" else options.mode)
    if options.file is not None:
        _no_sets(sets)
        found = [(options.file.name, task.read_cases(options.file))]
    else:
        found = [(name, task.built_in(name)) for name in _chosen(sets, list(task.KINDS))]
    made = [CaseSet(name, take(cases, options.limit, options.seed)) for name, cases in found]
    return task.Infill(candidates, context, far, canvas, choice), made


@app.command("svg")
@with_eval_options
def svg(
    *,
    attempts: Annotated[
        int, typer.Option(min=1, max=100, help="Also: draw an icon that is not sound again, so often in all.")
    ] = 1,
    answers: Annotated[
        Path | None, typer.Option(help="Run nothing: grade what --output kept on a machine without a renderer.")
    ] = None,
    options: EvalOptions,
) -> None:
    """Icons for held-out names; `--file` has a wish a line, or JSON lines with `prompt`."""
    from diffusiongemma.tasks.icons import Icons, grade_answers, missing_renderer

    if answers is not None:
        if missing := missing_renderer():
            raise InputError(f"icons are drawn to be graded, and {', '.join(missing)} is not installed here")
        _only_beside_answers(attempts == 1, options, "--json")
        _show_answers({name: (Icons(), reports) for name, reports in grade_answers(answers).items()}, answers, options)
        return
    run_sets(*plan_svg(options, attempts), options)


def plan_svg(options: EvalOptions, attempts: int = 1) -> tuple[Task[Any], list[CaseSet]]:
    from diffusiongemma.tasks import svg as task
    from diffusiongemma.tasks.icons import Icons, missing_renderer

    missing = missing_renderer()
    if missing and (options.output is None or options.plot is not None):
        raise InputError(
            f"icons are drawn to be graded, and {', '.join(missing)} is not installed here: keep the answers with "
            "--output FILE, and grade them elsewhere with --answers FILE"
        )
    options.refuse_attempts(attempts)
    name = "held-out names" if options.file is None else options.file.name
    cases = task.cases(options.file, options.limit, options.seed)
    return Icons(attempts, not missing), [CaseSet(name, cases)]


@app.command("arithmetic")
@with_eval_options
def arithmetic(*, options: EvalOptions) -> None:
    """Sums and the like, made by the seed; `--file` has JSON lines with `question` and `answer`."""
    run_sets(*plan_arithmetic(options), options)


def plan_arithmetic(options: EvalOptions) -> tuple[Task[Any], list[CaseSet]]:
    from diffusiongemma.tasks import arithmetic as task

    name = "held-out questions" if options.file is None else options.file.name
    return task.Arithmetic(), [CaseSet(name, task.cases(options.file, options.limit, options.seed))]


def _only_beside_answers(usual: bool, options: EvalOptions, *flags: str) -> None:
    """`usual`: the task's own flags are not set. Of the shared ones, only these may be."""
    names = [flag.removeprefix("--").replace("json", "as_json") for flag in flags]
    if not usual or options != EvalOptions(**{name: getattr(options, name) for name in names}):
        *others, last = flags
        allowed = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        raise InputError(f"--answers runs nothing, so only {allowed} an effect beside it")


def _show_answers(graded: Mapping[str, tuple[Task[Any], list[Report]]], answers: Path, options: EvalOptions) -> None:
    """What came of grading kept answers: as after a run, but for what only a run knows."""
    if options.output is not None:
        start_file(options.output)
    for name, (task, reports) in graded.items():
        one = CaseSet(name, reports[0].graded)
        if options.output is not None:
            save_cases(options.output, task, one, reports)
        if options.as_json:
            about = {"answers": str(answers), "settings": settings(task)}
            print(json.dumps(to_json(task, one, reports, about)), flush=True)
        else:
            print_reports(task, one, reports, str(answers))


def _chosen(wanted: list[str] | None, there: list[str]) -> list[str]:
    if wrong := [name for name in wanted or () if name not in there]:
        raise InputError(f"there is no set {wrong[0]!r}; there are: {', '.join(there)}")
    return list(dict.fromkeys(wanted)) if wanted else there


def _no_sets(wanted: list[str] | None) -> None:
    if wanted:
        raise InputError("--set and --file exclude each other: give one of the two")
