# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Tiles of matrices into a program: by a descriptor, which a card from Hopper on copies in bulk, or by pointers.

Triton would make pointers of a descriptor for an older card, but knows nothing of its strides then and reads number by
number; here they are known. Both ways give the same numbers: zeros where a tile sticks out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffusiongemma.ops import kernels


def described(t: Tensor, block: Sequence[int]) -> Any:
    """What `tile_at` and `cached` take tiles of this shape from"""
    return TensorDescriptor.from_tensor(t, list(block)) if kernels.card(t.device).early else t


def apart(t: Tensor) -> dict[str, int]:
    """Of a cache [R, K, S, Dh], numbers from one row, head and slot to the next, for `cached`; a descriptor knows"""
    known = kernels.card(t.device).early
    return dict(zip(("ROW", "HEAD", "SLOT"), (0, 0, 0) if known else t.stride()[:3], strict=True))


@triton.jit
def tile_at(matrix, row, column, rows, width, apart, R: tl.constexpr, C: tl.constexpr):
    """[R, C] of a matrix [rows, width] at this place, zeros beyond its sides; `apart`: numbers from a row to the next.
    rows or width None: nothing lies beyond"""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        return matrix.load([row, column])
    else:  # Triton reads on behind a return
        r, c = row + tl.arange(0, R), column + tl.arange(0, C)
        inside = (r >= 0)[:, None]
        if rows is not None:
            inside = inside & (r < rows)[:, None]
        if width is not None:
            inside = inside & (c < width)[None, :]
        return tl.load(matrix + r.to(tl.int64)[:, None] * apart + c[None, :], mask=inside, other=0.0)


@triton.jit
def cached(cache, row, head, slot, column, N: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
           SLOT: tl.constexpr):  # fmt: skip
    """[N, D] of a cache [R, K, S, Dh]: some numbers of N slots of a head from this slot on, zeros in front of the first
    slot; none is behind the last"""
    if isinstance(cache, tl.core.tensor_descriptor_base):
        return tl.reshape(cache.load([row, head, slot, column]), (N, D))
    else:
        n, d = slot + tl.arange(0, N), column + tl.arange(0, D)
        first = cache + row.to(tl.int64) * ROW + head * HEAD
        return tl.load(first + n[:, None] * SLOT + d[None, :], mask=(n >= 0)[:, None], other=0.0)
