"""One denoising step, all in: network, vocabulary end, sampler, the decision to stop, the engine around it.

The figure is a slope: the same request with many steps and with few, through the engine as anybody uses it, divided by
the steps that lie between. So prompt, start and end fall out, and nothing of a step does. Where the engine replays a
recorded graph, that graph alone is timed beside it, and its kernels are what the parts are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from diffusiongemma.bench.breakdown import parts_of_plain
from diffusiongemma.bench.clocks import clock_rows, watching
from diffusiongemma.bench.drive import random_tokens, same_prompt
from diffusiongemma.bench.floor import DENSE, EXPERTS, PARTS, Work, step_work
from diffusiongemma.bench.hardware import Card
from diffusiongemma.bench.kernels import profiled, summarise
from diffusiongemma.bench.look import look
from diffusiongemma.bench.replay import filled_lane, replay_seconds
from diffusiongemma.bench.routing import experts_hit
from diffusiongemma.bench.subject import Subject
from diffusiongemma.bench.timing import BELIEVED, Outcome, Rows, note, slope
from diffusiongemma.engine import Engine
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.steps import SELDOM
from diffusiongemma.errors import DiffusionGemmaError

# The stop rule is asked after every step and never satisfied.
ASKED = {"early_stop": True, "stability": 1, "confidence": 1e-9}
LOOKED_AT = 4  # steps that are taken apart
IMPOSSIBLE = 0.5  # of a floor: no such figure is told at all


def measure_step(
    subject: Subject,
    users: int = 1,
    prefixes: tuple[int, ...] = (512,),
    steps: int = 48,
    canvas: int | None = None,
    repeat: int = 5,
    breakdown: bool = True,
) -> Outcome:
    width = canvas or subject.model.config.canvas_length
    found = [_case(subject, users, prefix, width, steps, repeat, breakdown) for prefix in prefixes]
    cases, (first, *longer) = [case for case, _ in found], [case for case, _ in found]
    rows = [row for case, work in found for row in _case_rows(case, work, subject)]
    rows += [(f"prefix {case['prefix']} : {first['prefix']}", f"{case['ms'] / first['ms']:.2f}") for case in longer]
    shares, runner = first.pop("experts_hit"), first["runner"]
    told = {"users": users, "canvas": width, "prefix": prefixes[0], "steps": steps, "repeat": repeat}
    many = ", ".join(map(str, prefixes))
    title, head = subject.heading("a denoising step, all in", **told | {"prefix": many, "runner": runner})
    hit = f"{mean(shares):.1%} of {subject.model.config.num_experts} in a layer on average, {min(shares):.1%} at least"
    figures = {name: first[name] for name in ("ms", "floor_ms", "ratio", "replay_ms") if name in first}
    reached = {"mean": mean(shares), "min": min(shares), "layers": shares}
    result = subject.facts("step", **told, runner=runner) | figures | {"experts_hit": reached, "cases": cases}
    return Outcome(title, [*head, ("experts hit", hit), *rows], result)


def step_seconds(engine: Engine, users: int, prefix: int, width: int, steps: int, repeat: int) -> float:
    """Seconds of one step of `users` canvases over a prefix of this length."""
    prompt = random_tokens(engine, prefix)

    def run(count: int) -> float:
        ran = same_prompt(engine, prompt, users, width, steps=count, canvas=width, keep=prefix, **ASKED)
        taken = min(result.metrics.steps for result in ran.results)
        if taken < count:
            raise DiffusionGemmaError(f"a canvas was done after {taken} of {count} steps: this is no figure of a step")
        return ran.seconds

    same_prompt(engine, prompt, 1, width, steps=1, canvas=width, keep=prefix)  # encodes the prompt, for all that follow
    few = max(1, steps // 4)
    # Until every step that is timed has been recorded.
    run(SELDOM + 1 if isinstance(engine.scheduler.runner, FastRunner) else few)
    return slope(lambda: run(few), lambda: run(few + steps), steps, repeat)


def _case(
    subject: Subject, users: int, prefix: int, width: int, steps: int, repeat: int, breakdown: bool
) -> tuple[dict[str, Any], Work]:
    with subject.engine(users, prefix + width) as engine:
        with watching(subject.device) as clocks:
            seconds = step_seconds(engine, users, prefix, width, steps, repeat)
        note(f"a step over {prefix} tokens: {1e3 * seconds:.3f} ms")
        lane = filled_lane(engine, users, prefix, width)
        seen = None if lane is None else look(lane.network, partial(lane.step, lane.kind()))
        shares = experts_hit(subject.model, users, prefix, width) if seen is None else seen.shares
        work = step_work(subject.model, users, prefix, width, mean(shares))
        floor = work.seconds(subject.card)
        if seconds < IMPOSSIBLE * floor:
            told = f"{1e3 * seconds:.3f} ms a step, and its floor is {1e3 * floor:.3f}"
            raise DiffusionGemmaError(f"{told}: the canvases do not take the steps that they are asked to")
        case: dict[str, Any] = {
            "prefix": prefix,
            "ms": 1e3 * seconds,
            "floor_ms": 1e3 * floor,
            "ratio": seconds / floor,
        }
        case |= {"floor": work.to_dict(subject.card), "experts_hit": shares, **clocks.to_dict()}
        case["runner"] = type(engine.scheduler.runner).__name__
        replay = None if lane is None else lane.recorded(lane.kind())
        if replay is not None:
            with watching(subject.device) as clocks:
                case["replay_ms"] = 1e3 * replay_seconds(engine, replay, steps, repeat)
            case["replay"] = clocks.to_dict()
            note(f"the recorded step alone: {case['replay_ms']:.3f} ms")
        trouble = [None if seen is None else seen.trouble]
        if breakdown:
            try:
                case |= _parts(subject, engine, replay, users, prefix, width)
            except Exception as error:  # a figure is not lost because its explanation failed
                trouble.append(f"not taken apart: {type(error).__name__}: {error}")
        trouble.append(too_fast(case, work, subject.card))
        if any(trouble):
            case["trouble"] = "; ".join(text for text in trouble if text)
    return case, work


def too_fast(case: dict[str, Any], work: Work, card: Card) -> str | None:
    """A figure that cannot be: less than reading the weights takes. None, if there is no such."""
    taken = {"the step": (case["ms"], case["floor_ms"])}
    taken |= {part: (ms, 1e3 * work.part_seconds(part, card)) for part, ms in case.get("parts", {}).items()}
    if DENSE in taken and EXPERTS in taken:  # they run beside each other: who of them is charged says little
        (ms, floor), (beside, other) = taken[EXPERTS], taken.pop(DENSE)
        taken[EXPERTS] = (ms + beside, floor + other)
    below = [name for name, (ms, floor) in taken.items() if ms < BELIEVED * floor]
    return f"not to be believed: {', '.join(below)} below the floor" if below else None


def _parts(
    subject: Subject, engine: Engine, replay: Callable[[], object] | None, users: int, prefix: int, width: int
) -> dict[str, Any]:
    """Where a step's time goes: by kernel where a graph is replayed, by module on the plain path."""
    if replay is not None:
        if subject.device.type != "cuda":
            return {}  # the twin of a graph has no kernels

        def replays() -> None:
            for _ in range(LOOKED_AT):
                replay()

        found = summarise(profiled(replays), subject.model.config.num_hidden_layers, LOOKED_AT)
        return {"parts": found.parts, "idle_ms": found.idle_ms, "kernels": found.kernels}
    prompt, options = random_tokens(engine, prefix), {"steps": LOOKED_AT, "canvas": width, "keep": prefix, **ASKED}
    run = lambda: same_prompt(engine, prompt, users, width, **options).seconds  # noqa: E731
    return {"parts": parts_of_plain(subject.model, run, LOOKED_AT)}


def _case_rows(case: dict[str, Any], work: Work, subject: Subject) -> Rows:
    card, at = subject.card, f"prefix {case['prefix']}: "
    amount = f"{work.bytes.total() / 1e9:.3g} GB, {work.flops.total() / 1e12:.3g} TFLOP"
    rows = [
        (f"{at}floor", f"{case['floor_ms']:.3f} ms ({amount}: bound by {work.bound(card)})"),
        (f"{at}figure", f"{case['ms']:.3f} ms"),
        (f"{at}ratio", f"{case['ratio']:.2f}"),
        *clock_rows(case, "  clock"),
    ]
    if "replay_ms" in case:
        rows.append((f"{at}replay", f"{case['replay_ms']:.3f} ms: the recorded step alone"))
        rows += clock_rows(case["replay"], "  clock")
    for part in PARTS if "parts" in case else ():
        floor, taken = 1e3 * work.part_seconds(part, card), case["parts"].get(part, 0.0)
        rows.append(
            (f"  {part}", f"{taken:.3f} ms, floor {floor:.3f}" + (f", ratio {taken / floor:.2f}" if floor else ""))
        )
    if "trouble" in case:
        rows.append(("  TROUBLE", case["trouble"]))
    if "idle_ms" in case:
        rows.append(("  between kernels", f"{case['idle_ms']:.3f} ms"))
    for kernel in case.get("kernels", ()):
        rows.append((f"    {kernel['us']:8.1f} us", f"{kernel['calls']:g} × {kernel['kernel']} ({kernel['part']})"))
    return rows
