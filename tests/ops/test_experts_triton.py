from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import experts_triton, few_triton, int4
from diffusiongemma.ops.experts import experts_reference, geglu
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.quantized import EXPERTS
from diffusiongemma.ops.rows_triton import quantize_rows
from ops.test_product_triton import EIGHT, FORMATS, kept


def make(tokens: int, experts: int = 4, k: int = 2, hidden: int = 128):
    x = torch.randn(tokens, hidden).to(torch.bfloat16).to(DEVICE)
    index = torch.rand(tokens, experts).topk(k).indices.to(DEVICE)
    weight = torch.rand(tokens, k, device=DEVICE)
    return x, index, weight / weight.sum(-1, keepdim=True)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("fmt", FORMATS)
def test_against_float64(fmt: str, tokens: int) -> None:
    torch.manual_seed(0)
    x, index, weight = make(tokens)
    up, down = kept(fmt, 4, 128, 128, gated=True), kept(fmt, 4, 128, 64)
    out = experts_triton.experts_quantised(x, index, weight, *up, *down)
    expected = experts_reference(
        x.double(), index, weight.double(), weights(*up, True).double(), weights(*down).double()
    )
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < (8e-2 if fmt in EIGHT else 1e-2)


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_against_the_quantised_reference(fmt: str) -> None:
    torch.manual_seed(1)
    x, index, weight = make(20)
    args = (x, index, weight, *kept(fmt, 4, 128, 128), *kept(fmt, 4, 128, 64))
    assert error(experts_triton.experts_quantised(*args), EXPERTS[fmt](*args)) < (6e-2 if fmt == "fp8" else 1e-2)


def test_plain_weights_have_a_signature_of_their_own() -> None:
    torch.manual_seed(2)
    args = (*make(20), kept("bf16", 4, 128, 128)[0], kept("bf16", 4, 128, 64)[0])
    assert error(experts_triton.experts(*args), experts_reference(*args)) < 1e-2


def test_a_token_keeps_its_bits_among_others() -> None:
    torch.manual_seed(3)
    x, index, weight = make(6)
    up, down = kept("pairs-64", 4, 128, 128, gated=True), kept("pairs-64", 4, 128, 64)
    together = experts_triton.experts_quantised(x, index, weight, *up, *down)
    alone = experts_triton.experts_quantised(x[2:3], index[2:3], weight[2:3], *up, *down)
    assert torch.equal(together[2:3], alone)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounded", [False, True])
def test_a_few_tokens_go_another_way(fmt: str, rounded: bool) -> None:
    """No activation is rounded on it but x, if that comes in fp8: as near to float64 as bfloat16 allows."""
    torch.manual_seed(5)
    x, index, weight = make(3, experts=6, k=3, hidden=256)
    up, down = kept(fmt, 6, 384, 256, gated=True), kept(fmt, 6, 256, 192)
    rows = quantize_rows(x) if rounded else Rows(x)
    out = experts_triton.experts_rows(rows, index, weight, *up, *down, few=True)
    expected = experts_reference(
        rows.wide().double(), index, weight.double(), weights(*up, True).double(), weights(*down).double()
    )
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < 5e-3
    alone = experts_triton.experts_rows(Rows(x[1:2]), index[1:2], weight[1:2], *up, *down, few=True)
    if not rounded:
        assert torch.equal(out[1:2], alone)


@pytest.mark.parametrize("fmt", FORMATS)
def test_dense_products_with_a_few_rows(fmt: str) -> None:
    torch.manual_seed(6)
    x = make(2, hidden=320)[0]
    up, down = kept(fmt, 512, 320, gated=True), kept(fmt, 128, 256)
    expected = geglu(x.double() @ weights(*up, True).double().t()) @ weights(*down).double().t()
    assert error(few_triton.mlp_few(Rows(x), *up, *down), expected) < 5e-3
    for piece in (few_triton.Piece(16, 128, 4, 2), few_triton.Piece(4, 512, 4, 1)):
        out = few_triton.few(Rows(x), *up, gated=True, piece=piece)
        assert error(out, geglu(x.double() @ weights(*up, True).double().t())) < 5e-3


def test_outputs_that_no_program_fills() -> None:
    torch.manual_seed(7)
    x, w = make(2, hidden=64)[0], kept("fp8", 2 * 37, 64)
    expected = x.double() @ weights(*w).double().t()
    assert error(few_triton.few(Rows(x), *w), expected) < 5e-3
    assert error(few_triton.few(Rows(x), *w, gated=True), geglu(expected)) < 5e-3


def test_sums_of_pairs_are_made_in_order() -> None:
    """In float32, slot after slot: another order gives other bits here."""
    pairs = torch.tensor([[1e8], [1.0], [-1e8], [1.0]], device=DEVICE).expand(4, 48).contiguous()
    assert torch.equal(experts_triton.combine(pairs, 4), torch.ones(1, 48, device=DEVICE))


def test_says_why_it_cannot_run() -> None:
    up, down = torch.empty(4, 64, 128, dtype=torch.bfloat16), torch.empty(4, 128, 32, dtype=torch.bfloat16)
    assert experts_triton.supported(DEVICE, up, down) is None
    narrow = torch.empty(4, 128, 8, dtype=torch.bfloat16)
    assert "multiple of 16 inputs, not 8" in str(experts_triton.supported(DEVICE, up[:, :16], narrow))
    pairs, _ = int4.pack_pairs(torch.zeros(4, 128, 128, dtype=torch.int8), torch.ones(4, 128, 2), True)
    back, _ = int4.pack_pairs(torch.zeros(4, 128, 64, dtype=torch.int8), torch.ones(4, 128, 1), False)
    assert experts_triton.supported(DEVICE, pairs, back) is None
    assert "weights of torch.int32" in str(experts_triton.supported(DEVICE, up.int(), down.int()))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_graph_gives_what_a_plain_call_gives(fmt: str) -> None:
    torch.manual_seed(4)
    x, index, weight = make(64, experts=8, k=4)
    up, down = kept(fmt, 8, 256, 128, gated=True), kept(fmt, 8, 128, 128)
    args = (x, index, weight, *up, *down)
    expected = experts_triton.experts_quantised(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_triton.experts_quantised(*args)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
