"""Texts of several blocks, prompts and commits in one pass with a step (turns) and in passes of their own, by turns on
one card.

    python3 scripts/bench_turns.py [--quant fp8|int4|bf16] [--users 1,2,4,8] [--tokens 1024] [--prompt 512] [--rounds 7]
                                   [--apart 20]

Random weights of the 26B-A4B, 16 fixed steps a canvas; medians. `--apart`: users come so many milliseconds after one
another, so that their blocks end at different times. What a pass is recorded for is recorded in the first rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from diffusiongemma.bench.drive import make_request, random_tokens
from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.engine import Engine, Request, collect, fast, lane

WARM = 2  # rounds in which all is recorded


def compared(subject: Subject, users: int, args: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """With a pass each, and with turns: seconds, and those until the first draft (mean of all users)"""
    ways: dict[int, list[tuple[float, float]]] = {0: [], fast.TURN: []}
    lane.OFTEN = 0
    with subject.engine(users, args.prompt + args.tokens) as engine:
        if not isinstance(engine.scheduler.runner, fast.FastRunner):
            sys.exit("turns are for the fast runner: there is no card for it")
        for i in range(WARM + args.rounds):
            for most, taken in ways.items():
                prompts = [random_tokens(engine, args.prompt, seed=1 + users * i + user) for user in range(users)]
                asked = [make_request(prompt, args.tokens, seed=user, steps=16) for user, prompt in enumerate(prompts)]
                fast.TURN = most
                taken.append(run(engine, asked, args.apart / 1e3))
    medians = {}
    for most, taken in ways.items():
        whole, first = zip(*taken[WARM:], strict=True)
        medians[most] = statistics.median(whole), statistics.median(first)
    return medians


def run(engine: Engine, asked: list[Request], apart: float) -> tuple[float, float]:
    began, handles = time.perf_counter(), []
    for request in asked:
        handles.append(engine.submit(request))
        time.sleep(apart)
    results = [collect(handle) for handle in handles]
    seconds = time.perf_counter() - began
    return seconds, statistics.mean(result.metrics.first_draft_seconds or 0.0 for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("fp8", "int4", "bf16"), default="fp8")
    parser.add_argument("--users", default="1")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--apart", type=float, default=0.0)
    args = parser.parse_args()
    subject = Subject.make(Target(quant=args.quant, group=64 if args.quant == "int4" else None))
    for users in map(int, args.users.split(",")):
        (two, two_first), (one, one_first) = compared(subject, users, args).values()
        told = f"{1e3 * two:.1f} ms, with turns {1e3 * one:.1f} ({two / one - 1:.1%})"
        first = f"first draft {1e3 * two_first:.1f} and {1e3 * one_first:.1f}"
        print(f"{args.quant}, {users} users: {told}; {first}", flush=True)


if __name__ == "__main__":
    main()
