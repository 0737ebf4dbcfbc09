"""Integer products on a CPU: exact, the same for a row whatever stands beside it, and with and without instructions
for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.ops import int8_cpu
from diffusiongemma.ops.cpu import fast_int8
from diffusiongemma.ops.experts import experts_reference
from diffusiongemma.ops.int8_cpu import EXACT, experts_int8, linear_int8, quantize_rows, sums, sums_in_float32, use_int8
from diffusiongemma.ops.quant import Format, dequantize, quantize
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear

INT8 = Format("int8")


@pytest.fixture(params=["fast", "float32"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the same integers, where this CPU has both."""
    if request.param == "fast" and not fast_int8():
        pytest.skip("this CPU has no instructions for int8")
    monkeypatch.setattr(int8_cpu, "fast_int8", lambda: request.param == "fast")
    return str(request.param)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@given(st.integers(1, 40), st.integers(1, 2 * EXACT + 9), st.integers(1, 24), st.integers(0, 99))
def test_sums_are_those_of_int64(rows: int, inputs: int, outputs: int, seed: int) -> None:
    a, b = integers(rows, inputs, seed=seed), integers(outputs, inputs, seed=seed + 1)
    expected = a.long() @ b.long().t()
    assert torch.equal(sums_in_float32(a, b).long(), expected)
    assert torch.equal(sums(a, b).long(), expected)


def test_the_largest_sums_are_exact(way: str) -> None:
    """All numbers at the end of the range, over stretches that just fit float32 and over longer ones."""
    for inputs in (EXACT, EXACT + 1, 3 * EXACT):
        for sign in (1, -1):
            a, b = torch.full((3, inputs), 127, dtype=torch.int8), torch.full((2, inputs), 127 * sign, dtype=torch.int8)
            assert sums(a, b).unique().tolist() == [sign * 127 * 127 * inputs]


def test_rows_are_rounded_to_the_nearest(way: str) -> None:
    x = numbers(7, 33)
    x[3] = 0
    rows, scale = quantize_rows(x)
    assert rows.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    assert ((rows * scale - x).abs() <= scale / 2 * 1.00001).all()


def test_linear_is_the_product_of_what_was_rounded(way: str) -> None:
    x, (q, scale) = numbers(13, 96), quantize(numbers(40, 96, seed=1), INT8)
    rows, row_scale = quantize_rows(x)
    exact = (rows.double() * row_scale) @ (q.double() * scale).t()
    assert torch.allclose(linear_int8(x, q, scale).double(), exact, rtol=1e-6, atol=0)


def test_experts_are_near_the_plain_ones(way: str) -> None:
    x, index = numbers(50, 64), torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    index[index == 5] = 4 - index[index == 5] % 2 * 4  # one has no token; a token may then meet another twice
    weight = numbers(50, 2, seed=2).abs()
    up, down = quantize(numbers(8, 96, 64, seed=3) / 8, INT8), quantize(numbers(8, 64, 48, seed=4) / 7, INT8)
    plain = experts_reference(x, index, weight, dequantize(*up), dequantize(*down))
    out = experts_int8(x, index, weight, *up, *down)
    assert (out - plain).norm() < 0.02 * plain.norm()


@pytest.mark.parametrize("product", ["linear", "experts"])
def test_a_row_does_not_depend_on_its_neighbours(product: str, way: str) -> None:
    if product == "linear":
        q, scale = quantize(numbers(40, 64), INT8)
        run: Callable[[Tensor, Tensor], Tensor] = lambda x, _: linear_int8(x, q, scale)  # noqa: E731
    else:
        up, down = quantize(numbers(4, 96, 64), INT8), quantize(numbers(4, 64, 48), INT8)
        run = lambda x, index: experts_int8(x, index, torch.full(index.shape, 0.3), *up, *down)  # noqa: E731
    x, index = numbers(61, 64, seed=1), torch.arange(122).view(61, 2) % 4
    together = run(x, index)
    for some in (slice(0, 1), slice(17, 20), slice(3, 60)):
        assert torch.equal(run(x[some], index[some]), together[some])


def test_with_and_without_instructions_are_equal_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (q, scale) = numbers(21, 1500), quantize(numbers(40, 1500), INT8)
    found = []
    for fast in {fast_int8(), False}:
        monkeypatch.setattr(int8_cpu, "fast_int8", lambda fast=fast: fast)
        found.append(linear_int8(x, q, scale))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(bad: float, way: str) -> None:
    x, (q, scale) = numbers(4, 32), quantize(numbers(8, 32), INT8)
    x[2, 5] = bad
    out = linear_int8(x, q, scale)
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3]].isfinite().all()


def test_modules_get_them() -> None:
    root = torch.nn.ModuleList(
        [QuantLinear(32, 8, INT8), QuantExperts(4, 32, 16, INT8), QuantEmbedding(24, 32, INT8, torch.float32)]
    )
    for name, tensor in root.state_dict().items():
        tensor.copy_(integers(*tensor.shape) if name.endswith("q") else torch.full(tensor.shape, 0.01))
    use_int8(root)
    linear, experts, embedding = root
    assert (linear.run, experts.run, embedding.project_run) == (linear_int8, experts_int8, linear_int8)
    probs = numbers(5, 24).softmax(dim=-1)
    assert torch.allclose(embedding.mean(probs), probs @ embedding.weight.dequantize(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_can_change_its_dtype_afterwards(dtype: torch.dtype) -> None:
    embedding = QuantEmbedding(24, 32, INT8, torch.float32)
    embedding.weight.q.copy_(integers(24, 32))
    embedding.weight.scale.fill_(0.01)
    use_int8(embedding)
    probs, x = numbers(5, 24).softmax(dim=-1), numbers(5, 32)
    before = embedding.mean(probs), embedding.project(x)
    embedding.to(dtype)
    for old, new in zip(before, (embedding.mean(probs), embedding.project(x.to(dtype))), strict=True):
        assert new.dtype == dtype
        assert (old - new).norm() < 0.02 * old.norm()


def test_it_is_tried_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial forks, and later there are threads."""
    tried: list[bool] = []
    monkeypatch.setattr(int8_cpu, "fast_int8", lambda: tried.append(True))
    use_int8(torch.nn.ModuleList())
    assert tried
