"""Norms, heads and router in Triton against their torch definitions, and those against a layer of the network."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.model.cache import CacheRow
from diffusiongemma.model.layers import Layer, Pass
from diffusiongemma.ops import attention_cached, fused, heads_triton, norm_triton, router_triton
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.experts_triton import combine
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.quant import FP8

EPS = 1e-6
FP32, BF16 = torch.float32, torch.bfloat16


def randn(*shape, dtype=FP32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, want, dtype, steps: float = 1.0) -> None:
    """Within so many roundings of the dtype at the largest number."""
    limit = {FP32: 2e-6, BF16: 2**-8}[dtype] * steps * float(want.float().abs().max())
    assert (got.float() - want.float()).abs().max() <= limit


def close_rows(got: fused.Rows, want: fused.Rows, quant) -> None:
    assert got.values.dtype == quant
    torch.testing.assert_close(got.scale, want.scale, atol=0, rtol=0.01)
    # One step of the format may go either way, where bfloat16 before it went either way.
    step = 1.01 if quant == torch.int8 else 33
    assert (got.values.float() - want.values.float()).abs().max() <= step
    assert (got.wide() - want.wide()).norm() / want.wide().norm() < 0.02


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 72), (1, 2816)])
def test_rms_norm(shape, dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    for w in (weight, None):
        close(norm_triton.rms_norm(x, w, EPS), rms_norm(x, w, EPS), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("quant", [None, torch.int8, FP8])
def test_norms_with_what_surrounds_them(dtype, quant) -> None:
    x, dense, sparse, *weights = (randn(4, 72, dtype=dtype, seed=i) for i in range(7))
    weights = [w[0] for w in weights]
    scalar = torch.tensor([0.7], device=DEVICE, dtype=dtype)
    pairs = randn(4 * 3, 72, dtype=dtype, seed=8)
    for name, args in (
        ("norm_rows", (x, weights[0])),
        ("after_attention", (x, dense, *weights[:3])),
        ("after_feed_forward", (x, dense, sparse, tuple(weights[:3]), scalar, weights[3])),
        ("after_feed_forward", (x, dense, pairs, tuple(weights[:3]), scalar, weights[3])),
    ):
        got, want = (getattr(module, name)(*args, EPS, quant) for module in (norm_triton, fused))
        pairs = [(got, want)] if name == "norm_rows" else list(zip(got, want, strict=True))
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                close(one, other, dtype, 2)
            elif quant is None:
                close(one.values, other.values, dtype, 2)
            else:
                close_rows(one, other, quant)


@pytest.mark.parametrize("module", [norm_triton, fused])
@pytest.mark.parametrize("first", [0, 1, 3, 4])
def test_rows_behind_have_a_scalar_of_their_own(module, first) -> None:
    x, dense, sparse, *weights = (randn(4, 72, seed=i) for i in range(7))
    scalars = [torch.tensor([value], device=DEVICE) for value in (0.7, 1.3)]

    def after(part: slice, scalar: torch.Tensor, **more) -> list[torch.Tensor]:
        given = (x[part], dense[part], sparse[part], tuple(w[0] for w in weights[:3]), scalar, weights[3][0], EPS)
        out, rows = module.after_feed_forward(*given, **more)
        return [out, rows.values]

    both = after(slice(None), scalars[0], behind=(first, scalars[1]))
    apart = zip(after(slice(first), scalars[0]), after(slice(first, None), scalars[1]), strict=True)
    for got, want in zip(both, apart, strict=True):
        assert torch.equal(got, torch.cat(want))


def test_sums_of_pairs_leave_them_alone() -> None:
    pairs = randn(6, 8)
    before = pairs.clone()
    torch.testing.assert_close(fused.summed(pairs, 2), pairs.view(2, 3, 8).sum(dim=1))
    assert torch.equal(pairs, before)
    assert fused.summed(pairs[:0], 0).shape == (0, 8)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_pairs_are_summed_in_order_and_rounded_as_if_they_had_been_stored(dtype) -> None:
    x, dense, *weights = (randn(3, 72, dtype=dtype, seed=i) for i in range(6))
    pairs, scalar = randn(3 * 8, 72, dtype=dtype, seed=9), torch.ones(1, device=DEVICE, dtype=dtype)
    rest = (tuple(w[0] for w in weights[:3]), scalar, weights[3][0], EPS)
    got, want = (norm_triton.after_feed_forward(x, dense, s, *rest) for s in (pairs, combine(pairs, 8)))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].values, want[1].values)


@pytest.mark.parametrize("quant", [torch.int8, FP8])
def test_quantize_rows(quant) -> None:
    x = randn(5, 80)
    x[2] = 0
    (q, scale), (q2, scale2) = norm_triton.quantize_rows(x, quant), fused.quantize_rows(x, quant)
    torch.testing.assert_close(scale, scale2, atol=0, rtol=1e-6)
    assert scale[2] == 1
    assert (q.float() - q2.float()).abs().max() <= (1 if quant == torch.int8 else 16)
    assert (q == q2).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "shared"), [(4, 2, 16, False), (4, 1, 32, True), (16, 8, 32, False)]
)
def test_heads(heads, kv_heads, size, shared, dtype) -> None:
    positions = torch.tensor([0, 1, 77, 5000, 200_000], device=DEVICE)
    frequency = fused.rope_frequency(size, 1e6 if shared else 1e4, 0.25 if shared else 1.0, DEVICE)
    rope, same = (module.rope_at(positions, frequency, dtype) for module in (heads_triton, fused))
    for got, want in zip(rope, same, strict=True):
        close(got, want, dtype)
    qkv = randn(5, (heads + kv_heads * (1 if shared else 2)) * size, dtype=dtype)
    weights = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    for got, want in zip(
        heads_triton.split_heads(qkv, *weights, same, heads, kv_heads, EPS),
        fused.split_heads(qkv, *weights, same, heads, kv_heads, EPS),
        strict=True,
    ):
        assert got.shape == want.shape
        close(got, want, dtype, 2)


@pytest.mark.parametrize(("rows", "width", "experts", "k"), [(5, 72, 16, 3), (33, 320, 32, 8), (1, 64, 128, 1)])
def test_router(rows, width, experts, k) -> None:
    x, proj, scale = randn(rows, width), randn(experts, width, seed=1), randn(width, seed=2)
    per_expert = randn(experts, seed=3)
    index, weight = router_triton.route(x, proj, scale, per_expert, k, EPS)
    want_index, want_weight = fused.route(x, proj, scale, per_expert, k, EPS)
    assert torch.equal(index, want_index)
    torch.testing.assert_close(weight, want_weight, atol=1e-5, rtol=1e-4)


def test_router_in_bfloat16() -> None:
    """The kernel keeps more digits than the definition in bfloat16, so it is held to that in float32."""
    x, proj, scale = randn(40, 256, dtype=BF16), randn(32, 256, dtype=BF16, seed=1), randn(256, dtype=BF16, seed=2)
    per_expert = torch.ones(32, device=DEVICE, dtype=BF16)
    index, weight = router_triton.route(x, proj, scale, per_expert, 4, EPS)
    want_index, want_weight = fused.route(x.float(), proj.float(), scale.float(), per_expert.float(), 4, EPS)
    agree = index == want_index
    assert agree.float().mean() > 0.97
    assert (weight - want_weight)[agree.all(dim=1)].abs().max() < 0.02


def test_a_router_does_not_leave_its_experts() -> None:
    """Unused rows of a recorded graph may hold anything."""
    x = torch.full((3, 64), torch.nan, device=DEVICE)
    index, _ = router_triton.route(x, randn(16, 64), randn(64), randn(16), 4, EPS)
    assert ((index >= 0) & (index < 16)).all()


@pytest.mark.parametrize("mode", ["encode", "denoise"])
@pytest.mark.parametrize("layer", [0, 5])
def test_the_definitions_are_a_layer(mode, layer) -> None:
    """A layer of the network, put together from the definitions that the kernels have."""
    config = ModelConfig.preset("tiny")
    net = Layer(config, layer)
    for i, parameter in enumerate(net.parameters()):
        parameter.data = randn(*parameter.shape, seed=i).cpu() * 0.2 + (parameter.dim() == 1)
    net.decoder_scalar.fill_(0.7)
    net.encoder_scalar.fill_(1.3)
    row, x = CacheRow(config, 64), randn(9, config.hidden_size).cpu()
    with torch.inference_mode():
        first = randn(20, config.hidden_size, seed=5).cpu()
        net(first, Pass.over("encode", [row], [20], config, FP32, torch.device("cpu")))
        row.advance(20)
        slots = row.keys[layer].shape[1]
        prefix = Prefix(
            row.keys[layer][None].clone(),
            row.values[layer][None].clone(),
            torch.zeros(1).int(),
            torch.tensor([20]).int(),
        )
        run = Pass.over(mode, [row], [9], config, FP32, torch.device("cpu"))
        want = net(x, run)

        attn = net.self_attn
        y = fused.norm_rows(x, net.input_layernorm.weight, EPS).values
        norms = attn.q_norm.weight, attn.k_norm.weight
        q, k, v = fused.split_heads(attn.qkv_proj(y), *norms, run.rope[attn.kind], attn.heads, attn.kv_heads, EPS)
        window = attn.window if mode == "encode" else attn.canvas_window
        new = New(torch.tensor([0, 9]).int(), 9)
        mixed = attn.o_proj(attention_cached.attend(q, k, v, prefix, new, mode == "encode", window).flatten(1))
        if mode == "encode":
            attention_cached.store(k, v, prefix, new)
            held = torch.arange(max(0, 29 - slots), 29) % slots
            torch.testing.assert_close(prefix.keys[0][:, held], row.keys[layer][:, held])
        weights = net.post_attention_layernorm, net.pre_feedforward_layernorm, net.pre_feedforward_layernorm_2
        y, dense, sparse = fused.after_attention(x, mixed, *(w.weight for w in weights), EPS)
        router = net.router
        index, weight = fused.route(y, router.proj.weight, router.scale, router.per_expert_scale, router.top_k, EPS)
        after = net.post_feedforward_layernorm_1, net.post_feedforward_layernorm_2, net.post_feedforward_layernorm
        scalar = net.encoder_scalar if mode == "encode" else net.decoder_scalar
        got, _ = fused.after_feed_forward(
            y,
            net.mlp(dense.values),
            net.experts(sparse.values, index, weight),
            (after[0].weight, after[1].weight, after[2].weight),
            scalar,
            net.input_layernorm.weight,
            EPS,
        )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_reasons() -> None:
    assert "too wide" in str(norm_triton.supported(torch.empty(1, 20_000, device=DEVICE)))
    assert "bfloat16 or float32" in str(norm_triton.supported(torch.empty(1, 64, device=DEVICE, dtype=torch.float16)))
    assert "power of two" in str(heads_triton.supported(torch.empty(1, 64, device=DEVICE), 48))
    assert "power of two" in str(router_triton.supported(randn(1, 64), randn(24, 64), 4))
    assert "must both be" in str(router_triton.supported(randn(1, 64), randn(16, 64, dtype=BF16), 4))
    assert norm_triton.supported(randn(1, 64)) is None
    assert heads_triton.supported(randn(1, 64), 32) is None
    assert router_triton.supported(randn(1, 64), randn(16, 64), 4) is None
