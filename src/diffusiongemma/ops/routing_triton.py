# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""`ops.routing.route` on a GPU without a word to the host.

Few pairs: one kernel. A program an expert sees all pairs at once and places its own; a few programs more count for
themselves and write the table. Nobody waits for another, and reading 16 KB again costs less than a second launch.
Many pairs: two kernels. One counts the experts of each chunk of pairs; in the other a program places its chunk's pairs,
because with the counts of all chunks it knows where each expert's begin, and writes a piece of the table.

Legend: E experts, P pairs, C chunks of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.routing import Routing, capacity_of

AT_ONCE = 4096  # pairs, up to which one kernel is quicker
CHUNK = 128  # pairs of a program beyond that
GROUP = 64  # chunks whose counts a program reads in one go
WRITERS = 8  # programs of the one kernel that write the table


@triton.jit
def _write_table(table, capacity, counts, column, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts [BINS] of the experts -> these columns of the table"""
    blocks = (counts + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    before = ends[None, :] <= column[:, None]  # experts whose blocks come before this one
    expert = tl.sum(before.to(tl.int32), axis=1)
    row = tl.sum(tl.where(before, counts[None, :], 0), axis=1)
    first = tl.sum(tl.where(before, blocks[None, :], 0), axis=1)
    mine = tl.sum(tl.where(expert[:, None] == tl.arange(0, BINS)[None, :], counts[None, :], 0), axis=1)
    used = expert < BINS
    ok = column < capacity
    tl.store(table + column, tl.where(used, expert, -1), mask=ok)
    tl.store(table + capacity + column, tl.where(used, row + (column - first) * BLOCK, 0), mask=ok)
    tl.store(table + 2 * capacity + column, tl.where(used, row + mine, 0), mask=ok)


@triton.jit(do_not_specialize=["pairs", "capacity"])
def route_kernel(index, order, table, pairs, capacity, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
                 ALL: tl.constexpr, WIDTH: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """index [P], P <= ALL -> order [P], table [3, capacity], of which a writer makes WIDTH columns"""
    ready(HOPPER)
    at = tl.arange(0, ALL)
    here = at < pairs
    chosen = tl.load(index + at, mask=here, other=E).to(tl.int32)
    expert = tl.program_id(0)
    if expert < E:
        hit = chosen == expert
        row = tl.sum((chosen < expert).to(tl.int32))
        tl.store(order + row + tl.cumsum(hit.to(tl.int32), 0) - 1, at, mask=hit)
    else:
        counts = tl.histogram(chosen, BINS, mask=here)
        _write_table(table, capacity, counts, (expert - E) * WIDTH + tl.arange(0, WIDTH), BLOCK, BINS)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(index, counts, pairs, BINS: tl.constexpr, CHUNK: tl.constexpr, HOPPER: tl.constexpr):
    """index [P] -> counts [C, BINS]"""
    ready(HOPPER)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(index + at, mask=at < pairs, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(chosen, BINS, mask=at < pairs))


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks"])
def place_kernel(index, counts, order, table, pairs, capacity, chunks, BINS: tl.constexpr, BLOCK: tl.constexpr,
                 CHUNK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """index [P], counts [C, BINS] -> order [P], table [3, capacity], of which a program makes WIDTH columns"""
    ready(HOPPER)
    mine = tl.program_id(0)
    i, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    at = mine * CHUNK + i
    here = at < pairs
    chosen = tl.load(index + at, mask=here, other=0).to(tl.int32)
    total, earlier = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, chunks, GROUP):
        chunk = start + tl.arange(0, GROUP)
        found = tl.load(counts + chunk[:, None] * BINS + bins[None, :], mask=(chunk < chunks)[:, None], other=0)
        total += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where((chunk < mine)[:, None], found, 0), axis=0)
    begin = tl.cumsum(total, 0) - total + earlier  # where the chunk's first pair of each expert goes
    same = (chosen[:, None] == chosen[None, :]) & (i[None, :] < i[:, None])
    place = tl.gather(begin, chosen, 0) + tl.sum(same.to(tl.int32), axis=1)
    tl.store(order + place, at, mask=here)
    _write_table(table, capacity, total, mine * WIDTH + tl.arange(0, WIDTH), BLOCK, BINS)


def route(index: Tensor, experts: int, block: int) -> Routing:
    """index [N, k] of any integer dtype -> Routing"""
    pairs, index = index.numel(), index.contiguous()
    order = torch.empty(pairs, dtype=torch.int32, device=index.device)
    capacity = capacity_of(pairs, experts, block)
    table = torch.empty(3, capacity, dtype=torch.int32, device=index.device)
    bins = max(2, triton.next_power_of_2(experts))
    if pairs <= AT_ONCE:
        run(
            route_kernel, experts + WRITERS, index, order, table, pairs, capacity, E=experts, BINS=bins, BLOCK=block,
            ALL=max(128, triton.next_power_of_2(pairs)), WIDTH=_share(capacity, WRITERS), num_warps=8,
        )  # fmt: skip
    else:
        chunks = triton.cdiv(pairs, CHUNK)
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=index.device)
        run(count_kernel, chunks, index, counts, pairs, BINS=bins, CHUNK=CHUNK, num_warps=4)
        run(
            place_kernel, chunks, index, counts, order, table, pairs, capacity, chunks, BINS=bins, BLOCK=block,
            CHUNK=CHUNK, GROUP=GROUP, WIDTH=_share(capacity, chunks), num_warps=8,
        )  # fmt: skip
    return Routing(order, table, block, index.shape[1])


def _share(columns: int, programs: int) -> int:
    """Columns of a program: a power of two, with which all are written."""
    return int(triton.next_power_of_2(max(1, triton.cdiv(columns, programs))))
