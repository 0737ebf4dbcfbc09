"""One user end to end: a prompt, blocks at fixed steps, prefill and commits included. And the cold start."""

from __future__ import annotations

import statistics
import time
from typing import Any

from diffusiongemma.bench.clocks import clock_rows, watching
from diffusiongemma.bench.drive import make_request, random_tokens, reading_seconds, together
from diffusiongemma.bench.floor import prompt_seconds, request_seconds
from diffusiongemma.bench.subject import Subject
from diffusiongemma.bench.timing import Outcome, doubt
from diffusiongemma.engine import collect


def measure_e2e(
    subject: Subject,
    prefix: int = 512,
    tokens: int | None = None,
    steps: int = 16,
    canvas: int | None = None,
    repeat: int = 5,
) -> Outcome:
    """`tokens`: default four canvases, which is 1,024 on the 26B."""
    width = canvas or subject.model.config.canvas_length
    wanted = tokens or 4 * width
    options: dict[str, Any] = {"steps": steps, "canvas": width}
    if subject.cold_seconds is None:
        cold_start(subject, prefix, width, steps)
    with subject.engine(1, prefix + wanted) as engine:
        ran = []
        with watching(subject.device) as clocks:
            for i in range(1 + repeat):  # a fresh prompt each time: nothing is kept from before; the first warms up
                request = make_request(random_tokens(engine, prefix, seed=1 + i), wanted, seed=i, **options)
                ran.append(together(engine, [request]))
        for alone in (True, False):
            reading_seconds(engine, prefix, 98 + alone, alone)  # warms up
        prefill = statistics.median(reading_seconds(engine, prefix, 100 + i) for i in range(repeat))
        added = statistics.median(reading_seconds(engine, prefix, 200 + i, False) for i in range(repeat))
        chunk = engine.scheduler.chunk
    seconds = statistics.median(run.seconds for run in ran[1:])
    floor = request_seconds(subject.model, subject.card, 1, prefix, wanted, steps, width, chunk)
    passes = ran[0].results[0].metrics.steps
    # A machine that was busy while the prompt alone was read leaves nothing to subtract from.
    without = wanted / (seconds - added if added < seconds else seconds)
    trouble = doubt("reading the prompt", prefill, prompt_seconds(subject.model, subject.card, 1, prefix, chunk))
    config = {"prefix": prefix, "tokens": wanted, "steps": steps, "canvas": width, "repeat": repeat}
    title, rows = subject.heading("one user, end to end", **config)
    rows += [
        ("floor", f"{floor:.4f} s, {wanted / floor:,.0f} tokens/s"),
        ("figure", f"{seconds:.4f} s, {wanted / seconds:,.0f} tokens/s, prefill and commits included"),
        ("ratio", f"{seconds / floor:.2f}"),
        *clock_rows(clocks.to_dict()),
        (
            "prefill",
            f"{1e3 * prefill:.1f} ms, in one pass with a step {1e3 * added:.1f}: without {without:,.0f} tokens/s",
        ),
        *([("  TROUBLE", trouble)] if trouble else []),
        ("a pass", f"{1e3 * seconds / passes:.3f} ms of {passes} ({wanted / passes:.1f} tokens a pass)"),
        ("cold start", f"{subject.cold_seconds:.1f} s from weights in memory to the first committed block"),
    ]
    result = subject.facts("e2e", **config) | {
        "tokens_per_second": wanted / seconds, "tokens_per_second_without_prefill": without, "seconds": seconds,
        "floor_seconds": floor, "ratio": seconds / floor, "prefill_seconds": prefill,
        "added_prefill_seconds": added,
        "ms_a_pass": 1e3 * seconds / passes, "cold_seconds": subject.cold_seconds,
        "making_seconds": subject.making_seconds, **clocks.to_dict(),
    }  # fmt: skip
    return Outcome(title, rows, result | ({"trouble": trouble} if trouble else {}))


def cold_start(subject: Subject, prefix: int, width: int, steps: int) -> float:
    """The first engine of a process: kernels are compiled, graphs recorded, a prompt read, a block written."""
    begun = time.perf_counter()
    with subject.engine(1, prefix + width) as engine:
        request = make_request(random_tokens(engine, prefix), width, steps=steps, canvas=width)
        assert len(collect(engine.submit(request)).tokens) == width  # one block, so its commit is its end
        subject.cold_seconds = time.perf_counter() - begun
    return subject.cold_seconds
