# ruff: noqa: E402
"""Dense products of the 26B-A4B in fp8 by CUDA C++ (`ops/product_cuda.py`), the vendor and Triton: microseconds, bits.

    python3 scripts/bench_products.py [--rows 256 512] [--shapes 2816,8192 …] [--tiles 128,128,5 …]

Each stands behind a norm, as in a layer, eight of them over eight weights in one graph; the norms' own time is taken
off. Beside each: its distance from float64, whether it has Triton's bits, and how many of twenty runs have others. The
exit code is 1 if bits differ between runs, or from Triton's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from bench_stream import microseconds, recorded

from diffusiongemma.ops import product_cuda, product_triton
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.norm_triton import norm_rows
from diffusiongemma.ops.product_cuda import Tile
from diffusiongemma.ops.quant import FP8, Format, quantize

SETS, RUNS, EPS = 8, 20, 1e-6
TILES = ((64, 88, 8), (64, 176, 7), (64, 256, 5), (128, 88, 8), (128, 128, 5), (128, 144, 5), (128, 176, 5),
         (128, 192, 5), (128, 256, 4))  # fmt: skip
Way = Callable[[Rows, Tensor, Tensor], Tensor]


def vendor(x: Rows, w: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(x.values, w.t(), x.scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def triton(x: Rows, w: Tensor, scale: Tensor) -> Tensor:
    return product_triton.product(x, w, scale).values


@torch.inference_mode()
def measure(inputs: int, outputs: int, rows: int, tiles: list[Tile]) -> int:
    """-> how many ways have other bits"""
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    norm = torch.rand(inputs, device="cuda", dtype=torch.bfloat16) + 0.5
    made = [quantize(torch.randn(outputs, inputs, device="cuda") * 0.02, Format("fp8")) for _ in range(SETS)]
    ours: dict[str, Way] = {
        str(tuple(tile)): lambda x, w, s, tile=tile: product_cuda.product(x, w, s, tile) for tile in tiles
    }
    ways: dict[str, Way] = {"Triton": triton, "vendor": vendor, **ours}
    given = norm_rows(x, norm, EPS, FP8)
    w, s = made[0]
    exact = given.wide().double() @ (w.double() * s.double()).t()
    first, told, wrong = triton(given, w, s), dict[str, str](), 0
    for way, run in ways.items():
        out = run(given, w, s)
        error = float((out.double() - exact).norm() / exact.norm())
        same, moving = torch.equal(out, first), sum(not torch.equal(out, run(given, w, s)) for _ in range(RUNS))
        wrong += moving > 0 or (not same and way != "vendor")
        told[way] = f"error {error:.5f}, {'' if same else 'NOT '}Triton's bits, {moving} of {RUNS} differ"
    graphs = [recorded(lambda i: norm_rows(x, norm, EPS, FP8), SETS)]
    graphs += [recorded(lambda i, run=run: run(norm_rows(x, norm, EPS, FP8), *made[i]), SETS) for run in ways.values()]
    empty, *times = (us / SETS for us in microseconds([graph.replay for graph in graphs], 9, 4))
    print(f"{rows} x {inputs} -> {outputs}; the norm {empty:.2f} us", flush=True)
    for way, us in zip(ways, times, strict=True):
        print(f"  {way:<18}{us - empty:7.2f} us; {told[way]}", flush=True)
    return wrong


def sides(text: str) -> tuple[int, int]:
    inputs, outputs = map(int, text.split(","))
    return inputs, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--shapes", type=sides, nargs="+", default=list(product_cuda.MEASURED), help="inputs,outputs")
    parser.add_argument("--tiles", nargs="+", help="rows,outputs,stages")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    tiles = [Tile(*map(int, t.split(","))) for t in args.tiles] if args.tiles else [Tile(*t) for t in TILES]
    failed = sum(measure(*shape, rows, tiles) for shape in args.shapes for rows in args.rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
