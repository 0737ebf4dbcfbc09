"""What the engine costs and what it saves, on a CPU with random weights, in one run.

`dgemma bench engine`
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import torch

from diffusiongemma.bench.drive import make_request, random_tokens
from diffusiongemma.bench.timing import Outcome, alternate, machine, median_ratio
from diffusiongemma.engine import Engine, Limits, Request, collect
from diffusiongemma.ops.threads import alone

STEPS = 4  # denoising steps a timed call takes
PROMPT = 512


def measure_engine(preset: str, rounds: int) -> Outcome:
    with Engine.random(preset, std=0.02, limits=Limits(max_rows=8)) as engine:
        parts = [overhead(engine, rounds), together(engine, rounds), second_turn(engine, rounds), short(engine, rounds)]
    rows = [row for part, _ in parts for row in part]
    result: dict[str, Any] = {"bench": "engine", "preset": preset, **machine()}
    for _, figures in parts:
        result |= figures
    return Outcome(
        f"the engine on {preset}, float32 on {torch.get_num_threads()} threads, {rounds} rounds", rows, result
    )


Part = tuple[list[tuple[str, str]], dict[str, float]]


def overhead(engine: Engine, rounds: int) -> Part:
    """A step of the engine, sampler, events and all, against the bare network's `denoise`."""
    model, config = engine.model, engine.model.config
    prompt = random_tokens(engine, PROMPT)
    cache = model.new_cache(1, PROMPT)
    with torch.inference_mode():
        model.encode(torch.tensor([prompt]), cache)
        canvas = torch.tensor([random_tokens(engine, config.canvas_length)])

    @torch.inference_mode()
    def bare() -> None:
        logits = None  # as the engine: nothing to condition the first step on
        with alone(canvas.device, canvas.numel() * config.hidden_size):
            for _ in range(STEPS):
                logits = model.denoise(canvas, cache, logits)

    def whole() -> None:
        _run(engine, prompt, config.canvas_length)

    seconds = alternate({"bare": bare, "engine": whole}, rounds)
    share = median_ratio(seconds["engine"], seconds["bare"]) - 1
    bare_ms, engine_ms = (1e3 * statistics.median(seconds[name]) / STEPS for name in ("bare", "engine"))
    text = f"{bare_ms:.1f} ms bare, {engine_ms:.1f} ms in the engine: {100 * share:+.1f}% (limit +5%)"
    return [("a step", text)], {"bare_ms": bare_ms, "engine_ms": engine_ms, "overhead": share}


def together(engine: Engine, rounds: int) -> Part:
    """8 requests at once against one after another: the same texts, and how long."""
    prompts = [random_tokens(engine, 32, seed) for seed in range(8)]
    width = min(64, engine.model.config.canvas_length)

    def at_once() -> list[list[int]]:
        handles = [engine.submit(_request(p, width, seed=i, canvas=width)) for i, p in enumerate(prompts)]
        return [collect(handle).tokens for handle in handles]

    def in_turn() -> list[list[int]]:
        asked = [_request(p, width, seed=i, canvas=width) for i, p in enumerate(prompts)]
        return [collect(engine.submit(request)).tokens for request in asked]

    assert at_once() == in_turn(), "a request's text depends on its neighbours"
    seconds = alternate({"in turn": in_turn, "at once": at_once}, rounds)
    ratio = median_ratio(seconds["in turn"], seconds["at once"])
    return [(f"8 requests, canvas {width}", f"one after another : together = {ratio:.2f}, same texts")], {
        "batch_ratio": ratio
    }


def second_turn(engine: Engine, rounds: int) -> Part:
    """A conversation's first turn, and its second with the first in the prefix cache."""
    fresh = itertools.count(100)

    def turns() -> tuple[float, float, int]:
        prompt = random_tokens(engine, 1024, next(fresh))
        first = collect(engine.submit(_request(prompt, 32, steps=1, canvas=32)))
        again = (*prompt, *first.tokens, *random_tokens(engine, 32, next(fresh)))
        second = collect(engine.submit(_request(again, 32, steps=1, canvas=32)))
        return first.metrics.total_seconds, second.metrics.total_seconds, second.metrics.reused_tokens

    taken = [turns() for _ in range(rounds + 1)][1:]
    ratio = statistics.median(a / b for a, b, _ in taken)
    text = f"1,024 tokens first : second = {ratio:.1f}, {taken[0][2]} tokens reused"
    return [("second turn", text)], {"second_turn_ratio": ratio}


def short(engine: Engine, rounds: int) -> Part:
    """A ten-token answer, canvas as asked against the full one. The end is pinned, so both write the same."""
    end = engine.ends[0]
    pins = {i: 200 + i for i in range(10)} | {10: end}

    def answer(canvas: Any, limit: int) -> None:
        request = _request(random_tokens(engine, 32), limit, canvas=canvas, pins=pins)
        assert len(collect(engine.submit(request)).tokens) == 10

    full = engine.model.config.canvas_length
    contestants = {
        "full": lambda: answer(None, full),
        "asked": lambda: answer("adaptive", 32),  # the caller wants at most 32 tokens
        "dropped": lambda: answer("adaptive", full),  # the caller does not know; positions behind the end are dropped
    }
    seconds = alternate(contestants, rounds)
    asked = median_ratio(seconds["full"], seconds["asked"])
    dropped = median_ratio(seconds["full"], seconds["dropped"])
    text = f"full canvas : adaptive = {asked:.1f} when 32 are asked for, {dropped:.1f} when unknown (limit 3)"
    return [("ten-token answer", text)], {"short_ratio": asked, "short_ratio_unknown": dropped}


def _request(prompt: tuple[int, ...], limit: int, **options: Any) -> Request:
    return make_request(prompt, limit, **{"steps": STEPS, "keep": len(prompt)} | options)


def _run(engine: Engine, prompt: tuple[int, ...], limit: int) -> None:
    collect(engine.submit(replace(_request(prompt, limit), drafts=True)))
