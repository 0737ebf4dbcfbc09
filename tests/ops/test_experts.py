import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.ops import experts
from diffusiongemma.ops.experts import experts_grouped, experts_reference


def make(tokens: int, experts: int, k: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x, gate_up = torch.randn(tokens, 12, generator=g), torch.randn(experts, 10, 12, generator=g)
    down = torch.randn(experts, 12, 5, generator=g)
    index = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
    weight = torch.rand(tokens, k, generator=g)
    return x, index, weight, gate_up, down


@given(st.integers(1, 60), st.integers(1, 20), st.data())
@settings(max_examples=60, deadline=None)
def test_grouped_equals_reference(tokens: int, count: int, data) -> None:
    k = data.draw(st.integers(1, count))
    args = make(tokens, count, k, data.draw(st.integers(0, 9)))
    torch.testing.assert_close(experts_grouped(*args), experts_reference(*args), atol=1e-4, rtol=1e-4)


def test_both_ways_give_the_same_bits(monkeypatch) -> None:
    for tokens, count, k in ((1, 4, 2), (33, 8, 8), (200, 16, 4)):
        args = make(tokens, count, k)
        monkeypatch.setattr(experts, "MAX_WASTE", 1e9)
        at_once = experts_grouped(*args)
        monkeypatch.setattr(experts, "MAX_WASTE", 0.0)
        assert torch.equal(experts_grouped(*args), at_once)


@pytest.mark.parametrize("waste", [0.0, 2.5, 1e9])
def test_a_token_keeps_its_bits_in_any_batch(waste, monkeypatch) -> None:
    monkeypatch.setattr(experts, "MAX_WASTE", waste)
    x, index, weight, gate_up, down = make(200, 16, 4)
    together = experts_grouped(x, index, weight, gate_up, down)
    for i in range(0, 200, 7):
        alone = experts_grouped(x[i : i + 1], index[i : i + 1], weight[i : i + 1], gate_up, down)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("waste", [0.0, 1e9])
def test_gradients_flow(waste, monkeypatch) -> None:
    monkeypatch.setattr(experts, "MAX_WASTE", waste)
    x, index, weight, gate_up, down = make(9, 4, 2)
    x.requires_grad_()
    (mine,) = torch.autograd.grad(experts_grouped(x, index, weight, gate_up, down).square().sum(), x)
    (reference,) = torch.autograd.grad(experts_reference(x, index, weight, gate_up, down).square().sum(), x)
    torch.testing.assert_close(mine, reference, atol=1e-2, rtol=1e-4)
