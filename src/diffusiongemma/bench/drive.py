"""Requests of known length, alone or together, and how long they take from the outside."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from diffusiongemma.engine import Engine, Request, Result, SamplingParams, collect
from diffusiongemma.engine.fast import FastRunner


@dataclass(frozen=True)
class Ran:
    """Requests that ran together: from handing them in to the last end."""

    seconds: float
    results: list[Result]


def random_tokens(engine: Engine, count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(107, engine.model.config.vocab_size, (count,), generator=generator).tolist())


def make_request(prompt: tuple[int, ...], limit: int, **options: Any) -> Request:
    """No end of text ends it (random weights may write one anywhere), nothing stops a canvas before its last step.

    `keep`: prompt tokens that are worth keeping; a second request that begins with them does not encode them again.
    """
    pins, keep = options.pop("pins", {}), options.pop("keep", 0)
    given: dict[str, Any] = {"seed": 0, "max_new_tokens": limit}
    if options.get("mode") != "ar":
        given["early_stop"] = False
    params = SamplingParams.build(**given | options)
    return Request(prompt, params, pins, drafts=False, ends=bool(pins), stable=keep)


def together(engine: Engine, requests: list[Request]) -> Ran:
    """All at once. One that fails raises, and the others are cancelled."""
    start = time.perf_counter()
    handles = [engine.submit(request) for request in requests]
    try:
        results = [collect(handle) for handle in handles]
    finally:
        for handle in handles:
            handle.cancel()
    return Ran(time.perf_counter() - start, results)


def same_prompt(engine: Engine, prompt: tuple[int, ...], users: int, limit: int, **options: Any) -> Ran:
    """`users` requests that differ in their seed; with the prompt kept from before they all start in the same tick."""
    return together(engine, [make_request(prompt, limit, seed=i, **options) for i in range(users)])


def reading_seconds(engine: Engine, length: int, seed: int, alone: bool = True) -> float:
    """How long a prompt of this length takes: the same request twice, the second time with the prompt kept. `alone`: in
    passes of its own; else the last of it goes with the canvas's first step where it can, and a short one may cost
    nothing.

    The engine's own figure would not do: a GPU may still be reading when the host goes on.
    """
    prompt = random_tokens(engine, length, seed)
    runner = engine.scheduler.runner
    with runner.in_turn() if alone and isinstance(runner, FastRunner) else nullcontext():
        fresh, again = (same_prompt(engine, prompt, 1, 1, steps=1) for _ in range(2))
    reused = [run.results[0].metrics.reused_tokens for run in (fresh, again)]
    assert reused[0] < max(1, length // 4), "the prompt was read before"  # the first tokens may agree by chance
    assert reused[1] == length, "the prompt was not kept"
    if not alone:
        return max(0.0, fresh.seconds - again.seconds)
    return fresh.seconds - again.seconds if fresh.seconds > again.seconds else fresh.seconds
