"""Texts of several blocks with a commit and a step in one pass (turns), and with a pass each, by turns on one card.

    python3 scripts/bench_turns.py [--quant fp8|int4|bf16] [--users 1,2,4,8] [--tokens 1024] [--rounds 7]

Random weights of the 26B-A4B, prompts of 512 tokens, 16 fixed steps a canvas; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from diffusiongemma.bench.drive import make_request, random_tokens, together
from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.engine import fast

PROMPT = 512
WARM = 2  # rounds in which all is recorded


def compared(subject: Subject, users: int, tokens: int, rounds: int) -> list[float]:
    """Seconds with a pass each, and with turns"""
    ways: dict[int, list[float]] = {0: [], fast.TURN: []}
    with subject.engine(users, PROMPT + tokens) as engine:
        if not isinstance(engine.scheduler.runner, fast.FastRunner):
            sys.exit("turns are for the fast runner: there is no card for it")
        for i in range(WARM + rounds):
            for most, taken in ways.items():
                prompts = [random_tokens(engine, PROMPT, seed=1 + users * i + user) for user in range(users)]
                asked = [make_request(prompt, tokens, seed=user, steps=16) for user, prompt in enumerate(prompts)]
                fast.TURN = most
                taken.append(together(engine, asked).seconds)
    return [statistics.median(taken[WARM:]) for taken in ways.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("fp8", "int4", "bf16"), default="fp8")
    parser.add_argument("--users", default="1")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    subject = Subject.make(Target(quant=args.quant, group=64 if args.quant == "int4" else None))
    for users in map(int, args.users.split(",")):
        apart, turns = compared(subject, users, args.tokens, args.rounds)
        gain = f"{apart / turns - 1:.1%}"
        print(f"{args.quant}, {users} users: {1e3 * apart:.1f} ms, with turns {1e3 * turns:.1f} ({gain})", flush=True)


if __name__ == "__main__":
    main()
