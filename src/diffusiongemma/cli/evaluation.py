"""What the evaluations share: their flags, and the runs that follow from them. `figures.py` shows what came out."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.cli.figures import (
    CaseSet,
    draw_plot,
    import_pyplot,
    print_reports,
    save_cases,
    settings,
    to_json,
    where,
)
from diffusiongemma.cli.options import DEFAULT_MODEL, INTERRUPTED
from diffusiongemma.errors import InputError, check_writable

if TYPE_CHECKING:
    from diffusiongemma.engine import Engine
    from diffusiongemma.tasks.evaluation import Report, Task, Variant

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # steps that a plot looks at, as far as the model's own number
BATCH = {"cpu": 16, "cuda": 128}  # cases that run at once
MODES = ("diffusion", "ar", "both")
_PANEL = "Model and runs"


@dataclass(frozen=True)
class EvalOptions:
    """What the shared flags said."""

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    file: Path | None = None
    limit: int | None = None
    seed: int = 0
    mode: str = "diffusion"
    steps: str | None = None
    all_steps: bool = False
    option: list[str] = field(default_factory=list)
    batch: int | None = None
    plot: Path | None = None
    output: Path | None = None
    as_json: bool = False

    def check(self) -> None:
        """What can be refused before a model is loaded."""
        if self.mode not in MODES:
            raise InputError(f"--mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.mode == "ar":
            given = {"--steps": self.steps, "--all-steps": self.all_steps, "--plot": self.plot}
            if wrong := [name for name, value in given.items() if value]:
                raise InputError(f"{wrong[0]} has no effect with --mode ar: only diffusion takes steps")
        for path in (self.plot, self.output):
            if path is not None:
                check_writable(path)
        if self.plot is not None:
            if self.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
                raise InputError(f"--plot must name a .png, .svg or .pdf file, not {self.plot}")
            import_pyplot()
        self.step_limits()
        self.sampling()

    def step_limits(self) -> list[int] | None:
        if self.steps is None:
            return None
        parts = [part.strip() for part in self.steps.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise InputError(f"--steps must be numbers such as 48 or 8,16,48, got {self.steps!r}")
        return sorted({int(part) for part in parts})

    def sampling(self) -> dict[str, dict[str, Any]]:
        """The options of each mode that runs. One that no mode honours is refused."""
        from diffusiongemma.engine import SamplingParams
        from diffusiongemma.errors import ConfigError

        modes = ("diffusion", "ar") if self.mode == "both" else (self.mode,)
        found: dict[str, dict[str, Any]] = {mode: {} for mode in modes}
        fixed = ("mode", "max_new_tokens", "seed", "steps", "early_stop", "canvas", "logprobs", "stop", "stop_tokens")
        for text in self.option:
            name, sign, raw = text.partition("=")
            name = name.strip().replace("-", "_")
            if not sign or name in fixed:
                raise InputError(
                    f"--option takes NAME=NUMBER of a sampling option that the task does not set: {text!r}"
                )
            try:
                value: Any = json.loads(raw)
            except ValueError:
                raise InputError(f"--option {name}: {raw!r} is not a number") from None
            # t_min and t_max are judged together, below, and one of them may be the checkpoint's own.
            alone = {"t_min": value, "t_max": value} if name in ("t_min", "t_max") else {name: value}
            refused = None
            for mode in modes:
                try:
                    SamplingParams.build(mode=mode, **alone)
                    found[mode][name] = value
                except ConfigError as error:
                    refused = error
            if refused is not None and not any(name in options for options in found.values()):
                raise refused
        for mode, given in found.items():
            both = {name: given[name] for name in ("t_min", "t_max") if name in given}
            if len(both) == 2:
                SamplingParams.build(mode=mode, **both)
        return found

    def refuse_attempts(self, attempts: int) -> None:
        """The twin that takes its best token each time would say the same again."""
        twin = self.sampling().get("ar")
        if attempts > 1 and twin is not None and not twin.get("temperature"):
            raise InputError(
                f"--attempts {attempts} has no effect in mode 'ar', which says the same each time: "
                "use --mode diffusion, or -o temperature=… above 0"
            )

    def one_canvas(self) -> str | None:
        """What says that an answer is one canvas of so many steps (or none), so that these can be compared."""
        given = {"--steps": self.steps, "--all-steps": self.all_steps, "--plot": self.plot}
        given["--mode ar"] = self.mode == "ar"
        return next((flag for flag, value in given.items() if value), None)

    def variants(self, engine: Engine) -> list[Variant]:
        """The runs, in the order in which they are shown."""
        from diffusiongemma.tasks.evaluation import Variant

        limits: Sequence[int | None] = self.step_limits() or (None,)
        if self.plot is not None and self.steps is None:
            most = engine.params.steps
            limits = sorted({most, *(n for n in LADDER if n < most)})
        runs, options = [], self.sampling()
        if "diffusion" in options:
            runs += [Variant("diffusion", n, True, options["diffusion"]) for n in limits]
            if self.all_steps:
                runs += [Variant("diffusion", n, False, options["diffusion"]) for n in limits]
        if "ar" in options:
            runs.append(Variant("ar", options=options["ar"]))
        return runs

    def load(self) -> Engine:
        from diffusiongemma.checkpoint import pick_device
        from diffusiongemma.engine import Engine, Limits

        kind = pick_device(self.device).type
        rows = self.batch or BATCH.get(kind, 16)
        limits = Limits(rows, (8 if kind == "cuda" else 2) << 30, 8_192 if kind == "cuda" else 1_024)
        return Engine.load(self.model, self.device, self.dtype, limits=limits)


def with_eval_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared flags to a command; it gets them as its keyword argument `options`."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "options"]
    shared = _flags()

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = EvalOptions(**{p.name: given[p.name] for p in shared})
        options.check()
        try:
            command(**{p.name: given[p.name] for p in own}, options=options)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    vars(wrapped)["__signature__"] = signature.replace(parameters=[*own, *shared])
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    del vars(wrapped)["__wrapped__"]
    return wrapped


def _flags() -> list[inspect.Parameter]:
    def flag(name: str, type: Any, default: Any, help: str, *decls: str, **more: Any) -> inspect.Parameter:
        info = typer.Option(*decls, help=help, rich_help_panel=_PANEL, **more)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type, info]
        )

    return [
        flag("model", str, DEFAULT_MODEL, "'nano', a checkpoint folder, a hub id, or random:PRESET.", "--model", "-m"),
        flag("device", str, "auto", "Where to compute: auto, cpu, cuda, cuda:1, …"),
        flag("dtype", str, "auto", "Number format of the weights: auto, float32, bfloat16, …"),
        flag("file", Path | None, None, "Your own cases instead of the built-in ones."),
        flag("limit", int | None, None, "So many cases, drawn by the seed.", min=1),
        flag("seed", int, 0, "The same seed gives the same figures.", min=0, max=1 << 53),
        flag("mode", str, "diffusion", "diffusion, ar (one token after another, the best each) or both."),
        flag("steps", str | None, None, "Denoising steps at most; several, such as 8,16,48, are compared."),
        flag("all_steps", bool, False, "Also run without the early stop, and say what it costs.", "--all-steps"),
        flag("option", list[str], [], "A sampling option, such as entropy_bound=0.05; may be repeated.", "--option",
             "-o"),
        flag("batch", int | None, None, "Cases that run at once (16, on a GPU 128).", min=1),
        flag("plot", Path | None, None, "Draw steps against the first figure into this file."),
        flag("output", Path | None, None, "Write every case and its answer there, a JSON object a line."),
        flag("as_json", bool, False, "The figures as a JSON object a line for each set.", "--json"),
    ]  # fmt: skip


# ---- running and showing ---------------------------------------------------------------------------------------------


def run_sets(task: Task[Any], sets: Sequence[CaseSet], options: EvalOptions) -> None:
    """Every variant on every set: a table or a JSON line each, then the plot."""
    from diffusiongemma.cli.show import tell
    from diffusiongemma.tasks.evaluation import evaluate

    with options.load() as engine:
        if options.output is not None:  # not before: what it holds from another run would be gone for nothing
            start_file(options.output)
        curves: dict[str, list[Report]] = {}
        for one in sets:
            for remark in () if options.as_json else one.remarks:
                tell(remark)
            reports = []
            for variant in options.variants(engine):
                with Bar(f"{one.name}, {variant.label}", len(one.cases)) as progress:
                    reports.append(evaluate(engine, task, one.cases, variant, options.seed, progress))
                if options.output is not None:  # at once: a run that is cut off keeps what it has
                    save_cases(options.output, task, one, reports[-1:])
            if options.as_json:
                about = where(engine) | {"seed": options.seed, "settings": settings(task)}
                print(json.dumps(to_json(task, one, reports, about)), flush=True)
            else:
                print_reports(task, one, reports, engine.name)
            curves[one.name] = [report for report in reports if report.variant.steps is not None]
    if options.plot is not None:
        draw_plot(options.plot, task.headline, curves)
        tell(f"wrote {options.plot}")


def start_file(path: Path) -> None:
    """Empty, so that it holds this run alone"""
    try:
        path.write_text("")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from None


class Bar:
    """A progress bar on stderr, where there is a terminal."""

    def __init__(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(label, total=total)
        self._total = total

    def __call__(self, done: int, total: int) -> None:
        """A later round has only the cases that ask again."""
        self._progress.update(self._task, completed=self._total - total + done)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
