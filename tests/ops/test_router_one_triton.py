"""From attention to the chosen experts in one kernel, against chains of torch functions and of single kernels."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import fused, norm_triton, one, router_one_triton, router_triton
from diffusiongemma.ops.one import Router
from diffusiongemma.ops.quant import FP8

FP32, BF16, EPS = torch.float32, torch.bfloat16, 1e-6
DEFINITION = one.route(fused.after_attention, fused.route)
KERNELS = one.route(norm_triton.after_attention, router_triton.route)


def make(tokens: int, width: int, experts: int, k: int, dtype: torch.dtype, seed: int = 0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, std=1.0):
        return (torch.randn(*shape, generator=g) * std).to(DEVICE, dtype)

    norms = tuple(1 + randn(width, std=0.3) for _ in range(3))
    router = Router(randn(experts, width), 1 + randn(width, std=0.3), 1 + randn(experts, std=0.3), k)
    return randn(tokens, width, std=4.0), randn(tokens, width), norms, router, EPS


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("quant", [None, FP8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("tokens", "width", "experts", "k"), [(1, 128, 16, 2), (4, 352, 32, 8), (3, 512, 8, 2), (3, 64, 2, 1)]
)
def test_equals_both_chains(tokens, width, experts, k, dtype, quant) -> None:
    args, counters = (*make(tokens, width, experts, k, dtype), quant), zeros(tokens + 1)
    x, dense, sparse, index, weight = router_one_triton.route(*args, counters)
    assert not counters.any()
    want = DEFINITION(*args, counters)
    chain = KERNELS(*args, counters) if experts >= 16 else want
    loose = dict(atol=1e-5, rtol=1e-4) if dtype == FP32 else dict(atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(x, want[0], **loose)
    if experts >= 16:
        exact = DEVICE.type == "cpu"  # a card sums a norm as its warps lie, and of so narrow rows they lie otherwise
        torch.testing.assert_close(x, chain[0], **dict(atol=0, rtol=0) if exact else loose)
        for ours, theirs in ((dense.wide(), chain[1].wide()), (sparse.wide(), chain[2].wide())):
            assert float((ours - theirs).norm() / theirs.norm()) <= (0 if exact else 2e-2)
    assert torch.equal(index, chain[3])
    torch.testing.assert_close(weight, chain[4], atol=1e-5, rtol=1e-4 if dtype == FP32 else 1e-2)
    if dtype == FP32:  # in bfloat16 scores of equal size may change places
        assert torch.equal(index, want[3])
        torch.testing.assert_close(weight, want[4], atol=1e-5, rtol=1e-4)
    again = router_one_triton.route(*args, counters)
    assert torch.equal(again[0], x)
    assert torch.equal(again[4], weight)


def test_of_equal_experts_the_first_are_taken() -> None:
    x, branch, norms, router, eps = make(2, 64, 16, 4, FP32)
    proj = router.proj.clone()
    proj[5:] = proj[5]
    index = router_one_triton.route(x, branch, norms, router._replace(proj=proj), eps, None, zeros(2))[3]
    want = DEFINITION(x, branch, norms, router._replace(proj=proj), eps, None, zeros(2))[3]
    for ours, theirs in zip(index.tolist(), want.tolist(), strict=True):
        same = [e for e in ours if e >= 5]
        assert same == list(range(5, 5 + len(same)))
        assert len(same) == sum(e >= 5 for e in theirs)
        assert [e for e in ours if e < 5] == [e for e in theirs if e < 5]


def test_a_token_that_is_no_number_does_not_leave_the_experts() -> None:
    x, branch, norms, router, eps = make(2, 64, 16, 4, FP32)
    x[0] = torch.nan
    _, _, _, index, weight = router_one_triton.route(x, branch, norms, router, eps, None, zeros(2))
    assert index[0].tolist() == [0, 1, 2, 3]
    assert weight[0].isnan().all()
    assert weight[1].isfinite().all()


def test_what_it_cannot_do() -> None:
    x, branch, norms, router, eps = make(2, 64, 16, 4, FP32)
    with pytest.raises(AssertionError, match="2 counters are needed"):
        router_one_triton.route(x, branch, norms, router, eps, None, zeros(1))
    with pytest.raises(AssertionError, match="no power of two"):
        router_one_triton.route(x, branch, norms, router._replace(proj=router.proj[:12]), eps, None, zeros(2))
