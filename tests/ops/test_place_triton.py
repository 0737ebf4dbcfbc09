"""Pairs that are placed while they are picked, not sorted: against the twins, and against the sort."""

from ops.triton_cpu import DEVICE  # isort: skip

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffusiongemma.ops import experts_triton, fused, product, product_triton, router_triton, routing
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.rows_triton import quantize_placed, quantize_rows
from diffusiongemma.ops.tiles import Tile, block_rows, format_of
from ops.test_product_triton import EIGHT, FORMATS, error, kept, rows_of, same, tokens

EPS = 1e-6


def made(rows: int, width: int, experts: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (experts, width), (width,), (experts,))
    return tuple(torch.randn(shape, generator=g).to(DEVICE) for shape in shapes)


def zeros(experts: int, pairs: int) -> Tensor:
    return torch.zeros(routing.counters(experts, pairs)[0], dtype=torch.int32, device=DEVICE)


def check(args: tuple[Tensor, ...], k: int, block: int) -> Placed:
    """Bits as from the router alone; each pair once, in its expert's list, its weight beside it; the blocks that lists
    of this length have"""
    experts = len(args[1])
    index, weight, placed = router_triton.place(*args, k, EPS, block, zeros(experts, len(args[0]) * k))
    alone, alone_weight = router_triton.route(*args, k, EPS)
    assert torch.equal(index, alone)
    assert torch.equal(weight.view(torch.int32), alone_weight.view(torch.int32))
    want = routing.place(index, weight, experts, block)
    assert torch.equal(placed.counts, want.counts)
    for ours, theirs, count in zip(placed.lists, want.lists, want.counts.tolist(), strict=False):
        assert torch.equal(ours[:count].sort().values, theirs[:count])
    for lists in (placed, want):
        where = lists.place.long()
        assert torch.equal(lists.lists.flatten()[where], torch.arange(index.numel(), dtype=torch.int32, device=DEVICE))
        assert torch.equal(lists.share.flatten()[where].view(torch.int32), weight.flatten().view(torch.int32))
    beyond = int(want.counts[-1])
    assert torch.equal(placed.beyond[:beyond].sort().values, want.beyond[:beyond])
    return placed


@pytest.mark.parametrize(
    ("rows", "width", "experts", "k", "block"), [(1, 64, 16, 2, 16), (40, 320, 32, 4, 4), (33, 600, 16, 3, 5)]
)
def test_equals_the_router_and_the_twin(rows, width, experts, k, block) -> None:
    args = made(rows, width, experts)
    check(args, k, block)
    index, weight, _ = router_triton.place(*args, k, EPS, block, zeros(experts, len(args[0]) * k))
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
    index, _, placed = router_triton.place(*args, 3, EPS, 8, zeros(16, 3 * len(args[0])))
    assert index.tolist() == [[0, 1, 2]] * 20
    assert placed.counts.tolist() == [20] * 3 + [0] * 13 + [6]


def test_tokens_that_are_no_numbers_do_not_overflow_a_list() -> None:
    """Experts that are taken twice would: a list has room for every token once."""
    args = made(20, 64, 16)
    args[0][3:], args[0][10:] = torch.nan, torch.inf
    check(args, 4, 8)
    index, weight, _ = router_triton.place(*args, 4, EPS, 8, zeros(16, 4 * len(args[0])))
    assert index[3:].tolist() == [[0, 1, 2, 3]] * 17
    assert weight[3:].isnan().all()
    assert weight[:3].isfinite().all()


def test_counters_of_other_experts() -> None:
    with pytest.raises(AssertionError, match="17 counters do not fit 16 experts of 20 tokens"):
        router_triton.place(*made(20, 64, 16), 4, EPS, 8, torch.zeros(17, dtype=torch.int32, device=DEVICE))


# ---- products ----------------------------------------------------------------------------------------------------


def shares(count: int, k: int) -> Tensor:
    return torch.rand(count, k, device=DEVICE) + 0.1


def picked(count: int, k: int, experts: int, uneven: bool) -> Tensor:
    """`uneven`: all tokens take the first expert, none the last"""
    g = torch.Generator().manual_seed(count)
    if not uneven:
        return torch.rand(count, experts, generator=g).topk(k).indices.to(DEVICE)
    others = 1 + torch.rand(count, experts - 2, generator=g).topk(k - 1).indices
    return torch.cat([torch.zeros(count, 1, dtype=torch.int64), others], dim=1).to(DEVICE)


def shuffled(placed: Placed) -> Placed:
    """The same in another order within each list, and of the blocks beyond; where no pair is, a
    wrong one and no number"""
    g = torch.Generator().manual_seed(1)
    lists, share = torch.full_like(placed.lists, 1 << 30), torch.full_like(placed.share, torch.nan)
    place, beyond = placed.place.clone(), placed.beyond.clone()
    *counts, blocks = placed.counts.tolist()
    for expert, count in enumerate(counts):
        order = torch.randperm(count, generator=g).to(DEVICE)
        lists[expert, :count], share[expert, :count] = placed.lists[expert, order], placed.share[expert, order]
        first = expert * lists.shape[1]
        place[lists[expert, :count].long()] = first + torch.arange(count, dtype=torch.int32, device=DEVICE)
    beyond[:blocks] = beyond[torch.randperm(blocks, generator=g).to(DEVICE)]
    return replace(placed, lists=lists, place=place, share=share, beyond=beyond)


def laid(placed: Placed, x: Tensor) -> Tensor:
    """Rows of pairs [P, K] -> as the lists lie, [E N, K], and no numbers in between"""
    out = torch.full((placed.lists.numel(), x.shape[1]), torch.nan, dtype=x.dtype, device=DEVICE)
    out[placed.place.long()] = x
    return out


def test_rows_are_rounded_where_they_lie() -> None:
    """As `quantize_rows` does, and no other row is touched."""
    x, place = tokens(9, 48), torch.tensor([7, 0, 4], dtype=torch.int32, device=DEVICE)
    was, want = x.clone(), quantize_rows(x)
    found = quantize_placed(x, place)
    assert want.scale is not None
    assert found.scale is not None
    there, others = place.long(), [1, 2, 3, 5, 6, 8]
    assert found.values.data_ptr() == x.data_ptr()
    assert torch.equal(found.values[there].view(torch.uint8), want.values[there].view(torch.uint8))
    assert torch.equal(found.scale[there], want.scale[there])
    assert torch.equal(x[others].view(torch.int16), was[others].view(torch.int16))


def same_pairs(
    x: Rows, w: Tensor, scale: Tensor | None, placed: Placed, quantise=False, tile: Tile | None = None
) -> None:
    """The first product against the twin, where pairs are"""
    how = {"gated": True, "quantise": quantise, "routing": placed}
    found = product_triton.product(x, w, scale, tile=tile, **how).wide()
    expected = product.product(x, w, scale, **how).wide()
    assert found.shape == expected.shape
    there = placed.place.long()
    assert error(Rows(found[there]), Rows(expected[there])) < (1e-2 if quantise else 4e-3)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("uneven", [False, True])
def test_products_of_placed_pairs(fmt: str, uneven: bool) -> None:
    placed = shuffled(routing.place(picked(40, 3, 5, uneven), shares(40, 3), 5, 16))
    assert placed.counts[5] > 0
    up = kept(fmt, 5, 256, 192, gated=True)
    same_pairs(rows_of(fmt, tokens(40, 192)), *up, placed, quantise=fmt in EIGHT)
    x = rows_of(fmt, laid(placed, tokens(120, 128)))
    same(x, *kept(fmt, 5, 256, 128), routing=placed, share=placed.share.flatten())


def test_products_with_smaller_tiles_and_rows_beside() -> None:
    index = picked(50, 2, 4, uneven=True)
    for block, tile in ((32, Tile(32, 64, 4, 2, half=True)), (48, Tile(32, 64, 4, 2, more=16))):
        placed = shuffled(routing.place(index, shares(50, 2), 4, block))
        up = kept("fp8", 4, 128, 128, gated=True)
        same_pairs(rows_of("fp8", tokens(50, 128)), *up, placed, tile=tile)
        x = rows_of("fp8", laid(placed, tokens(100, 128)))
        same(x, *kept("fp8", 4, 128, 128), routing=placed, share=placed.share.flatten(), tile=tile)


def test_rows_and_shares_that_lie_otherwise() -> None:
    placed = routing.place(picked(20, 2, 4, False), shares(20, 2), 4, 16)
    w = kept("bf16", 4, 64, 64)
    with pytest.raises(AssertionError, match="40 rows of 20 placed tokens"):
        product_triton.product(Rows(tokens(40, 64)), *w, routing=placed, share=placed.share.flatten())
    with pytest.raises(AssertionError, match="shares lie as the lists do"):
        product_triton.product(Rows(tokens(80, 64)), *w, routing=placed, share=shares(20, 2).flatten())


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "pairs-64"])
@pytest.mark.parametrize("uneven", [False, True])
def test_experts_have_the_same_bits_as_sorted(fmt: str, uneven: bool) -> None:
    """In any order within a list."""
    index = picked(40, 3, 6, uneven)
    up, down = kept(fmt, 6, 256, 128, gated=True), kept(fmt, 6, 128, 128)
    x, weight = rows_of(fmt, tokens(40, 128)), shares(40, 3)
    want = experts_triton.experts_pairs(x, index, weight, *up, *down)
    placed = routing.place(index, weight, 6, block_rows(120, 6, format_of(up[0])))
    for lists in (placed, shuffled(placed)):
        assert torch.equal(experts_triton.experts_pairs(x, index, weight, *up, *down, placed=lists), want)


def test_as_many_launches_as_sorted_without_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    run = product_triton.run
    monkeypatch.setattr(product_triton, "run", lambda kernel, *a, **o: (launched.append(kernel), run(kernel, *a, **o)))
    monkeypatch.setattr(experts_triton, "route", lambda *args: pytest.fail("sorted"))
    index, up, down = picked(20, 2, 4, False), kept("bf16", 4, 128, 64, gated=True), kept("bf16", 4, 64, 64)
    x, weight = rows_of("bf16", tokens(20, 64)), shares(20, 2)
    experts_triton.experts_pairs(x, index, weight, *up, *down, placed=routing.place(index, weight, 4, 16))
    assert launched == [product_triton.product_kernel] * 2
