"""A recorded step alone: the graph that the fast runner replays, over a board that real requests have filled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from diffusiongemma.bench.drive import make_request, random_tokens
from diffusiongemma.bench.timing import synchronise
from diffusiongemma.engine import Draft, Engine
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Lane
from diffusiongemma.errors import DiffusionGemmaError

FILL = 2  # steps that every canvas takes before, so that the next one is conditioned on something
MANY = 10_000  # steps of a canvas that is not meant to end
TRIES = 5  # a canvas may be given up before the others are


def filled_lane(engine: Engine, users: int, prefix: int, width: int) -> Lane | None:
    """A lane with `users` canvases that have taken a few steps, and nobody else uses; None: there is no such thing.

    `lane.recorded(lane.kind())` takes one step of them, sampler and stop decision included.
    """
    runner = engine.scheduler.runner
    if not isinstance(runner, FastRunner):
        return None
    for _ in range(TRIES):
        _fill(engine, users, prefix, width)
        lane = runner.lane(width)
        if lane.kind().rows == users:
            return lane
    raise DiffusionGemmaError(f"{users} canvases never took a step together")


def _fill(engine: Engine, users: int, prefix: int, width: int) -> None:
    prompt = random_tokens(engine, prefix)
    requests = [make_request(prompt, width, seed=i, steps=MANY, canvas=width, keep=prefix) for i in range(users)]
    handles = [engine.submit(replace(request, drafts=True)) for request in requests]
    streams = [iter(handle) for handle in handles]
    for stream in streams:
        for _ in range(FILL):
            assert isinstance(next(stream), Draft), "the request ended early"
    for handle in handles:
        handle.cancel()
    for stream in streams:  # until its end: the engine's thread is done with the board
        for _ in stream:
            pass
    synchronise(engine.model.device)


def replay_seconds(engine: Engine, replay: Callable[[], object], count: int, repeat: int) -> float:
    """Seconds of one of `count` replays on end."""
    device, taken = engine.model.device, []
    for _ in range(1 + repeat):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(count):
            replay()
        synchronise(device)
        taken.append((time.perf_counter() - start) / count)
    return statistics.median(taken[1:])
