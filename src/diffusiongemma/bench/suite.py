"""Several measurements over one set of weights, in one process: making 26 billion random numbers once is enough."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diffusiongemma.bench.ar import measure_ar
from diffusiongemma.bench.batch import measure_batch
from diffusiongemma.bench.e2e import cold_start, measure_e2e
from diffusiongemma.bench.memory import measure_memory
from diffusiongemma.bench.prefill import LENGTHS, measure_prefill
from diffusiongemma.bench.step import measure_step
from diffusiongemma.bench.subject import Subject, Target, free
from diffusiongemma.bench.timing import Outcome, show
from diffusiongemma.errors import DiffusionGemmaError, InputError

PARTS = ("step", "long", "e2e", "memory", "ar", "batch", "prefill")


@dataclass(frozen=True)
class Plan:
    """What each part is given."""

    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of batch and ar
    prefix: int = 512
    long: int = 32_768  # the prefix that `long` compares with that
    context: int = 8192  # of memory
    steps: int = 16  # a canvas
    repeat: int = 3


def run_suite(
    target: Target, parts: tuple[str, ...], plan: Plan, seconds: float | None = None, file: Path | None = None
) -> list[str]:
    """Run these parts in this order, show each as it comes -> those that failed or were not begun in time."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise InputError(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    began = time.perf_counter()
    subject = Subject.make(target)
    print(f"weights ready after {time.perf_counter() - began:.1f} s", flush=True)
    width = subject.model.config.canvas_length
    lengths = tuple(n for n in LENGTHS if n < subject.model.config.max_position_embeddings)
    calls: dict[str, Callable[[], Outcome]] = {
        "step": partial(measure_step, subject, 1, (plan.prefix,), repeat=plan.repeat),
        "long": partial(measure_step, subject, 1, (plan.prefix, plan.long), 16, repeat=plan.repeat, breakdown=False),
        "e2e": partial(measure_e2e, subject, plan.prefix, steps=plan.steps, repeat=plan.repeat),
        "memory": partial(measure_memory, subject, prefix=plan.context),
        "ar": partial(measure_ar, subject, plan.users, plan.prefix, repeat=plan.repeat),
        "batch": partial(measure_batch, subject, plan.users, plan.prefix, steps=plan.steps, repeat=plan.repeat),
        "prefill": partial(measure_prefill, subject, lengths, plan.repeat),
    }
    missing: dict[str, Any] = {}
    _guarded("cold start", lambda: _tell_start(subject, plan, width), missing)
    for part in parts:
        if seconds is not None and time.perf_counter() - began > seconds:
            missing[part] = "not begun: the time was up"
            print(f"{part}: {missing[part]}", flush=True)
            continue
        _guarded(part, lambda part=part: show(calls[part](), file), missing)  # type: ignore[misc]
        free(subject.device)
    taken = round(time.perf_counter() - began, 1)
    rows = [(part, str(missing.get(part, "done"))) for part in parts] + [("seconds", f"{taken}")]
    show(Outcome("suite", rows, subject.facts("suite") | {"seconds": taken, "parts": parts, "missing": missing}), file)
    return list(missing)


def _tell_start(subject: Subject, plan: Plan, width: int) -> None:
    print(f"first block {cold_start(subject, plan.prefix, width, plan.steps):.1f} s after that", flush=True)


def _guarded(part: str, call: Callable[[], None], missing: dict[str, Any]) -> None:
    """One part that fails does not end the others."""
    try:
        call()
    except Exception as error:
        if not isinstance(error, DiffusionGemmaError):
            traceback.print_exc()
        missing[part] = f"{type(error).__name__}: {error}"
        print(f"{part}: failed: {missing[part]}", flush=True)
