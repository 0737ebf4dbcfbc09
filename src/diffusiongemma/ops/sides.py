"""The two sides of a Hopper card: which half of the L2 cache memory belongs to, and which a multiprocessor is near.

What a multiprocessor reads from the other side crosses from one half of the cache to the other. On an H200 that way
carries 2.5 TB/s, and half of all that is read takes it: of experts that are streamed at the memory's speed, together
with the rows that they need, more than it carries. Reading near memory alone leaves it free, and takes a tenth less
power (`docs/log.md`).

Sides change every CHUNK bytes: a chunk's is the parity of some bits of its place in a page (`Sides.mask`) and of one
bit of the page, which is found by asking (`sides.cu`). So of two chunks side by side one is near, one is far. Nobody
says so but measurements: where a card shows nothing of the kind, it has no sides here.

Tiles of weights that are laid out by side lie in pairs. Of tiles 2 m and 2 m + 1 the chunks take turns, each on its own
tile's side: 0 or 1, as the number of the tile is even or odd.

Legend: T tiles, C chunks of a tile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops import kernels, nvrtc

log = logging.getLogger(__name__)

CHUNK, PAGE = 4096, 2 << 20  # bytes
LINE = 128
PAIRS = PAGE // (2 * CHUNK)  # pairs of chunks in a page
BITS = range(13, 21)  # of a place in a page, that may tell its chunk's side, beside the one by which chunks differ
PROCESSORS = 1024  # more than any card has
ASKED = 9  # times a multiprocessor is asked, and multiprocessors about a page or a bit
SURE = 0.97  # of random chunks that a mask must explain


@dataclass(frozen=True)
class Sides:
    mask: int  # of the number of a pair in its page: the bits whose parity is the side of its first chunk
    processors: Tensor  # int32 [PROCESSORS]: the side of each multiprocessor

    @property
    def both(self) -> bool:
        """Are there two?"""
        return self.mask != 0


@dataclass(frozen=True)
class Sided:
    """Tiles of weights, laid out by side"""

    lines: Tensor  # uint8 [T C x 32, LINE], from a multiple of PAGE on
    pages: Tensor  # int32: of each page the side of its first chunk
    tiles: int
    size: int  # bytes of a tile
    sides: Sides

    @property
    def chunks(self) -> int:
        """Of a tile"""
        return chunks_of(self.size)

    @property
    def nbytes(self) -> int:
        """That are read: what makes the last chunk of a tile whole is not"""
        return self.tiles * self.size


def none(device: torch.device) -> Sides:
    """Of a card without sides: all is near"""
    return Sides(0, torch.zeros(PROCESSORS, dtype=torch.int32, device=device))


@cache
def sides_of(device: torch.device) -> Sides:
    """Found by asking; the log says what"""
    if not kernels.cpp(device):
        return none(device)
    try:
        found = _found(aligned(PAGE, device))
    except Exception as error:  # whoever cannot ask does without
        log.warning("the sides of the L2 cache could not be asked for: %s", error)
        return none(device)
    if found is None:
        log.info("no sides of the L2 cache were found")
        return none(device)
    log.info("the L2 cache has two sides: bits 0x%x of a pair's number tell them", found.mask)
    return found


def aligned(size: int, device: torch.device) -> Tensor:
    """Memory [size] from a multiple of PAGE on"""
    whole = torch.zeros(size + PAGE, dtype=torch.uint8, device=device)
    first = -whole.data_ptr() % PAGE
    return whole[first : first + size]


def _found(probe: Tensor) -> Sides | None:
    many = kernels.card(probe.device).processors
    near, who = _asked(probe, [i % (CHUNK // LINE) * LINE for i in range(ASKED * many)])
    votes = torch.zeros(PROCESSORS, dtype=torch.int32)
    votes.index_add_(0, who, near.int() * 2 - 1)
    processors = (votes < 0).int()  # side 0: those near the first chunk
    if not 0 < int(processors[who].sum()) < len(who):
        return None
    bits = [CHUNK, *(1 << bit for bit in BITS)]
    other = _sides(probe, bits, processors)
    mask = sum(bit for bit, side in zip(bits, other.tolist(), strict=True) if side)
    if not mask & CHUNK:
        return None
    chunks = torch.randperm(PAGE // CHUNK, generator=torch.Generator().manual_seed(0))[:128]
    offsets = (chunks * CHUNK).tolist()
    right = _sides(probe, offsets, processors) == torch.tensor([(n & mask).bit_count() % 2 for n in offsets])
    if right.float().mean() < SURE:
        return None
    return Sides(mask // (2 * CHUNK), processors.to(probe.device))


def _sides(base: Tensor, offsets: list[int], processors: Tensor) -> Tensor:
    """Of each chunk at such an offset, as several multiprocessors find it -> int32, on the CPU"""
    near, who = _asked(base, [offset for offset in offsets for _ in range(ASKED)])
    votes = (processors.cpu()[who] ^ (~near).int()).view(-1, ASKED)
    return (votes.sum(1) > ASKED // 2).int()


def _asked(base: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """-> is each nearer than the chunk beside it, and to which multiprocessor, both on the CPU"""
    at = torch.tensor(offsets, dtype=torch.int64, device=base.device)
    nearer, who = torch.empty(2, len(offsets), dtype=torch.int32, device=base.device)
    kernel_of().run(min(len(offsets), kernels.card(base.device).processors), 32, base, at, len(offsets), nearer, who)
    return nearer.cpu() > 0, who.long().cpu() % PROCESSORS


@cache
def kernel_of() -> nvrtc.Kernel:
    # With so much shared memory, no two programs are on a multiprocessor.
    return nvrtc.Kernel("sides_cuda_kernel", nvrtc.source("sides.cu"), {"APART": CHUNK}, shared=120 << 10)


# ---- weights -----------------------------------------------------------------------------------------------------


def chunks_of(tile: int) -> int:
    """Of a tile of so many bytes"""
    return -(-tile // CHUNK)


def lie_by_side(tiles: int, tile: int) -> bool:
    """Can tiles of so many bytes? They do in pairs, of which each is in two pages at most"""
    return tiles % 2 == 0 and chunks_of(tile) <= PAIRS


def bytes_of(tiles: int, tile: int) -> int:
    """That tiles of so many bytes take"""
    return tiles * chunks_of(tile) * CHUNK + PAGE


def lay_out(tiles: Tensor, sides: Sides) -> Sided:
    """tiles uint8 [T, bytes] -> the same by side"""
    count, size = tiles.shape
    chunks = chunks_of(size)
    assert lie_by_side(count, size), f"{count} tiles of {size} bytes"
    memory = aligned(count * chunks * CHUNK, tiles.device)
    pages = _pages(memory, sides)
    first = first_sides(count // 2 * chunks, pages, sides)
    pairs = memory.view(count // 2, chunks, 2, CHUNK)
    turned = first.view(count // 2, chunks, 1, 1).bool()
    for at in range(0, count // 2, 64):  # bounds the memory beside them
        some = tiles[2 * at : 2 * (at + 64)]
        padded = F.pad(some, (0, chunks * CHUNK - size)).view(-1, 2, chunks, CHUNK).transpose(1, 2)
        pairs[at : at + 64] = torch.where(turned[at : at + 64], padded.flip(2), padded)
    return Sided(memory.view(-1, LINE), pages, count, size, sides)


def first_sides(pairs: int, pages: Tensor, sides: Sides) -> Tensor:
    """Of each pair of chunks: the side of the first"""
    number = torch.arange(pairs, dtype=torch.int32, device=pages.device)
    bits = number & sides.mask
    for shift in (4, 2, 1):
        bits = bits ^ bits >> shift
    return bits & 1 ^ pages[number // PAIRS]


def laid_back(sided: Sided) -> Tensor:
    """The reverse of `lay_out` -> uint8 [T, bytes]"""
    pairs, chunks = sided.tiles // 2, sided.chunks
    turned = first_sides(pairs * chunks, sided.pages, sided.sides).view(pairs, chunks, 1, 1).bool()
    found = sided.lines.view(pairs, chunks, 2, CHUNK)
    found = torch.where(turned, found.flip(2), found).transpose(1, 2)
    return found.reshape(sided.tiles, -1)[:, : sided.size]


def _pages(memory: Tensor, sides: Sides) -> Tensor:
    many = -(-memory.numel() // PAGE)
    if not sides.both:
        return torch.zeros(many, dtype=torch.int32, device=memory.device)
    return _sides(memory, [page * PAGE for page in range(many)], sides.processors).to(memory.device)
