"""Fair timing on a noisy machine: alternate the contestants, take medians, compare within one run."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Rows = list[tuple[str, str]]
BELIEVED = 0.9  # of a floor: what is in the card's cache already need not be read


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


def slope(short: Callable[[], float], long: Callable[[], float], more: int, rounds: int) -> float:
    """Seconds of one unit of work, where `long` does so many units more than `short`; each gives the seconds it took.

    What both do beside it, and what their first and last unit cost more, falls out.
    """
    found = []
    for _ in range(rounds):
        less, all_of_it = short(), long()
        # A machine that was busy during the short call alone leaves nothing to subtract from.
        found.append((all_of_it - less) / more if all_of_it > less else all_of_it / more)
    return statistics.median(found)


def doubt(what: str, seconds: float, floor: float) -> str | None:
    """Why this figure cannot be, or None"""
    if seconds >= BELIEVED * floor:
        return None
    return f"not to be believed: {what} takes {1e3 * floor:.1f} ms at least, not {1e3 * seconds:.1f}"


def note(text: str) -> None:
    """Tell a figure as soon as it is known: who is cut off later has at least that."""
    print(f"… {text}", file=sys.stderr, flush=True)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Where a figure was taken."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        facts |= {"card": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts


@dataclass(frozen=True)
class Outcome:
    """What a measurement found: a short table for people, one object for programs."""

    title: str
    rows: Rows
    result: dict[str, Any]


def rounded(value: Any) -> Any:
    """The same with floats of six digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def show(outcome: Outcome, file: Path | None = None) -> None:
    """The table, then one line of JSON; that line is also added to `file`, which may hold those of other runs."""
    print(outcome.title)
    width = max(len(name) for name, _ in outcome.rows)
    for name, value in outcome.rows:
        print(f"  {name:<{width}}  {value}")
    line = json.dumps(rounded(outcome.result))
    print(line, flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
