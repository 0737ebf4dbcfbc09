"""Time, floor and error of the expert and linear kernels at the 26B-A4B geometry, on one GPU.

    python3 scripts/bench_kernels.py [--only experts-pairs …] [--users 1 2 4 8 16] [--tune] [--save tiles.json]

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.ops import kernels, product_triton, tiles
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.experts_triton import combine, experts_rows
from diffusiongemma.ops.experts_triton import down as down_pairs
from diffusiongemma.ops.few_triton import FEW, Piece, experts_few, few, mlp_few
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import card, compiling
from diffusiongemma.ops.linear_triton import mlp
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.product_triton import product
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Routing
from diffusiongemma.ops.routing import route as reference_route
from diffusiongemma.ops.routing_triton import route
from diffusiongemma.ops.rows_triton import quantize_rows
from diffusiongemma.ops.tiles import Shape, Tile, block_rows

BANDWIDTH = 4.33e12
CACHE = 60 << 20
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LIMITS = {"bf16": 1e-2, "int8": 1e-2, "fp8": 6e-2, "pairs": 6e-2}
FOUR = ("pairs-64", "pairs-32")  # 4 bits, in groups
EIGHT = ("fp8", *FOUR)  # formats whose activations are fp8


@dataclass
class Bench:
    config: ModelConfig
    users: list[int]
    tune: bool
    dry: bool = False  # compile only
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)  # shapes that were tuned: 8 and 16 users have the same blocks

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

    def tuned(self, shape: Shape, calls: Callable[[Tile], list[Callable[[], object]]]) -> None:
        """Time many tiles and keep the best; `calls` are the products with a tile, over different weights."""
        if not self.tune or not CUDA or (not shape.experts and shape.rows not in (1, *self.tokens)):
            return
        if shape.key() in self.done:
            return
        self.done.add(shape.key())
        limit = card(DEVICE).shared
        wanted = [tile for tile in more(shape) if tiles.fits(shape, tile, limit)]
        if self.dry:
            for tile in wanted:
                calls(tile)[0]()
            return
        times: dict[Tile, float] = {}

        def measure(tile: Tile) -> float:
            times[tile] = microseconds(calls(tile), 3)
            return times[tile]

        tiles.tune(shape, measure, limit, wanted)
        ranked = sorted(times, key=lambda tile: times[tile])
        best = ", ".join(f"{brief(tile)} {times[tile]:.1f}" for tile in [*ranked[:6], ranked[-1]])
        print(f"   {shape.key()}: {len(times)} of {len(wanted)} tiles run; {best}", flush=True)


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
        for part in q.view(-1, inputs).split(1 << 16):  # what is beyond 448 would be no number
            part.copy_((torch.randn(part.shape, device=DEVICE) * 100).clamp_(-448, 448))
        return q, (0.5 + torch.rand(*lead, 1, device=DEVICE)) * inputs**-0.5 / 100
    group = int(fmt.removeprefix("pairs-"))
    places = (*lead[:-1], lead[-1] // 128, inputs // group, 64)
    bits = ((0.5 + torch.rand(*places, 2, device=DEVICE)) * inputs**-0.5 / 4.6).to(torch.bfloat16)
    q = torch.randint(0, 256, (*places, group), dtype=torch.uint8, device=DEVICE)
    return q, bits.view(torch.int32).squeeze(-1)


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


def bench_quantise(bench: Bench) -> None:
    """Rows before a product in fp8: the experts' between their two, the dense MLP's, and attention's before o_proj"""
    config = bench.config
    k, heads = config.top_k_experts, config.num_attention_heads
    mixed, wide = heads * config.head_dim, heads * config.global_head_dim
    widths = (config.intermediate_size, config.hidden_size, mixed, wide)
    shapes = [(1, width) for width in widths] + [(t, width) for t in bench.tokens for width in widths]
    for rows, width in [*shapes, *((t * k, config.moe_intermediate_size) for t in (1, *bench.tokens))]:
        x = torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE)
        for warps in (None, *((1, 2, 4, 8, 16) if CUDA and bench.tune else ())):
            bench.add(f"quantise [{rows}, {width}]" + (f", {warps} warps" if warps else ""),
                      [partial(quantize_rows, x, warps)], nbytes(x) * 1.5,
                      partial(quantise_error, x, warps), LIMITS["fp8"])  # fmt: skip


def quantise_error(x: Tensor, warps: int | None) -> float:
    return relative(quantize_rows(x, warps).wide(), x.double())


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
        for tokens in (*bench.tokens, 1, 4, 8):
            experts_once(bench, fmt, sets, tokens)

    return run


def experts_once(bench: Bench, fmt: str, sets: list[tuple[Stored, Stored]], tokens: int) -> None:
    config, limit, (up, down) = bench.config, LIMITS[fmt.split("-")[0]], sets[0]
    index, weight = routed(tokens, config)
    # Few tokens touch few experts, which would stay in the cache: other calls, other experts.
    picks = [(index, weight), *(routed(tokens, config) for _ in range(0 if tokens > 64 or not CUDA else 7))]
    number = tiles.format_of(up[0]) or "bf16"
    pairs, block = index.numel(), block_rows(index.numel(), config.num_experts, number)
    routings = [route(i, config.num_experts, block) for i, _ in picks]
    routing = routings[0]
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    rows = quantize_rows(x) if fmt in EIGHT else Rows(x)
    wide = Shape(number, config.hidden_size, config.moe_intermediate_size, config.num_experts, True, block)
    back = Shape(number, config.moe_intermediate_size, config.hidden_size, config.num_experts, False, block)
    middle = product(rows, *up, gated=True, routing=routing)
    hidden = quantize_rows(middle.values) if fmt in EIGHT else middle
    if tokens in (4, 8):  # the same shape as one token
        bench = replace(bench, tune=False)
    share = weight.flatten()
    bench.tuned(wide, lambda t: [partial(product, rows, *u, gated=True, routing=r, tile=t)
                                 for r in routings for u, _ in sets])  # fmt: skip
    bench.tuned(back, lambda t: [partial(product, hidden, *d, routing=r, share=share, tile=t)
                                 for r in routings for _, d in sets])  # fmt: skip
    hit = len(index.unique()) / config.num_experts
    flops = 2.0 * pairs * config.hidden_size * 2 * config.moe_intermediate_size
    label = f"{fmt} {tokens} tokens, {pairs / config.num_experts:g}/expert"
    up_bytes = hit * nbytes(*up) + nbytes(rows.values, middle.values)
    down_bytes = hit * nbytes(*down) + nbytes(hidden.values) + 2 * pairs * config.hidden_size
    bench.add(
        f"gate_up {label}", [partial(product, rows, *u, gated=True, routing=r) for r in routings for u, _ in sets],
        up_bytes, lambda: relative(middle.wide(), hidden_reference(x, routing, up)), limit, flops, short(wide),
    )  # fmt: skip
    bench.add(
        f"down    {label}", [partial(down_pairs, hidden, r, weight, *d) for r in routings for _, d in sets], down_bytes,
        lambda: relative(down_pairs(hidden, routing, weight, *down),
                         down_reference(hidden.wide().double(), routing, weight, down)), 1e-2, flops / 2, short(back),
    )  # fmt: skip

    def whole() -> Tensor:
        expected = down_reference(hidden_reference(x, routing, up), routing, weight, down)
        return expected.view(tokens, config.top_k_experts, -1).sum(1)

    def error() -> float:
        return relative(experts_rows(rows, index, weight, *up, *down), whole())

    bench.add(
        f"EXPERTS {label}", [partial(experts_rows, rows, *pick, *u, *d) for pick in picks for u, d in sets],
        hit * nbytes(*up, *down) + 2 * nbytes(x), error, limit, 1.5 * flops, f"{hit:.0%} of the experts hit",
    )  # fmt: skip
    if tokens <= 2 * FEW:
        few_once(
            bench, label, sets, picks, x, error_of=lambda out: relative(out, whole()), floors=(up_bytes, down_bytes)
        )


def few_once(bench: Bench, label: str, sets: list[tuple[Stored, Stored]], picks: list[tuple[Tensor, Tensor]], x: Tensor,
             error_of: Callable[[Tensor], float], floors: tuple[float, float]) -> None:  # fmt: skip
    """The way of a few tokens: its two products, with several pieces where tuning, and both"""
    (up, down), (index, weight) = sets[0], picks[0]
    rows, middle = Rows(x), Rows(few(Rows(x), *up, gated=True, index=index))
    for gated, name, floor in ((True, "gate_up", floors[0]), (False, "down", floors[1])):
        for piece in (None, *(pieces(gated) if CUDA and bench.tune else ())):
            if gated:
                calls = [partial(few, rows, *u, gated=True, index=i, piece=piece) for i, _ in picks for u, _ in sets]
            else:
                calls = [partial(few, middle, *d, index=i, share=w, piece=piece) for i, w in picks for _, d in sets]
            bench.add(f"few {name} {label}{f', {tuple(asdict(piece).values())}' if piece else ''}", list(calls), floor,
                      lambda: 0.0, 1.0)  # fmt: skip
    calls = [partial(experts_few, rows, *pick, *u, *d) for pick in picks for u, d in sets]
    bench.add(f"FEW {label}", list(calls), sum(floors), lambda: error_of(experts_few(rows, index, weight, *up, *down)),
              1e-2)  # fmt: skip


def pieces(gated: bool) -> list[Piece]:
    """Rows of the weight a program, inputs a turn, warps, stages"""
    outputs = (4, 8, 16) if gated else (2, 4, 8)
    steps = (256, 512) if gated else (256, 1024)
    return [Piece(o, step, 4, stages) for o in outputs for step in steps for stages in (1, 3, 5)]


def hidden_reference(x: Tensor, routing: Routing, up: Stored) -> Tensor:
    """Float64: GeGLU of the pairs by expert"""
    return geglu(by_expert(x.double()[routing.order.long() // routing.top_k], routing, up, True))


def down_reference(hidden: Tensor, routing: Routing, weight: Tensor, down: Stored) -> Tensor:
    """Float64: weighted results of the pairs in their own order"""
    order = routing.order.long()
    made = by_expert(hidden, routing, down)
    out = torch.empty_like(made)
    out[order] = made * weight.flatten().double()[order, None]
    return out


def by_expert(rows: Tensor, routing: Routing, kept: Stored, gated: bool = False) -> Tensor:
    outputs = product_triton.outputs_of(kept[0], gated) * (1 + gated)
    out = rows.new_empty(len(rows), outputs)
    for expert, first, end in routing.table.t().tolist():
        if expert >= 0:
            part = slice(first, min(end, first + routing.block))
            wide = weights(kept[0][expert], None if kept[1] is None else kept[1][expert], gated)
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
    rows = quantize_rows(x) if fmt in EIGHT else Rows(x)

    def reference() -> Tensor:
        return geglu(x.double() @ weights(*up, True).double().t()) @ weights(*down).double().t()

    def error() -> float:
        return relative(mlp(rows, *up, *down), reference())

    flops = 6.0 * tokens * config.hidden_size * config.intermediate_size
    bench.add(f"MLP {fmt} {tokens} rows", [partial(mlp, rows, *u, *d) for u, d in sets],
              nbytes(*up, *down) + 2 * nbytes(x), error, LIMITS[fmt.split("-")[0]], flops)  # fmt: skip
    if tokens <= FEW:
        bench.add(f"MLP {fmt} {tokens} rows, few", [partial(mlp_few, Rows(x), *u, *d) for u, d in sets],
                  nbytes(*up, *down) + 2 * nbytes(x), lambda: relative(mlp_few(Rows(x), *up, *down), reference()),
                  1e-2, flops)  # fmt: skip


def linear_once(bench: Bench, name: str, fmt: str, sets: list[Stored], tokens: int, outputs: int, inputs: int,
                gated: bool) -> None:  # fmt: skip
    limit, first = LIMITS[fmt.split("-")[0]], sets[0]
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=DEVICE)
    rows = quantize_rows(x) if fmt in EIGHT else Rows(x)
    shape = Shape(tiles.format_of(first[0]) or "bf16", inputs, outputs, 0, gated, tokens)
    bench.tuned(shape, lambda t: [partial(product, rows, *s, gated=gated, tile=t) for s in sets])
    flops = 2.0 * tokens * outputs * (1 + gated) * inputs
    moved = nbytes(*first, rows.values) + tokens * outputs * 2
    label = f"{name} {fmt} {tokens} rows"

    def reference() -> Tensor:
        out = x.double() @ weights(*first, gated).double().t()
        return geglu(out) if gated else out

    bench.add(
        label, [partial(product, rows, *s, gated=gated) for s in sets], moved,
        lambda: relative(product(rows, *first, gated=gated).wide(), reference()), limit, flops, short(shape),
    )  # fmt: skip
    if tokens <= FEW:
        bench.add(f"{label}, few", [partial(few, Rows(x), *s, gated=gated) for s in sets], moved,
                  lambda: relative(few(Rows(x), *first, gated=gated), reference()), 1e-2, flops)  # fmt: skip
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


def more(shape: Shape) -> list[Tile]:
    """A wider list than the package's own, the rule's first choice first."""
    first = tiles.candidates(shape)[0]
    rows, few = first.rows, first.rows <= 32
    if shape.format == "pairs":
        found = pair_tiles(shape)
    else:
        sizes = {
            (64, 4, 0): (2, 3, 4, 5, 6) if shape.gated else (3, 4, 5, 6, 8),
            (128, 4, 0): (3,) if shape.gated else (3, 4, 5, 6, 8),
            (128, 8, 0): (2, 3, 4, 6),
            (256, 8, 0): () if shape.gated else (3, 4),
        }
        if not few:
            sizes = {(64, 4, 0): (3, 4, 6), (128, 4, 0): (3, 4), (128, 8, 0): (3, 4, 6)}
        found = [Tile(rows, o, warps, s, limit, more=first.more)
                 for (o, warps, limit), stages in sizes.items() for s in stages]  # fmt: skip
    fitting = [t for t in found if t.rows * t.outputs * (1 + shape.gated) // (32 * t.warps) <= 128]
    return list(dict.fromkeys([first, *fitting]))


def pair_tiles(shape: Shape) -> list[Tile]:
    """For 4-bit weights; with 4 warps, for with 8 the halves of bytes would have to change places. More groups a turn
    take more registers, but fewer instructions a group."""
    rows, outputs = tiles.candidates(shape)[0].rows, 64 if shape.gated else 128
    deep = {1: ((0, 4), (0, 5), (0, 6), (0, 8), (96, 5)), 2: ((0, 3), (0, 4), (0, 5)), 4: ((0, 3), (128, 2), (128, 3))}
    turns = [turn for turn in deep if shape.inputs // 64 % turn == 0]
    halves = (False, True) if shape.experts and rows >= 32 else (False,)
    return [Tile(rows, outputs, 4, stages, registers, half, turn)
            for half in halves for turn in turns for registers, stages in deep[turn]]  # fmt: skip


def brief(tile: Tile) -> str:
    extra = f" r{tile.registers}" * bool(tile.registers) + " half" * tile.half + f" x{tile.turns}" * (tile.turns > 1)
    extra += f" +{tile.more}" * bool(tile.more)
    return f"{tile.rows}x{tile.outputs} w{tile.warps} s{tile.stages}{extra}"


def short(shape: Shape) -> str:
    return f"{brief(tiles.choose(shape, card(DEVICE).shared))} {'tuned' if shape.key() in tiles.TUNED else 'rule'}"


def profile(bench: Bench, fmt: str) -> None:
    """Each product of the experts once, for a profiler to look at."""
    config = bench.config
    experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    up, down = stored(fmt, experts, 2 * width, hidden), stored(fmt, experts, hidden, width)
    index, weight = routed(bench.tokens[0], config)
    routing = route(index, experts, block_rows(index.numel(), experts, tiles.format_of(up[0])))
    x = torch.randn(bench.tokens[0], hidden, dtype=torch.bfloat16, device=DEVICE)
    made = product(quantize_rows(x) if fmt in EIGHT else Rows(x), *up, gated=True, routing=routing)
    rows = quantize_rows(made.values) if fmt in EIGHT else made
    product(rows, *down, routing=routing, share=weight.flatten())
    print(f"profiled {fmt}: gate_up, down", flush=True)


# ---- what memory gives --------------------------------------------------------------------------------------------


@triton.jit
def read_kernel(w, out, PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
                STEP: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One program reads PIECES pieces of ROWS x WIDTH bytes, a STEP apart; SIZE bytes belong to it."""
    at = w + tl.program_id(0).to(tl.int64) * SIZE
    at += (tl.arange(0, ROWS) * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.uint8)
    for piece in tl.range(0, PIECES, num_stages=STAGES):
        total ^= tl.load(at + piece * STEP)
    tl.store(out + tl.program_id(0), tl.max(total.to(tl.int32)))


def bench_read(bench: Bench) -> None:
    """The experts' reads without their products: how much of the bandwidth each way of lying in memory gives."""
    total = 128 * 1408 * 2816 if CUDA else 4 * 128 * 704
    sets = [torch.randint(0, 256, (total,), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    ways = [("128 rows of 2,816, 128 bytes each", 22, 128, 128, 2816, 128, 128 * 2816),
            ("128 rows of 2,816, 256 bytes each", 11, 128, 256, 2816, 256, 128 * 2816),
            ("128 rows of 704, 64 bytes each", 11, 128, 64, 704, 64, 128 * 704),
            ("one piece after another, 16 KB", 22, 128, 128, 128, 16384, 22 * 16384),
            ("one piece after another, 4 KB", 44, 64, 64, 64, 4096, 44 * 4096),
            ("one piece after another, 4 KB, short", 11, 64, 64, 64, 4096, 11 * 4096)]  # fmt: skip
    for name, pieces, rows, width, stride, step, size in ways:
        programs = total // size
        out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
        for stages in (3, 5, 8) if CUDA else (2,):
            calls: list[Callable[[], object]] = [
                partial(kernels.launch, read_kernel, programs, w, out, PIECES=pieces, ROWS=rows, WIDTH=width,
                        STRIDE=stride, STEP=step, SIZE=size, STAGES=stages, num_warps=4) for w in sets
            ]  # fmt: skip
            bench.add(f"read {name}, {stages} stages", calls, programs * size, lambda: 0.0, 1.0)


CASES: dict[str, Callable[[Bench], None]] = {
    "read": bench_read,
    "routing": bench_routing,
    "quantise": bench_quantise,
    **{f"experts-{fmt}": bench_experts(fmt) for fmt in ("bf16", "fp8", *FOUR)},
    **{f"linear-{fmt}": bench_linear(fmt) for fmt in ("fp8", "pairs-64", "int8", "bf16")},
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
    parser.add_argument("--profile", action="store_true", help="only run each of the experts' products once, for ncu")
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
            if args.profile:
                if name.startswith("experts-"):
                    profile(bench, name.removeprefix("experts-"))
                continue
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
