# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Tiles that are laid out by side (`ops/sides.py`), in kernels: where a chunk lies, and which tiles a program takes.

Programs of a side take its tiles: all of the first product first, then those that the other side has left of it, then
the same of the second. So nobody waits for a tile of the first product that nobody has taken, and a side that is ahead
helps the other. Blocks are rounded when the tiles of both sides are there: should the other side not have begun when a
program has taken ALONE tiles, it takes tiles of both, in order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diffusiongemma.ops.sides import CHUNK, LINE
from diffusiongemma.ops.sides import PAIRS as _PAIRS
from diffusiongemma.ops.sides import PROCESSORS as _PROCESSORS

LINES = gl.constexpr(CHUNK // LINE)  # of a chunk
PAIRS, PROCESSORS = gl.constexpr(_PAIRS), gl.constexpr(_PROCESSORS)
ALONE = gl.constexpr(4)  # tiles


@gluon.jit
def own_side(processors):
    """Of the multiprocessor that runs this"""
    which = gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return gl.load(processors + which % PROCESSORS)


@gluon.jit
def pages_of(pages, tile, CHUNKS: gl.constexpr):
    """-> a tile's first pair of chunks, and of the pages in which the first and the last of its pairs lie the sides"""
    first = tile // 2 * CHUNKS
    one = gl.load(pages + first // PAIRS)
    two = gl.load(pages + (first + CHUNKS - 1) // PAIRS)
    return first, one, two


@gluon.jit
def line_of(first, one, two, tile, chunk, mask):
    """The first line of a chunk of a tile"""
    pair = first + chunk
    bits = pair & mask
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    side = bits ^ gl.where(pair // PAIRS == first // PAIRS, one, two)
    return (2 * pair + ((side ^ tile) & 1)) * LINES


@gluon.jit
def first_of(marks, side):
    """The number of the first tile that a program takes, before anything else is known"""
    return 2 * gl.atomic_add(marks + side, 1, sem="relaxed", scope="gpu") + side


@gluon.jit
def next_of(marks, side, queue, taken, alone, ups, downs):
    """-> the next tile's number, of the second product counted on from `ups`, or -1; from which queue (0 and 1 are the
    first product's of this side and of the other, 2 and 3 the second's); how many tiles were taken; and whether the
    other side has not begun"""
    if taken == ALONE:
        alone = _counted(marks + 1 - side) == 0
    taken += 1
    if alone & (queue < 2):
        queue = queue * 0
        side = gl.where(_counted(marks) <= _counted(marks + 1), 0, 1)
    at = gl.to_tensor(-1)
    while (at < 0) & (queue < 4):
        whose = side ^ (queue & 1)
        found = 2 * gl.atomic_add(marks + (queue & 2) + whose, 1, sem="relaxed", scope="gpu") + whose
        if found < gl.where(queue < 2, ups, downs):
            at = gl.where(queue < 2, found, ups + found)
        else:
            queue += 1
    return at, queue, taken, alone


@gluon.jit
def _counted(mark):
    return gl.atomic_add(mark, 0, sem="relaxed", scope="gpu")
