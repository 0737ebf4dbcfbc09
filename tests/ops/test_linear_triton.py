from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import linear_triton, quant
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.quantized import LINEAR
from ops.test_product_triton import EIGHT, FORMATS, kept


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_against_float64(fmt: str, rows: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(rows, 192).to(torch.bfloat16).to(DEVICE), kept(fmt, 128 if fmt in EIGHT else 80, 192)
    out = linear_triton.linear(x, *w)
    assert out.dtype == torch.bfloat16
    assert error(out, x.double() @ weights(*w).double().t()) < (5e-2 if fmt in EIGHT else 1e-2)


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_linear_against_the_quantised_reference(fmt: str) -> None:
    torch.manual_seed(1)
    x, w = torch.randn(9, 128).to(torch.bfloat16).to(DEVICE), kept(fmt, 64, 128)
    assert error(linear_triton.linear(x, *w), LINEAR[fmt](x, *w)) < 5e-3


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_dense_mlp(fmt: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(20, 128).to(torch.bfloat16).to(DEVICE)
    up, down = kept(fmt, 256, 128, gated=True), kept(fmt, 128, 128)
    rows = linear_triton.quantize_rows(x) if fmt in EIGHT else Rows(x)
    hidden = geglu(x.double() @ weights(*up, True).double().t())
    expected = hidden @ weights(*down).double().t()
    assert error(linear_triton.mlp(rows, *up, *down), expected) < (8e-2 if fmt in EIGHT else 1e-2)


@pytest.mark.parametrize("warps", [None, 1, 4])
def test_rows_are_rounded_as_the_reference_rounds_them(warps: int | None) -> None:
    torch.manual_seed(3)
    x = (torch.randn(7, 100) * torch.logspace(-20, 5, 7)[:, None]).to(torch.bfloat16)
    x[3] = 0
    found = linear_triton.quantize_rows(x.to(DEVICE), warps)
    q, scale = quant.quantize_tokens(x)
    assert found.scale is not None
    torch.testing.assert_close(found.scale.cpu(), scale, rtol=1e-6, atol=0)
    assert torch.equal(found.values.cpu().float(), q.float())
