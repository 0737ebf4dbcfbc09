"""Several users at once: tokens a second in all, each with its own prompt, prefill and commits included."""

from __future__ import annotations

import statistics
from typing import Any

from diffusiongemma.bench.clocks import clock_rows, watching
from diffusiongemma.bench.drive import Ran, make_request, random_tokens, together
from diffusiongemma.bench.floor import request_seconds
from diffusiongemma.bench.subject import Subject, peak, reset_peak
from diffusiongemma.bench.timing import Outcome, note
from diffusiongemma.engine import Engine
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.ops.memory import is_out_of_memory


def measure_batch(
    subject: Subject,
    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    prefix: int = 512,
    tokens: int | None = None,
    steps: int = 16,
    canvas: int | None = None,
    repeat: int = 2,
) -> Outcome:
    """`tokens` of each user: default two canvases. A number of users that fails is told, and the others go on."""
    width = canvas or subject.model.config.canvas_length
    wanted = tokens or 2 * width
    config: dict[str, Any] = {"prefix": prefix, "tokens": wanted, "steps": steps, "canvas": width, "repeat": repeat}
    title, rows = subject.heading("users at once", **config)
    cases: list[dict[str, Any]] = []
    for count in users:
        try:
            case = _case(subject, count, config)
        except Exception as error:
            if not isinstance(error, DiffusionGemmaError) and not is_out_of_memory(error):
                raise
            rows.append((f"users {count}", f"failed: {str(error).splitlines()[0]}"))
            cases.append({"users": count, "error": str(error)})
            continue
        cases.append(case)
        note(f"users {count}: {case['tokens_per_second']:,.0f} tokens/s in all")
        speed, floor = case["tokens_per_second"], case["floor_tokens_per_second"]
        figure = f"figure {speed:,.0f} tokens/s in all, floor {floor:,.0f}, ratio {case['ratio']:.2f}"
        rows.append((f"users {count}", f"{figure}; {speed / count:,.0f} a user, peak memory {case['peak_gb']:.1f} GB"))
        rows += clock_rows(case, "  clock")
    done = [case for case in cases if "error" not in case]
    if not done:
        raise DiffusionGemmaError(f"no number of users could be measured: {cases[0]['error']}")
    best = max(done, key=lambda case: case["tokens_per_second"])
    figures = {name: best[name] for name in ("users", "tokens_per_second", "ratio")}
    return Outcome(title, rows, subject.facts("batch", **config) | figures | {"cases": cases})


def _case(subject: Subject, users: int, config: dict[str, Any]) -> dict[str, Any]:
    prefix, wanted, steps, width = (config[name] for name in ("prefix", "tokens", "steps", "canvas"))
    reset_peak(subject.device)
    with subject.engine(users, prefix + wanted) as engine:

        def run(turn: int) -> Ran:
            return together(engine, _requests(engine, users, prefix, wanted, turn, steps, width))

        run(0)  # warms up
        with watching(subject.device) as clocks:
            seconds = statistics.median(run(1 + i).seconds for i in range(config["repeat"]))
        highest = peak(subject.device)
        passes = engine.scheduler.chunk, engine.scheduler.room
    floor = request_seconds(subject.model, subject.card, users, prefix, wanted, steps, width, *passes)
    total = users * wanted
    return {
        "users": users, "tokens_per_second": total / seconds, "floor_tokens_per_second": total / floor,
        "ratio": seconds / floor, "seconds": seconds, "peak_gb": highest / 1e9, **clocks.to_dict(),
    }  # fmt: skip


def _requests(engine: Engine, users: int, prefix: int, wanted: int, turn: int, steps: int, width: int) -> list[Any]:
    seeds = [turn * users + i for i in range(users)]
    prompts = [random_tokens(engine, prefix, seed=1 + seed) for seed in seeds]
    return [make_request(p, wanted, seed=s, steps=steps, canvas=width) for p, s in zip(prompts, seeds, strict=True)]
