"""The fast runner on a card: is it right (small networks), and how fast is it (26B-A4B with random weights)?

    python scripts/check_runner.py [--only small,blocks,fp8,int4,bf16] [--users 8,16] [--tiny]

small: graph against eager, batched against alone, kernels against plain torch, in every number format, with pins; and
which bits of a canvas, if any, depend on what is beside it.
blocks: texts of several blocks, with commits launched before they are read and without; caches that are only filled.
fp8, int4, bf16: a step of one user over 512 tokens with the dense MLP beside the experts and after them, what its
kernels take, over 32,768 tokens, for several users, and peak memory. `--tiny` runs all of it without a card, in
Triton's interpreter. A part that fails prints why, and the next begins.
"""

from __future__ import annotations

import argparse
import gc

import torch
from runner_blocks import blocks
from runner_large import Large
from runner_small import small
from runner_stage import TINY, failed, finish, part, say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="small,blocks,fp8,int4,bf16")
    parser.add_argument("--users", default="8,16")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    say(f"torch {torch.__version__}, {'Triton interpreter' if TINY else torch.cuda.get_device_name()}")
    only = chosen.only.split(",")
    users = [2] if TINY else [int(n) for n in chosen.users.split(",") if n]
    if "small" in only:
        for kind in (None, "fp8", "int4", "int8"):
            part(f"small {kind or 'bf16'}", lambda kind=kind: small(kind))
    if "blocks" in only:
        for kind in (None, "fp8", "int4", "int8"):
            part(f"blocks {kind or 'bf16'}", lambda kind=kind: blocks(kind))
    for kind in ("fp8", "int4", "bf16"):
        if kind in only:
            part(kind, Large(kind, users).run)
            gc.collect()
            if not TINY:
                torch.cuda.empty_cache()
    finish()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
