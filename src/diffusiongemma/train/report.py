"""What a run tells: metrics.jsonl, a progress bar on a terminal or plain lines elsewhere, curves as PNG at the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.train.objective import Result


class Window:
    """Sums on the device between two records, so that a step need not wait for its numbers."""

    def __init__(self) -> None:
        self.start, self.tokens, self.flops = time.monotonic(), 0, 0.0
        self.sums: dict[str, dict[str, Tensor]] = {}
        self.counts: dict[str, int] = {}

    def add(self, task: str, result: Result, flops: float, tokens: int) -> None:
        self.tokens, self.flops = self.tokens + tokens, self.flops + flops
        self.counts[task] = self.counts.get(task, 0) + 1
        sums = self.sums.setdefault(task, {})
        for key, value in result.metrics.items():
            sums[key] = sums[key] + value if key in sums else value

    def means(self) -> dict[str, dict[str, float]]:
        flat = {(t, k): v / self.counts[t] for t, sums in self.sums.items() for k, v in sums.items()}
        values = torch.stack(list(flat.values())).tolist()
        out: dict[str, dict[str, float]] = {}
        for (task, key), value in zip(flat, values, strict=True):
            out.setdefault(task, {})[key] = value
        return dict(sorted(out.items()))


class Report:
    """Appends records to metrics.jsonl and shows them; with a bar on a terminal where rich is installed."""

    def __init__(self, folder: Path, resumed_at: int, quiet: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.quiet = folder / "metrics.jsonl", quiet
        # Steps after the checkpoint will be done again, so their records go.
        kept = [r for r in read_metrics(self.path) if r["step"] <= resumed_at]
        self.path.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        self.bar: Any = None
        if sys.stdout.isatty() and not quiet:
            try:
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            except ImportError:
                return
            columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("starting", total=1.0)
            self.bar.start()

    def record(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        line = summary(record)
        if self.bar is not None:
            self.bar.update(self.task, completed=record["progress"], description=line)
        else:
            self.say(line)

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif not self.quiet:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file; a last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def summary(record: dict[str, Any]) -> str:
    """One record on one line"""
    if "evaluation" in record:
        return f"step {record['step']}: " + ", ".join(f"{k} {v:.4g}" for k, v in record["evaluation"].items())
    each = record["tasks"].items()
    tasks = "  ".join(f"{n} {m['decoder']:.3f}/{m['encoder']:.3f} {100 * m['accuracy']:.0f}%" for n, m in each)
    speed = per_second(record["tokens_per_second"])
    mfu = f" MFU {100 * record['mfu']:.1f}%" if record.get("mfu") else ""
    balance = f"load max {record['load_max']:.2f} entropy {record['load_entropy']:.3f}"
    norm, rate = f"|g| {record['grad_norm']:.2f}", f"lr x{record['rate']:.3f}"
    return f"step {record['step']} {100 * record['progress']:.1f}% {speed}{mfu} {rate} {norm} {balance} | {tasks}"


def per_second(tokens: float) -> str:
    return f"{tokens / 1e3:.0f}k tok/s" if tokens >= 1e4 else f"{tokens:.0f} tok/s"


def plot(folder: Path) -> Path | None:
    """Curves of metrics.jsonl as curves.png; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_metrics(folder / "metrics.jsonl")
    steps = [r for r in records if "tasks" in r]
    if not steps:
        return None
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8))
    names = list(dict.fromkeys(name for r in steps for name in r["tasks"]))
    for axis, key in ((axes[0, 0], "decoder"), (axes[0, 1], "encoder")):
        for name in names:
            points = [(r["tokens"] / 1e6, r["tasks"][name][key]) for r in steps if name in r["tasks"]]
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set(title=f"{key} loss, nats a token", xlabel="million tokens", yscale="log")
        axis.legend()
    axes[1, 0].plot([r["tokens"] / 1e6 for r in steps], [r["load_max"] for r in steps])
    axes[1, 0].set(title="busiest expert, times an even share", xlabel="million tokens")
    evaluations = [r for r in records if "evaluation" in r]
    shares = (key for r in evaluations for key in r["evaluation"] if not key.endswith(" steps"))
    for key in dict.fromkeys(shares):
        points = [(r["tokens"] / 1e6, r["evaluation"][key]) for r in evaluations if key in r["evaluation"]]
        axes[1, 1].plot(*zip(*points, strict=True), label=key, marker="o")
    axes[1, 1].set(title="evaluation while training, shares", xlabel="million tokens", ylim=(0, 1.02))
    if evaluations:
        axes[1, 1].legend()
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot.close(figure)
    return folder / "curves.png"
