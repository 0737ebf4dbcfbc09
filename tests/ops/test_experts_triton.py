from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import experts_triton, int4
from diffusiongemma.ops.experts import experts_reference
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.quantized import EXPERTS
from ops.test_product_triton import FORMATS, kept


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
    up, down = kept(fmt, 4, 128, 128), kept(fmt, 4, 128, 64)
    out = experts_triton.experts_quantised(x, index, weight, *up, *down)
    expected = experts_reference(x.double(), index, weight.double(), weights(*up).double(), weights(*down).double())
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < (8e-2 if fmt == "fp8" else 1e-2)


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
    up, down = kept("int4-64", 4, 128, 128), kept("int4-64", 4, 128, 64)
    together = experts_triton.experts_quantised(x, index, weight, *up, *down)
    alone = experts_triton.experts_quantised(x[2:3], index[2:3], weight[2:3], *up, *down)
    assert torch.equal(together[2:3], alone)


def test_sums_of_pairs_are_made_in_order() -> None:
    """In float32, slot after slot: another order gives other bits here."""
    pairs = torch.tensor([[1e8], [1.0], [-1e8], [1.0]], device=DEVICE).expand(4, 48).contiguous()
    assert torch.equal(experts_triton.combine(pairs, 4), torch.ones(1, 48, device=DEVICE))


def test_says_why_it_cannot_run() -> None:
    up, down = torch.empty(4, 64, 128, dtype=torch.bfloat16), torch.empty(4, 128, 32, dtype=torch.bfloat16)
    assert experts_triton.supported(DEVICE, up, down) is None
    words = int4.pack(torch.zeros(4, 64, 128, dtype=torch.int8))
    narrow = torch.empty(4, 128, 8, dtype=torch.int16)
    assert "multiple of 64 inputs, not 32" in str(experts_triton.supported(DEVICE, words, narrow))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_graph_gives_what_a_plain_call_gives(fmt: str) -> None:
    torch.manual_seed(4)
    x, index, weight = make(64, experts=8, k=4)
    up, down = kept(fmt, 8, 256, 128), kept(fmt, 8, 128, 128)
    args = (x, index, weight, *up, *down)
    expected = experts_triton.experts_quantised(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_triton.experts_quantised(*args)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
