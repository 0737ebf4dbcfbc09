"""Which operations are checked, on which shapes: every one of `Ops` as `FusedNetwork` and the engine call it.

A case calls an operation on inputs of its own and knows the float64 reference of what comes back. Calls and references
are apart, so that kernels can be called alone, and compiled before any of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import exact_products as products
import exact_small as small
import torch
from exact_limits import Part, named, same_bits
from exact_products import Given, Matrix
from exact_shapes import Inputs, Shapes
from torch import Tensor

from diffusiongemma.model.backend import VENDOR_ROWS, Ops, triton_ops
from diffusiongemma.ops import product_cuda
from diffusiongemma.ops.fused import Rows, rope_frequency, summed
from diffusiongemma.ops.packed import Packed, once_more
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed, Routing, counters
from diffusiongemma.ops.sides import sides_of
from diffusiongemma.ops.tiles import block_rows

Sort = Callable[[Tensor, int, int], Routing]
DENSE = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "fp8"}  # as `Scheme.parse` has it
FAR = 200_000  # the last position of a rotary embedding


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    format: str
    call: Callable[[Ops], Any]
    parts: Callable[[Any], list[Part]]


@cache
def by_triton() -> Ops:
    """The kernels that those in CUDA C++ stand in for"""
    return triton_ops(exact=True, cpp=False)


def layer_cases(
    kind: str, shapes: Shapes, inputs: Inputs, sort: Sort, vendor: bool, alone: bool = False
) -> Iterator[Case]:  # fmt: skip
    """All but attention and the vocabulary end; `vendor`: its products are used where they are faster; `alone`: bits do
    not depend on what a row is multiplied with"""
    quant = FP8 if DENSE[kind] == "fp8" else None
    for n in shapes.rows:
        yield from _norms(n, shapes, inputs, quant)
        yield from _heads(n, shapes, inputs)
        yield from _router(n, shapes, inputs)
    for n in shapes.sorted:
        yield _sorted(n, kind, shapes, inputs, sort)
    yield _draws(max(shapes.rows), shapes, inputs)
    yield from _products(kind, shapes, inputs, vendor)
    yield from _experts(kind, shapes, inputs, alone)


def _label(quant: torch.dtype | None) -> str:
    return "bf16" if quant is None else "fp8" if quant == FP8 else "int8"


def _norms(n: int, shapes: Shapes, inputs: Inputs, quant: torch.dtype | None) -> Iterator[Case]:
    width, eps = shapes.config.hidden_size, shapes.config.rms_norm_eps
    x, a, b = (inputs.randn(n, width, std=std) for std in (4.0, 0.5, 2.0))
    w, scalar, size = [inputs.near_one(width) for _ in range(4)], inputs.near_one(1), f"{n} x {width}"
    for to in dict.fromkeys((quant, None)):  # self-conditioning is bfloat16 in all kinds
        yield Case(
            "norm_rows", size, _label(to), lambda ops, to=to: ops.norm_rows(x, w[0], eps, to),
            lambda got, to=to: small.norm_rows(got, x, w[0], eps, to),
        )  # fmt: skip
    yield Case(
        "norm_rows, no weight", size, "bf16", lambda ops: ops.norm_rows(x, None, eps),
        lambda got: small.norm_rows(got, x, None, eps, None),
    )  # fmt: skip
    yield Case(
        "after_attention", size, _label(quant), lambda ops: ops.after_attention(x, a, *w[:3], eps, quant),
        lambda got: small.after_attention(got, x, a, w[:3], eps, quant),
    )  # fmt: skip
    pairs = inputs.randn(n * shapes.config.top_k_experts, width, std=0.7)
    for name, sparse in (("after_feed_forward", pairs), ("after_feed_forward, summed", b)):
        joined = (x, a, sparse, (w[0], w[1], w[2]), scalar, w[3], eps)
        for to in dict.fromkeys((quant, None)):  # the last layer's goes to the head as it is
            yield Case(
                name, size, _label(to), lambda ops, to=to, joined=joined: ops.after_feed_forward(*joined, to),
                lambda got, to=to, joined=joined: small.after_feed_forward(got, *joined, to),
            )  # fmt: skip
    for dtype in (FP8, torch.int8):
        yield Case(
            "quantize_rows", size, _label(dtype), lambda ops, dtype=dtype: Rows(*ops.quantize_rows(x, dtype)),
            lambda got, dtype=dtype: small.rows("", got, x.double(), None, dtype),
        )  # fmt: skip


def _heads(n: int, shapes: Shapes, inputs: Inputs) -> Iterator[Case]:
    config = shapes.config
    for layer in shapes.layers():
        turns = (config.rope_theta, 1.0)
        if not layer.sliding:
            turns = (config.global_rope_theta, config.global_partial_rotary_factor)
        frequency = rope_frequency(layer.size, *turns, inputs.device)
        positions = (torch.arange(1, n + 1, device=inputs.device) * FAR // n).int()
        angle = positions[:, None] * frequency
        rope = (angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16))
        yield Case(
            f"rope_at {layer.name}", f"{n} x {layer.size // 2}", "bf16",
            lambda ops, p=positions, f=frequency: ops.rope_at(p, f, torch.bfloat16),
            lambda got, p=positions, f=frequency: small.rope_at(got, p, f),
        )  # fmt: skip
        args = (
            inputs.randn(n, layer.projected, std=3.0), inputs.near_one(layer.size), inputs.near_one(layer.size), rope,
            layer.heads, layer.kv_heads, config.rms_norm_eps,
        )  # fmt: skip
        yield Case(
            f"split_heads {layer.name}", f"{n} x {layer.heads} + {layer.kv_heads} heads of {layer.size}", "bf16",
            lambda ops, args=args: ops.split_heads(*args), lambda got, args=args: small.split_heads(got, *args),
        )  # fmt: skip


def _router(n: int, shapes: Shapes, inputs: Inputs) -> Iterator[Case]:
    config = shapes.config
    width, experts = config.hidden_size, config.num_experts
    weights = (inputs.randn(experts, width), inputs.near_one(width), inputs.near_one(experts))
    args = (inputs.randn(n, width, std=4.0), *weights, config.top_k_experts, config.rms_norm_eps)
    size = f"{n} x {width}, {config.top_k_experts} of {experts}"
    yield Case("route", size, "bf16", lambda ops: ops.route(*args), lambda got: small.route(got, *args))
    if n == shapes.rows[0]:
        nan = (torch.full_like(args[0], torch.nan), *args[1:])
        yield Case("route", size, "bf16", lambda ops: ops.route(*nan), lambda got: small.lost(got, experts))


def _sorted(n: int, kind: str, shapes: Shapes, inputs: Inputs, sort: Sort) -> Case:
    experts = shapes.config.num_experts
    index = inputs.chosen(n, experts, shapes.config.top_k_experts)
    block = block_rows(index.numel(), experts, "pairs" if kind == "int4" else kind)  # type: ignore[arg-type]
    return Case(
        "routing sort", f"{index.numel()} pairs, {experts} experts, blocks of {block}", "int32",
        lambda ops: sort(index, experts, block), lambda got: small.sort(got, index, experts, block),
    )  # fmt: skip


def _draws(n: int, shapes: Shapes, inputs: Inputs) -> Case:
    at = torch.arange(n, device=inputs.device)
    args = (at * 2**40 - 7, (at // 3).int(), at.int(), shapes.config.vocab_size)
    return Case(
        "draws", f"{n} of {args[3]}", "int64", lambda ops: ops.draws(*args), lambda got: small.draws(got, *args)
    )


# ---- products ----------------------------------------------------------------------------------------------------


def _products(kind: str, shapes: Shapes, inputs: Inputs, vendor: bool) -> Iterator[Case]:
    config, dense = shapes.config, DENSE[kind]
    hidden, width = config.hidden_size, config.intermediate_size
    plain: list[tuple[str, str, int, int]] = []  # name, format, inputs, outputs
    for layer in shapes.layers():
        plain.append((f"linear qkv {layer.name}", dense, hidden, layer.projected))
        plain.append((f"linear o {layer.name}", dense, layer.heads * layer.size, hidden))
    around = len(plain)
    plain += [("linear down", dense, width, hidden), ("linear self-conditioning", "bf16", width, hidden)]
    if kind == "int4":  # nothing in the engine has it, but `Ops.linear` takes it
        plain.append(("linear, 4-bit", "int4", hidden, next(shapes.layers()).projected))
    for i, (name, fmt, ins, outs) in enumerate(plain):
        w = inputs.matrix(fmt, outs, ins)
        many = (*shapes.rows, *(shapes.dense if i < around else ()))
        yield from (_linear(name, n, w, inputs.randn(n, ins), outs, vendor) for n in many)
    for name, fmt in (("geglu up", dense), ("geglu self-conditioning", "bf16")):
        w = inputs.matrix(fmt, 2 * width, hidden, gated=True)
        yield from (_geglu(name, n, w, inputs.randn(n, hidden), width) for n in shapes.rows)


class Made(NamedTuple):
    """Of a product"""

    out: Tensor
    given: Rows
    twin: Tensor | None  # the same by Triton, where a kernel in CUDA C++ has made it


def _linear(name: str, n: int, w: Matrix, x: Tensor, outs: int, vendor: bool) -> Case:
    vendor = vendor and w.fmt == "bf16" and n >= VENDOR_ROWS

    def call(ops: Ops) -> Made:
        given = ops.rows_for(Rows(x), w.kept)
        cuda = product_cuda.tile_for(given, w.kept[0]) is not None
        return Made(ops.linear(given, w.kept), given, by_triton().linear(given, w.kept) if cuda else None)

    def parts(got: Made) -> list[Part]:
        found = _both(w, lambda form: products.linear(got.out, Given(got.given, x), w, form, vendor))
        return found + ([] if got.twin is None else [same_bits("as by Triton", got.out, got.twin)])

    return Case(name, f"{n} x {x.shape[1]} -> {outs}", w.fmt, call, parts)


def _geglu(name: str, n: int, w: Matrix, x: Tensor, outs: int) -> Case:
    def call(ops: Ops) -> tuple[Rows, Rows]:
        given = ops.rows_for(Rows(x), w.kept)
        return ops.geglu(given, w.kept), given

    def parts(got: tuple[Rows, Rows]) -> list[Part]:
        return _both(w, lambda form: products.geglu(got[0], Given(got[1], x), w, form))

    return Case(name, f"{n} x {x.shape[1]} -> {outs}", w.fmt, call, parts)


def _experts(kind: str, shapes: Shapes, inputs: Inputs, alone: bool) -> Iterator[Case]:
    config = shapes.config
    hidden, width, k = config.hidden_size, config.moe_intermediate_size, config.top_k_experts
    up = inputs.matrix(kind, config.num_experts, 2 * width, hidden, gated=True)
    down = inputs.matrix(kind, config.num_experts, hidden, width)
    for n in shapes.rows:
        x, index = inputs.randn(n, hidden), inputs.chosen(n, config.num_experts, k)
        weight = inputs.randn(n, k).float().softmax(dim=1)

        def call(ops: Ops, x: Tensor = x, index: Tensor = index, weight: Tensor = weight) -> tuple[Tensor, Rows]:
            given = ops.rows_for(Rows(x), up.kept)
            return summed(ops.experts(given, index, weight, up.kept, down.kept), len(x)), given

        def parts(
            got: tuple[Tensor, Rows], x: Tensor = x, index: Tensor = index, weight: Tensor = weight
        ) -> list[Part]:
            given = Given(got[1], x)
            return _both(up, lambda form: products.experts(got[0], given, index, weight, up, down, form))

        size = f"{n} x {hidden} -> {width} -> {hidden}, {k} of {config.num_experts}"
        yield Case("experts", size, kind, call, parts)
        yield _placed(n, kind, shapes, inputs, up, down, alone)
    yield from (_placed(n, kind, shapes, inputs, up, down, alone) for n in shapes.placed)


class Found(NamedTuple):
    index: Tensor
    weight: Tensor
    placed: Placed | None
    given: Rows
    pairs: Tensor
    routed: tuple[Tensor, Tensor]  # the same from `route`
    ordered: Tensor  # the same of pairs that were sorted
    packed: tuple[Tensor, Tensor] | None  # where they are read: by packed experts, and by plain ones that are rounded


@cache
def _packed(up: Matrix, down: Matrix) -> tuple[Weight, Weight, Packed]:
    """Weights rounded to what has a place, and the same packed, or laid out by side"""
    weights = [tuple(None if t is None else t.clone() for t in w.kept) for w in (up, down)]
    (first, first_scale), (second, second_scale) = weights
    assert first is not None
    assert second is not None
    made = once_more(first, first_scale, second, second_scale, sides_of(first.device))
    return (first, first_scale), (second, second_scale), made


def _placed(n: int, kind: str, shapes: Shapes, inputs: Inputs, up: Matrix, down: Matrix, alone: bool) -> Case:
    """From the router to the experts without a sort, and the same bits with one"""
    config = shapes.config
    width, experts, k, eps = config.hidden_size, config.num_experts, config.top_k_experts, config.rms_norm_eps
    router = (inputs.randn(experts, width), inputs.near_one(width), inputs.near_one(experts), k)
    router[0][1] *= 4  # some experts have more than a block
    x = inputs.randn(n, width)

    def call(ops: Ops) -> Found:
        counts = torch.zeros(counters(experts, n * k)[0], dtype=torch.int32, device=inputs.device)
        index, weight, placed = ops.place(x, *router, eps, up.kept, counts=counts)
        given = ops.rows_for(Rows(x), up.kept)
        pairs = ops.experts(given, index, weight, up.kept, down.kept, placed)
        ordered = ops.experts(given, index, weight, up.kept, down.kept)
        return Found(index, weight, placed, given, pairs, ops.route(x, *router, eps), ordered, both(ops, given))

    def both(ops: Ops, given: Rows) -> tuple[Tensor, Tensor] | None:
        if not ops.streams(n, k, up.kept, down.kept):
            return None
        *weights, held = _packed(up, down)
        made = list[Tensor]()
        for packed in (held, None):  # lists and marks are used up
            counts = torch.zeros(counters(experts, n * k)[0], dtype=torch.int32, device=inputs.device)
            index, weight, placed = ops.place(x, *router, eps, up.kept, counts=counts)
            made.append(ops.experts(given, index, weight, *weights, placed, packed))
        return made[0], made[1]

    def parts(got: Found) -> list[Part]:
        assert got.placed is not None
        found = [
            *small.route((got.index, got.weight), x, *router, eps),
            *small.placed(got.placed, got.index, got.weight),
        ]
        found.append(Part("experts as routed", got.index, got.routed[0], how="equal"))
        found.append(Part("weights as routed", got.weight, got.routed[1], how="equal"))
        if alone:
            found.append(Part("as sorted", got.pairs, got.ordered, how="equal"))
        if got.packed is not None:
            found.append(Part("as packed", *got.packed, how="equal"))
        made, given = summed(got.pairs, n), Given(got.given, x)
        return found + _both(
            up, lambda form: products.experts(made, given, got.index, got.weight, up, down, form)
        )  # fmt: skip

    return Case("place", f"{n} x {width}, {k} of {experts}, and these", kind, call, parts)


def _both(w: Matrix, parts: Callable[[bool], list[Part]]) -> list[Part]:
    """The two errors of a product; of bfloat16 weights, which are what they were, one"""
    found = named("arithmetic", parts(False))
    return found if w.fmt == "bf16" else found + named("format", parts(True))
