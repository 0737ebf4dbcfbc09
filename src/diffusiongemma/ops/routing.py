"""Which expert reads which tokens: the (token, expert) pairs sorted by expert and cut into blocks of rows.

A pair is numbered token × k + slot. Products over experts take blocks of at most `block` rows of one expert. How many
there are depends on the routing, so there is room for the worst case (`capacity`), and the host never has to know.

Of not too many tokens (`Ops.placing`) the pairs are placed while they are picked, each into the list of its expert
(`Placed`), as the next that comes. In which order they come is chance on a GPU, and no result may depend on it: what
lies between the two products keeps the lists' order, row for row, but ends in the pair's own place.

Legend: N tokens, k experts a token, P = N k pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    order: Tensor  # int32 [P]: the pairs by expert, and within an expert in their own order
    table: (
        Tensor  # int32 [3, capacity]: of each block the expert, its first row in `order`, where the expert's rows end
    )
    block: int  # rows of a block; the last one of an expert may have fewer
    top_k: int

    @property
    def capacity(self) -> int:
        return self.table.shape[1]


def capacity_of(pairs: int, experts: int, block: int) -> int:
    """The most blocks that any routing can need."""
    hit = min(pairs, experts)
    return (pairs + hit * (block - 1)) // block


def route(index: Tensor, experts: int, block: int) -> Routing:
    """index [N, k] -> Routing; blocks that are not needed have expert -1, the rest of their column is 0"""
    flat = index.flatten().cpu()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    ends = counts.cumsum(0)
    rows = [
        (expert, start, int(ends[expert]))
        for expert in range(experts)
        for start in range(int(ends[expert] - counts[expert]), int(ends[expert]), block)
    ]
    table = torch.zeros(3, capacity_of(len(flat), experts, block), dtype=torch.int32)
    table[0] = -1
    table[:, : len(rows)] = torch.tensor(rows, dtype=torch.int32).view(-1, 3).t()
    return Routing(order.to(torch.int32).to(index.device), table.to(index.device), block, index.shape[1])


@dataclass(frozen=True)
class Placed:
    """A block is the first of its expert, the same for any routing, or one of those `beyond`. Any expert may have all
    tokens, so what lies as the lists do has E N rows, of which P are there; nobody touches the others."""

    lists: Tensor  # int32 [E, N]: of each expert the pairs, in any order
    place: Tensor  # int32 [P]: where in `lists`, flat, each pair is
    share: Tensor  # float32 [E, N]: of each pair in `lists` its weight
    counts: Tensor  # int32 [E + 1]: of each expert how many, then how many blocks there are beyond the first
    beyond: Tensor  # int32 [most]: where in `lists`, flat, each of these begins
    # int32 [4 + blocks] or more, zeros, for one launch of `experts_gluon.py`: the next tile's number, three spare,
    # and of each block how much is done
    marks: Tensor
    block: int
    top_k: int


def most_beyond(pairs: int, block: int) -> int:
    """The most blocks beyond the first of an expert that any routing can need, and room for one at least."""
    return max(1, (pairs - 1) // block)


LEAST_BLOCK = 16  # of `tiles.block_rows`: smaller ones would be more


def counters(experts: int, pairs: int) -> tuple[int, int]:
    """How many zeros placing wants, all in one piece, and where in them the marks begin: the others are the counts.
    Both are multiples of 16 bytes: for a pointer that is none, Triton would compile every kernel once more."""
    first = -(-(experts + 1) // 4) * 4
    return -(-(first + 4 + experts + most_beyond(pairs, LEAST_BLOCK)) // 4) * 4, first


def place(index: Tensor, weight: Tensor, experts: int, block: int) -> Placed:
    """index, weight [N, k], a token's experts all different -> Placed"""
    flat = index.flatten().cpu()
    lists = torch.zeros(experts, len(index), dtype=torch.int32)
    at = torch.zeros(len(flat), dtype=torch.int32)
    share = torch.zeros(experts, len(index))
    counts = torch.bincount(flat, minlength=experts).tolist()
    for expert, count in enumerate(counts):
        pairs = (flat == expert).nonzero().flatten()
        lists[expert, :count] = pairs
        at[pairs] = expert * len(index) + torch.arange(count, dtype=torch.int32)
        share[expert, :count] = weight.flatten().float().cpu()[pairs]
    begin = [e * len(index) + first for e, count in enumerate(counts) for first in range(block, count, block)]
    beyond = torch.zeros(most_beyond(len(flat), block), dtype=torch.int32)
    beyond[: len(begin)] = torch.tensor(begin, dtype=torch.int32)
    found = torch.tensor([*counts, len(begin)], dtype=torch.int32)
    marks = torch.zeros(4 + experts + len(beyond), dtype=torch.int32)
    lists, at, share, found, beyond, marks = (t.to(index.device) for t in (lists, at, share, found, beyond, marks))
    return Placed(lists, at, share, found, beyond, marks, block, index.shape[1])
