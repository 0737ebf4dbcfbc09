# ruff: noqa: E402
"""What the parts of `check_runner.py` share: where they run, how they tell, canvases without requests."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops")]
TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    import triton_cpu  # noqa: F401
    from triton.runtime import interpreter

    float_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, precision, imprecise):  # type: ignore[no-untyped-def]  # integers too
        if a.dtype.scalar != tl.int8:
            return float_dot(self, a, b, d, precision, imprecise)
        product = np.matmul(a.data.astype(np.int64), b.data.astype(np.int64)).astype(np.int32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

import torch

from diffusiongemma.diffusion import (
    Constraint,
    Denoiser,
    EntropyBound,
    LinearTemperature,
    SeededDraws,
    StableAndConfident,
)
from diffusiongemma.engine import slate
from diffusiongemma.engine.lane import Lane
from diffusiongemma.engine.steps import Kind
from diffusiongemma.model import CacheRow
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops import kernels

DEVICE = torch.device("cpu" if TINY else "cuda")
if TINY:
    slate.LEAST = 16  # the interpreter takes its time for every token
BF16 = torch.bfloat16
BEGAN = time.perf_counter()
figures: dict[str, object] = {}
failed: list[str] = []


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def part(name: str, work: Callable[[], object]) -> None:
    try:
        try:
            work()
        except Exception as error:
            if TINY or not kernels.EARLY or "CUDA error" in str(error):
                raise
            say(f"{name} failed ({type(error).__name__}: {error}); once more, with no launch before its time")
            failed.append(f"{name}, launched early")
            kernels.EARLY = False
            work()
    except Exception as error:
        failed.append(name)
        say(f"FAILED {name}: {type(error).__name__}: {error}")
        traceback.print_exc()
        if "CUDA error" in str(error):  # nothing works after it
            finish()
            raise SystemExit(1) from None


def finish() -> None:
    print(json.dumps({"failed": failed, "seconds": round(time.perf_counter() - BEGAN, 1), **figures}), flush=True)


def check(name: str, good: bool, told: object = "") -> None:
    say(f"{'ok  ' if good else 'BAD '} {name} {told}")
    if not good:
        failed.append(name)


def seat(lane: Lane, rows: Sequence[CacheRow], rules: dict[int, list[Constraint]] | None = None) -> None:
    """Canvases over these rows, without requests; some with rules"""
    pooled = [row for row in rows if isinstance(row, PoolRow)]
    for i in range(len(rows)):
        constraints = [] if rules is None else rules.get(i, [])
        denoiser = Denoiser(
            lane.network.config.vocab_size,
            LinearTemperature(0.4, 0.8, 1 << 20),
            EntropyBound(0.1),
            StableAndConfident(1, 1e-6),
            constraints,
        )
        lane.board.put(i, denoiser, denoiser.start(lane.width, SeededDraws(i), DEVICE), None, i, 0)
    lane.offsets[:, : len(rows)].copy_(lane.network.pool.offsets(pooled))
    lane.length[: len(rows)].copy_(torch.tensor([row.length for row in rows], dtype=torch.int32))


def kind_of(lane: Lane, users: int) -> Kind:
    return Kind(users, lane.network.pool.reach_for(int(lane.length[:users].max())))
