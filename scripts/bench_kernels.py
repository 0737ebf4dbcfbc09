"""Time, floor and error of the expert and linear kernels at the 26B-A4B geometry, on one GPU.

    python3 scripts/bench_kernels.py [--only experts-int4 …] [--users 1 2 4 8 16] [--tune] [--save tiles.json]

Needs torch and Triton only. A floor is every byte of weights, scales, input and output once at 4.33 TB/s, what an H200
reads. Calls are captured into a CUDA graph over several sets of weights, so that none comes from the cache. An error is
|out - ref| / |ref| against float64 with the same stored weights and the activations before any rounding. All kernels of
a case are compiled side by side before it begins. A case that fails is reported and the others go on.
Without a GPU, TRITON_INTERPRET=1 and --tiny check the script itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.ops import kernels, product_triton, tiles
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.experts_triton import combine, experts_rows, gate_up
from diffusiongemma.ops.experts_triton import down as down_pairs
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import compiling, shared_memory
from diffusiongemma.ops.linear_triton import mlp, quantize_rows
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.product_triton import product
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Routing
from diffusiongemma.ops.routing import route as reference_route
from diffusiongemma.ops.routing_triton import route
from diffusiongemma.ops.tiles import Shape, Tile, block_rows

BANDWIDTH = 4.33e12
CACHE = 60 << 20
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LIMITS = {"bf16": 1e-2, "int8": 1e-2, "int4": 1e-2, "fp8": 6e-2}


@dataclass
class Bench:
    config: ModelConfig
    users: list[int]
    tune: bool
    dry: bool = False  # compile only
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [self.config.canvas_length * users for users in self.users]

    def add(self, name: str, calls: list[Callable[[], object]], moved: float, error: Callable[[], float], limit: float,
            flops: float = 0.0, note: str = "") -> None:  # fmt: skip
        if self.dry:
            calls[0]()
            return
        try:
            wrong = error()
            us = microseconds(calls)
        except Exception as problem:
            if "CUDA error" in str(problem):  # nothing works in this process any more
                raise
            self.failed.append(name)
            print(f"{name:<40} FAILED: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            return
        floor = moved / BANDWIDTH * 1e6
        print(
            f"{name:<40}{us:8.1f} us  floor {floor:7.1f} {floor / us:6.1%} {moved / us / 1e6:5.2f} TB/s"
            f" {flops / us / 1e6:5.0f} TF/s  err {wrong:.1e}{'' if wrong <= limit else ' WRONG'}  {note}",
            flush=True,
        )
        self.rows.append(dict(name=name, us=round(us, 2), floor_us=round(floor, 2), error=wrong, note=note))

    def tuned(self, shape: Shape, call: Callable[[Tile], object]) -> None:
        """Time many tiles and keep the best; `call` runs the product with a tile."""
        if not self.tune or not CUDA or (not shape.experts and shape.rows not in (1, *self.tokens)):
            return
        limit = shared_memory(DEVICE)
        wanted = [tile for tile in more(shape) if tiles.shared_bytes(shape, tile) <= limit]
        if self.dry:
            for tile in wanted:
                call(tile)
        else:
            tiles.tune(shape, call, limit, wanted)


# ---- measuring ---------------------------------------------------------------------------------------------------


def microseconds(calls: list[Callable[[], object]], rounds: int = 9) -> float:
    """Median time of one call; the calls of a list differ in their weights."""
    if not CUDA:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e6
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()
    graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start_mark, end_mark in marks:
        start_mark.record()
        graph.replay()
        end_mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in marks]
    return float(statistics.median(times)) * 1e3 / (len(calls) * repeats)


def relative(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ---- data --------------------------------------------------------------------------------------------------------

Stored = tuple[Tensor, Tensor | None]


def stored(fmt: str, *shape: int) -> Stored:
    """A random weight [..., O, K] as it is kept; made in its format, which is quicker than quantising."""
    *lead, inputs = shape
    if fmt == "bf16":
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * inputs**-0.5, None
    if fmt == "int8":
        q = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
        return q, (0.5 + torch.rand(*lead, 1, device=DEVICE)) * inputs**-0.5 / 73
    if fmt == "fp8":
        q = torch.empty(shape, dtype=FP8, device=DEVICE)
        for part in q.view(-1, inputs).split(1 << 16):
            part.copy_(torch.randn(part.shape, device=DEVICE) * 100)
        return q, (0.5 + torch.rand(*lead, 1, device=DEVICE)) * inputs**-0.5 / 100
    group = int(fmt.removeprefix("int4-"))
    words = torch.randint(-(2**15), 2**15, (*lead, inputs // 4), dtype=torch.int16, device=DEVICE)
    scale = 0.5 + torch.rand(*lead[:-1], inputs // group, lead[-1], device=DEVICE)
    return words, (scale * inputs**-0.5 / 4.6).to(torch.bfloat16)


def routed(tokens: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Every token picks its experts at random -> index [N, k], weight [N, k]"""
    index = torch.rand(tokens, config.num_experts, device=DEVICE).topk(config.top_k_experts, dim=-1).indices
    weight = torch.rand(tokens, config.top_k_experts, device=DEVICE) + 0.1
    return index, weight / weight.sum(-1, keepdim=True)


def sets_for(bytes_of_one: float) -> int:
    return max(2, min(96, round(4 * CACHE / bytes_of_one))) if CUDA else 1


# ---- cases -------------------------------------------------------------------------------------------------------


def bench_routing(bench: Bench) -> None:
    for tokens in (1, 16, *bench.tokens):
        small_kernels(bench, tokens)


def small_kernels(bench: Bench, tokens: int) -> None:
    config = bench.config
    k, experts = config.top_k_experts, config.num_experts
    index, _ = routed(tokens, config)
    block = block_rows(index.numel(), experts)
    bench.add(f"route {tokens} tokens", [lambda: route(index, experts, block)], 2 * nbytes(index),
              lambda: routing_error(index, route(index, experts, block)), 0.0, note=f"block {block}")  # fmt: skip
    pairs = torch.randn(index.numel(), config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    bench.add(f"combine {tokens} tokens", [lambda: combine(pairs, k)], nbytes(pairs) * (1 + 1 / k),
              lambda: relative(combine(pairs, k), pairs.double().view(tokens, k, -1).sum(1)), 1e-2)  # fmt: skip
    x = pairs[:tokens]
    bench.add(f"quantise {tokens} rows", [lambda: quantize_rows(x)], nbytes(x) * 1.5,
              lambda: relative(quantize_rows(x).wide(), x.double()), LIMITS["fp8"])  # fmt: skip


def routing_error(index: Tensor, routing: Routing) -> float:
    """0 if all is right: the order, and blocks that cover every pair once, each with its own expert"""
    expected = reference_route(index, int(index.max()) + 1, routing.block)
    used = routing.table[:, routing.table[0] >= 0]
    wanted = expected.table[:, expected.table[0] >= 0]
    return 0.0 if torch.equal(routing.order, expected.order) and torch.equal(used, wanted) else 1.0


def bench_experts(fmt: str) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        experts, hidden, width = bench.config.num_experts, bench.config.hidden_size, bench.config.moe_intermediate_size
        sets = [(stored(fmt, experts, 2 * width, hidden), stored(fmt, experts, hidden, width)) for _ in range(2)]
        for tokens in (*bench.tokens, 1, 8):
            experts_once(bench, fmt, sets, tokens)

    return run


def experts_once(bench: Bench, fmt: str, sets: list[tuple[Stored, Stored]], tokens: int) -> None:
    config, limit, (up, down) = bench.config, LIMITS[fmt.split("-")[0]], sets[0]
    index, weight = routed(tokens, config)
    # Few tokens touch few experts, which would stay in the cache: other calls, other experts.
    picks = [(index, weight), *(routed(tokens, config) for _ in range(0 if tokens > 64 or not CUDA else 7))]
    pairs, block = index.numel(), block_rows(index.numel(), config.num_experts)
    routings = [route(i, config.num_experts, block) for i, _ in picks]
    routing = routings[0]
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    rows = quantize_rows(x) if fmt == "fp8" else Rows(x)
    number = tiles.format_of(up[0]) or "bf16"
    wide = Shape(number, config.hidden_size, config.moe_intermediate_size, config.num_experts, True, block)
    back = Shape(number, config.moe_intermediate_size, config.hidden_size, config.num_experts, False, block)
    hidden = gate_up(rows, routing, *up)
    if tokens == 8:  # the same shape as one token
        bench = replace(bench, tune=False)
    bench.tuned(wide, lambda t: product(rows, *up, gated=True, quantise=fmt == "fp8", routing=routing, tile=t))
    bench.tuned(back, lambda t: product(hidden, *down, routing=routing, share=weight.flatten(), tile=t))
    hit = len(index.unique()) / config.num_experts
    flops = 2.0 * pairs * config.hidden_size * 2 * config.moe_intermediate_size
    label = f"{fmt} {tokens} tokens, {pairs / config.num_experts:g}/expert"
    bench.add(
        f"gate_up {label}", [partial(gate_up, rows, r, *u) for r in routings for u, _ in sets],
        hit * nbytes(*up) + nbytes(rows.values, hidden.values),
        lambda: relative(hidden.wide(), hidden_reference(x, routing, up)), limit, flops, short(wide),
    )  # fmt: skip
    bench.add(
        f"down    {label}", [partial(down_pairs, hidden, r, weight, *d) for r in routings for _, d in sets],
        hit * nbytes(*down) + nbytes(hidden.values) + 2 * pairs * config.hidden_size,
        lambda: relative(down_pairs(hidden, routing, weight, *down),
                         down_reference(hidden.wide().double(), routing, weight, down)), 1e-2, flops / 2, short(back),
    )  # fmt: skip

    def error() -> float:
        expected = down_reference(hidden_reference(x, routing, up), routing, weight, down)
        expected = expected.view(tokens, config.top_k_experts, -1).sum(1)
        return relative(experts_rows(rows, index, weight, *up, *down), expected)

    bench.add(
        f"EXPERTS {label}", [partial(experts_rows, rows, *pick, *u, *d) for pick in picks for u, d in sets],
        hit * nbytes(*up, *down) + 2 * nbytes(x), error, limit, 1.5 * flops, f"{hit:.0%} of the experts hit",
    )  # fmt: skip


def hidden_reference(x: Tensor, routing: Routing, up: Stored) -> Tensor:
    """Float64: GeGLU of the pairs by expert"""
    return geglu(by_expert(x.double()[routing.order.long() // routing.top_k], routing, up))


def down_reference(hidden: Tensor, routing: Routing, weight: Tensor, down: Stored) -> Tensor:
    """Float64: weighted results of the pairs in their own order"""
    order = routing.order.long()
    out = torch.empty(len(order), down[0].shape[-2], dtype=torch.float64, device=DEVICE)
    out[order] = by_expert(hidden, routing, down) * weight.flatten().double()[order, None]
    return out


def by_expert(rows: Tensor, routing: Routing, kept: Stored) -> Tensor:
    out = rows.new_empty(len(rows), kept[0].shape[-2])
    for expert, first, end in routing.table.t().tolist():
        if expert >= 0:
            part = slice(first, min(end, first + routing.block))
            wide = weights(kept[0][expert], None if kept[1] is None else kept[1][expert])
            out[part] = rows[part] @ wide.double().t()
    return out


def bench_linear(fmt: str) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        config = bench.config
        hidden, width = config.hidden_size, config.intermediate_size
        heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        mixed = config.num_attention_heads * config.head_dim
        shapes = [("qkv", heads, hidden, False), ("o", hidden, mixed, False), ("gate_up", width, hidden, True),
                  ("down", hidden, width, False)]  # fmt: skip
        for name, outputs, inputs, gated in shapes:
            first = stored(fmt, outputs * (1 + gated), inputs)
            sets = [first, *(stored(fmt, outputs * (1 + gated), inputs) for _ in range(sets_for(nbytes(*first)) - 1))]
            for tokens in (1, 16, *bench.tokens):
                linear_once(bench, name, fmt, sets, tokens, outputs, inputs, gated)
        both = [(stored(fmt, 2 * width, hidden), stored(fmt, hidden, width)) for _ in range(32 if CUDA else 1)]
        for tokens in (1, 16, *bench.tokens):
            mlp_once(bench, fmt, both, tokens)

    return run


def mlp_once(bench: Bench, fmt: str, sets: list[tuple[Stored, Stored]], tokens: int) -> None:
    config, (up, down) = bench.config, sets[0]
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    rows = quantize_rows(x) if fmt == "fp8" else Rows(x)

    def error() -> float:
        reference = geglu(x.double() @ weights(*up).double().t()) @ weights(*down).double().t()
        return relative(mlp(rows, *up, *down), reference)

    flops = 6.0 * tokens * config.hidden_size * config.intermediate_size
    bench.add(f"MLP {fmt} {tokens} rows", [partial(mlp, rows, *u, *d) for u, d in sets],
              nbytes(*up, *down) + 2 * nbytes(x), error, LIMITS[fmt.split("-")[0]], flops)  # fmt: skip


def linear_once(bench: Bench, name: str, fmt: str, sets: list[Stored], tokens: int, outputs: int, inputs: int,
                gated: bool) -> None:  # fmt: skip
    limit, quantise, first = LIMITS[fmt.split("-")[0]], gated and fmt == "fp8", sets[0]
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=DEVICE)
    rows = quantize_rows(x) if fmt == "fp8" else Rows(x)
    shape = Shape(tiles.format_of(first[0]) or "bf16", inputs, outputs, 0, gated, tokens)
    bench.tuned(shape, lambda t: product(rows, *first, gated=gated, quantise=quantise, tile=t))
    flops = 2.0 * tokens * outputs * (1 + gated) * inputs
    moved = nbytes(*first, rows.values) + tokens * outputs * (1 if quantise else 2)
    label = f"{name} {fmt} {tokens} rows"

    def reference() -> Tensor:
        out = x.double() @ weights(*first).double().t()
        return geglu(out) if gated else out

    bench.add(
        label, [partial(product, rows, *s, gated=gated, quantise=quantise) for s in sets], moved,
        lambda: relative(product(rows, *first, gated=gated, quantise=quantise).wide(), reference()), limit, flops,
        short(shape),
    )  # fmt: skip
    if CUDA and fmt == "bf16":
        bench.add(f"{label}, torch", [partial(library, x, s[0], gated) for s in sets], moved,
                  lambda: relative(library(x, first[0], gated), reference()), limit, flops)  # fmt: skip
    if CUDA and fmt == "fp8" and not gated:
        for fast in (True, False):
            bench.add(f"{label}, _scaled_mm{' fast' if fast else ''}", [partial(vendor, rows, s, fast) for s in sets],
                      moved, lambda fast=fast: relative(vendor(rows, first, fast), reference()),  # type: ignore[misc]
                      limit, flops)  # fmt: skip


def library(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    out = torch.nn.functional.linear(x, weight)
    return geglu(out) if gated else out


def vendor(x: Rows, s: Stored, fast: bool) -> Tensor:
    assert x.scale is not None
    assert s[1] is not None
    wide = s[0].t()
    return torch._scaled_mm(x.values, wide, x.scale, s[1].t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


# ---- tiles -------------------------------------------------------------------------------------------------------


def more(shape: Shape) -> Iterator[Tile]:
    """A wider list than the package's own, the rule's first choice first."""
    seen = set()
    first = tiles.candidates(shape)[0]
    sizes = [(64, 4, 0), (128, 4, 0), (128, 8, 0)]
    if shape.format == "int4" and shape.rows <= 32:
        sizes += [(128, 4, 128), (128, 8, 128), *([] if shape.gated else [(64, 4, 128), (256, 8, 128)])]
    wide = [Tile(first.rows, o, w, s, g) for o, w, g in sizes for s in (2, 3, 4, 6)]
    for tile in [*tiles.candidates(shape), *wide]:
        sums = tile.rows * tile.outputs * (1 + shape.gated) // (32 * tile.warps)
        if tile not in seen and sums <= 128:
            seen.add(tile)
            yield tile


def short(shape: Shape) -> str:
    tile = tiles.choose(shape, shared_memory(DEVICE))
    mark = "tuned" if shape.key() in tiles.TUNED else "rule"
    return (
        f"{tile.rows}x{tile.outputs} w{tile.warps} s{tile.stages}{f' r{tile.registers}' * bool(tile.registers)} {mark}"
    )


CASES: dict[str, Callable[[Bench], None]] = {
    "routing": bench_routing,
    **{f"experts-{fmt}": bench_experts(fmt) for fmt in ("bf16", "fp8", "int4-64", "int4-32")},
    **{f"linear-{fmt}": bench_linear(fmt) for fmt in ("fp8", "int4-64", "int8", "bf16")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"cases whose name begins so: {', '.join(CASES)}")
    parser.add_argument("--users", nargs="+", type=int, default=[1, 16], help="how many canvases of 256 tokens")
    parser.add_argument("--tune", action="store_true", help="try many tiles for every shape and keep the best")
    parser.add_argument("--ahead", type=int, help="bytes of each row of a weight to ask for early")
    parser.add_argument("--no-early", action="store_true", help="a launch begins only after the one before has ended")
    parser.add_argument("--load", type=Path, help="tiles from an earlier --save")
    parser.add_argument("--save", type=Path, help="write the tuned tiles here")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to check this script")
    args = parser.parse_args()
    chosen = [name for name in CASES if not args.only or any(name.startswith(o) for o in args.only)]
    if not chosen:
        parser.error(f"no case is named {', '.join(args.only)}; there are: {', '.join(CASES)}")
    if args.ahead is not None:
        product_triton.AHEAD = args.ahead
    kernels.EARLY = not args.no_early
    if args.load:
        tiles.load(args.load)
    small = dict(hidden_size=128, intermediate_size=64, moe_intermediate_size=64)
    config = ModelConfig.preset("tiny", **small) if args.tiny else ModelConfig.preset("26b-a4b")
    bench = Bench(config, args.users, args.tune)
    torch.manual_seed(0)
    began = time.perf_counter()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'no GPU: times mean nothing'}",
        flush=True,
    )
    with torch.no_grad():
        for i, name in enumerate(chosen):
            start = time.perf_counter()
            try:
                if CUDA:
                    with compiling():
                        CASES[name](Bench(config, args.users, args.tune, dry=True))
                    torch.cuda.empty_cache()
                    print(f"-- {name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
                CASES[name](bench)
            except Exception as problem:
                bench.failed.append(name)
                print(f"{name} FAILED\n{traceback.format_exc(limit=6)}", flush=True)
                if "CUDA error" in str(problem) and chosen[i + 1 :]:
                    print("this process is lost; the other cases run in a new one", flush=True)
                    rest = [arg for arg in sys.argv[1:] if arg not in chosen and arg != "--only"]
                    sys.exit(subprocess.call([sys.executable, __file__, *rest, "--only", *chosen[i + 1 :]]))
            if CUDA:
                torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)
    if args.save:
        tiles.save(args.save)
    if args.json:
        args.json.write_text(json.dumps(bench.rows, indent=1))
    for key, tile in sorted(tiles.TUNED.items()):
        print(f"tuned {key}: {tuple(asdict(tile).values())}")
    print(json.dumps(dict(seconds=round(time.perf_counter() - began, 1), failed=bench.failed, rows=len(bench.rows))))


if __name__ == "__main__":
    main()
