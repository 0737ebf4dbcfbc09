"""Encoding on the device: prompts and committed blocks, packed, through a recorded pass of a few fixed sizes.

What is shorter than the recorded size is filled up with tokens that belong to no row: they are computed, and nothing is
kept of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.shelf import Shelf, Work
from diffusiongemma.model.cache import CacheRow
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops.attention_cached import New

LEAST = 64  # tokens of the smallest recorded pass; each further one has twice as many
MOST = (256, 1024)  # tokens that each row of a pass may have: those of a canvas, of a short prompt; else all there are


class Kind(NamedTuple):
    """What a pass is recorded for. Nothing of it shows in a row: it says what is launched, not what is computed."""

    rows: int
    size: int  # tokens of all rows
    most: int  # … of any of them. Each could have all: of eight rows, seven in eight programs would find nothing
    reach: int  # `CachePool.reach_for` the longest cache row
    hidden: bool  # whether somebody reads hidden states: else the last layer ends at its keys and values

    def __str__(self) -> str:
        what = "encoding" if self.hidden else "remembering"
        return f"{what} {self.size} tokens, a row {self.most} at most, up to {self.reach}"


class Parcel(NamedTuple):
    """Tokens that are to be encoded."""

    tokens: Tensor  # [N], on CPU or device: of all rows, one after another
    rows: Sequence[CacheRow]
    counts: Sequence[int]


class Slate:
    def __init__(self, network: FusedNetwork, recorder: Recorder, rows: int, tokens: int) -> None:
        """For at most so many rows and tokens in one pass."""
        config, device = network.config, network.device
        self.network, self.recorder, self.most_rows, self.most_tokens = network, recorder, rows, tokens
        room = self.size_for(tokens)
        self.tokens = torch.zeros(room, dtype=torch.int64, device=device)
        self.positions = torch.zeros(room, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(config.num_hidden_layers, rows, dtype=torch.int32, device=device)
        self.length = torch.zeros(rows, dtype=torch.int32, device=device)
        self.begin = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(room, config.hidden_size, dtype=network.dtype, device=device)
        self._passes = Shelf[Kind](recorder.shelves)

    def size_for(self, tokens: int) -> int:
        return max(LEAST, 1 << (tokens - 1).bit_length())

    def encode(self, tokens: Tensor, rows: Sequence[CacheRow], counts: Sequence[int]) -> Tensor:
        """tokens [N], on CPU or device -> hidden [N, D], overwritten by the next pass; the rows grow by them"""
        self._pass(Parcel(tokens, rows, counts), hidden=True)
        return self.hidden[: tokens.shape[0]]

    def remember(self, tokens: Tensor, rows: Sequence[CacheRow], counts: Sequence[int]) -> None:
        """The same without hidden states"""
        self._pass(Parcel(tokens, rows, counts), hidden=False)

    def _pass(self, parcel: Parcel, hidden: bool) -> None:
        kind = self.kind(parcel, hidden)
        work = self.recorded(kind)
        self.put(parcel, kind)
        work()

    def kind(self, parcel: Parcel, hidden: bool = False) -> Kind:
        """The pass that these tokens need."""
        _, rows, counts = parcel
        # One row is a case of its own: a pass for many looks for work in each of them.
        lines, size = 1 if len(rows) == 1 else self.most_rows, self.size_for(sum(counts))
        most = size if lines == 1 else next((most for most in MOST if max(counts) <= most), size)
        longest = max(row.length + count for row, count in zip(rows, counts, strict=True))
        return Kind(lines, size, min(size, most), self.network.pool.reach_for(longest), hidden)

    def put(self, parcel: Parcel, kind: Kind) -> None:
        """What the next pass of this kind encodes, and where; the rows grow by it."""
        tokens, rows, counts = parcel
        pooled = [row for row in rows if isinstance(row, PoolRow)]
        assert len(pooled) == len(rows) <= kind.rows
        total, unused = tokens.shape[0], [0] * (kind.rows - len(rows))
        at = [torch.arange(row.length, row.length + n, dtype=torch.int32) for row, n in zip(rows, counts, strict=True)]
        begin = torch.tensor([*accumulate([0, *counts, *unused])], dtype=torch.int32)
        lengths = torch.tensor([*(row.length for row in rows), *unused], dtype=torch.int32)
        self.tokens[:total].copy_(tokens, non_blocking=True)
        self.positions[:total].copy_(torch.cat(at), non_blocking=True)
        self.length[: kind.rows].copy_(lengths, non_blocking=True)
        self.offsets[:, : len(rows)].copy_(self.network.pool.offsets(pooled), non_blocking=True)
        self.begin[: kind.rows + 1].copy_(begin, non_blocking=True)
        for row, count in zip(rows, counts, strict=True):
            row.advance(count)

    def recorded(self, kind: Kind) -> Work:
        return self._passes.get(kind, partial(self._record, kind))

    def _record(self, kind: Kind) -> Work:
        self.rest()
        return self.recorder.record(str(kind), partial(self._encode, kind))

    def rest(self) -> None:
        """Nothing is to be encoded until the next `put`: recording runs a pass, which must not write into any row."""
        self.begin.zero_()

    @torch.inference_mode()
    def _encode(self, kind: Kind) -> None:
        tokens, batch = self.given(kind)
        if kind.hidden:
            self.hidden[: kind.size].copy_(self.network.encode(tokens, batch))
        else:
            self.network.remember(tokens, batch)

    def given(self, kind: Kind) -> tuple[Tensor, Batch]:
        """What a pass of this kind finds here"""
        rows, size = kind.rows, kind.size
        new = New(self.begin[: rows + 1], kind.most)
        batch = Batch(self.offsets[:, :rows], self.length[:rows], self.positions[:size], new, kind.reach)
        return self.tokens[:size], batch
