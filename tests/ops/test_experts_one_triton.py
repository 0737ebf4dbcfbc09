"""The feed-forward of a few tokens in two launches, against the chain of torch functions and that of single kernels."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.model.backend import torch_ops
from diffusiongemma.ops import experts_one_triton, few_triton, fused, norm_triton, one
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.one import Ends
from diffusiongemma.ops.quant import FP8
from ops.test_product_triton import kept

EPS, EXPERTS, K, HIDDEN, WIDTH, DENSE = 1e-6, 6, 3, 256, 192, 320
TORCH = torch_ops()
DEFINITION = one.feed_forward(TORCH.geglu, TORCH.linear, TORCH.experts, TORCH.after_feed_forward)
KERNELS = one.feed_forward(
    lambda x, w: Rows(few_triton.few(x, *w, gated=True)),
    lambda x, w: few_triton.few(x, *w),
    lambda x, index, weight, up, down: few_triton.experts_few(x, index, weight, *up, *down),
    norm_triton.after_feed_forward,
)
KINDS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "int8": ("int8", "int8"), "int4": ("pairs-64", "fp8")}


def make(kind: str, tokens: int, quant: torch.dtype | None, seed: int = 0):
    torch.manual_seed(seed)
    sparse, dense = KINDS[kind]

    def randn(*shape, std=1.0):
        return (torch.randn(*shape) * std).to(torch.bfloat16).to(DEVICE)

    def rows(x):
        return Rows(x) if quant is None else Rows(*fused.quantize_rows(x, quant))

    x = randn(tokens, HIDDEN, std=2.0)
    index = torch.rand(tokens, EXPERTS).topk(K).indices.to(DEVICE)
    weight = torch.rand(tokens, K, device=DEVICE)
    mlp = kept(dense, 2 * DENSE, HIDDEN, gated=True), kept(dense, HIDDEN, DENSE)
    experts = kept(sparse, EXPERTS, 2 * WIDTH, HIDDEN, gated=True), kept(sparse, EXPERTS, HIDDEN, WIDTH)
    norms = tuple(1 + 0.3 * randn(HIDDEN) for _ in range(3))
    ends = Ends(norms, 1 + 0.3 * randn(1), 1 + 0.3 * randn(HIDDEN), EPS, quant)
    return x, rows(randn(tokens, HIDDEN)), rows(randn(tokens, HIDDEN)), index, weight, mlp, experts, ends


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


def error(got: Rows, want: Rows) -> float:
    return float((got.wide().double() - want.wide().double()).norm() / want.wide().double().norm())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("kind", "quant"), [("bf16", None), ("fp8", FP8), ("fp8", None), ("int8", None), ("int4", FP8), ("int4", None)]
)
def test_equals_both_chains(kind: str, quant: torch.dtype | None, tokens: int) -> None:
    args, counters = make(kind, tokens, quant), zeros(6)
    x, rows = experts_one_triton.feed_forward(*args, counters)
    assert not counters.any()
    chain_x, chain_rows = KERNELS(*args, counters)
    if DEVICE.type == "cpu":  # a card sums a norm as its warps lie, and of so narrow rows they lie otherwise
        assert torch.equal(x, chain_x)
        assert torch.equal(rows.wide(), chain_rows.wide())
    assert error(Rows(x), Rows(chain_x)) < 3e-3
    assert error(rows, chain_rows) < (2e-2 if quant else 5e-3)
    want_x, want_rows = DEFINITION(*args, counters)
    assert x.dtype == want_x.dtype
    # The definition rounds what lies between two products where their rows are in fp8.
    assert error(Rows(x), Rows(want_x)) < (2e-2 if quant else 1e-2)
    assert error(rows, want_rows) < (5e-2 if quant else 1e-2)
    again, _ = experts_one_triton.feed_forward(*args, counters)
    assert torch.equal(x, again)


def test_a_token_keeps_its_bits_among_others() -> None:
    args = make("fp8", 4, FP8)
    whole, rows = experts_one_triton.feed_forward(*args, zeros(4))
    x, to_dense, to_sparse, index, weight, *rest = args
    one_row = [Rows(r.values[2:3].contiguous(), r.scale[2:3].contiguous()) for r in (to_dense, to_sparse)]
    alone, row = experts_one_triton.feed_forward(x[2:3], *one_row, index[2:3], weight[2:3], *rest, zeros(1))
    assert torch.equal(alone[0], whole[2])
    assert torch.equal(row.values[0].float(), rows.values[2].float())


def test_counters_must_suffice() -> None:
    with pytest.raises(AssertionError, match="3 counters are needed"):
        experts_one_triton.feed_forward(*make("bf16", 3, None), zeros(2))
