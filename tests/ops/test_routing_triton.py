from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import routing, routing_triton


def check(index: torch.Tensor, experts: int, block: int) -> None:
    found = routing_triton.route(index.to(DEVICE), experts, block)
    expected = routing.route(index, experts, block)
    assert torch.equal(found.order.cpu(), expected.order)
    assert torch.equal(found.table.cpu(), expected.table)
    assert (found.block, found.top_k) == (block, index.shape[1])


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block"),
    [(1, 1, 1, 16), (1, 2, 8, 16), (5, 2, 8, 16), (64, 2, 8, 16), (70, 3, 6, 32), (33, 4, 4, 16)],
)
def test_equals_the_reference(tokens: int, k: int, experts: int, block: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    check(torch.rand(tokens, experts, generator=g).topk(k).indices, experts, block)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block"), [(150, 2, 4, 16), (40, 3, 6, 32), (64, 2, 8, 20), (1, 2, 8, 16), (7, 1, 1, 16)]
)
def test_many_pairs_go_through_two_kernels(monkeypatch, tokens: int, k: int, experts: int, block: int) -> None:
    """Several chunks, the last one not full, in more than one group."""
    monkeypatch.setattr(routing_triton, "AT_ONCE", 0)
    monkeypatch.setattr(routing_triton, "CHUNK", 16)
    monkeypatch.setattr(routing_triton, "GROUP", 4)
    g = torch.Generator().manual_seed(tokens)
    check(torch.rand(tokens, experts, generator=g).topk(k).indices, experts, block)


@pytest.mark.parametrize("expert", [0, 7])
def test_many_pairs_of_one_expert(monkeypatch, expert: int) -> None:
    monkeypatch.setattr(routing_triton, "AT_ONCE", 0)
    check(torch.full((300, 1), expert), 8, 16)


def test_which_way_depends_on_the_number_of_pairs(monkeypatch) -> None:
    taken: list[object] = []
    run = routing_triton.run
    monkeypatch.setattr(routing_triton, "run", lambda kernel, *a, **o: (taken.append(kernel), run(kernel, *a, **o)))
    monkeypatch.setattr(routing_triton, "AT_ONCE", 40)
    for tokens, kernels in ((20, [routing_triton.route_kernel]),
                            (21, [routing_triton.count_kernel, routing_triton.place_kernel])):  # fmt: skip
        taken.clear()
        check(torch.rand(tokens, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices, 4, 16)
        assert taken == kernels


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_to_one_expert(expert: int) -> None:
    check(torch.full((40, 1), expert), 8, 16)


def test_takes_narrow_integers() -> None:
    g = torch.Generator().manual_seed(2)
    check(torch.rand(20, 8, generator=g).topk(2).indices.to(torch.int32), 8, 16)


def test_the_reference_covers_every_pair_once() -> None:
    index = torch.rand(50, 8, generator=torch.Generator().manual_seed(3)).topk(3).indices
    route = routing.route(index, 8, 16)
    seen = []
    for expert, first, end in route.table.t().tolist():
        if expert >= 0:
            rows = route.order[first : min(end, first + 16)].tolist()
            assert all(int(index.flatten()[row]) == expert for row in rows)
            seen += rows
    assert sorted(seen) == list(range(150))
