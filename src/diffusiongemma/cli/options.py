"""The flags that `run`, `chat` and `infill` share: model, output, and every option of `SamplingParams`.

They stand here as a table, because reading `SamplingParams` itself would import torch and make `--help` slow; a test
holds the table equal to the dataclass. A flag that was not written is not passed on, so that the engine can refuse
what has no effect and a checkpoint's own settings stay in force.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.errors import InputError

if TYPE_CHECKING:
    from diffusiongemma.engine import Engine

DEFAULT_MODEL = "nano"
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
_MODEL, _BOTH, _DIFFUSION, _AR = "Model and output", "Sampling", "Sampling by diffusion", "Sampling with --ar"


@dataclass(frozen=True)
class Flag:
    """One option of SamplingParams on the command line."""

    name: str
    type: Any
    default: Any
    help: str
    panel: str = _DIFFUSION
    decls: tuple[str, ...] = ()

    def parameter(self) -> inspect.Parameter:
        decls = self.decls or (self.typed(None),)
        text = self.help.replace("DEFAULT", f"default {self.default}")
        info = typer.Option(*decls, help=text, rich_help_panel=self.panel, show_default=False)
        return _keyword(self.name, Annotated[self.type | None, info], None)

    def typed(self, value: Any) -> str:
        """How a user writes it to get this value."""
        on, _, off = (self.decls[0] if self.decls else f"--{self.name.replace('_', '-')}").partition("/")
        return off if value is False else on


FLAGS = (
    Flag(
        "mode", bool, "diffusion", "One token after another, the causal path, or a canvas (default of all but svg).",
        _BOTH, ("--ar/--diffusion",),
    ),
    Flag("max_new_tokens", int, 256, "The answer is cut exactly there (DEFAULT).", _BOTH),
    Flag("seed", int, None, "The same seed gives the same text (default: a fresh one, told at the end).", _BOTH),
    Flag("stop", list[str], (), "Text that ends the answer and is no part of it; may be repeated.", _BOTH),
    Flag("stop_tokens", list[int], (), "The same by token id; may be repeated.", _BOTH, ("--stop-token",)),
    Flag("logprobs", int, None, "With --json: log-probabilities, and so many alternatives a token.", _BOTH),
    Flag("steps", int, 48, "Denoising steps of a block at most (DEFAULT)."),
    Flag("t_min", float, 0.4, "Temperature that the last steps approach (DEFAULT)."),
    Flag("t_max", float, 0.8, "Temperature of the first step (DEFAULT)."),
    Flag("entropy_bound", float, 0.1, "Accept the surest positions up to this sum of entropies, in nats (DEFAULT)."),
    Flag("threshold", float, None, "Accept by this probability instead of by --entropy-bound (default: off)."),
    Flag("stability", int, 1, "Steps that the best tokens must stay the same before a block may stop (DEFAULT)."),
    Flag("confidence", float, 0.005, "… and the mean entropy it must be below, in nats (DEFAULT)."),
    Flag(
        "early_stop", bool, True, "Stop a block that is stable and sure (default), or always take all steps.",
        decls=("--early-stop/--no-early-stop",),
    ),
    Flag("canvas", str, None, "Width of a block in tokens, or 'adaptive' (default: the model's own)."),
    Flag("forget", int, 0, "After so many steps, and again, an unsettled canvas drops its belief; 0: never (DEFAULT)."),
    Flag("redo", int, 0, "How often a block that came out as garbage is done again (DEFAULT)."),
    Flag("temperature", float, 1.0, "0 takes the best token (DEFAULT).", _AR),
    Flag("top_p", float, 1.0, "Draw from the smallest set with this much probability (DEFAULT).", _AR),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the shared flags said."""

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    plain: bool = False
    as_json: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # those that were written, as SamplingParams names them

    def load(self, either_mode: bool = False) -> Engine:
        """Check what can be checked at once, then load the model, which may take long.

        `either_mode`: where no mode was written the model's own habit decides it, so options of the causal path alone
        are no mistake yet.
        """
        from diffusiongemma.engine import Engine, SamplingParams, prepare
        from diffusiongemma.engine.params import without_effect, without_stop_rule
        from diffusiongemma.engine.request import check_stop_tokens

        # t_min and t_max are judged together, and one of them may be the checkpoint's own.
        options = {k: v for k, v in self.options.items() if k not in ("t_min", "t_max")}
        if either_mode and "mode" not in options and not without_effect("ar", self.options):
            options["mode"] = "ar"
        mode = options.get("mode", "diffusion")
        if wrong := without_effect(mode, self.options):
            raise InputError(f"{as_typed(wrong, self.options)} has no effect in mode {mode!r}: leave it out")
        if wrong := without_stop_rule(options):
            raise InputError(f"{as_typed(wrong, options)} has no effect with --no-early-stop: leave it out")
        SamplingParams.build(**options)
        if self.plain and self.as_json:
            raise InputError("--plain and --json exclude each other: give one of the two")
        if "logprobs" in self.options and not self.as_json:
            raise InputError("--logprobs has no effect without --json: nothing else shows them")
        engine = Engine.load(self.model, self.device, self.dtype)
        if tokens := options.get("stop_tokens"):
            check_stop_tokens(tokens, engine.model.config.vocab_size)
        if either_mode and "mode" not in self.options:
            mode = engine.svg_mode
        if engine.model.device.type == "cuda" and mode == "diffusion":  # it takes seconds: say so, and not in the text
            prepare(engine)
        return engine


def as_typed(names: Iterable[str], options: Mapping[str, Any]) -> str:
    """These of the written options as they stand on the command line."""
    flags = {flag.name: flag for flag in FLAGS}
    return ", ".join(flags[name].typed(options[name]) for name in names)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared flags to a command; it gets them as its keyword argument `settings`."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    shared = [*_model_flags(), *(flag.parameter() for flag in FLAGS)]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        settings = _settings({p.name: given[p.name] for p in shared})
        try:
            command(**{p.name: given[p.name] for p in own}, settings=settings)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    # Typer reads the signature; following `__wrapped__` it would find the command without its flags.
    vars(wrapped)["__signature__"] = signature.replace(parameters=[*own, *shared])
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    del vars(wrapped)["__wrapped__"]
    return wrapped


def _model_flags() -> list[inspect.Parameter]:
    def flag(name: str, type: Any, default: Any, help: str, *decls: str) -> inspect.Parameter:
        return _keyword(name, Annotated[type, typer.Option(*decls, help=help, rich_help_panel=_MODEL)], default)

    return [
        flag("model", str, DEFAULT_MODEL, "'nano', a checkpoint folder, a hub id, or random:PRESET.", "--model", "-m"),
        flag("device", str, "auto", "Where to compute: auto, cpu, cuda, cuda:1, …"),
        flag("dtype", str, "auto", "Number format of the weights: auto, float32, bfloat16, …"),
        flag("plain", bool, False, "Text only, as it becomes final; what a pipe gets anyway.", "--plain"),
        flag("as_json", bool, False, "One JSON object a line for every event.", "--json"),
    ]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _settings(given: dict[str, Any]) -> Settings:
    written = {flag.name: given.pop(flag.name) for flag in FLAGS}
    options = {name: value for name, value in written.items() if value not in (None, [])}
    if "mode" in options:
        options["mode"] = "ar" if options["mode"] else "diffusion"
    if options.get("canvas", "").isdecimal():
        options["canvas"] = int(options["canvas"])
    return Settings(**given, options=options)
