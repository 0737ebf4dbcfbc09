"""A training run as a TOML file: every key has a place here, and an unknown one is an error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class TaskConfig:
    """One source of rows; `kind` names the class in train/mixtures.py, `options` are that class's own keys."""

    name: str
    kind: str
    weight: float  # share of the micro-batches
    prefix: int
    canvas: int
    views: int = 1  # canvases with noise of their own over one encoded row
    rounds: int = 1  # passes over each canvas, all trained: each after the first is the sampler's next step
    hold: int = 0  # rounds at most over several micro-batches, for canvases that are still wrong; 0: one micro-batch
    forget: int = 0  # with hold: after so many rounds, and again, a canvas is read without its belief; 0: never
    trust: float = 0.0  # with forget: share of the rows that are given the right tokens for such a round
    drop: float = 0.0  # with rounds: share of the positions whose belief is left out, in every round
    noise: tuple[float, float] = (1e-3, 1.0)  # range of t, the share of a canvas that is noise
    temperature: tuple[float, float] | None = None  # None: the objective's; the range that the task is sampled with
    accept: tuple[float, float] | None = None  # None: the objective's
    unroll: float | None = None  # None: the objective's; 0 where many answers are right, or their mean is learned
    tail_weight: float = 1.0  # of the canvas's last position; falls evenly from 1 at its first
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectiveConfig:
    """See train/objective.py."""

    encoder_weight: float = 1.0
    balance_weight: float = 0.01
    self_conditioning: float = 0.5  # share of the canvases, in tasks of one round
    unroll: float = 0.5  # share of those
    temperature: tuple[float, float] = (0.5, 1.0)  # of the belief that is fed back; the sampler's are 0.4 to 0.8
    accept: tuple[float, float] = (0.1, 10.0)  # range of the entropy bound of an unrolled step, log-uniform
    span: float = 0.1  # share of the canvases whose noise is one hole


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-3  # AdamW: embeddings, norms, routers
    matrix_lr: float = 1e-3  # Muon, or AdamW for everything when muon is off
    muon: bool = False
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05  # of matrices
    warmup: int = 100  # steps
    decay: float = 1.0  # the last share of the run over which the rate falls evenly to zero
    clip: float = 1.0
    ema: float = 0.999  # decay a step; 0 keeps none
    ema_every: int = 4  # steps


@dataclass(frozen=True)
class RunConfig:
    total_steps: int = 0  # one of the two ends the run and its schedule
    total_minutes: float = 0.0
    seed: int = 0
    micro_tokens: int = 65_536  # tokens of one micro-batch, encoder and decoder together
    accumulate: int = 4  # micro-batches a step
    dtype: str = "bfloat16"  # of the computation on a GPU; a CPU always computes in float32
    compile: bool = True  # on a GPU
    graphs: bool = True  # on a GPU: each task's micro-batch is recorded and replayed
    experts: str = "auto"
    workers: int = 8  # processes that make batches; 0 makes them in the trainer
    log_every: int = 20
    evaluate_every: int = 0
    checkpoint_every: int = 500
    checkpoint_minutes: float = 4.0
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class Recipe:
    name: str
    model: ModelConfig | None  # None: the config of init_from
    tasks: tuple[TaskConfig, ...]
    run: RunConfig
    optim: OptimConfig
    objective: ObjectiveConfig
    tokenizer: str = "bytes"  # a folder with tokenizer.json, or `bytes`: one token a byte
    data: str = ""  # the folder with token arrays that tasks name
    evaluation: str = ""  # the folder with sudoku_*.txt
    init_from: str = ""  # a checkpoint to begin with
    sliding_window: int = 0  # tokens that its sliding layers see from now on; 0: as many as before

    def __post_init__(self) -> None:
        problems = []
        if (self.run.total_steps > 0) == (self.run.total_minutes > 0):
            problems.append("[run] needs either total_steps or total_minutes")
        if not self.tasks:
            problems.append("there must be at least one [[task]]")
        if len({task.name for task in self.tasks}) < len(self.tasks):
            problems.append("two tasks have the same name")
        for task in self.tasks:
            problems += [f"task {task.name}: {problem}" for problem in _problems(task, self.objective)]
        if (self.model is None) == (not self.init_from):
            problems.append("give either [model] or init_from")
        if self.sliding_window < 0 or (self.sliding_window and not self.init_from):
            problems.append("sliding_window must be positive, and goes with init_from: [model] has its own")
        if problems:
            raise ConfigError("this recipe cannot be used", problems)

    def objective_of(self, task: TaskConfig) -> ObjectiveConfig:
        """The objective with the task's own values, where it has some"""
        own = {name: getattr(task, name) for name in ("temperature", "accept", "unroll")}
        return replace(self.objective, **{name: value for name, value in own.items() if value is not None})


def _problems(task: TaskConfig, objective: ObjectiveConfig) -> list[str]:
    """What a task asks for that cannot be, or would have no effect"""
    found = []
    if task.weight <= 0 or min(task.prefix, task.canvas, task.views, task.rounds) < 1:
        found.append("weight, prefix, canvas, views and rounds must be positive")
    if task.hold and (task.hold <= task.rounds or task.views > 1):
        found.append(f"hold must be more than its {task.rounds} rounds, with one view")
    if task.forget and not 1 < task.forget < task.hold:
        found.append("forget must be from 2 to less than hold")
    if not 0 <= task.trust <= 1 or (task.trust and not task.forget):
        found.append("trust must be a share, and needs forget")
    if not 0 <= task.drop < 1 or (task.drop and task.rounds == 1):
        found.append("drop must be a share below 1, and needs several rounds")
    if not 0 < task.noise[0] <= task.noise[1] <= 1:
        found.append("noise must be two shares above 0, the lower first")
    for name, pair in (("temperature", task.temperature), ("accept", task.accept)):
        if pair is not None and not 0 < pair[0] <= pair[1]:
            found.append(f"{name} must be two positive numbers, the lower first")
        if pair is not None and task.rounds == 1 and not objective.self_conditioning:
            found.append(f"{name} needs rounds or self-conditioning")
    unroll = objective.unroll if task.unroll is None else task.unroll
    if task.accept is not None and task.rounds == 1 and not unroll:
        found.append("accept needs rounds, or unroll above 0: nothing is accepted on no path")
    if task.unroll is not None and not 0 <= task.unroll <= 1:
        found.append("unroll must be a share")
    if task.unroll is not None and (task.rounds > 1 or not objective.self_conditioning):
        found.append("unroll needs self-conditioning, and one round: more of them follow the path themselves")
    return found


def read_recipe(path: Path, **overrides: Any) -> Recipe:
    """A recipe from its file; `overrides` are keys of [run], or of the top level, that win over the file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from None
    run_keys = {f.name for f in fields(RunConfig)}
    for key, value in overrides.items():
        target = table.setdefault("run", {}) if key in run_keys else table
        target[key] = value
    if overrides.get("total_minutes"):
        table["run"].pop("total_steps", None)
    if overrides.get("total_steps"):
        table["run"].pop("total_minutes", None)
    return parse_recipe(table)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    table = dict(table)
    model = table.pop("model", None)
    if isinstance(model, Mapping):
        model = dict(model)
        if "layer_types" in model:
            model["layer_types"] = tuple(model["layer_types"])
        if "eos_token_ids" in model:
            model["eos_token_ids"] = tuple(model["eos_token_ids"])
        preset = model.pop("preset", None)
        model = _build(ModelConfig, model, "model") if preset is None else ModelConfig.preset(preset, **model)
    known = {f.name for f in fields(TaskConfig)}
    tasks = []
    for number, entry in enumerate(table.pop("task", [])):
        own = {key: value for key, value in entry.items() if key in known}
        options = {key: value for key, value in entry.items() if key not in known}
        tasks.append(_build(TaskConfig, {**own, "options": options}, f"task {number + 1}"))
    parts = {
        name: _build(cls, table.pop(name, {}), name)
        for name, cls in (("run", RunConfig), ("optim", OptimConfig), ("objective", ObjectiveConfig))
    }
    return _build(Recipe, {**table, **parts, "model": model, "tasks": tuple(tasks)}, "the recipe")


def _build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """A dataclass from a table: keys and simple types are checked."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    problems = [f"{where}: unknown key {key}" for key in table if key not in known]
    values: dict[str, Any] = {}
    for name, spec in known.items():
        if name not in table:
            if spec.default is MISSING and spec.default_factory is MISSING:
                problems.append(f"{where}: {name} is missing")
            continue
        value, hint = table[name], hints[name]
        if isinstance(hint, UnionType):  # a number or None: the file has no None
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        if hint is float and type(value) is int:
            value = float(value)
        if get_args(hint) == (float, float):
            if isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) for v in value):
                value = tuple(map(float, value))
            else:
                problems.append(f"{where}: {name} must be two numbers, got {value!r}")
        elif isinstance(value, list):
            value = tuple(value)
        if hint in (int, float, str, bool) and type(value) is not hint:
            problems.append(f"{where}: {name} must be of type {hint.__name__}, got {value!r}")
        values[name] = value
    if problems:
        raise ConfigError("this recipe cannot be used", problems)
    return cls(**values)
