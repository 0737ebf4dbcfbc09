"""How 4-bit weights lie in memory when kernels read them: words of 16 bits, and scales with the outputs side by side.

K is cut into blocks of 64. Word i of a block (i = 0 … 15) holds the weights i, 16 + i, 32 + i and 48 + i of the block,
the first in the lowest bits, each as its value plus 8. So the same nibble of neighbouring words is a run of
neighbouring weights: a kernel gets a tile of weights by a shift and a mask, nothing has to be interleaved. A group of
32 or 64 weights shares a scale.

Legend: O outputs, K inputs, g group; leading dimensions (experts) are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusiongemma.errors import InputError
from diffusiongemma.ops.quant import unpack_int4

BLOCK = 64  # weights of a block
QUARTERS = 4  # weights of a word
GROUPS = (32, 64)
MAX_SCALE = 8.0  # the kernel adds 125 to a scale's exponent


def pack(q: Tensor) -> Tensor:
    """int8 [..., K] of -8 … 7 -> words int16 [..., K/4]"""
    if q.shape[-1] % BLOCK:
        raise InputError(f"4-bit kernels need rows of a multiple of {BLOCK} weights, got {q.shape[-1]}")
    quarters = (q.unflatten(-1, (-1, QUARTERS, BLOCK // QUARTERS)) + 8).to(torch.int16).unbind(-2)
    words: Tensor = quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12
    return words.flatten(-2)


def unpack(words: Tensor) -> Tensor:
    """words int16 [..., K/4] -> int8 [..., K] of -8 … 7"""
    blocks = words.unflatten(-1, (-1, BLOCK // QUARTERS))
    quarters = [(blocks >> shift & 15).to(torch.int8) - 8 for shift in (0, 4, 8, 12)]
    return torch.stack(quarters, dim=-2).flatten(-3)


def to_runtime(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [..., O, K] of -8 … 7, scale [..., O, K/g] -> words [..., O, K/4], scale bfloat16 [..., K/g, O]"""
    if q.shape[-1] // scale.shape[-1] not in GROUPS:
        raise InputError(f"4-bit kernels take groups of 32 or 64 weights, not {q.shape[-1] / scale.shape[-1]:g}")
    if not bool((scale.abs() < MAX_SCALE).all()):
        raise InputError(f"a scale of 4-bit weights is not below {MAX_SCALE:g}: the weights are damaged")
    return pack(q), scale.to(torch.bfloat16).transpose(-1, -2).contiguous()


def from_stored(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int32 words of `ops.quant` [..., O, K/8], scale [..., O, K/g] -> as `to_runtime`; the words stay where they are,
    so that no second copy of a large weight is ever there: q itself is overwritten"""
    words = q.view(torch.int16)
    turned = scale.new_empty((*scale.shape[:-2], scale.shape[-1], scale.shape[-2]), dtype=torch.bfloat16)
    _pack_into(q, scale, words, turned)
    return words, turned


def _pack_into(q: Tensor, scale: Tensor, words: Tensor, turned: Tensor) -> None:
    if q.dim() > 2:
        for parts in zip(q, scale, words, turned, strict=True):
            _pack_into(*parts)
        return
    new, new_scale = to_runtime(unpack_int4(q), scale)
    words.copy_(new)
    turned.copy_(new_scale)


def dequantize(words: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """words [..., O, K/4], scale [..., K/g, O] -> weights [..., O, K]"""
    q = unpack(words)
    grouped: Tensor = q.unflatten(-1, (scale.shape[-2], -1)) * scale.transpose(-1, -2)[..., None].float()
    return grouped.flatten(-2).to(dtype)
