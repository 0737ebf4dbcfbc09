"""How 4-bit weights lie in memory when kernels read them: bytes of two weights, in tiles, each tile in one piece.

A byte holds two weights of the same column. They are of rows 64 apart or, where gated, of a gate and its up: what a
program makes side by side from the same inputs. Each is a nibble whose lowest bit is its sign: 2 n for n ≥ 0, else
-2 n - 1, so that 0, -1, 1, -2 … 7, -8 are 0 … 15 (a kernel needs few operations to make fp8 numbers of that, and no
product that takes an offset off: `ops/int4_triton.py`). A tile is 64 such rows of one group (32 or 64 columns, which
share a scale), and the tiles of a row of tiles follow each other. The scales of a byte's two weights are the two
bfloat16 halves of an int32. All takes the same memory as the stored form (`ops/quant.py`), so it is made in place.

Legend: O outputs, K inputs, g group; leading dimensions (experts) are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusiongemma.errors import InputError
from diffusiongemma.ops.quant import pack_int4, unpack_int4

GROUPS = (32, 64)
PAIRS = 64  # of a tile: its rows of bytes
AT_ONCE = 1 << 25  # weights that are packed at once: bounds the memory beside them


def unfit(rows: int, columns: int, group: int) -> str | None:
    """Why kernels cannot read 4-bit weights of this shape, or None."""
    if group not in GROUPS or columns % group:
        return f"4-bit kernels take rows of groups of 32 or 64 weights, not {columns} in groups of {group}"
    if rows % (2 * PAIRS):
        return f"4-bit kernels need a multiple of {2 * PAIRS} rows, got {rows}"
    return None


def pack_pairs(q: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """q int8 [..., O, K] of -8 … 7, scale [..., O, K/g] -> bytes [..., O/128, K/g, 64, g], scales [..., O/128, K/g, 64]

    gated: the first half of the rows are gates, the second their ups.
    """
    groups = scale.shape[-1]
    group = q.shape[-1] // groups
    if reason := unfit(q.shape[-2], q.shape[-1], group):
        raise InputError(reason)
    if not bool(scale.isfinite().all()):
        raise InputError("a scale of 4-bit weights is not a number: the weights are damaged")
    low, high = _paired((q << 1 ^ q >> 7).view(torch.uint8), gated)
    tiles = (low | high << 4).unflatten(-1, (groups, group)).transpose(-2, -3).contiguous()
    bits = [part.contiguous().view(torch.int16).to(torch.int32) for part in _paired(scale.to(torch.bfloat16), gated)]
    both = (bits[0] & 0xFFFF) | bits[1] << 16
    return tiles, both.transpose(-1, -2).contiguous()


def _paired(rows: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """[..., O, W] -> the first and the second row of every pair, [..., O/128, 64, W] each"""
    halves = rows.unflatten(-2, (2, -1, PAIRS) if gated else (-1, 2, PAIRS))
    first, second = halves.unbind(-4 if gated else -3)
    return first, second


def _joined(first: Tensor, second: Tensor, gated: bool) -> Tensor:
    """The reverse of `_paired`"""
    return torch.stack((first, second), -4 if gated else -3).flatten(-4, -2)


def unpack_pairs(tiles: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The reverse of `pack_pairs`"""
    rows = tiles.transpose(-2, -3).flatten(-2)
    nibbles = _joined(rows & 15, rows >> 4, gated).view(torch.int8)
    q = nibbles >> 1 ^ -(nibbles & 1)
    turned = scale.transpose(-1, -2)
    bits = [(turned << 16 >> 16).to(torch.int16), (turned >> 16).to(torch.int16)]
    halves = [part.contiguous().view(torch.bfloat16) for part in bits]
    return q, _joined(halves[0], halves[1], gated)


def from_stored(words: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """int32 words of `ops.quant` [..., O, K/8], scale [..., O, K/g] -> as `pack_pairs`, in the same memory: both are
    overwritten, a few experts at a time, so that no second copy of a large weight is ever there"""
    *lead, rows, columns = (*words.shape[:-1], words.shape[-1] * 8)
    group = columns // scale.shape[-1]
    assert words.is_contiguous()
    assert scale.is_contiguous()
    if reason := unfit(rows, columns, group):
        raise InputError(reason)
    tiles = words.view(torch.uint8).view(*lead, rows // (2 * PAIRS), columns // group, PAIRS, group)
    both = scale.view(-1).view(torch.int32).view(tiles.shape[:-1])
    at_once = max(1, AT_ONCE // (rows * columns))
    parts = zip(*(_lead(t, 2).split(at_once) for t in (words, scale)), strict=True)
    places = zip(_lead(tiles, 4).split(at_once), _lead(both, 3).split(at_once), strict=True)
    for (q, s), (tile_place, scale_place) in zip(parts, places, strict=True):
        new, new_scale = pack_pairs(unpack_int4(q), s, gated)
        tile_place.copy_(new)
        scale_place.copy_(new_scale)
    return tiles, both


def _lead(tensor: Tensor, kept: int) -> Tensor:
    """All dimensions but the last ones made one."""
    return tensor.view(-1, *tensor.shape[tensor.dim() - kept :])


def to_stored(tiles: Tensor, scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The reverse of `from_stored`, as a copy"""
    q, s = unpack_pairs(tiles, scale, gated)
    return pack_int4(q), s


def dequantize_pairs(tiles: Tensor, scale: Tensor, gated: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """tiles and scales of `pack_pairs` -> weights [..., O, K]"""
    q, s = unpack_pairs(tiles, scale, gated)
    grouped: Tensor = q.unflatten(-1, (s.shape[-1], -1)) * s[..., None].float()
    return grouped.flatten(-2).to(dtype)
