"""Dense products in fp8 of some hundreds of rows in CUDA C++, with the bits of `product_triton`.

`product.cu` holds the kernel and says how it works. Which shapes are its own, and in which tiles, was measured on an
H200 (`scripts/bench_products.py`, `docs/log.md`): of others the vendor's kernel or Triton's is the faster one.

Legend: N tokens, K inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.ops import kernels, nvrtc
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.nvrtc import LINE
from diffusiongemma.ops.quant import FP8


class Tile(NamedTuple):
    rows: int  # of a program: 64 or 128
    outputs: int
    stages: int

    @property
    def pitch(self) -> int:
        """Bytes from a row of the result to the next in shared memory: eight rows lie in different banks"""
        bytes_ = 2 * self.outputs
        while bytes_ // 4 % 32 not in (4, 12, 20, 28):
            bytes_ += 16
        return bytes_

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring, which begins at a multiple of 1,024; the result goes through it, too"""
        return 1024 + max(self.stages * (self.rows + self.outputs) * LINE, self.rows * self.pitch)

    @property
    def threads(self) -> int:
        return 2 * self.rows + 32


# The products of the 26B-A4B, by inputs and outputs: of so many rows, in these tiles. Of other numbers of rows the last
# wave of programs would be half empty.
_BEHIND = ((range(65, 257), Tile(64, 88, 8)), (range(385, 513), Tile(128, 88, 8)),
           (range(897, 1025), Tile(128, 176, 5)), (range(1921, 2049), Tile(128, 176, 5)))  # fmt: skip
MEASURED = {
    (2816, 8192): ((range(129, 257), Tile(128, 128, 5)),),
    (2816, 9216): ((range(129, 257), Tile(128, 144, 5)), (range(257, 385), Tile(128, 256, 4)),
                   (range(385, 513), Tile(128, 144, 5))),
    (4096, 2816): _BEHIND,
    (8192, 2816): _BEHIND,
}  # fmt: skip


def _sums(outputs: int) -> str:
    """The tensor cores' instruction for 64 rows and so many outputs: all sums of a thread are named in it."""
    many = outputs // 2
    sums = ", ".join(f"%{i}" for i in range(many))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(many))
    name = f"wgmma.mma_async.sync.aligned.m64n{outputs}k32.f32.e4m3.e4m3"
    return f'asm volatile("{name} {{{sums}}}, %{many}, %{many + 1}, 1, 1, 1;" : {bound} : "l"(a), "l"(b));'


@cache
def kernel_of(tile: Tile) -> nvrtc.Kernel:
    assert tile.rows % 64 == 0
    assert tile.outputs % 8 == 0
    names: dict[str, int | str] = {
        "BM": tile.rows, "BN": tile.outputs, "STAGES": tile.stages, "PITCH": tile.pitch, "SUMS": _sums(tile.outputs),
    }  # fmt: skip
    return nvrtc.Kernel("product_cuda_kernel", nvrtc.source("product.cu"), names, shared=tile.shared)


def unfit(x: Rows, w: Tensor) -> str | None:
    """Why the kernel cannot multiply these, or None"""
    values = x.values
    if not kernels.cpp(values.device):
        return "there are no kernels in CUDA C++ here"
    if not values.dtype == w.dtype == FP8 or w.dim() != 2:
        return f"no kernel for {values.dtype} times {w.dtype}"
    if x.scale is None or x.scale.shape[1] != 1:
        return "rows in fp8 have one scale each"
    if not w.is_contiguous() or values.stride(1) != 1:
        return "the numbers of a row lie together"
    if any(n % 16 for t in (values, w) for n in (t.stride(0), t.data_ptr())):
        return "rows begin at multiples of 16 bytes"
    if w.shape[1] % LINE:
        return f"sums are made {LINE} numbers at a time"
    return "a row of the result is written 8 numbers at a time" if w.shape[0] % 8 else None


def tile_for(x: Rows, w: Tensor) -> Tile | None:
    """In which tiles this product is faster here than elsewhere, or None"""
    known = MEASURED.get((w.shape[1], w.shape[0]), ()) if w.dim() == 2 else ()
    tile = next((tile for rows, tile in known if len(x.values) in rows), None)
    return None if tile is None or unfit(x, w) else tile


def product(x: Rows, w: Tensor, w_scale: Tensor | None, tile: Tile) -> Tensor:
    """As `product.product`: x [N, K], w [O, K], both fp8 -> [N, O] bfloat16"""
    reason = unfit(x, w)
    assert reason is None, reason
    assert x.scale is not None
    assert w_scale is not None
    assert x.scale.is_contiguous()
    assert w_scale.is_contiguous()
    (rows, inputs), outputs = x.values.shape, w.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=w.device)
    kernel_of(tile).run(
        -(-rows // tile.rows) * -(-outputs // tile.outputs), tile.threads, nvrtc.Tiles(x.values, tile.rows),
        nvrtc.Tiles(w, tile.outputs), x.scale, w_scale, out, rows, outputs, inputs // LINE,
    )  # fmt: skip
    return out
