"""Which expert reads which tokens: the (token, expert) pairs sorted by expert and cut into blocks of rows.

A pair is numbered token × k + slot. Products over experts take blocks of at most `block` rows of one expert. How many
there are depends on the routing, so there is room for the worst case (`capacity`), and the host never has to know.

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
