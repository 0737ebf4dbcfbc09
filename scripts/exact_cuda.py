"""Cases of the product in CUDA C++ (`ops/product_cuda.py`): in each of its tiles, with what sticks out of them, and
beside the kernel in Triton, whose bits it must have.

The shapes that the engine gives it are among those of `exact_cases.py`. These are as small as they can be.
"""

from __future__ import annotations

from collections.abc import Iterator

from exact_cases import Case, Made, by_triton
from exact_limits import Part, named, same_bits
from exact_products import Given, linear
from exact_shapes import Inputs

from diffusiongemma.model.backend import Ops
from diffusiongemma.ops import kernels, product_cuda
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product_cuda import MEASURED, Tile
from diffusiongemma.ops.quant import FP8

ROWS = 130  # two beyond a whole tile
INPUTS = (384, 2176)  # fewer steps than a ring has stages, and more


def tiles() -> list[Tile]:
    return sorted({tile for known in MEASURED.values() for _, tile in known})


def cuda_cases(kind: str, inputs: Inputs) -> Iterator[Case]:
    """None where there are no such kernels"""
    if kind == "fp8" and kernels.cpp(inputs.device):
        yield from (_product(tile, ins, inputs) for ins in INPUTS for tile in tiles())


def _product(tile: Tile, ins: int, inputs: Inputs) -> Case:
    outs = 2 * tile.outputs + 24
    x, w = inputs.randn(ROWS, ins), inputs.matrix("fp8", outs, ins)

    def call(ops: Ops) -> Made:
        given = Rows(*ops.quantize_rows(x, FP8))
        return Made(product_cuda.product(given, *w.kept, tile), given, by_triton().linear(given, w.kept))

    def parts(got: Made) -> list[Part]:
        assert got.twin is not None
        found = linear(got.out, Given(got.given, x), w, form=False, vendor=False)
        return [*named("arithmetic", found), same_bits("as by Triton", got.out, got.twin)]

    name = f"product in CUDA C++, {tile.rows} x {tile.outputs}"
    return Case(name, f"{ROWS} x {ins} -> {outs}", "fp8", call, parts)
