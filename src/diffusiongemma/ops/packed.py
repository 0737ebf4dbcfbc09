"""Experts' weights without the bits that they do not use: fp8 in 7 bits, bfloat16 in 12.

A step of few users waits for the experts' weights to come from memory, so fewer bytes are less time. A number has a
sign, an exponent and a fraction. Of a row of weights whose largest number is at the top, the lower half of all octaves
is used once in a hundred numbers (fp8) or in ten thousand (the lower 15/16 of bfloat16's). So a row is multiplied by a
power of two that leaves the upper bits of the exponent zero; the sums are multiplied by what makes up for it, exactly;
and these bits are not kept:

| kept                | octaves of numbers that stay as they are | below: multiples of, of the row's top octave |
| ------------------- | ---------------------------------------- | -------------------------------------------- |
| fp8 in 7 bits       | 7 of 16                                  | 2^-9                                         |
| bfloat16 in 12 bits | 15 of 256                                | 2^-21                                        |

What that changes of normally distributed rows, by their norm (`tests/ops/test_packed.py` holds the figures): 0.02 % in
7 bits, where fp8 itself loses 2.6 %; 3e-9 of bfloat16's, less than float32 can hold. A network whose numbers all have a
place stays the same. `model/packed.py` says where it is done, and where it would change too much.

Bits that are not used carry others. Eight pieces, 64 rows of 32 fp8 numbers, lie in seven: each of them has one bit of
a number of the eighth. Four pieces, of 16 bfloat16 numbers, lie in three. A piece is 2,048 bytes, what four warps give
the tensor cores at once, and shifts and masks make the last of the others (`code`).

A tile is 64 outputs of the first product with their gates, or 128 of the second. A stage of it is 128 bytes of each
row, eight pieces: of each of four steps along K the first 64 rows and the second. Where K ends with half a stage, four
pieces are left: they make three, or lie there as they are.

Legend: E experts, O outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.ops import sides
from diffusiongemma.ops.sides import Sided, Sides, lay_out

FP8 = torch.float8_e4m3fn
LINE = 128  # bytes
ROWS = 64  # of a piece
STEP = 32  # bytes of its rows
AT_ONCE = 1 << 26  # numbers that are rounded and packed at once: bounds the memory beside them
LIFT = 112  # bfloat16 numbers are that many octaves lower where they lie than where they are multiplied


class Field(NamedTuple):
    """Bits of the last piece, and who carries them: (carrier >> shift) & bits, or << -shift"""

    carrier: int
    bits: int
    shift: int


@dataclass(frozen=True)
class Packing:
    name: str
    dtype: torch.dtype  # of the numbers
    kept: int  # bits of a number that stay where they are
    fields: tuple[Field, ...]
    most: float  # of a matrix' norm that may be lost, else it is not packed: a tenth of what the format loses itself

    @property
    def size(self) -> int:
        """Bytes of a number"""
        return self.dtype.itemsize

    @property
    def stored(self) -> int:
        """Pieces that lie in memory"""
        return 1 + max(field.carrier for field in self.fields)

    @property
    def whole(self) -> int:
        """Pieces that they make"""
        return self.stored + 1

    @property
    def slots(self) -> int:
        """Pieces of a stage that lie in memory"""
        return 8 // self.whole * self.stored

    @property
    def left(self) -> int:
        """… and of half a stage"""
        return 4 // self.whole * self.stored or 4

    @property
    def kind(self) -> torch.dtype:
        """Whole numbers of the same size"""
        return torch.uint8 if self.size == 1 else torch.int16


_TWELVE = (Field(0, 0x0780, 4), Field(1, 0x0078, 8), Field(2, 0x0007, 11), Field(2, 0x8000, -1))
_SEVEN = (Field(0, 0x80, -1), *(Field(n, 0x40 >> n, n) for n in range(1, 7)))
SEVEN = Packing("fp8 in 7 bits", FP8, 0xBF, _SEVEN, 2.6e-3)
TWELVE = Packing("bfloat16 in 12 bits", torch.bfloat16, 0x87FF, _TWELVE, 1.7e-4)
PACKINGS = {packing.dtype: packing for packing in (SEVEN, TWELVE)}


# ---- numbers -----------------------------------------------------------------------------------------------------


def shrunk(w: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """w [.., O, K] -> the nearest numbers that have a place, upper bits of their exponents zero; and by what their sums
    are multiplied, a power of two, float32 [.., O, 1]."""
    assert w.dtype == packing.dtype
    wide = w.float()
    octave = torch.frexp(wide.abs().amax(dim=-1, keepdim=True)).exponent - 1
    x = torch.ldexp(wide, -octave)  # in (-2, 2)
    back = torch.ldexp(torch.ones_like(x[..., :1]), octave)
    if packing.dtype == FP8:
        return x.to(FP8), back
    raw = x.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    exponent = (raw >> 7 & 0xFF) - LIFT
    small = torch.where(exponent > 0, exponent << 7 | raw & 0x7F, (x.abs() * 2.0**21).round().to(torch.int32))
    return (raw & -0x8000 | small).to(torch.int16).view(torch.bfloat16), back


def lifted(q: Tensor, packing: Packing) -> Tensor:
    """Numbers of `shrunk` as the tensor cores get them"""
    if packing.dtype == FP8:
        return q
    raw = q.view(torch.int16).to(torch.int32)
    exponent, fraction = raw >> 7 & 0xFF, raw & 0x7F
    size = torch.ldexp(torch.where(exponent > 0, 128 + fraction, fraction).float(), exponent.clamp(min=1) - 22)
    return torch.where(raw < 0, -size, size).to(torch.bfloat16)


def restored(q: Tensor, back: Tensor, packing: Packing) -> Tensor:
    """What `shrunk` was given, as near as it has a place: exactly the numbers that are multiplied"""
    return (lifted(q, packing).float() * back).to(packing.dtype)


@dataclass(frozen=True)
class Packed:
    """The experts of a layer once more: tiles by side, and what a row's sums are multiplied by, [E, O, 1]; of 4-bit
    weights, which are as they were but for their place (`packing` is None), the scales of `int4.pack_pairs`"""

    packing: Packing | None
    up: Sided
    up_scale: Tensor
    down: Sided
    down_scale: Tensor

    @property
    def name(self) -> str:
        return "4 bits by side" if self.packing is None else self.packing.name

    @property
    def nbytes(self) -> int:
        """That are read: where scales are those of the plain weights, they lie there once"""
        return sum(t.nbytes for t in (self.up, self.up_scale, self.down, self.down_scale))


def fits(up: Tensor, down: Tensor) -> Packing | None:
    """How experts with these weights, of [E, 2 I, D] and [E, D, I], can be packed; None: they cannot"""
    packing = PACKINGS.get(up.dtype)
    if packing is None or up.dtype != down.dtype:
        return None
    (_, hidden, width) = down.shape
    whole = hidden % 128 == width % 64 == 0  # tiles, whose rows are whole halves of a stage
    return packing if whole and all(sides.lie_by_side(*_tiles(w, packing)) for w in (up, down)) else None


def lie_in_pairs(up: Tensor, down: Tensor) -> bool:
    """Are these 4-bit weights, of tiles as `int4.pack_pairs` has them, [E, tiles, groups, 64, 64]?"""
    return all(w.dtype == torch.uint8 and w.shape[-2:] == (ROWS, ROWS) and sides.lie_by_side(*_tiles(w, None))
               for w in (up, down))  # fmt: skip


def bytes_of(w: Tensor, packing: Packing | None) -> int:
    """What a weight takes when it is packed, or laid out by side, without scales"""
    return sides.bytes_of(*_tiles(w, packing))


def _tiles(w: Tensor, packing: Packing | None) -> tuple[int, int]:
    """How many tiles a weight is, packed or as it lies in pairs, and the bytes of each"""
    if packing is None:
        return w.shape[0] * w.shape[1], w[0, 0].numel()
    experts, outputs, inputs = w.shape
    halves = inputs * packing.size * 2 // LINE
    pieces = halves // 2 * packing.slots + halves % 2 * packing.left
    return experts * outputs // (2 * ROWS), pieces * ROWS * STEP


# ---- layout ------------------------------------------------------------------------------------------------------


def pack(q: Tensor, packing: Packing, gated: bool) -> Tensor:
    """q [E, O, K] of `shrunk` -> bytes [E, tiles, lines, LINE]; gated: the first half of the rows are gates"""
    codes = q.view(packing.kind)
    halves = codes.unflatten(1, (2, -1, ROWS)).transpose(1, 2) if gated else codes.unflatten(1, (-1, 2, ROWS))
    steps = halves.unflatten(-1, (-1, STEP // packing.size))  # [E, tiles, 2, ROWS, steps, numbers]
    pieces = steps.permute(0, 1, 4, 2, 3, 5).flatten(2, 3)
    many = pieces.shape[2] // packing.whole * packing.whole
    groups = pieces[:, :, :many].unflatten(2, (-1, packing.whole))
    stored = groups[:, :, :, :-1].clone()
    for carrier, bits, shift in packing.fields:
        carried = groups[:, :, :, -1] & _whole(bits, packing)
        stored[:, :, :, carrier] |= carried << shift if shift > 0 else _right(carried, -shift)
    lying = torch.cat((stored.flatten(2, 3), pieces[:, :, many:]), dim=2).contiguous()
    return lying.view(torch.uint8).view(*lying.shape[:2], -1, LINE)


def lost(w: Tensor, packing: Packing) -> float:
    """What rounding to places changes, of the norm of the expert that loses most: w [E, O, K]"""
    found = list[Tensor]()
    for some in _some(w):
        wide = some.float()
        off = (restored(*shrunk(some, packing), packing).float() - wide).flatten(1).norm(dim=1)
        found.append(off / wide.flatten(1).norm(dim=1).clamp_min(1e-30))
    return float(torch.cat(found).max())  # NaN, where there is one


def once_more(up: Tensor, up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None, sides: Sides) -> Packed:
    """As these weights can be: packed (they themselves are rounded), or, of 4 bits, laid out by side"""
    if packing := fits(up, down):
        return round_and_pack(packing, up, up_scale, down, down_scale, sides)
    assert lie_in_pairs(up, down), f"{up.dtype} {tuple(up.shape)} can be neither packed nor laid out by side"
    assert up_scale is not None
    assert down_scale is not None
    return by_side(up, up_scale, down, down_scale, sides)


def round_and_pack(
    packing: Packing, up: Tensor, up_scale: Tensor | None, down: Tensor, down_scale: Tensor | None, sides: Sides
) -> Packed:
    """up [E, 2 I, D], down [E, D, I], and a scale a row, packed; they themselves are rounded to what has a place. Where
    they have scales, these take what rows are multiplied by: then tensor cores get the same numbers of both, for they
    do not give the same bits for all rows that are twice as large (the smallest numbers of fp8 count for more)."""
    return Packed(
        packing, *_rounded(up, up_scale, packing, True, sides), *_rounded(down, down_scale, packing, False, sides)
    )


def by_side(up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, sides: Sides) -> Packed:
    """4-bit weights as `int4.pack_pairs` has them"""
    return Packed(None, lay_out(up.flatten(2).flatten(0, 1), sides), up_scale,
                  lay_out(down.flatten(2).flatten(0, 1), sides), down_scale)  # fmt: skip


def _rounded(w: Tensor, scale: Tensor | None, packing: Packing, gated: bool, sides: Sides) -> tuple[Sided, Tensor]:
    """-> packed, and what a row's sums are multiplied by"""
    parts, backs = list[Tensor](), list[Tensor]()
    scales = (None,) * len(_some(w)) if scale is None else scale.split(len(_some(w)[0]))
    for some, its in zip(_some(w), scales, strict=True):
        q, back = shrunk(some, packing)
        parts.append(pack(q, packing, gated).flatten(2).flatten(0, 1))
        backs.append(back)
        new = restored(q, back, packing) if its is None else q
        some.copy_(new)  # nothing is made from here on: should memory run out, numbers are as they were, or rounded
        if its is not None:
            its.mul_(back)
    return lay_out(torch.cat(parts), sides), torch.cat(backs) if scale is None else scale


def _some(w: Tensor) -> tuple[Tensor, ...]:
    """A few experts after the other"""
    found: tuple[Tensor, ...] = w.split(max(1, AT_ONCE // w[0].numel()))
    return found


def unpack(tiles: Tensor, packing: Packing, shape: tuple[int, int], gated: bool) -> Tensor:
    """The reverse of `pack`: bytes [E, tiles, lines, LINE] -> q [E, O, K]; shape: O and K"""
    groups = 2 * shape[1] * packing.size // STEP // packing.whole
    pieces = tiles.flatten(-2).view(packing.kind).unflatten(-1, (-1, ROWS, STEP // packing.size))
    stored = pieces[:, :, : groups * packing.stored].unflatten(2, (groups, packing.stored))
    whole = made(list(stored.unbind(3)), packing)
    halves = torch.cat((torch.stack(whole, dim=3).flatten(2, 3), pieces[:, :, groups * packing.stored :]), dim=2)
    rows = halves.unflatten(2, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(-2)  # [E, tiles, 2, ROWS, K]
    flat: Tensor = (rows.transpose(1, 2) if gated else rows).reshape(len(tiles), *shape)
    return flat.view(packing.dtype)


def made(stored: list[Tensor], packing: Packing) -> list[Tensor]:
    """Pieces that lie in memory -> all of them, in torch; what `code` has the card do, but for the lift"""
    last = torch.zeros_like(stored[0])
    for carrier, bits, shift in packing.fields:
        carried = stored[carrier]
        last |= (_right(carried, shift) if shift > 0 else carried << -shift) & _whole(bits, packing)
    return [*(piece & _whole(packing.kept, packing) for piece in stored), last]


def _whole(bits: int, packing: Packing) -> int:
    """As a number of `kind`"""
    return bits - (1 << 16) if packing.size == 2 and bits >> 15 else bits


def _right(x: Tensor, shift: int) -> Tensor:
    """Without copies of the sign"""
    return x >> shift if x.dtype == torch.uint8 else x >> shift & (1 << 16 - shift) - 1


# ---- instructions ------------------------------------------------------------------------------------------------


def code(packing: Packing) -> str:
    """PTX: a register of each piece that lies in memory -> one of each that they make, bfloat16 numbers lifted"""
    spread, many = 0x01010101 if packing.size == 1 else 0x00010001, packing.whole
    lines = [".reg .b32 t;"]
    for n, (carrier, bits, shift) in enumerate(packing.fields):
        last, mask = f"${many - 1}", f"0x{bits * spread:08x}"
        lines.append(f"{'shr' if shift > 0 else 'shl'}.b32 t, ${many + carrier}, {abs(shift)};")
        # 0xEA: (a & b) | c
        lines.append(f"lop3.b32 {last}, t, {mask}, {last}, 0xEA;" if n else f"and.b32 {last}, t, {mask};")
    for n in range(packing.stored):
        lines.append(f"and.b32 ${n}, ${many + n}, 0x{packing.kept * spread:08x};")
    if packing.size == 2:
        factor = (LIFT + 127) << 7  # 2^LIFT
        lines += [".reg .b32 c;", f"mov.b32 c, 0x{factor * spread:08x};"]
        lines += [f"mul.bf16x2 ${n}, ${n}, c;" for n in range(many)]
    return "{\n" + "\n".join(lines) + "\n}"


def constraints(packing: Packing) -> str:
    """The last piece is written before all others have been read."""
    return ",".join(["=&r"] * packing.whole + ["r"] * packing.stored)
