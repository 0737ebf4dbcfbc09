"""Cache rows that lie in one piece of memory, so that kernels find any of them by a number.

A recorded CUDA graph reads fixed addresses. Here those are two arenas, one of keys and one of values; where a row
begins in each layer is a small tensor that the graph reads on the device. A row is one run of the arena as long as it
may ever get, its layers one after another, each [S, K, Dh]: the numbers of a token side by side, so that rows of any
length can follow each other. A new row takes the first gap between those that live that is large enough; where none
is, some of them move together. Nobody gives a row back: it is free when nobody holds it.

Legend: R rows, K key/value heads, S slots, Dh head size, a unit: the numbers by which the start of a layer counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CacheError
from diffusiongemma.model.cache import CacheRow, Layers
from diffusiongemma.ops.attention_cached import Prefix

MOVE = 1 << 24  # numbers that move at once
REACH = 2048  # tokens; the next is four times as much
FAR = 8192  # from here on twice as much: what attention needs in memory grows with it


class CachePool:
    def __init__(
        self, config: ModelConfig, max_bytes: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.ring = max(config.sliding_window - 1, config.canvas_window)
        self._widths = [math.prod(config.layer_heads(layer)) for layer in range(config.num_hidden_layers)]
        self.unit = math.gcd(*self._widths)
        self.units = max_bytes // (2 * dtype.itemsize * self.unit)
        # The torch twin indexes rows like any tensor, so all that a view may name must be there.
        spare = 0 if self.device.type == "cuda" else self.units
        # Zeros, not what memory held before: a kernel may read (and then weigh with 0) what was never written.
        self._keys = torch.zeros((self.units + spare) * self.unit, dtype=dtype, device=self.device)
        self._values = torch.zeros_like(self._keys)
        self._rows: weakref.WeakSet[PoolRow] = weakref.WeakSet()
        self.moves = 0  # how often rows have moved: who keeps offsets asks for them again after that
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and slots

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def new_row(self, max_length: int) -> PoolRow:
        size = self.size_of(max_length)
        living = sorted(self._rows, key=lambda row: row.start)
        free = self.units - sum(row.size for row in living)
        if free < size:
            left = 2 * free * self.unit * self.dtype.itemsize
            raise CacheError(f"a row of {max_length} tokens does not fit: {left} bytes of the cache are free")
        start = self._find_gap(living, size)
        row = PoolRow(self, self._make_gap(living, size) if start is None else start, max_length)
        self._rows.add(row)
        return row

    def size_of(self, max_length: int) -> int:
        """Units that a row of this length takes in either arena."""
        return sum(self._layer_units(layer, max_length) for layer in range(self.config.num_hidden_layers))

    def offsets(self, rows: Sequence[PoolRow]) -> Tensor:
        """-> [layers, R] int32, on the CPU: where each layer of these rows begins, as `prefix` wants it"""
        return torch.tensor([row.starts for row in rows], dtype=torch.int32).t().contiguous()

    def prefix(self, layer: int, row: Tensor, length: Tensor, reach: int) -> Prefix:
        """row [B] of `offsets`, length [B] int32 -> what attention reads in this layer, and where new tokens go

        `reach`: no row gets longer than that. Kernels make room for as much, so it should not be far more than needed.
        """
        slots = self.ring if self.config.is_sliding(layer) else reach
        if (layer, slots) not in self._views:
            self._views[layer, slots] = self._view(self._keys, layer, slots), self._view(self._values, layer, slots)
        return Prefix(*self._views[layer, slots], row, length)

    def reach_for(self, length: int) -> int:
        """What to say as `reach` for rows of this length: one of few numbers, for each is a recording of its own."""
        reach = REACH
        while reach < length:
            reach *= 4 if reach < FAR else 2
        return reach

    def layer(self, layer: int, start: int, slots: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer that begins at this unit, [K, S, Dh] each"""
        heads, size = self.config.layer_heads(layer)
        first, count = start * self.unit, slots * heads * size
        keys, values = (arena[first : first + count].view(slots, heads, size) for arena in (self._keys, self._values))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def run(self, layer: int, start: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """The numbers in some slots of a layer that begins at this unit, [count K Dh] each"""
        width = self._widths[layer]
        first = start * self.unit + slot * width
        return self._keys[first : first + count * width], self._values[first : first + count * width]

    def starts(self, start: int, max_length: int) -> list[int]:
        """Where each layer of a row begins, counted in units."""
        found = []
        for layer in range(self.config.num_hidden_layers):
            found.append(start)
            start += self._layer_units(layer, max_length)
        return found

    def _layer_units(self, layer: int, max_length: int) -> int:
        slots = min(max_length, self.ring) if self.config.is_sliding(layer) else max_length
        return slots * self._widths[layer] // self.unit

    def _view(self, arena: Tensor, layer: int, slots: int) -> Tensor:
        """An arena as attention sees it: [R, K, S, Dh], a row beginning at every unit."""
        heads, size = self.config.layer_heads(layer)
        width = self._widths[layer]
        if arena.is_cuda:
            return _borrowed(arena, (self.units, heads, slots, size), (self.unit, size, width, 1))
        slots = min(slots, self.units * self.unit // width)
        return arena.as_strided((self.units + 1, heads, slots, size), (self.unit, size, width, 1))

    def _find_gap(self, living: Sequence[PoolRow], size: int) -> int | None:
        """Where the first gap of so many units begins, if there is one. `living`: all rows, by where they begin."""
        end = 0
        for row in living:
            if row.start - end >= size:
                return end
            end = row.start + row.size
        return end if self.units - end >= size else None

    def _make_gap(self, living: Sequence[PoolRow], size: int) -> int:
        """Move rows to the front, in order, until so many units are free behind them: no more than that takes."""
        end = 0
        self.moves += 1
        for row in living:
            if row.start - end >= size:
                break
            if row.start != end:
                for arena in (self._keys, self._values):
                    self._move(arena, row.start, end, row.size)
                row.settle(end)
            end += row.size
        return end

    def _move(self, arena: Tensor, source: int, target: int, size: int) -> None:
        # Forwards and in pieces, each through a copy: the two runs may overlap.
        for done in range(0, size * self.unit, MOVE):
            count = min(MOVE, size * self.unit - done)
            piece = arena[source * self.unit + done :][:count].clone()
            arena[target * self.unit + done :][:count] = piece


class PoolRow(CacheRow):
    """A row of a pool; for everything else a row like any other."""

    def __init__(self, pool: CachePool, start: int, max_length: int) -> None:
        self.pool = pool
        self.size = pool.size_of(max_length)  # units
        super().__init__(pool.config, max_length, pool.dtype, pool.device)
        self.settle(start)

    def settle(self, start: int) -> None:
        """Its memory begins at this unit now."""
        self.start, self.starts = start, self.pool.starts(start, self.max_length)
        self._layers = None

    @property
    def nbytes(self) -> int:
        return 2 * self.size * self.pool.unit * self.dtype.itemsize

    def _allocate(self) -> None:
        """Its memory is the pool's. Kernels know it by a number, so views of it are made when somebody asks."""

    def _grow(self, layer: int, needed: int) -> None:
        """It has all the room that it may ever need."""

    def _slots(self, layer: int) -> int:
        return self.ring if self.config.is_sliding(layer) else self.max_length

    def _run(self, layer: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens lie side by side: one piece of either arena, without any views of the row"""
        return self.pool.run(layer, self.starts[layer], start, count)

    def _made(self) -> Layers:
        if self._layers is None:
            keys, values = list[Tensor](), list[Tensor]()
            for layer, start in enumerate(self.starts):
                slots = self._slots(layer)
                for views, view in zip((keys, values), self.pool.layer(layer, start, slots), strict=True):
                    views.append(view)
            self._layers = keys, values
        return self._layers

    def _new(self, max_length: int) -> CacheRow:
        return self.pool.new_row(max_length)


class _Lent:
    """Memory as other libraries lend it: torch takes shape and strides as they are said."""

    def __init__(self, owner: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.owner = owner
        size = owner.element_size()
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": f"<i{size}",
            "data": (owner.data_ptr(), False),
            "strides": tuple(size * stride for stride in strides),
            "version": 2,
        }


def _borrowed(arena: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """As `as_strided`, which refuses a view that could name more than there is: that of a row near the arena's end,
    with slots that it does not have. Kernels never touch those."""
    return torch.as_tensor(_Lent(arena, shape, strides), device=arena.device).view(arena.dtype)
