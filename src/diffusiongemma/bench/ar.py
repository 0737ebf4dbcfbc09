"""The autoregressive twin on the same weights and the same engine, against diffusion: one user, and many.

Diffusion writes a canvas in n steps and a commit; the twin writes a token a pass. The more users share a pass, the
less a token of the twin costs, because experts that were read for one serve others; a step of diffusion reads all
experts anyway. So there is a number of users from which on the twin writes more in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from diffusiongemma.bench.drive import random_tokens, same_prompt
from diffusiongemma.bench.floor import encode_work
from diffusiongemma.bench.look import Look, watched
from diffusiongemma.bench.routing import experts_hit
from diffusiongemma.bench.step import step_seconds
from diffusiongemma.bench.subject import Subject
from diffusiongemma.bench.timing import Outcome, note, slope
from diffusiongemma.engine import Engine
from diffusiongemma.engine.fast import FastRunner

STEPS = (12, 16, 24, 48)  # a canvas
LOOKED_AT = 8  # tokens of each user: enough that all draw together


def measure_ar(
    subject: Subject,
    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    prefix: int = 512,
    tokens: int = 64,
    canvas: int | None = None,
    repeat: int = 3,
) -> Outcome:
    width = canvas or subject.model.config.canvas_length
    config: dict[str, Any] = {"prefix": prefix, "tokens": tokens, "canvas": width, "repeat": repeat}
    title, rows = subject.heading("the autoregressive twin", **config)
    cases = [_case(subject, count, prefix, tokens, width, repeat) for count in users]
    for case in cases:
        figure = f"figure {case['ms']:.3f} ms a token, floor {case['floor_ms']:.3f}, ratio {case['ratio']:.2f}"
        in_all = (
            f"{case['users'] / case['ms'] * 1e3:,.0f} tokens/s in all, {case['experts_hit']:.1%} of the experts hit"
        )
        there = f"a step of diffusion {case['step_ms']:.3f} ms, a commit {case['commit_ms']:.3f}"
        rows.append((f"users {case['users']}", f"{figure}; {in_all}; {there}"))
        if "trouble" in case:
            rows.append(("  TROUBLE", case["trouble"]))
    ratios, crossings = {}, {}
    for steps in STEPS:
        curve = [(case["users"], advantage(case, steps, width)) for case in cases]
        ratios[steps] = {count: round(ratio, 3) for count, ratio in curve}
        crossings[steps] = overtakes(curve)
        rows.append(
            (
                f"diffusion : AR, {steps} steps",
                f"{curve[0][1]:.2f} at {curve[0][0]} users; {_told(crossings[steps], users)}",
            )
        )
    figures = {name: cases[0][name] for name in ("users", "ms", "floor_ms", "ratio")}
    result = subject.facts("ar", **config) | figures
    return Outcome(title, rows, result | {"cases": cases, "diffusion_to_ar": ratios, "overtakes_at": crossings})


def _case(subject: Subject, users: int, prefix: int, tokens: int, width: int, repeat: int) -> dict[str, Any]:
    few = max(1, tokens // 4)
    with subject.engine(users, prefix + 2 * max(width, tokens) + 1) as engine:
        prompt = random_tokens(engine, prefix + 1)  # the last one is what the first new token is drawn from

        def run(count: int) -> float:
            return same_prompt(engine, prompt, users, count, mode="ar", keep=prefix).seconds

        run(1), run(few)
        seconds = slope(lambda: run(few), lambda: run(few + tokens), tokens, repeat)
        note(f"users {users}: {1e3 * seconds:.3f} ms a token")
        step = step_seconds(engine, users, prefix, width, 16, repeat)
        note(f"users {users}: {1e3 * step:.3f} ms a step")
        commit = _commit_seconds(engine, users, prefix, width, step, repeat)
        seen = _look(engine, lambda: run(LOOKED_AT), users)
        share = mean(experts_hit(subject.model, users, prefix, None) if seen is None else seen.shares)
    work = encode_work(subject.model, users, prefix, 1, share, head=users)
    floor = work.seconds(subject.card)
    case: dict[str, Any] = {
        "users": users, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "ratio": seconds / floor, "experts_hit": share,
        "step_ms": 1e3 * step, "commit_ms": 1e3 * commit, "floor": work.to_dict(subject.card),
    }  # fmt: skip
    return case if seen is None or seen.trouble is None else case | {"trouble": seen.trouble}


def _look(engine: Engine, run: Callable[[], object], users: int) -> Look | None:
    """The last pass of all users together in this run; None: the plain runner has no such pass."""
    runner = engine.scheduler.runner
    if not isinstance(runner, FastRunner):
        return None
    with watched(runner.drawing) as found:
        run()
    return next((look for rows, look in reversed(found) if rows == users), None)


def _commit_seconds(engine: Engine, users: int, prefix: int, width: int, step: float, repeat: int) -> float:
    """A second block costs a commit of the first, and its own step."""
    prompt = random_tokens(engine, prefix)

    def run(blocks: int) -> float:
        return same_prompt(engine, prompt, users, blocks * width, steps=1, canvas=width, keep=prefix).seconds

    run(2)
    return max(0.0, slope(lambda: run(1), lambda: run(2), 1, repeat) - step)


def advantage(case: dict[str, Any], steps: int, width: int) -> float:
    """How many times more tokens diffusion writes than the twin in the same time, with so many users each."""
    return float(width * case["ms"] / (steps * case["step_ms"] + case["commit_ms"]))


def overtakes(curve: Sequence[tuple[int, float]]) -> float | None:
    """Users at which the advantage falls to 1, between the measured ones on straight lines of the logarithms; None:
    not within them."""
    if curve[0][1] <= 1:
        return float(curve[0][0])
    for (few, high), (many, low) in pairwise(curve):
        if low <= 1 < high:
            share = math.log(high) / (math.log(high) - math.log(low)) if low != high else 0.0
            return math.exp(math.log(few) + share * (math.log(many) - math.log(few)))
    return None


def _told(at: float | None, users: tuple[int, ...]) -> str:
    return f"AR overtakes at {at:.1f} users" if at is not None else f"AR does not overtake up to {max(users)} users"
