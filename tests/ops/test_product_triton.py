from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import int4, product, product_triton, quant
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.routing import Routing, route
from diffusiongemma.ops.tiles import Tile

FORMATS = ["bf16", "int8", "fp8", "int4-32", "int4-64"]


def kept(fmt: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    w = torch.randn(shape) * shape[-1] ** -0.5
    if fmt == "bf16":
        return w.to(torch.bfloat16).to(DEVICE), None
    kind, _, group = fmt.partition("-")
    q, scale = quant.quantize(w, quant.parse_format(kind, int(group) if group else None))
    if kind == "int4":
        q, scale = int4.to_runtime(quant.unpack_int4(q), scale)
    return q.to(DEVICE), scale.to(DEVICE)


def rows_of(fmt: str, x: torch.Tensor) -> Rows:
    return Rows(*quant.quantize_tokens(x)) if fmt == "fp8" else Rows(x)


def tokens(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width).to(torch.bfloat16).to(DEVICE)


def routing_for(count: int, k: int, experts: int, block: int) -> tuple[Routing, torch.Tensor]:
    index = torch.rand(count, experts).topk(k).indices.to(DEVICE)
    return route(index, experts, block), torch.rand(count * k, device=DEVICE) + 0.1


def error(a: Rows, b: Rows) -> float:
    return float((a.wide().double() - b.wide().double()).norm() / b.wide().double().norm())


def same(x: Rows, w: torch.Tensor, scale: torch.Tensor | None, tile: Tile | None = None, **how) -> None:
    """Both round sums to bfloat16, which may fall either way; a quantised result may be one step of fp8 off."""
    found = product_triton.product(x, w, scale, tile=tile, **how)
    expected = product.product(x, w, scale, **how)
    assert found.values.shape == expected.values.shape
    assert found.values.dtype == expected.values.dtype
    assert error(found, expected) < (1e-2 if how.get("quantise") else 4e-3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (40, 192, 192), (17, 320, 128)])
def test_dense(fmt: str, gated: bool, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x = rows_of(fmt, tokens(rows, inputs))
    same(x, *kept(fmt, outputs * (1 + gated), inputs), gated=gated, quantise=gated and fmt == "fp8")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outputs", [40, 100])
def test_outputs_that_fill_no_tile(fmt: str, outputs: int) -> None:
    torch.manual_seed(1)
    same(rows_of(fmt, tokens(5, 128)), *kept(fmt, outputs, 128))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", [16, 32])
def test_by_expert(fmt: str, block: int) -> None:
    torch.manual_seed(2)
    routing, share = routing_for(30, 3, 5, block)
    same(rows_of(fmt, tokens(30, 192)), *kept(fmt, 5, 256, 192), gated=True, quantise=fmt == "fp8", routing=routing)
    hidden = tokens(90, 128)
    x = product.quantize_blocks(hidden) if fmt == "fp8" else Rows(hidden)
    same(x, *kept(fmt, 5, 192, 128), routing=routing, share=share)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_tile_gives_the_same(fmt: str) -> None:
    torch.manual_seed(3)
    x, w = rows_of(fmt, tokens(50, 256)), kept(fmt, 256, 256)
    for tile in (Tile(16, 64, 4, 2), Tile(32, 128, 8, 3), Tile(64, 64, 4, 1)):
        same(x, *w, tile=tile, gated=True, quantise=fmt == "fp8")
        if DEVICE.type == "cuda":  # the interpreter leaves the order of sums to numpy
            first = product_triton.product(x, *w, tile=Tile(16, 64, 4, 2)).values
            assert torch.equal(product_triton.product(x, *w, tile=tile).values, first)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_the_others(fmt: str) -> None:
    torch.manual_seed(4)
    x, w = tokens(20, 128), kept(fmt, 64, 128)
    together = product_triton.product(rows_of(fmt, x), *w, tile=Tile(16, 64, 4, 2)).values
    alone = product_triton.product(rows_of(fmt, x[7:8]), *w, tile=Tile(16, 64, 4, 2)).values
    assert torch.equal(together[7:8], alone)


def test_large_and_tiny_numbers_survive_four_bits() -> None:
    """The unpacking works at the edge of bfloat16's range."""
    torch.manual_seed(5)
    q = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    for size in (1e-30, 1e-6, 7.9):
        words, scale = int4.to_runtime(q, torch.full((64, 2), size).to(torch.bfloat16))
        same(Rows(tokens(16, 128)), words.to(DEVICE), scale.to(DEVICE))


def test_says_why_it_cannot_run(monkeypatch) -> None:
    w = torch.zeros(100, 128, dtype=torch.bfloat16)
    assert product_triton.supported(DEVICE, w, 128) is None
    assert "weights of torch.float64" in str(product_triton.supported(DEVICE, w.double(), 128))
    assert "multiple of 16 inputs" in str(product_triton.supported(DEVICE, w, 120))
    assert "multiple of 64 inputs" in str(product_triton.supported(DEVICE, w.to(torch.int16), 96))
    fp8 = w.to(torch.float8_e4m3fn)
    assert "multiple of 64 outputs" in str(product_triton.supported(DEVICE, fp8, 128, gated=True))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "need a CUDA device" in str(product_triton.supported(torch.device("cpu"), w, 128))
