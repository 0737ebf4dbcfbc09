"""How large a tile of the product kernel is, for which shape: a rule, the results of tuning, and the tuning itself.

Tuning changes speed only: the kernel's sums do not depend on the tile (`ops/product_triton.py`).
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from diffusiongemma.errors import DeviceError

log = logging.getLogger(__name__)

Format = Literal["bf16", "fp8", "int8", "int4"]
_WEIGHT_BITS: dict[Format, int] = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Tile:
    rows: int  # T, tokens
    outputs: int  # BO, rows of the weight
    warps: int
    stages: int  # loads in flight, one step along K each
    registers: int = 0  # that a thread may have; 0: as the compiler likes


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


TUNED: dict[str, Tile] = {}  # by Shape.key(); filled by `tune` or `load`


def format_of(weight: torch.Tensor) -> Format | None:
    formats: dict[torch.dtype, Format] = {
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "fp8",
        torch.int8: "int8",
        torch.int16: "int4",
    }
    return formats.get(weight.dtype)


def step_of(fmt: Format, inputs: int, blocked: bool) -> int:
    """Numbers along K that one turn of the loop takes: a function of format and K alone, because it orders the sums."""
    if fmt == "int4":
        return 64 * min(4, 1 << (max(1, inputs // 64) - 1).bit_length())
    if fmt == "bf16" or blocked or inputs % 128:
        return 64
    return 128


def block_rows(pairs: int, experts: int) -> int:
    """Rows of an expert's block: enough that most experts need one, up to 128."""
    mean = pairs / experts
    return 16 if mean <= 4 else 32 if mean <= 20 else 64 if mean <= 44 else 128


def choose(shape: Shape, limit: int) -> Tile:
    """The tuned tile, else the rule's; `limit`: bytes of shared memory that a program may have."""
    tuned = TUNED.get(shape.key())
    if tuned is not None and shared_bytes(shape, tuned) <= limit:
        return tuned
    return next((tile for tile in candidates(shape) if shared_bytes(shape, tile) <= limit), candidates(shape)[-1])


def shared_bytes(shape: Shape, tile: Tile) -> int:
    """About what a tile takes: `stages` steps of weight and x. 4-bit weights leave for registers a step earlier."""
    step = step_of(shape.format, shape.inputs, False)
    weight = tile.outputs * (1 + shape.gated) * step * _WEIGHT_BITS[shape.format] // 8
    x = tile.rows * step * (1 if shape.format == "fp8" else 2)
    return tile.stages * x + (tile.stages - (shape.format == "int4")) * weight + 4096


def candidates(shape: Shape) -> list[Tile]:
    """Tiles worth trying, the rule's choice first; the last one fits any card."""
    found = []
    for rows, outputs in _sizes(shape):
        for warps in (4, 8) if rows <= 32 or outputs == 64 or shape.format == "fp8" else (8, 4):
            sums = rows * outputs * (1 + shape.gated) // (32 * warps)  # that one thread holds
            if sums <= 128 and (warps == 4 or outputs > 64):
                registers = 128 if _unpacking(shape) and outputs == 32 * warps else 0
                found += [Tile(rows, outputs, warps, stages, registers) for stages in _stages(shape, rows, outputs)]
    return [*found, Tile(min(tile.rows for tile in found), 64, 4, 2)]


def _unpacking(shape: Shape) -> bool:
    """Whether unpacking 4 bits, not memory, may be the limit: then many warps must share a multiprocessor."""
    return shape.format == "int4" and shape.experts > 0 and shape.rows == 32


def _sizes(shape: Shape) -> list[tuple[int, int]]:
    """Rows and outputs of a tile, the best guess first."""
    if shape.experts:
        # The second product is short in K, so that larger tiles pay for starting up. With many rows they always pay,
        # but for fp8's second product, which holds two sums.
        large = not shape.gated if shape.rows <= 64 else shape.gated or shape.format != "fp8"
        return [(shape.rows, outputs) for outputs in ((128, 64) if large else (64, 128))]
    fitting = max(16, min(128, 1 << (shape.rows - 1).bit_length()))
    if fitting <= 32:  # the weight is all there is to read: the more programs read, the better
        return [(fitting, 64), (fitting, 128)]
    sizes = [(rows, outputs) for rows in (128, 64) if rows <= fitting for outputs in (128, 64)]
    return sorted(sizes, key=lambda size: _badness(shape, *size))


def _badness(shape: Shape, rows: int, outputs: int) -> float:
    """About the time of a dense product: waves over the card's multiprocessors; small tiles read more."""
    programs = -(-shape.rows // rows) * -(-shape.outputs // outputs)
    return -(-programs // 132) * (rows * outputs + 2048 * (rows != 128) + 2048 * (outputs != 128))


def _stages(shape: Shape, rows: int, outputs: int) -> list[int]:
    """As many as let two programs share a multiprocessor (four where unpacking is the limit), or one of many rows fill
    it; then one less, one more."""
    budget = (56 if _unpacking(shape) else 112 if rows <= 64 else 216) << 10
    fitting = [n for n in range(2, 9) if shared_bytes(shape, Tile(rows, outputs, 4, n)) <= budget]
    deep = fitting[-1] if fitting else 2
    return [n for n in (deep, deep - 1, deep + 1, deep - 2) if n >= 2]


def tune(shape: Shape, call: Callable[[Tile], object], limit: int, tiles: Iterable[Tile] | None = None) -> Tile:
    """Times every candidate on the device (`call` runs the product once) and keeps the fastest in `TUNED`."""
    times: dict[Tile, float] = {}
    for tile in tiles if tiles is not None else candidates(shape):
        if shared_bytes(shape, tile) > limit:
            continue
        try:
            times[tile] = _milliseconds(partial(call, tile))
        except Exception as error:
            if "CUDA error" in str(error):  # not the tile's fault alone: nothing works after it
                raise
            log.info("%s: %s cannot be used: %s", shape.key(), tile, error)
    if not times:
        raise DeviceError(f"no tile works for {shape.key()}")
    best = min(times, key=lambda tile: times[tile])
    TUNED[shape.key()] = best
    return best


def _milliseconds(call: Callable[[], object], rounds: int = 7) -> float:
    call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in marks))


def save(file: Path) -> None:
    file.write_text(json.dumps({key: asdict(tile) for key, tile in sorted(TUNED.items())}, indent=1))


def load(file: Path) -> None:
    TUNED.update({key: Tile(**tile) for key, tile in json.loads(file.read_text()).items()})
