"""Reading a prompt: tokens a second over its length, through the engine, in the engine's chunks."""

from __future__ import annotations

import statistics
from typing import Any

from diffusiongemma.bench.drive import reading_seconds
from diffusiongemma.bench.floor import prompt_seconds
from diffusiongemma.bench.subject import Subject
from diffusiongemma.bench.timing import Outcome, doubt, note

LENGTHS = (512, 2048, 8192, 32_768)


def measure_prefill(subject: Subject, lengths: tuple[int, ...] = LENGTHS, repeat: int = 3) -> Outcome:
    cases: list[dict[str, Any]] = []
    with subject.engine(1, max(lengths) + 1) as engine:
        chunk = engine.scheduler.chunk
        config: dict[str, Any] = {"prefix": list(lengths), "chunk": chunk, "repeat": repeat}
        title, rows = subject.heading("reading a prompt", **config)
        reading_seconds(engine, min(lengths), 0)  # warms up
        for length in lengths:
            seconds = statistics.median(reading_seconds(engine, length, 1000 * length + i) for i in range(repeat))
            note(f"{length} tokens: {1e3 * seconds:.1f} ms")
            floor = prompt_seconds(subject.model, subject.card, 1, length, chunk)
            trouble = doubt("reading so many tokens", seconds, floor)
            cases.append({
                "prefix": length, "seconds": seconds, "tokens_per_second": length / seconds, "floor_seconds": floor,
                "ratio": seconds / floor, **({"trouble": trouble} if trouble else {}),
            })  # fmt: skip
            figure = f"figure {1e3 * seconds:.1f} ms, {length / seconds:,.0f} tokens/s"
            rows.append((f"{length} tokens", f"{figure}; floor {1e3 * floor:.1f} ms, ratio {seconds / floor:.2f}"))
            if trouble:
                rows.append(("  TROUBLE", trouble))
    figures = {name: cases[0][name] for name in ("tokens_per_second", "ratio")}
    return Outcome(title, rows, subject.facts("prefill", **config) | figures | {"cases": cases})
