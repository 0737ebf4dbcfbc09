"""Both products of the experts in one launch that streams weights, packed ones, too, beside two kernels: the same bits?
How fast?

    python3 scripts/bench_stream.py [--formats fp8 bf16 int4] [--tokens 256 512] [--runs 30]

26B-A4B geometry on one Hopper card, 256 tokens a user (four, six, eight: `--formats fp8 --tokens 1024 1536 2048`).
Tokens go to their experts evenly, and so that some experts have none and others several blocks. Times are of a CUDA
graph over several sets of weights, by turns, medians; the floor is all weights once at 4.33 TB/s. Weights that can be
packed are rounded to what has a place there; 4-bit ones are laid out by side. The exit code is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from diffusiongemma.ops import routing
from diffusiongemma.ops.experts_triton import experts_pairs, streams, streams_wide
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.packed import Packed, once_more
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.rows_triton import quantize_rows
from diffusiongemma.ops.sides import sides_of
from diffusiongemma.ops.tiles import Format, block_rows, format_of

EXPERTS, HIDDEN, WIDTH, TOP, SETS, TURNS = 128, 2816, 704, 8, 4, 15
BANDWIDTH, FORMATS = 4.33e12, ["fp8", "bf16", "int4"]
Weights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def matrix(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    out = torch.empty(EXPERTS, rows, columns, dtype=dtype, device="cuda")
    for expert in out:
        expert.copy_(torch.randn(rows, columns, device="cuda") * (1.0 if dtype == FP8 else 0.02))
    return out, torch.rand(EXPERTS, rows, 1, device="cuda") * 0.01 + 0.001 if dtype == FP8 else None


def weights_of(fmt: str) -> Weights:
    if fmt != "int4":
        dtype = FP8 if fmt == "fp8" else torch.bfloat16
        return *matrix(2 * WIDTH, HIDDEN, dtype), *matrix(HIDDEN, WIDTH, dtype)
    return *pairs(WIDTH // 64, HIDDEN // 64), *pairs(HIDDEN // 128, WIDTH // 64)


def pairs(tiles: int, groups: int) -> tuple[Tensor, Tensor]:
    """Any bytes are 4-bit weights, as `int4.pack_pairs` has them"""
    scale = torch.rand(EXPERTS, tiles, groups, 64, 2, device="cuda") * 0.01 + 0.001
    q = torch.randint(256, (EXPERTS, tiles, groups, 64, 64), dtype=torch.uint8, device="cuda")
    return q, scale.to(torch.bfloat16).view(torch.int32).squeeze(-1).contiguous()


def placed(tokens: int, even: bool, fmt: Format) -> tuple[Tensor, Tensor, Placed]:
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    index = (scores if even else scores * torch.linspace(0.2, 1, EXPERTS, device="cuda")).topk(TOP, -1).indices
    weight = torch.rand(tokens, TOP, device="cuda")
    block = block_rows(tokens * TOP, EXPERTS, fmt)
    return index, weight, routing.place(index, weight, EXPERTS, block)


def call(
    x: Rows, route: tuple[Tensor, Tensor, Placed], marks: list[Tensor], i: int, weights: Weights, stream: bool,
    packed: Packed | None = None,
) -> Tensor:  # fmt: skip
    """Marks are set to zero two launches before they are used: one may begin before the one before it has ended."""
    index, weight, where = route
    marks[(i + 1) % len(marks)].zero_()
    where = replace(where, marks=marks[i % len(marks)])
    return experts_pairs(x, index, weight, *weights, placed=where, stream=stream, packed=packed)


def recorded(run: Callable[[int], object], sets: int = SETS) -> torch.cuda.CUDAGraph:
    """One run over each of so many sets of weights"""
    for i in range(sets):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            run(i)
    return graph


def microseconds(replays: list[Callable[[], object]], rounds: int = TURNS, at_once: int = 1) -> list[float]:
    """Median time of each, replayed by turns, `at_once` times on end"""
    found: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for replay, times in zip(replays, found, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            begin.record()
            for _ in range(at_once):
                replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / at_once)
    return [statistics.median(times) for times in found]


def measure(fmt: str, tokens: int, runs: int) -> int:
    """-> how many comparisons failed"""
    sets, unequal = [weights_of(fmt) for _ in range(SETS)], 0
    less = [packed_of(weights) for weights in sets]
    floor, packed_floor = reading(sets[0]), less[0].nbytes / BANDWIDTH * 1e6
    for even in (True, False):
        route = placed(tokens, even, format_of(sets[0][0]))
        asked = route[2].block, sets[0][0], sets[0][2]
        if not streams(*asked) and not streams_wide(*asked):
            print(f"{fmt}, {tokens} tokens: not streamed", flush=True)
            return 0
        ways: dict[str, list[Packed | None] | None] = {"two kernels": None, "streamed": [None] * SETS}
        if streams(*asked):
            ways["packed"] = [*less]
        marks = [torch.zeros_like(route[2].marks) for _ in range(SETS)]
        before_this = unequal
        for run in range(runs):
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            rows, at = Rows(x) if fmt == "bf16" else quantize_rows(x), run % SETS
            found = []
            for way in ways.values():
                for mark in marks:
                    mark.zero_()
                found.append(call(rows, route, marks, run, sets[at], way is not None, way and way[at]))
                torch.cuda.synchronize()
            unequal += sum(not torch.equal(found[0], other) for other in found[1:])
        graphs = [
            recorded(lambda i, w=way, r=rows, p=route, m=marks: call(r, p, m, i, sets[i], w is not None, w and w[i]))  # type: ignore[misc]
            for way in ways.values()
        ]
        before, *after = (us / SETS for us in microseconds([graph.replay for graph in graphs]))
        counts = route[2].counts[:-1]
        told = "".join(
            f", {name} {us:7.1f} ({us / before:.3f})" for name, us in zip(list(ways)[1:], after, strict=True)
        )
        print(
            f"{fmt:<5}{tokens:>5} tokens, {int(counts.min()):>3} to {int(counts.max()):>3} an expert: two kernels "
            f"{before:7.1f} us{told}, floor {floor:6.1f}, packed {packed_floor:6.1f}; "
            f"{unequal - before_this} of {runs} runs unequal",
            flush=True,
        )
    return unequal


def packed_of(weights: Weights) -> Packed:
    """They themselves are rounded to what has a place"""
    return once_more(*weights, sides_of(torch.device("cuda", 0)))


def reading(parts: Iterable[Tensor | None]) -> float:
    """Microseconds that it takes to read them once"""
    return sum(t.nbytes for t in parts if t is not None) / BANDWIDTH * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    failed = [measure(fmt, tokens, args.runs) for fmt in args.formats for tokens in args.tokens]
    sys.exit(1 if any(failed) else 0)


if __name__ == "__main__":
    main()
