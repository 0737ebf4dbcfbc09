"""Pairs that are placed while they are picked, not sorted: against the twins, and against the sort."""

from ops.triton_cpu import DEVICE  # isort: skip

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffusiongemma.ops import experts_triton, fused, product_triton, router_triton, routing
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.tiles import Tile, block_rows, format_of
from ops.test_product_triton import FORMATS, kept, rows_of, same, tokens

EPS = 1e-6


def made(rows: int, width: int, experts: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (experts, width), (width,), (experts,))
    return tuple(torch.randn(shape, generator=g).to(DEVICE) for shape in shapes)


def zeros(experts: int) -> Tensor:
    return torch.zeros(experts + 1, dtype=torch.int32, device=DEVICE)


def check(args: tuple[Tensor, ...], k: int, block: int) -> Placed:
    """Bits as from the router alone; each pair once, in its expert's list; the blocks that lists of this length have"""
    experts = len(args[1])
    index, weight, placed = router_triton.place(*args, k, EPS, block, zeros(experts))
    alone, alone_weight = router_triton.route(*args, k, EPS)
    assert torch.equal(index, alone)
    assert torch.equal(weight.view(torch.int32), alone_weight.view(torch.int32))
    want = routing.place(index, experts, block)
    assert torch.equal(placed.counts, want.counts)
    for ours, theirs, count in zip(placed.lists, want.lists, want.counts.tolist(), strict=False):
        assert torch.equal(ours[:count].sort().values, theirs[:count])
    beyond = int(want.counts[-1])
    assert torch.equal(placed.beyond[:beyond].sort().values, want.beyond[:beyond])
    return placed


@pytest.mark.parametrize(
    ("rows", "width", "experts", "k", "block"), [(1, 64, 16, 2, 16), (40, 320, 32, 4, 4), (33, 600, 16, 3, 5)]
)
def test_equals_the_router_and_the_twin(rows, width, experts, k, block) -> None:
    args = made(rows, width, experts)
    check(args, k, block)
    index, weight, _ = router_triton.place(*args, k, EPS, block, zeros(experts))
    want_index, want_weight = fused.route(*args, k, EPS)
    assert torch.equal(index, want_index)
    torch.testing.assert_close(weight, want_weight, atol=1e-5, rtol=1e-4)


def test_all_tokens_on_the_same_experts() -> None:
    x, proj, scale, per_expert = made(40, 64, 16)
    placed = check((x[:1].expand(40, 64).contiguous(), proj, scale, per_expert), 2, 16)
    assert sorted(placed.counts[:16].tolist()) == [0] * 14 + [40, 40]
    assert int(placed.counts[16]) == 4  # two blocks beyond the first for each


def test_of_equal_experts_the_first_are_taken() -> None:
    x, proj, scale, per_expert = made(20, 64, 16)
    args = (x, proj[:1].expand(16, 64).contiguous(), scale, per_expert)
    check(args, 3, 8)
    index, _, placed = router_triton.place(*args, 3, EPS, 8, zeros(16))
    assert index.tolist() == [[0, 1, 2]] * 20
    assert placed.counts.tolist() == [20] * 3 + [0] * 13 + [6]


def test_tokens_that_are_no_numbers_do_not_overflow_a_list() -> None:
    """Experts that are taken twice would: a list has room for every token once."""
    args = made(20, 64, 16)
    args[0][3:], args[0][10:] = torch.nan, torch.inf
    check(args, 4, 8)
    index, weight, _ = router_triton.place(*args, 4, EPS, 8, zeros(16))
    assert index[3:].tolist() == [[0, 1, 2, 3]] * 17
    assert weight[3:].isnan().all()
    assert weight[:3].isfinite().all()


def test_counters_of_other_experts() -> None:
    with pytest.raises(AssertionError, match="16 counters do not fit 16 experts"):
        router_triton.place(*made(20, 64, 16), 4, EPS, 8, zeros(15))


# ---- products ----------------------------------------------------------------------------------------------------


def picked(count: int, k: int, experts: int, uneven: bool) -> Tensor:
    """`uneven`: all tokens take the first expert, none the last"""
    g = torch.Generator().manual_seed(count)
    if not uneven:
        return torch.rand(count, experts, generator=g).topk(k).indices.to(DEVICE)
    others = 1 + torch.rand(count, experts - 2, generator=g).topk(k - 1).indices
    return torch.cat([torch.zeros(count, 1, dtype=torch.int64), others], dim=1).to(DEVICE)


def shuffled(placed: Placed) -> Placed:
    """The same in another order within each list, and of the blocks beyond"""
    g = torch.Generator().manual_seed(1)
    lists, beyond = placed.lists.clone(), placed.beyond.clone()
    *counts, blocks = placed.counts.tolist()
    for row, count in zip(lists, counts, strict=True):
        row[:count] = row[torch.randperm(count, generator=g).to(DEVICE)]
    beyond[:blocks] = beyond[torch.randperm(blocks, generator=g).to(DEVICE)]
    return replace(placed, lists=lists, beyond=beyond)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("uneven", [False, True])
def test_products_of_placed_pairs(fmt: str, uneven: bool) -> None:
    placed = shuffled(routing.place(picked(40, 3, 5, uneven), 5, 16))
    assert placed.counts[5] > 0
    share = torch.rand(120, device=DEVICE) + 0.1
    up = kept(fmt, 5, 256, 192, gated=True)
    same(rows_of(fmt, tokens(40, 192)), *up, gated=True, quantise=fmt == "fp8", routing=placed)
    same(rows_of(fmt, tokens(120, 128)), *kept(fmt, 5, 256, 128), routing=placed, share=share)


def test_products_with_smaller_tiles_and_rows_beside() -> None:
    index = picked(50, 2, 4, uneven=True)
    for block, tile in ((32, Tile(32, 64, 4, 2, half=True)), (48, Tile(32, 64, 4, 2, more=16))):
        placed = shuffled(routing.place(index, 4, block))
        up = kept("fp8", 4, 128, 128, gated=True)
        same(rows_of("fp8", tokens(50, 128)), *up, gated=True, routing=placed, tile=tile)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "pairs-64"])
@pytest.mark.parametrize("uneven", [False, True])
def test_experts_have_the_same_bits_as_sorted(fmt: str, uneven: bool) -> None:
    """In any order within a list."""
    index = picked(40, 3, 6, uneven)
    up, down = kept(fmt, 6, 256, 128, gated=True), kept(fmt, 6, 128, 128)
    x, weight = rows_of(fmt, tokens(40, 128)), torch.rand(40, 3, device=DEVICE)
    want = experts_triton.experts_pairs(x, index, weight, *up, *down)
    placed = routing.place(index, 6, block_rows(120, 6, format_of(up[0])))
    for lists in (placed, shuffled(placed)):
        assert torch.equal(experts_triton.experts_pairs(x, index, weight, *up, *down, placed=lists), want)


def test_as_many_launches_as_sorted_without_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    launch = product_triton.launch
    monkeypatch.setattr(
        product_triton, "launch", lambda kernel, *a, **o: (launched.append(kernel), launch(kernel, *a, **o))
    )
    monkeypatch.setattr(experts_triton, "route", lambda *args: pytest.fail("sorted"))
    index, up, down = picked(20, 2, 4, False), kept("bf16", 4, 128, 64, gated=True), kept("bf16", 4, 64, 64)
    x, weight = rows_of("bf16", tokens(20, 64)), torch.rand(20, 2, device=DEVICE)
    experts_triton.experts_pairs(x, index, weight, *up, *down, placed=routing.place(index, 4, 16))
    assert launched == [product_triton.product_kernel] * 2
