"""Fair timing on a noisy machine: alternate the contestants, take medians, compare within one run."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def alternate(contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, round by round: A B A B …, so that a slow spell of the machine hits both."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median over rounds of slow / fast; neighbours in time are compared with each other."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def report(title: str, rows: list[tuple[str, str]], result: dict[str, Any]) -> None:
    """A short table for people, then one line of JSON for programs."""
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print(json.dumps(result))
