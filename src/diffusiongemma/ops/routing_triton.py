# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""`ops.routing.route` as one kernel without a word to the host.

One program an expert. Each counts the pairs of all experts for itself: reading the few kilobytes of `index` again costs
less than a second launch, and no program waits for another. At 256 tokens × 8 that is 2,048 numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.kernels import early, interpreted, launch
from diffusiongemma.ops.routing import Routing, capacity_of

CHUNK = 2048  # pairs that a program looks at in one go


@triton.jit(do_not_specialize=["pairs", "capacity"])
def route_kernel(index, order, table, pairs, capacity, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
                 CHUNK: tl.constexpr, WIDTH: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """index [P] -> order [P], table [3, capacity]"""
    if HOPPER:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, CHUNK):
        here = start + at < pairs
        chosen = tl.load(index + start + at, mask=here, other=0).to(tl.int32)
        counts += tl.histogram(chosen, BINS, mask=here)
    blocks = (counts + BLOCK - 1) // BLOCK
    before = bins < expert
    row = tl.sum(tl.where(before, counts, 0))
    mine = tl.sum(tl.where(bins == expert, counts, 0))
    first = tl.sum(tl.where(before, blocks, 0))
    total = tl.sum(blocks)

    placed = row
    for start in range(0, pairs, CHUNK):
        here = start + at < pairs
        chosen = tl.load(index + start + at, mask=here, other=-1).to(tl.int32)
        hit = (chosen == expert).to(tl.int32)
        tl.store(order + placed + tl.cumsum(hit, 0) - 1, start + at, mask=hit == 1)
        placed += tl.sum(hit)

    wide = tl.arange(0, WIDTH)
    for start in range(0, tl.cdiv(mine, BLOCK), WIDTH):
        block = start + wide
        ok = block < tl.cdiv(mine, BLOCK)
        column = table + first + block
        tl.store(column, tl.full((WIDTH,), 0, tl.int32) + expert, mask=ok)
        tl.store(column + capacity, row + block * BLOCK, mask=ok)
        tl.store(column + 2 * capacity, tl.full((WIDTH,), 0, tl.int32) + row + mine, mask=ok)
    if expert == E - 1:  # what no expert needs
        for start in range(total, capacity, WIDTH):
            ok = start + wide < capacity
            none = tl.full((WIDTH,), 0, tl.int32)
            tl.store(table + start + wide, none - 1, mask=ok)
            tl.store(table + capacity + start + wide, none, mask=ok)
            tl.store(table + 2 * capacity + start + wide, none, mask=ok)


def route(index: Tensor, experts: int, block: int) -> Routing:
    """index [N, k] of any integer dtype -> Routing"""
    pairs = index.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=index.device)
    table = torch.empty(3, capacity_of(pairs, experts, block), dtype=torch.int32, device=index.device)
    chunk = min(CHUNK, max(128, triton.next_power_of_2(pairs)))
    launch(
        route_kernel, experts, index.contiguous(), order, table, pairs, table.shape[1], E=experts,
        BINS=max(2, triton.next_power_of_2(experts)), BLOCK=block, CHUNK=chunk, WIDTH=128,
        HOPPER=not interpreted(), num_warps=8, **early(),
    )  # fmt: skip
    return Routing(order, table, block, index.shape[1])
