"""Quantised modules equal dequantise-then-multiply; fp8 also rounds its activations, as written out here in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops import quantized
from diffusiongemma.ops.experts import experts_reference, geglu
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.quant import FP8, Format, quantize_into
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear, QuantWeight

FORMATS = [Format("int8"), Format("fp8"), Format("int4", 32), Format("int4", 64)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(weight: QuantWeight, seed: int = 1) -> Tensor:
    quantize_into(gauss(*weight.shape, seed=seed) * 0.1, weight.format, weight.q, weight.scale)
    return weight.dequantize(torch.float64)


def tokens_as_fp8(x: Tensor) -> Tensor:
    """What fp8 activations are, by the definition: a scale a token that puts its largest number at 448."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(FP8).double() * scale.double()


def close(ours: Tensor, exact: Tensor) -> bool:
    """Sums of some 100 products in float32, then rounded to the dtype that comes out."""
    summing = 32 * torch.finfo(torch.float32).eps * exact.abs().mean()
    return bool(((ours.double() - exact).abs() <= summing + torch.finfo(ours.dtype).eps * exact.abs()).all())


@every_format
@every_dtype
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_linear(fmt: Format, dtype: torch.dtype, rows: int) -> None:
    module = QuantLinear(128, 96, fmt)
    weight = fill(module.weight)
    x = gauss(rows, 128).to(dtype)
    seen = tokens_as_fp8(x) if fmt.kind == "fp8" else x.double()
    if dtype == torch.bfloat16 and fmt.kind != "fp8":
        weight = module.weight.dequantize(torch.bfloat16).double()  # dequantised into the dtype that it computes in
    out = module(x)
    assert out.dtype == dtype
    assert close(out, F.linear(seen, weight))


@every_format
def test_linear_is_dequantise_then_matmul_to_the_bit(fmt: Format) -> None:
    """In float32 the same products in the same order as a plain module with the dequantised weight."""
    module, plain = QuantLinear(64, 40, fmt), Linear(64, 40)
    fill(module.weight)
    plain.weight.data = module.weight.dequantize()
    x = gauss(19, 64)
    if fmt.kind == "fp8":
        assert torch.allclose(module(x), plain(tokens_as_fp8(x).float()), rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(module(x), plain(x))


@every_format
def test_blocks_of_rows_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    module = QuantLinear(64, 40, fmt)
    fill(module.weight)
    x = gauss(5, 64)
    whole = module(x)
    monkeypatch.setattr(quantized, "BLOCK", 8 * module.weight.q.shape[1])
    assert len(quantized._row_blocks(module.weight.q, module.weight.scale)) == 5
    assert torch.allclose(module(x), whole, rtol=1e-5, atol=1e-6)


@every_format
@every_dtype
def test_experts(fmt: Format, dtype: torch.dtype) -> None:
    module = QuantExperts(4, 64, 64, fmt)
    up, down = fill(module.gate_up_proj, 1), fill(module.down_proj, 2)
    x = gauss(21, 64).to(dtype)
    index = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(i))[:2] for i in range(21)])
    weight = torch.rand(21, 2, generator=torch.Generator().manual_seed(9))
    out = module(x, index, weight)
    assert out.dtype == dtype
    if fmt.kind != "fp8":
        exact = experts_reference(x.double(), index, weight.double(), up, down)
        assert (out.double() - exact).norm() / exact.norm() < (2e-6 if dtype == torch.float32 else 1e-2)
        return
    exact = torch.zeros(21, 64, dtype=torch.float64)
    for token in range(21):
        for slot in range(2):
            expert = int(index[token, slot])
            hidden = geglu(F.linear(tokens_as_fp8(x[token : token + 1]), up[expert])).to(dtype)
            exact[token] += F.linear(tokens_as_fp8(hidden), down[expert])[0] * weight[token, slot].double()
    assert (out.double() - exact).norm() / exact.norm() < (5e-3 if dtype == torch.float32 else 2e-2)


@every_format
def test_a_token_keeps_its_bits_whatever_its_neighbours(fmt: Format) -> None:
    module = QuantExperts(4, 64, 64, fmt)
    fill(module.gate_up_proj, 1)
    fill(module.down_proj, 2)
    linear = QuantLinear(64, 40, fmt)
    fill(linear.weight)
    x, weight = gauss(30, 64), torch.rand(30, 2)
    index = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(30)])
    together, products = module(x, index, weight), linear(x)
    for i in (0, 7, 29):
        one = slice(i, i + 1)
        assert torch.equal(module(x[one], index[one], weight[one]), together[one])
        assert torch.equal(linear(x[one]), products[one])


@pytest.mark.parametrize("fmt", FORMATS[:2], ids=str)
@every_dtype
def test_embedding(fmt: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = QuantEmbedding(100, 64, fmt, dtype)
    fill(module.weight)
    weight = module.weight.dequantize(dtype)
    tokens = torch.tensor([0, 99, 7, 7])
    assert torch.equal(module(tokens), weight[tokens])
    hidden, probs = gauss(5, 64).to(dtype), gauss(5, 100).softmax(-1)
    monkeypatch.setattr(quantized, "BLOCK", 16 * 64)  # several blocks
    assert close(module.project(hidden), F.linear(hidden.double(), weight.double()))
    assert close(module.mean(probs), probs.to(dtype).double() @ weight.double())
    assert module.project(hidden).dtype == module.mean(probs).dtype == dtype


@every_format
def test_moving_and_casting_keep_the_format(fmt: Format) -> None:
    module = QuantLinear(64, 16, fmt)
    fill(module.weight)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.to(torch.bfloat16).double().half()
    assert {n: t.dtype for n, t in module.state_dict().items()} == {n: t.dtype for n, t in before.items()}
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in module.state_dict().items())
    assert module.to("meta").weight.q.is_meta
    embedding = QuantEmbedding(8, 64, Format("int8"), torch.float32).to(torch.bfloat16)
    assert embedding.dtype == torch.bfloat16


def test_another_kernel_can_be_put_in() -> None:
    module = QuantLinear(64, 16, Format("int8"))
    fill(module.weight)
    seen = []
    module.run = lambda x, q, scale: seen.append((x.shape, q.dtype, scale.shape)) or x[:, :16]  # type: ignore[func-returns-value]
    assert module(gauss(3, 64)).shape == (3, 16)
    assert seen == [((3, 64), torch.int8, (16, 1))]
