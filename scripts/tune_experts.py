"""Experts and router on one GPU, 26B-A4B geometry: checked against their twins, small kernels timed, tiles tuned.

    python3 scripts/tune_experts.py [--parts check small tiles] [--users 8 1] [--formats fp8 pairs-64]

`check`: routing must equal its definition; a row's bits must not depend on tile, block or number of rows. `small`:
the routing, the router and the sum of pairs, each also with the blocks that few rows take. `tiles`: both products of
the experts with many tiles and blocks of rows; a line for `ops/tiles.py` is printed for each best one, and for `down`
in fp8 also how a step along K of another length would do. Times are of a CUDA graph over two sets of weights.
Without a GPU, TRITON_INTERPRET=1 and --tiny check the script itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from bench_kernels import CUDA, DEVICE, FOUR, Stored, brief, microseconds, pair_tiles, routed, stored
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.ops import fused, product_triton, router_triton, routing_triton, tiles
from diffusiongemma.ops.experts_triton import combine
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.kernels import card, compiling
from diffusiongemma.ops.product_triton import product
from diffusiongemma.ops.routing import Routing
from diffusiongemma.ops.routing import route as reference_route
from diffusiongemma.ops.rows_triton import quantize_rows
from diffusiongemma.ops.tiles import Shape, Tile

Call = Callable[[], object]
failed: list[str] = []


def judge(name: str, good: bool, note: str = "") -> None:
    print(f"{'ok   ' if good else 'WRONG'} {name} {note}", flush=True)
    if not good:
        failed.append(name)


# ---- check -------------------------------------------------------------------------------------------------------


def check(config: ModelConfig, formats: list[str]) -> None:
    experts, k = config.num_experts, config.top_k_experts
    for tokens in (1, 256, 512, 513, 2048, 4096) if CUDA else (1, 40):
        index = routed(tokens, config)[0]
        narrow = torch.arange(k, device=DEVICE).expand(tokens, k).contiguous()  # all tokens to the same experts
        for name, i in (("even", index), ("narrow", narrow)):
            for block in (32, 160):
                found, wanted = routing_triton.route(i, experts, block), reference_route(i, experts, block)
                same = torch.equal(found.order, wanted.order) and torch.equal(found.table, wanted.table)
                judge(f"route {tokens} tokens, {name}, blocks of {block}", same)
    check_router(config)
    for fmt in formats:
        check_products(config, fmt)


def check_router(config: ModelConfig) -> None:
    args = router_data(4096 if CUDA else 40, config)
    index, weight = router_triton.route(*args)
    for rows in (1, 256, 1000, 2048) if CUDA else (1, 20):
        few_index, few_weight = router_triton.route(args[0][:rows], *args[1:])
        same = torch.equal(few_index, index[:rows]) and torch.equal(few_weight, weight[:rows])
        judge(f"router: bits of {rows} rows alone", same or not CUDA)
    wide = [a.float() if isinstance(a, Tensor) else a for a in args]
    agree = float((fused.route(*wide)[0] == index).float().mean())  # type: ignore[arg-type]
    judge("router against its definition in float32", agree > 0.97, f"{agree:.4f} of the picks")


def router_data(rows: int, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, int, float]:
    hidden, experts = config.hidden_size, config.num_experts
    x, proj = (torch.randn(n, hidden, device=DEVICE, dtype=torch.bfloat16) for n in (rows, experts))
    ones = [torch.ones(n, device=DEVICE, dtype=torch.bfloat16) for n in (hidden, experts)]
    return x, proj, ones[0], ones[1], config.top_k_experts, 1e-6


def check_products(config: ModelConfig, fmt: str) -> None:
    """Blocks of many rows give the bits of blocks of 32; and those are near float64 (`bench_kernels.py`)."""
    work = Work(config, fmt, 2048 if CUDA else 64)
    for gated in (True, False):
        small = work.run(gated, 32, 0, Tile(32, 64 if gated or fmt == "fp8" else 128, 4, 3))
        for block in (64,) if fmt != "fp8" else (80, 128, 160):
            out = work.run(gated, block, 0, None)
            good = torch.equal(out, small) if CUDA else bool((out - small).abs().max() < 0.1)
            judge(f"{fmt} {'up' if gated else 'down'}: blocks of {block} against blocks of 32", good)


# ---- small kernels -----------------------------------------------------------------------------------------------


def small_kernels(config: ModelConfig) -> None:
    experts, k = config.num_experts, config.top_k_experts
    calls: list[tuple[str, Call]] = []
    for tokens in (256, 512, 2048) if CUDA else (20,):
        index = routed(tokens, config)[0]
        for name, limit in (("one kernel", 1 << 20), ("two kernels", 0)):
            calls.append((f"route {tokens} tokens, {name}", partial(limited, limit, index, experts)))
        args = router_data(tokens, config)
        rule = router_triton.blocks_for(tokens)
        sizes = [(rows, warps) for rows in (16, 32, 64, 128) for warps in (4, 8) if rows * 4 <= tokens or rows == 16]
        for rows, warps in sizes if CUDA else sizes[:1]:
            blocks = rule._replace(rows=rows, warps=warps)
            note = " (the rule's)" if blocks == rule else ""
            calls.append((f"router {tokens} rows, {rows} a program, {warps} warps{note}",
                          partial(router_triton.route, *args, blocks)))  # fmt: skip
        pairs = torch.randn(tokens * k, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        calls.append((f"combine {tokens} tokens", partial(combine, pairs, k)))
    compile_all(call for _, call in calls)
    for name, call in calls:
        print(f"{name:<56}{microseconds([call]):8.1f} us", flush=True)


def limited(limit: int, index: Tensor, experts: int) -> Routing:
    """Routing with one kernel up to `limit` pairs"""
    before, routing_triton.AT_ONCE = routing_triton.AT_ONCE, limit
    try:
        return routing_triton.route(index, experts, tiles.block_rows(index.numel(), experts))
    finally:
        routing_triton.AT_ONCE = before


def compile_all(calls: Iterable[Call]) -> None:
    if CUDA:
        start = time.perf_counter()
        with compiling():
            for call in calls:
                call()
        print(f"-- compiled in {time.perf_counter() - start:.1f} s", flush=True)


# ---- tiles -------------------------------------------------------------------------------------------------------


class Work:
    """Both products of the experts with two sets of weights, for routings of the same tokens in any blocks"""

    def __init__(self, config: ModelConfig, fmt: str, tokens: int) -> None:
        self.config, self.tokens = config, tokens
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.up: list[Stored] = [stored(fmt, experts, 2 * width, hidden) for _ in range(2)]
        self.down: list[Stored] = [stored(fmt, experts, hidden, width) for _ in range(2)]
        self.number = tiles.format_of(self.up[0][0]) or "bf16"
        self.index, weight = routed(tokens, config)
        self.share = weight.flatten()
        self.x = self._rows(tokens, hidden)
        self.hidden = self._rows(self.index.numel(), width)
        self.routings: dict[int, Routing] = {}

    @staticmethod
    def _rows(rows: int, width: int) -> Rows:
        return quantize_rows(torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE))

    def shape(self, gated: bool, block: int) -> Shape:
        sizes = (self.config.hidden_size, self.config.moe_intermediate_size)
        return Shape(self.number, *(sizes if gated else sizes[::-1]), self.config.num_experts, gated, block)

    def run(self, gated: bool, block: int, which: int, tile: Tile | None, step: int = 0) -> Tensor:
        if block not in self.routings:
            self.routings[block] = reference_route(self.index, self.config.num_experts, block)
        routing, usual = self.routings[block], product_triton.step_of
        product_triton.step_of = (lambda *_: step) if step else usual
        try:
            if gated:
                return product(self.x, *self.up[which], gated=True, routing=routing, tile=tile).values
            return product(self.hidden, *self.down[which], routing=routing, share=self.share, tile=tile).values
        finally:
            product_triton.step_of = usual


def to_try(shape: Shape) -> list[Tile]:
    rows, more = tiles.split(shape.rows)
    halves = (False, True) if rows >= 64 and not more else (False,)
    if shape.format == "pairs":
        return pair_tiles(shape)
    sizes = [(64, 4), (64, 8), (128, 8), (128, 16)] if shape.gated else [(64, 4), (128, 4), (128, 8), (256, 8)]
    stages = (3, 4, 6) if rows <= 32 else (3, 4) if shape.gated else (4, 6)
    return [Tile(rows, outputs, warps, n, 0, half, 1, more) for outputs, warps in sizes for n in stages
            for half in halves if (rows > 32 or outputs <= 128)
            and (rows + more) * outputs * (1 + shape.gated) // (32 * warps) <= 160]  # fmt: skip


def tune(config: ModelConfig, fmt: str, users: int) -> None:
    work = Work(config, fmt, users * (config.canvas_length if CUDA else 8))
    usual = tiles.block_rows(work.index.numel(), config.num_experts, work.number)
    blocks = sorted({usual, *((32, 64) if work.number == "pairs" else (64, 128, 160))} if users > 2 else {usual})
    jobs: list[tuple[bool, int, Tile, int]] = []
    for gated in (True, False):
        usual_step = tiles.step_of(work.number, work.shape(gated, 16).inputs)
        steps = (64, 128, 256) if CUDA and fmt == "fp8" and not gated and users == 1 else (usual_step,)
        for block in blocks:
            shape = work.shape(gated, block)
            wanted = dict.fromkeys([tiles.choose(shape, card(DEVICE).shared), *to_try(shape)])
            fitting = [tile for tile in wanted if tiles.fits(shape, tile, card(DEVICE).shared)]
            jobs += [(gated, block, tile, step) for tile in (fitting if CUDA else fitting[:2]) for step in steps]
    compile_all(partial(work.run, g, b, 0, t, s) for g, b, t, s in jobs)
    times: dict[tuple[bool, int, Tile, int], float] = {}
    for job in jobs:
        gated, block, tile, step = job
        try:
            times[job] = microseconds([partial(work.run, gated, block, which, tile, step) for which in (0, 1)], 3)
        except Exception as problem:
            if "CUDA error" in str(problem):  # nothing works after it
                raise
            print(f"   {brief(tile)} step {step}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
    report(work, users, times)


def report(work: Work, users: int, times: dict[tuple[bool, int, Tile, int], float]) -> None:
    """For each product, block and step the best tiles, and the best one as `ops/tiles.py` wants it"""
    limit = card(DEVICE).shared
    for gated, block, step in dict.fromkeys((g, b, s) for g, b, _, s in times):
        here = {t: us for (g, b, t, s), us in times.items() if (g, b, s) == (gated, block, step)}
        ranked, shape = sorted(here, key=lambda tile: here[tile]), work.shape(gated, block)
        rule = tiles.choose(shape, limit)
        best = ", ".join(f"{brief(tile)} {here[tile]:.1f}" for tile in ranked[:5])
        print(f"{work.number} {users} users, {'up' if gated else 'down'}, blocks of {block}, step {step}: {best};"
              f" now {brief(rule)} {here.get(rule, float('nan')):.1f}", flush=True)  # fmt: skip
        name = "{up}" if gated else "{down}"
        print(
            f'        f"{work.number} {name}, {block} rows": {paste(ranked[0])},  # {here[ranked[0]]:.1f}', flush=True
        )


def paste(tile: Tile) -> str:
    plain = Tile(tile.rows, tile.outputs, tile.warps, tile.stages)
    names = ("registers", "half", "turns", "more")
    rest = [f"{n}={getattr(tile, n)}" for n in names if getattr(tile, n) != getattr(plain, n)]
    return f"Tile({', '.join([str(n) for n in (tile.rows, tile.outputs, tile.warps, tile.stages)] + rest)})"


def main() -> None:
    parts = ("check", "small", "tiles")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--users", nargs="+", type=int, default=[8, 1], help="canvases of 256 tokens")
    parser.add_argument("--formats", nargs="+", choices=("fp8", *FOUR), default=["fp8", "pairs-64"])
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to check this script")
    args = parser.parse_args()
    small = dict(hidden_size=128, intermediate_size=64, moe_intermediate_size=64, num_experts=16)
    config = ModelConfig.preset("tiny", **small) if args.tiny else ModelConfig.preset("26b-a4b")
    torch.manual_seed(0)
    began = time.perf_counter()
    with torch.no_grad():
        if "check" in args.parts:
            check(config, args.formats)
        if "small" in args.parts:
            small_kernels(config)
        for fmt in args.formats if "tiles" in args.parts else []:
            for users in args.users:
                tune(config, fmt, users)
                if CUDA:
                    torch.cuda.empty_cache()
    print(json.dumps(dict(seconds=round(time.perf_counter() - began, 1), failed=failed)))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
