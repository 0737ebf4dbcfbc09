"""The small kernels of a layer at the 26B-A4B geometry: microseconds before a change and after it.

    python scripts/bench_small.py [--old PATH]

PATH: the `src` folder of the version before (`git archive COMMIT src | tar -x -C build/old`, then build/old/src). Times
are those of a CUDA graph that runs an operation 20 times in a row, so launches that begin early count as they do in a
step; inputs of 1 token lie in the card's cache. Ends in one line of JSON. Needs a Hopper card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

D, EPS, RING = 2816, 1e-6, 1023
SLIDING, FULL = (16, 8, 256), (16, 2, 512)  # query heads, K/V heads, head size
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Case = tuple[str, Callable[[], object]]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def norms(tokens: int, quant: torch.dtype | None) -> Iterator[Case]:
    from diffusiongemma.ops import norm_triton

    x, a, b = (randn(tokens, D) for _ in range(3))
    w, scalar = [randn(D) for _ in range(4)], torch.ones(1, device="cuda", dtype=BF16)
    yield "after attention", lambda: norm_triton.after_attention(x, a, *w[:3], EPS, quant)
    weights = (w[0], w[1], w[2])
    yield "after feed-forward", lambda: norm_triton.after_feed_forward(x, a, b, weights, scalar, w[3], EPS, quant)


def attention(tokens: int, quant: torch.dtype | None) -> Iterator[Case]:
    """Heads, and attention with all that follows it up to the next product; a row of 1 token also stores it"""
    from diffusiongemma.ops import attention_triton, fused, heads_triton
    from diffusiongemma.ops.attention_cached import New, Prefix
    from diffusiongemma.ops.rows_triton import quantize_rows

    new, length = min(tokens, 256), 512
    rows = tokens // new
    for name, (heads, kv, size), slots in (("sliding", SLIDING, RING), ("full", FULL, 2048)):
        causal, wide = new == 1, name == "full"
        rope = fused.rope_at(torch.arange(tokens, device="cuda"), fused.rope_frequency(size, 1e4, 1.0, "cuda"), BF16)
        qkv, norm = randn(tokens, (heads + kv * (1 if wide else 2)) * size), randn(size)
        yield f"heads {name}", lambda a=(qkv, norm, norm, rope, heads, kv, EPS): heads_triton.split_heads(*a)
        at = torch.arange(rows, dtype=torch.int32, device="cuda")
        prefix = Prefix(randn(rows, kv, slots, size), randn(rows, kv, slots, size), at, torch.full_like(at, length))
        fresh = New(torch.arange(0, tokens + 1, new, dtype=torch.int32, device="cuda"), new)
        window = None if wide else RING + causal
        args = (randn(tokens, heads, size), randn(tokens, kv, size), randn(tokens, kv, size), prefix, fresh)

        def whole(args: Any = args, causal: bool = causal, window: int | None = window) -> None:
            if hasattr(attention_triton, "attend_rows"):
                attention_triton.attend_rows(*args, causal, window, quant, causal)
                return
            out = attention_triton.attend(*args, causal, window).flatten(1)
            if causal:
                attention_triton.store(*args[1:])
            if quant is not None:
                quantize_rows(out)

        yield f"attention {name} to its product", whole


def few() -> Iterator[Case]:
    """Products of one token, each after a norm: their weights can be on their way while that runs"""
    from diffusiongemma.ops import few_triton, norm_triton
    from diffusiongemma.ops.fused import Rows

    shapes = {"qkv": (D, 8192, False), "o": (4096, D, False), "geglu": (D, 2112, True), "down": (2112, D, False)}
    pieces: dict[str, Any] = {"": None, ", in registers 4 x 512": few_triton.Piece(4, 512, 4, 1)}
    pieces[", in registers 2 x 1024"] = few_triton.Piece(2, 1024, 4, 1)
    for name, (inputs, outputs, gated) in shapes.items():
        x, rows = randn(1, inputs), outputs * (2 if gated else 1)
        # As many weights as the card's cache does not hold: each is read from memory.
        many = [(randn(rows, inputs).to(FP8), torch.ones(rows, 1, device="cuda")) for _ in range(20)]
        for how, piece in pieces.items():

            def run(x: Tensor = x, many: Any = many, gated: bool = gated, piece: Any = piece) -> None:
                many.append(many.pop(0))
                normed = norm_triton.norm_rows(x, None, EPS).values
                few_triton.few(Rows(normed), *many[0], gated=gated, piece=piece)

            yield f"norm and {name}{how}", run


def cases() -> Iterator[tuple[int, Case]]:
    for tokens in (1, 256, 2048):
        quant = FP8 if tokens > 1 else None
        for case in (*norms(tokens, quant), *attention(tokens, quant)):
            yield tokens, case
    for case in few():
        yield 1, case


def microseconds(call: Callable[[], object], times: int = 20, replays: int = 20) -> float:
    """The best of some replays of a graph that has the call so many times"""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    best = float("inf")
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / times)
    return best


def measure() -> dict[str, float]:
    from diffusiongemma.ops.kernels import compiling

    made = list(cases())
    began = time.perf_counter()
    with compiling():
        for _, (_, call) in made:
            call()
    torch.cuda.synchronize()
    print(f"compiled in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    found = {}
    for tokens, (name, call) in made:
        try:
            call()
            torch.cuda.synchronize()
            found[f"{tokens} {name}"] = round(microseconds(call), 2)
        except Exception as failure:
            print(f"{tokens} {name}: {type(failure).__name__}: {str(failure)[:200]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1] / "src")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.src))
    torch.manual_seed(0)
    old: dict[str, float] = {}
    if asked.old is not None:
        command = [sys.executable, __file__, "--src", str(asked.old)]
        old = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    new = measure()
    for name, taken in new.items():
        before = f"{old[name]:8.2f} ->" if name in old else ""
        print(f"{name:50} {before} {taken:8.2f} us", flush=True)
    print(json.dumps(new))


if __name__ == "__main__":
    main()
