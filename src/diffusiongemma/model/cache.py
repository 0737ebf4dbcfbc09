"""The K/V cache: what the network remembers of the prefix.

A `CacheRow` is one sequence. Its full layers grow with it; its sliding layers are rings that keep the window and
nothing more. A `KVCache` is a list of rows that go through the network together; rows are independent, so rows of
several caches can form a batch for one pass (`KVCache(rows)`) and part again.

Shapes: K key/value heads, S slots, Dh head size. Token at position p lies in slot p of a full layer and in slot
p mod S of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CacheError

GROWTH = 256  # a full layer starts with this many slots and doubles
Layers = tuple[list[Tensor], list[Tensor]]  # keys and values


class Aside(NamedTuple):
    """What the rings of a row held where tokens have been written since."""

    length: int  # of the row then
    end: int  # it has no more tokens now than this
    deepest: int
    numbers: list[Tensor]


class CacheRow:
    """One sequence's keys and values in every layer. `length` counts the tokens it has seen."""

    def __init__(
        self,
        config: ModelConfig,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rollback: int = 0,
    ) -> None:
        """`rollback`: extra slots in the rings, so that that many tokens can be truncated after the window slid."""
        if not 1 <= max_length <= config.max_position_embeddings:
            raise CacheError(f"max_length must be from 1 to {config.max_position_embeddings}, got {max_length}")
        if rollback < 0:
            raise CacheError(f"rollback must be at least 0, got {rollback}")
        self.config, self.max_length, self.rollback = config, max_length, rollback
        self.length = 0
        self._deepest = 0  # the longest this row has been since its rings were written
        self._aside: Aside | None = None
        self.ring = min(max_length, max(config.sliding_window - 1, config.canvas_window) + rollback)
        self.dtype, self.device = dtype, torch.device(device)
        self._layers = self._allocate()

    @property
    def keys(self) -> list[Tensor]:
        """A layer each: [K, S, Dh]"""
        return self._made()[0]

    @property
    def values(self) -> list[Tensor]:
        return self._made()[1]

    def _made(self) -> Layers:
        assert self._layers is not None
        return self._layers

    def _allocate(self) -> Layers | None:
        keys, values = list[Tensor](), list[Tensor]()
        for layer in range(self.config.num_hidden_layers):
            heads, head_dim = self.config.layer_heads(layer)
            slots = self.ring if self.config.is_sliding(layer) else min(self.max_length, GROWTH)
            for tensors in (keys, values):
                tensors.append(torch.empty(heads, slots, head_dim, dtype=self.dtype, device=self.device))
        return keys, values

    def _new(self, max_length: int) -> CacheRow:
        """An empty row of the same kind."""
        return CacheRow(self.config, max_length, self.dtype, self.device, self.rollback)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def last(self, layer: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """The last `count` (or fewer) cached tokens in order, as one or two views of keys and of values."""
        return self._between(layer, self.length - min(count, self.length), self.length)

    def _slots(self, layer: int) -> int:
        return self.keys[layer].shape[1]

    def _run(self, layer: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values in so many slots from this one on, in whatever shape copies them fastest"""
        return self.keys[layer][:, start : start + count], self.values[layer][:, start : start + count]

    def _between(self, layer: int, first: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
        """The tokens at positions first … end - 1, as one or two views."""
        slots, keys, values = self._slots(layer), self.keys[layer], self.values[layer]
        spans = [slice(start, start + count) for start, _, count in _runs(first, end, slots, slots)]
        return [keys[:, span] for span in spans], [values[:, span] for span in spans]

    def check_room(self, count: int) -> None:
        if self.length + count > self.max_length:
            raise CacheError(
                f"the cache holds {self.length} of at most {self.max_length} tokens, {count} more do not fit: "
                "make it with a larger max_length"
            )

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the tokens after the current ones; k, v [K, T, Dh]. `advance` makes them count."""
        new = k.shape[1]
        if self.config.is_sliding(layer):
            slots = self.keys[layer].shape[1]
            kept = min(new, slots)
            at = torch.arange(self.length + new - kept, self.length + new, device=k.device) % slots
            self.keys[layer].index_copy_(1, at, k[:, new - kept :].to(self.keys[layer].dtype))
            self.values[layer].index_copy_(1, at, v[:, new - kept :].to(self.values[layer].dtype))
        else:
            self._grow(layer, self.length + new)
            self.keys[layer][:, self.length : self.length + new] = k
            self.values[layer][:, self.length : self.length + new] = v

    def _grow(self, layer: int, needed: int) -> None:
        """Room for so many tokens; a ring has what it needs."""
        slots = self._slots(layer)
        if needed <= slots or self.config.is_sliding(layer):
            return
        for store in (self.keys, self.values):
            old = store[layer]
            grown = old.new_empty(old.shape[0], min(self.max_length, max(needed, 2 * slots)), old.shape[2])
            grown[:, : self.length] = old[:, : self.length]
            store[layer] = grown

    def advance(self, count: int) -> None:
        self.length += count
        self._deepest = max(self._deepest, self.length)

    def can_truncate(self, length: int) -> bool:
        """Are the tokens that a row of this length would look back on still in the rings?"""
        if not 0 <= length <= self.length:
            return False
        oldest_needed = max(0, length - max(self.config.sliding_window - 1, self.config.canvas_window))
        return length == 0 or oldest_needed >= max(0, self._deepest - self.ring)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot truncate a cache of {self.length} tokens to {length}")
        if length == self.length:
            return
        aside, self._aside = self._aside, None
        if aside is not None and length == aside.length and self.length <= aside.end:
            self._bring_back(aside)
            return
        if not self.can_truncate(length):
            raise CacheError(
                f"cannot truncate to {length} tokens: the sliding layers, once at {self._deepest}, no longer hold "
                f"the window before it; make the cache with rollback >= {self._deepest - length}, or encode again"
            )
        self.length = length
        if length == 0:
            self._deepest = 0

    def put_aside(self, count: int) -> None:
        """Keep what the next `count` tokens will overwrite in the rings: they can then be truncated, whatever the
        window, until `drop_aside`."""
        lost = self._overwritten(self.length, self.length + count)
        kept = [torch.empty_like(run, memory_format=torch.contiguous_format) for run in lost]
        if lost:
            torch._foreach_copy_(kept, lost)
        self._aside = Aside(self.length, self.length + count, self._deepest, kept)

    def drop_aside(self) -> None:
        self._aside = None

    def _bring_back(self, aside: Aside) -> None:
        if aside.numbers:
            torch._foreach_copy_(self._overwritten(aside.length, aside.end), aside.numbers)
        self.length, self._deepest = aside.length, aside.deepest

    def _overwritten(self, length: int, end: int) -> list[Tensor]:
        """Where the tokens at positions length … end - 1 lie, or will lie, in the rings"""
        found = list[Tensor]()
        for layer in range(self.config.num_hidden_layers):
            if self.config.is_sliding(layer):
                slots = self._slots(layer)
                for start, _, count in _runs(max(length, end - slots), end, slots, slots):
                    found += self._run(layer, start, count)
        return found

    def fork(self, max_length: int | None = None, length: int | None = None) -> CacheRow:
        """An independent copy of the first `length` tokens (default: all), with room for `max_length` in all."""
        length = self.length if length is None else length
        limit = self.max_length if max_length is None else max_length
        if not self.can_truncate(length):
            raise CacheError(f"cannot fork at {length} of {self.length} tokens: the sliding layers no longer hold them")
        if limit < length:
            raise CacheError(f"a fork with room for {limit} tokens cannot hold {length}")
        twin = self._new(limit)
        oldest = max(0, self._deepest - self.ring)  # what the rings still hold begins here
        here, there = list[Tensor](), list[Tensor]()
        for layer in range(self.config.num_hidden_layers):
            first = max(oldest, length - twin.ring) if self.config.is_sliding(layer) else 0
            twin._grow(layer, length)
            for start, into, count in _runs(first, length, self._slots(layer), twin._slots(layer)):
                here += self._run(layer, start, count)
                there += twin._run(layer, into, count)
        if here:  # all layers at once: on a card that is one launch, not hundreds
            torch._foreach_copy_(there, here)
        twin.length = length
        oldest = max(oldest, length - twin.ring)
        twin._deepest = max(length, oldest + twin.ring) if oldest else length
        return twin

    @staticmethod
    @lru_cache(maxsize=256)  # a scheduler asks for all its rows, again and again
    def bytes_for(config: ModelConfig, max_length: int, dtype: torch.dtype, rollback: int = 0) -> int:
        """What a row of this size takes when it is full."""
        ring = min(max_length, max(config.sliding_window - 1, config.canvas_window) + rollback)
        numbers = 0
        for layer in range(config.num_hidden_layers):
            heads, head_dim = config.layer_heads(layer)
            numbers += 2 * heads * head_dim * (ring if config.is_sliding(layer) else max_length)
        return numbers * dtype.itemsize


def _runs(first: int, end: int, slots: int, others: int) -> Iterator[tuple[int, int, int]]:
    """The tokens at positions first … end - 1, cut where one of two rings of so many slots begins anew: where each run
    lies in the one and in the other, and how long it is"""
    while first < end:
        start, into = first % slots, first % others
        count = min(end - first, slots - start, others - into)
        yield start, into, count
        first += count


class KVCache:
    """The rows of one batch. `model.new_cache()` makes it; `model.encode()` fills it; `model.denoise()` reads it."""

    def __init__(self, rows: Sequence[CacheRow]) -> None:
        if not rows:
            raise CacheError("a cache needs at least one row")
        self.rows = list(rows)

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def truncate(self, length: int) -> None:
        for row in self.rows:
            row.truncate(length)

    def fork(self, max_length: int | None = None) -> KVCache:
        return KVCache([row.fork(max_length) for row in self.rows])
