"""How large a tile of the product kernel is, for which shape: the results of tuning, a rule for the rest, and tuning.

Tuning changes speed only: the kernel's sums do not depend on the tile (`ops/product_triton.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from diffusiongemma.errors import DeviceError
from diffusiongemma.ops.kernels import NO_CARD

log = logging.getLogger(__name__)

Format = Literal["bf16", "fp8", "int8", "pairs"]  # pairs: of 4-bit weights, a byte each (`ops/int4.py`)
LARGE = NO_CARD.shared  # bytes of shared memory that a program may have on Hopper
MOST_SUMS = 80  # of a thread on cards with less
_WEIGHT_BITS: dict[Format, int] = {"bf16": 16, "fp8": 8, "int8": 8, "pairs": 4}


@dataclass(frozen=True)
class Tile:
    rows: int  # T, tokens
    outputs: int  # BO, rows of the weight
    warps: int
    stages: int  # loads in flight, one step along K each
    registers: int = 0  # that a thread may have; 0: as the compiler likes
    half: bool = False  # an expert with few rows takes a tile of half as many
    turns: int = 1  # groups of 4-bit weights that one turn of the loop takes, if they divide
    more: int = 0  # rows beyond T that an expert's block may have, as a small product of their own beside the other


@dataclass(frozen=True)
class Shape:
    """What a choice depends on. `experts` 0: a dense product; `rows` are then all rows, else those of a block."""

    format: Format
    inputs: int  # K
    outputs: int  # O, the width after GeGLU where gated
    experts: int
    gated: bool
    rows: int

    def key(self) -> str:
        kind = ("gated" if self.gated else "plain") + (f" × {self.experts}" if self.experts else "")
        return f"{self.format} {kind} {self.inputs} -> {self.outputs}, {self.rows} rows"


def _measured() -> dict[str, Tile]:
    """The experts of the 26B-A4B on an H200: `scripts/tune_experts.py`, microseconds beside them."""
    up, down = "gated × 128 2816 -> 704", "plain × 128 704 -> 2816"
    return {
        f"bf16 {up}, 16 rows": Tile(16, 64, 4, 6),  # 20.4 (one token)
        f"bf16 {up}, 32 rows": Tile(32, 64, 4, 5),  # 246.0 (256 tokens)
        f"bf16 {down}, 16 rows": Tile(16, 64, 4, 6),  # 11.2
        f"bf16 {down}, 32 rows": Tile(32, 128, 4, 5),  # 129.4
        f"fp8 {up}, 16 rows": Tile(16, 64, 4, 6),  # 13.1
        f"fp8 {up}, 32 rows": Tile(32, 64, 4, 5),  # 128.5
        f"fp8 {down}, 16 rows": Tile(16, 64, 4, 6),  # 7.4
        f"fp8 {down}, 32 rows": Tile(32, 64, 4, 6),  # 72.1
        f"fp8 {up}, 64 rows": Tile(64, 64, 4, 3, half=True),  # 207.9 (2,048 tokens, as all below in fp8)
        f"fp8 {up}, 128 rows": Tile(128, 64, 4, 3, half=True),  # 189.4
        f"fp8 {up}, 160 rows": Tile(128, 64, 4, 3, more=32),  # 171.6
        f"fp8 {down}, 64 rows": Tile(64, 128, 4, 6, half=True),  # 153.8
        f"fp8 {down}, 128 rows": Tile(128, 128, 4, 6, half=True),  # 136.0
        f"fp8 {down}, 160 rows": Tile(128, 128, 4, 4, more=32),  # 123.1
        f"pairs {up}, 16 rows": Tile(16, 64, 4, 4, turns=2),  # 14.0 (an older kernel)
        f"pairs {up}, 32 rows": Tile(32, 64, 4, 4, half=True, turns=2),  # 70.6
        f"pairs {up}, 64 rows": Tile(64, 64, 4, 4, half=True, turns=2),  # 100.5 (512 tokens)
        f"pairs {down}, 16 rows": Tile(16, 128, 4, 6),  # 5.6 (an older kernel)
        f"pairs {down}, 32 rows": Tile(32, 128, 4, 5, half=True),  # 42.7
        f"pairs {down}, 64 rows": Tile(64, 128, 4, 5, half=True),  # 65.1 (512 tokens)
    }


# Dense products beside experts that are streamed (`experts_gluon.py`): 74 KB and 128 threads fit there.
SLIM, SLIM_GATED = Tile(64, 128, 4, 3), Tile(64, 64, 4, 3)

TUNED: dict[str, Tile] = _measured()  # by Shape.key(); `tune` and `load` add to it


def format_of(weight: torch.Tensor) -> Format | None:
    formats: dict[torch.dtype, Format] = {
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "fp8",
        torch.int8: "int8",
        torch.uint8: "pairs",
    }
    return formats.get(weight.dtype)


def step_of(fmt: Format, inputs: int) -> int:
    """Numbers along K that one turn of the loop takes: a function of format and K alone, because it orders the sums."""
    return 64 if fmt in ("bf16", "pairs") or inputs % 128 else 128


def block_rows(pairs: int, experts: int, fmt: Format | None = None) -> int:
    """Rows of an expert's block: enough that nearly all experts need one, for a second block reads the weights once
    more. Experts that may be streamed have 64 for longer, because those of more rows are not, or leave no room beside
    them. In fp8 a tile of 128 rows may have a quarter more beside it (measured there only). 4-bit weights, whose sums
    take twice the registers, have at most 64."""
    mean = pairs / experts
    if mean <= (50 if fmt in ("fp8", "bf16") else 44) or fmt == "pairs":
        return 16 if mean <= 4 else 32 if mean <= 20 else 64
    return 160 if mean > 100 and fmt == "fp8" else 128


def split(rows: int) -> tuple[int, int]:
    """Rows of a block -> T, a power of two, and how many more there are beside it"""
    whole = 1 << (rows.bit_length() - 1)
    return whole, rows - whole


def choose(shape: Shape, limit: int) -> Tile:
    """The tuned tile, else the rule's; `limit`: bytes of shared memory that a program may have."""
    tuned = TUNED.get(shape.key())
    tried = [*([] if tuned is None else [tuned]), *candidates(shape, limit)]
    return next((tile for tile in tried if fits(shape, tile, limit)), tried[-1])


def fits(shape: Shape, tile: Tile, limit: int) -> bool:
    """Into shared memory, and on cards with less of it than Hopper into registers: sums share those with the numbers
    that are multiplied there."""
    return shared_bytes(shape, tile, limit) <= limit and (limit >= LARGE or _sums(shape, tile) <= MOST_SUMS)


def _sums(shape: Shape, tile: Tile) -> int:
    """That one thread holds"""
    paired = shape.gated or shape.format == "pairs"
    outputs = tile.outputs // (2 if shape.format == "pairs" and not shape.gated else 1)
    return (tile.rows + tile.more) * outputs * (1 + paired) // (32 * tile.warps)


def shared_bytes(shape: Shape, tile: Tile, limit: int = LARGE) -> int:
    """About what a tile takes: `stages` steps of weight and x. On cards with a lower limit tensor cores read registers,
    and a step is not held until its product is made: one less."""
    step = step_of(shape.format, shape.inputs) * (tile.turns if shape.format == "pairs" else 1)
    weight = tile.outputs * (1 + shape.gated) * step * _WEIGHT_BITS[shape.format] // 8
    x = (tile.rows + tile.more) * step * (1 if shape.format in ("fp8", "pairs") else 2)
    return (tile.stages - (limit < LARGE)) * (x + weight) + 4096


def candidates(shape: Shape, limit: int = LARGE) -> list[Tile]:
    """Tiles worth trying, the rule's choice first; the last one fits any card. `limit`: as in `choose`"""
    if shape.format == "pairs":
        return _pair_tiles(shape)
    more = split(shape.rows)[1] if shape.experts else 0
    found = []
    for rows, outputs in _sizes(shape):
        for warps in (4, 8) if rows <= 32 or outputs == 64 or shape.format == "fp8" else (8, 4):
            sums = _sums(shape, Tile(rows, outputs, warps, 2, more=more))
            if sums <= (160 if more and warps == 8 else 128) and (warps == 4 or outputs > 64 or rows > 64):
                tiles = [Tile(rows, outputs, warps, stages, more=more) for stages in range(2, 10)]
                found += _deep(shape, tiles, limit)
    return [*found, Tile(min(tile.rows for tile in found), 64, 8 if more else 4, 2, more=more)]


def _pair_tiles(shape: Shape) -> list[Tile]:
    """Outputs are given by the packing. As measured for the experts of the 26B: two groups a turn of gates and ups, and
    half tiles where an expert may have few of a block's rows."""
    rows = shape.rows if shape.experts else max(16, min(64, 1 << (shape.rows - 1).bit_length()))
    warps = 4 if rows <= 64 else 8
    half, turns = bool(shape.experts) and rows >= 32, 2 if shape.gated else 1
    found = [Tile(rows, 64 if shape.gated else 128, warps, stages, 0, half, turns) for stages in (4, 5, 6, 3, 8)]
    return [*found, Tile(rows, 64 if shape.gated else 128, warps, 2)]


def _sizes(shape: Shape) -> list[tuple[int, int]]:
    """Rows and outputs of a tile, the best guess first."""
    if shape.experts:
        # The second product is short in K, so that larger tiles pay for starting up. With many rows they always pay:
        # what limits is the way from the L2 cache, and each tile reads all rows again.
        large = shape.rows > 64 or not shape.gated
        return [(split(shape.rows)[0], outputs) for outputs in ((128, 64) if large else (64, 128))]
    fitting = max(16, min(128, 1 << (shape.rows - 1).bit_length()))
    if fitting <= 32:  # the weight is all there is to read: the more programs read, the better
        return [(fitting, 64), (fitting, 128)]
    sizes = [(rows, outputs) for rows in (128, 64) if rows <= fitting for outputs in (128, 64)]
    return sorted(sizes, key=lambda size: _badness(shape, *size))


def _badness(shape: Shape, rows: int, outputs: int) -> float:
    """About the time of a dense product: waves over the card's multiprocessors; small tiles read more."""
    programs = -(-shape.rows // rows) * -(-shape.outputs // outputs)
    return -(-programs // 132) * (rows * outputs + 2048 * (rows != 128) + 2048 * (outputs != 128))


def _deep(shape: Shape, tiles: list[Tile], limit: int) -> list[Tile]:
    """Of tiles with 2, 3, … stages those with as many as let two programs share a multiprocessor, or a large one fill
    it; then one less, one more, two less."""
    first = tiles[0]
    alone = first.rows + first.more > 64 and (first.warps == 8 or not shape.experts)
    budget = limit - (11 << 10) if alone else (limit - (3 << 10)) // 2
    deep = sum(shared_bytes(shape, tile, limit) <= budget for tile in tiles[:-1]) or 1
    return [tiles[n - 1] for n in (deep, deep - 1, deep + 1, deep - 2) if n >= 1]


def tune(shape: Shape, measure: Callable[[Tile], float], limit: int, tiles: Iterable[Tile] | None = None) -> Tile:
    """Times every candidate (`measure` runs the product with it) and keeps the fastest in `TUNED`."""
    times: dict[Tile, float] = {}
    for tile in tiles if tiles is not None else candidates(shape, limit):
        if not fits(shape, tile, limit):
            continue
        try:
            times[tile] = measure(tile)
        except Exception as error:
            if "CUDA error" in str(error):  # not the tile's fault alone: nothing works after it
                raise
            log.info("%s: %s cannot be used: %s", shape.key(), tile, error)
    if not times:
        raise DeviceError(f"no tile works for {shape.key()}")
    best = min(times, key=lambda tile: times[tile])
    TUNED[shape.key()] = best
    return best


def save(file: Path) -> None:
    file.write_text(json.dumps({key: asdict(tile) for key, tile in sorted(TUNED.items())}, indent=1))


def load(file: Path) -> None:
    TUNED.update({key: Tile(**tile) for key, tile in json.loads(file.read_text()).items()})
