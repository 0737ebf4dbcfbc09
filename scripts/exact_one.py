"""Cases of the three operations of a layer where each of a few rows has one new token (`ops/one.py`).

What lies inside them cannot be seen: queries, and what the two branches of a feed-forward add. The references make it
in float64 and carry on how far it may be off; what is stored on the way (keys, values, the residual) is judged by
itself, and read from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import exact_attention as attention
import exact_products as products
import exact_small as small
import torch
from exact_cases import DENSE, Case
from exact_ends import SHARP, Attention
from exact_limits import Part, named
from exact_products import Given
from exact_shapes import Inputs, LayerShape, Lines, Shapes
from torch import Tensor

from diffusiongemma.model.backend import Ops
from diffusiongemma.ops.attention_cached import Prefix
from diffusiongemma.ops.fused import Rows, rope_at, rope_frequency
from diffusiongemma.ops.one import Ends, Routed, Router
from diffusiongemma.ops.quant import FP8

ROWS = (1, 4)
EXPERTS = 16  # the kernels do not know how many there are: so many are quickly made


def one_cases(kind: str, shapes: Shapes, inputs: Inputs) -> Iterator[Case]:
    quant = FP8 if DENSE[kind] == "fp8" else None
    for layer in shapes.layers():
        yield from (_attend(layer, lines, shapes, inputs) for lines in shapes.ones)
    for n in ROWS:
        yield _route(n, shapes, inputs, quant)
        yield _feed_forward(n, kind, shapes, inputs, quant)


def _zeros(inputs: Inputs, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=inputs.device)


def _counted(counters: Tensor) -> Part:
    return Part("counters", counters, torch.zeros_like(counters), how="equal")


def _attend(layer: LayerShape, lines: Lines, shapes: Shapes, inputs: Inputs) -> Case:
    like = Attention(f"attend_one {layer.name}", layer, lines, True, None, shapes, inputs)
    before, new, eps = like.prefix, like.new, shapes.config.rms_norm_eps
    rope = rope_at(before.length, rope_frequency(layer.size, 1e4, 1.0, inputs.device), torch.bfloat16)
    sharp = (SHARP * layer.size**-0.5) ** 0.5
    heads = (
        inputs.randn(len(lines), layer.projected, std=3.0), sharp * inputs.near_one(layer.size),
        sharp * inputs.near_one(layer.size), rope, layer.heads, layer.kv_heads, eps,
    )  # fmt: skip

    def call(ops: Ops) -> tuple[Tensor, Prefix, Tensor]:
        keys, values = (t.transpose(1, 2).clone().transpose(1, 2) for t in (before.keys, before.values))
        prefix, counters = Prefix(keys, values, before.row, before.length), _zeros(inputs, len(lines) * layer.kv_heads)
        return ops.attend_one(*heads, prefix, new, layer.window, counters), prefix, counters

    def parts(got: tuple[Tensor, Prefix, Tensor]) -> list[Part]:
        mixed, prefix, counters = got
        slot = prefix.length.long() % prefix.keys.shape[2]
        k, v = (t[prefix.row.long(), :, slot] for t in (prefix.keys, prefix.values))
        unseen = torch.zeros(len(lines), layer.heads, layer.size, device=inputs.device)
        q, *kept = small.split_heads((unseen, k, v), *heads)
        return [
            *named("cached", kept),
            *attention.cached(prefix, before, k, v, new, keep=True),
            *attention.attend(Rows(mixed), q.want, k, v, before, new, True, layer.window, None, q.bound),
            _counted(counters),
        ]

    return Case(like.name, like.shape, "bf16", call, parts)


def _route(n: int, shapes: Shapes, inputs: Inputs, quant: torch.dtype | None) -> Case:
    config = shapes.config
    width, experts, eps = config.hidden_size, config.num_experts, config.rms_norm_eps
    x, branch = inputs.randn(n, width, std=4.0), inputs.randn(n, width, std=0.5)
    one, two, three, scale = (inputs.near_one(width) for _ in range(4))
    router = Router(inputs.randn(experts, width), scale, inputs.near_one(experts), config.top_k_experts)

    def call(ops: Ops) -> tuple[Routed, Tensor]:
        counters = _zeros(inputs, n)
        return ops.route_one(x, branch, (one, two, three), router, eps, quant, counters), counters

    def parts(got: tuple[Routed, Tensor]) -> list[Part]:
        residual, dense, sparse, index, weight = got[0]
        made = small.after_attention((residual, dense, sparse), x, branch, [one, two, three], eps, quant)
        return [*made, *small.route((index, weight), residual, *router, eps), _counted(got[1])]

    size = f"{n} x {width}, {config.top_k_experts} of {experts}"
    return Case("route_one", size, "bf16" if quant is None else "fp8", call, parts)


def _feed_forward(n: int, kind: str, shapes: Shapes, inputs: Inputs, quant: torch.dtype | None) -> Case:
    config, fmt = shapes.config, DENSE[kind]
    hidden, width, inner = config.hidden_size, config.moe_intermediate_size, config.intermediate_size
    experts, k = min(EXPERTS, config.num_experts), config.top_k_experts
    dense = inputs.matrix(fmt, 2 * inner, hidden, gated=True), inputs.matrix(fmt, hidden, inner)
    sparse = inputs.matrix(kind, experts, 2 * width, hidden, gated=True), inputs.matrix(kind, experts, hidden, width)
    x, to_dense, to_sparse = inputs.randn(n, hidden, std=4.0), inputs.randn(n, hidden), inputs.randn(n, hidden)
    index, weight = inputs.chosen(n, experts, k), inputs.randn(n, k).float().softmax(dim=1)
    one, two, three, following = (inputs.near_one(hidden) for _ in range(4))
    ends = Ends((one, two, three), inputs.near_one(1), following, config.rms_norm_eps, quant)

    def call(ops: Ops) -> tuple[tuple[Tensor, Rows], Rows, Rows, Tensor]:
        given = [Rows(t) if quant is None else Rows(*ops.quantize_rows(t, quant)) for t in (to_dense, to_sparse)]
        weights = ((dense[0].kept, dense[1].kept), (sparse[0].kept, sparse[1].kept))
        counters = _zeros(inputs, n)
        return ops.feed_forward_one(x, *given, index, weight, *weights, ends, counters), *given, counters

    def parts(got: tuple[tuple[Tensor, Rows], Rows, Rows, Tensor]) -> list[Part]:
        made, for_dense, for_sparse, counters = got
        unseen = torch.zeros_like(x)
        (a,) = products.mlp(unseen, Given(for_dense, to_dense), *dense)
        (b,) = products.experts(unseen, Given(for_sparse, to_sparse), index, weight, *sparse, form=False)
        assert a.bound is not None
        assert b.bound is not None
        found = small.after_feed_forward(made, x, a.want, b.want, *ends, offs=(a.bound, b.bound))
        return [*found, _counted(counters)]

    size = f"{n} x {hidden} -> {inner} and {k} of {experts} x {width} -> {hidden}"
    return Case("feed_forward_one", size, kind, call, parts)
