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


def test_more_pairs_than_one_look_takes(monkeypatch) -> None:
    monkeypatch.setattr(routing_triton, "CHUNK", 128)
    g = torch.Generator().manual_seed(1)
    check(torch.rand(150, 4, generator=g).topk(2).indices, 4, 16)


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
