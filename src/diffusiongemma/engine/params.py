"""What a request may ask of the sampler. Each default is written once, here, and is the released one.

An option that has no effect in the chosen mode is refused, not ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diffusiongemma.errors import ConfigError
from diffusiongemma.text.alike import LEAST

Mode = Literal["diffusion", "ar"]
LEAST_CONTEXT = 8  # tokens around a hole, with the marks between them
WIDTHS = (32, 64, 128, 256)  # canvases that `canvas="adaptive"` chooses from


@dataclass(frozen=True)
class SamplingParams:
    mode: Mode = "diffusion"
    max_new_tokens: int = 256
    seed: int | None = None  # None: a fresh one, reported with the result
    stop: tuple[str, ...] = ()  # texts that end the reply and are not part of it
    stop_tokens: tuple[int, ...] = ()  # ids that do, beside the model's own
    logprobs: int | None = None  # alternatives to report for each committed token; 0: the token's own alone

    # diffusion
    steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    threshold: float | None = None  # accept by confidence instead of by entropy bound
    stability: int = 1
    confidence: float = 0.005
    early_stop: bool = True
    forget: int = 0  # after so many steps, and again, an unsettled canvas goes on without its belief; 0: never
    canvas: int | Literal["adaptive"] | None = None  # None: the model's own width, nothing dropped
    redo: int = 0  # how often a block that came out as garbage is done again

    # autoregressive
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError("these sampling options cannot be honoured", problems)

    @classmethod
    def build(cls, base: SamplingParams | None = None, **options: Any) -> SamplingParams:
        """From what a caller wrote: unknown names, and options of the other mode, are errors."""
        known = {f.name for f in fields(cls)}
        problems = [f"{name}: there is no such option" for name in options if name not in known]
        mode = options.get("mode", "diffusion" if base is None else base.mode)
        problems += [f"{name} has no effect in mode {mode!r}" for name in without_effect(mode, options)]
        if options.get("threshold") is not None and "entropy_bound" in options:
            problems.append("threshold replaces entropy_bound: give one of the two")
        if problems:
            raise ConfigError("these sampling options cannot be honoured", problems)
        for name in ("stop", "stop_tokens"):
            value = options.get(name)
            if isinstance(value, (str, int)):
                options[name] = (value,)
            elif value is None and name in options:
                options[name] = ()
            elif isinstance(value, list):
                options[name] = tuple(value)
        return replace(base or cls(), **options)

    def _problems(self) -> list[str]:
        found = []
        if self.mode not in ("diffusion", "ar"):
            found.append(f"mode must be 'diffusion' or 'ar', got {self.mode!r}")
        ranges: dict[str, tuple[int, int]] = {
            "max_new_tokens": (1, 1 << 20), "steps": (1, 10_000), "stability": (0, 1000), "redo": (0, 100),
            "forget": (0, 10_000),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                found.append(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, optional, low, high in (("seed", True, 0, (1 << 63) - 1), ("logprobs", True, 0, 100)):
            value = getattr(self, name)
            if not (value is None and optional) and (type(value) is not int or not low <= value <= high):
                found.append(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, above in (("t_min", 0.0), ("t_max", 0.0), ("entropy_bound", 0.0), ("confidence", 0.0)):
            if not _number(getattr(self, name)) or getattr(self, name) <= above:
                found.append(f"{name} must be a number above {above}, got {getattr(self, name)!r}")
        if not found and self.t_max < self.t_min:
            found.append(f"t_max {self.t_max} is below t_min {self.t_min}")
        if self.threshold is not None and not (_number(self.threshold) and 0 < self.threshold <= 1):
            found.append(f"threshold must be above 0 and at most 1, got {self.threshold!r}")
        if not _number(self.temperature) or not 0 <= self.temperature <= 100:
            found.append(f"temperature must be from 0 to 100, got {self.temperature!r}")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            found.append(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        stopping: Any = self.early_stop  # callers are not always type-checked
        if type(stopping) is not bool:
            found.append(f"early_stop must be true or false, got {self.early_stop!r}")
        if self.canvas is not None and self.canvas != "adaptive" and not (type(self.canvas) is int and self.canvas > 0):
            found.append(f"canvas must be a width, 'adaptive' or None, got {self.canvas!r}")
        stops: Any = self.stop
        if not isinstance(stops, tuple) or not all(isinstance(s, str) and s for s in stops):
            found.append(f"stop must be texts that are not empty, got {self.stop!r}")
        ids: Any = self.stop_tokens
        if not isinstance(ids, tuple) or not all(type(t) is int and t >= 0 for t in ids):
            found.append(f"stop_tokens must be token ids, got {self.stop_tokens!r}")
        return found


_AR_ONLY = frozenset({"temperature", "top_p"})
_DIFFUSION_ONLY = frozenset(
    "steps t_min t_max entropy_bound threshold stability confidence early_stop forget canvas redo".split()
)


def without_effect(mode: str, options: Iterable[str]) -> list[str]:
    """Of these options, those of the other mode."""
    foreign = _AR_ONLY if mode == "diffusion" else _DIFFUSION_ONLY
    return [name for name in options if name in foreign]


def without_stop_rule(options: Mapping[str, Any]) -> list[str]:
    """Of these options, those of the stop rule where `early_stop` is off. `canvas="adaptive"` asks `confidence` too."""
    rule = ("stability",) if options.get("canvas") == "adaptive" else ("stability", "confidence")
    return [name for name in rule if name in options] if options.get("early_stop") is False else []


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_far(value: Any) -> bool:
    """Can so many tokens be for passages from elsewhere? Fewer than the least would always stay empty."""
    return type(value) is int and (value == 0 or value >= LEAST)


@dataclass(frozen=True)
class HoleSettings:
    """How a model fills holes best. What it was trained to see before one: at most `context` tokens of the text around
    it (None: it does not say), before them at most `far` of passages from elsewhere in it, and before fewer of them the
    end of `run_in`, as of another document, so that there are as many after all; engine/hole.py shows the whole.
    `entropy_bound`: of the sampler, for holes alone (None: as for all else)."""

    context: int | None = None
    far: int = 0
    run_in: str = ""
    entropy_bound: float | None = None

    def __post_init__(self) -> None:
        context, far, run_in, problems = self.context, self.far, self.run_in, []
        if context is not None and (type(context) is not int or context < LEAST_CONTEXT):
            problems.append(f"context must be an integer of at least {LEAST_CONTEXT} tokens, got {context!r}")
        if not is_far(far):
            problems.append(f"far must be 0 or an integer of at least {LEAST} tokens, got {far!r}")
        elif far and context is None:
            problems.append("far has no effect without context, beyond which it looks")
        if type(run_in) is not str:
            problems.append(f"run_in must be a text, got {run_in!r}")
        elif run_in and context is None:
            problems.append("run_in has no effect without context, up to which it fills")
        if self.entropy_bound is not None and not (_number(self.entropy_bound) and self.entropy_bound > 0):
            problems.append(f"entropy_bound must be a number above 0, got {self.entropy_bound!r}")
        if problems:
            raise ConfigError("these settings of holes cannot be honoured", problems)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """What the sampler does for a hole, unless a call says otherwise"""
        return params if self.entropy_bound is None else replace(params, entropy_bound=self.entropy_bound)


class Released(NamedTuple):
    """What a checkpoint asks for: sampler settings, end-of-text ids, how it draws icons unless told otherwise, and how
    it fills holes best."""

    params: SamplingParams = SamplingParams()
    ends: tuple[int, ...] = ()
    svg_mode: Mode = "diffusion"
    hole: HoleSettings = HoleSettings()


def released_params(folder: Path) -> Released:
    """What a checkpoint's `generation_config.json` says, and its `dgemma.json`, which holds what is our own.

    Transformers refuses a generation config of this model that has a key it does not know.
    """
    data, own = _read_object(folder / "generation_config.json"), _read_object(folder / "dgemma.json")
    names = {
        "max_denoising_steps": "steps", "t_min": "t_min", "t_max": "t_max", "stability_threshold": "stability",
        "confidence_threshold": "confidence",
    }  # fmt: skip
    options = {ours: data[theirs] for theirs, ours in names.items() if data.get(theirs) is not None}
    sampler = data.get("sampler_config")
    if isinstance(sampler, Mapping) and sampler.get("entropy_bound") is not None:
        options["entropy_bound"] = sampler["entropy_bound"]
    ends = data.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    svg_mode, hole = own.get("svg_mode", "diffusion"), HoleSettings()
    problems = [f"{name}: there is no such setting" for name in own if name not in ("svg_mode", "hole")]
    if svg_mode not in ("diffusion", "ar"):
        problems.append(f"svg_mode must be 'diffusion' or 'ar', got {svg_mode!r}")
    if "hole" in own:
        try:
            hole = HoleSettings(**own["hole"])
        except TypeError:
            known = ", ".join(f.name for f in fields(HoleSettings))
            problems.append(f"hole must be an object with some of {known}, got {own['hole']!r}")
        except ConfigError as error:
            problems += [f"hole: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(f"{folder / 'dgemma.json'} cannot be honoured", problems)
    return Released(SamplingParams.build(**options), tuple(t for t in ids if type(t) is int), svg_mode, hole)


def _read_object(file: Path) -> Mapping[str, Any]:
    """Empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, Mapping):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return data
