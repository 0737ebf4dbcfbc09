"""Texts of several blocks, prompts and commits in one pass with a step (turns) and in passes of their own, by turns on
one card.

    python3 scripts/bench_turns.py [--quant fp8|int4|bf16] [--users 1,2,4,8] [--tokens 1024] [--prompt 512] [--rounds 7]
                                   [--uneven]

Random weights of the 26B-A4B, 16 fixed steps a canvas; medians, after as many rounds as record something (at most 8).
`--uneven`: every user takes another number of steps, 16 in the mean, so that their blocks end at different times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from diffusiongemma.bench.drive import make_request, random_tokens, together
from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.engine import Engine, fast

WARM = 2, 8  # rounds that do not count: at least, and at most


def compared(subject: Subject, users: int, args: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    """With a pass each, and with turns: seconds of each round, and those until the first draft (mean of all users)"""
    ways: dict[int, list[tuple[float, float]]] = {0: [], fast.TURN: []}
    with subject.engine(users, args.prompt + args.tokens) as engine:
        runner = engine.scheduler.runner
        if not isinstance(runner, fast.FastRunner):
            sys.exit("turns are for the fast runner: there is no card for it")
        counting = i = 0
        while counting < args.rounds:
            recorded = runner.recorder.recorded
            for most, taken in ways.items():
                fast.TURN = most
                taken.append(run(engine, users, args, seed=i))
            new, i = runner.recorder.recorded - recorded, i + 1
            counting += counting > 0 or i >= WARM[1] or (i >= WARM[0] and not new)
        print(f"… {i} rounds, {runner.recorder.recorded} passes recorded", file=sys.stderr, flush=True)
    return {most: taken[-counting:] for most, taken in ways.items()}


def run(engine: Engine, users: int, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    asked = []
    for user in range(users):
        prompt = random_tokens(engine, args.prompt, seed=1 + users * seed + user)
        steps = 16 + (user - users // 2 if args.uneven else 0)
        asked.append(make_request(prompt, args.tokens, seed=user, steps=steps))
    ran = together(engine, asked)
    return ran.seconds, statistics.mean(result.metrics.first_draft_seconds or 0.0 for result in ran.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("fp8", "int4", "bf16"), default="fp8")
    parser.add_argument("--users", default="1")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--uneven", action="store_true")
    args = parser.parse_args()
    subject = Subject.make(Target(quant=args.quant, group=64 if args.quant == "int4" else None))
    for users in map(int, args.users.split(",")):
        two, one = (list(zip(*taken, strict=True)) for taken in compared(subject, users, args).values())
        (whole, first), (turns, first_turns) = (tuple(map(statistics.median, way)) for way in (two, one))
        told = f"{1e3 * whole:.1f} ms, with turns {1e3 * turns:.1f} ({whole / turns - 1:.1%})"
        drafts = f"first draft {1e3 * first:.1f} and {1e3 * first_turns:.1f}"
        spread = f"{1e3 * min(one[0]):.1f} to {1e3 * max(one[0]):.1f}"
        print(f"{args.quant}, {users} users: {told}, from {spread}; {drafts}", flush=True)


if __name__ == "__main__":
    main()
