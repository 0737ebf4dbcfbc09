"""Cases of the operation from attention to the experts where each of a few rows has one new token (`ops/one.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import exact_small as small
import torch
from exact_cases import DENSE, Case
from exact_limits import Part
from exact_shapes import Inputs, Shapes
from torch import Tensor

from diffusiongemma.model.backend import Ops
from diffusiongemma.ops.one import Routed, Router
from diffusiongemma.ops.quant import FP8

ROWS = (1, 4)


def one_cases(kind: str, shapes: Shapes, inputs: Inputs) -> Iterator[Case]:
    quant = FP8 if DENSE[kind] == "fp8" else None
    for n in ROWS:
        yield _route(n, shapes, inputs, quant)


def _route(n: int, shapes: Shapes, inputs: Inputs, quant: torch.dtype | None) -> Case:
    config = shapes.config
    width, experts, eps = config.hidden_size, config.num_experts, config.rms_norm_eps
    x, branch = inputs.randn(n, width, std=4.0), inputs.randn(n, width, std=0.5)
    one, two, three, scale = (inputs.near_one(width) for _ in range(4))
    router = Router(inputs.randn(experts, width), scale, inputs.near_one(experts), config.top_k_experts)

    def call(ops: Ops) -> tuple[Routed, Tensor]:
        counters = torch.zeros(n, dtype=torch.int32, device=inputs.device)
        return ops.route_one(x, branch, (one, two, three), router, eps, quant, counters), counters

    def parts(got: tuple[Routed, Tensor]) -> list[Part]:
        residual, dense, sparse, index, weight = got[0]
        made = small.after_attention((residual, dense, sparse), x, branch, [one, two, three], eps, quant)
        counted = Part("counters", got[1], torch.zeros_like(got[1]), how="equal")
        return [*made, *small.route((index, weight), residual, *router, eps), counted]

    size = f"{n} x {width}, {config.top_k_experts} of {experts}"
    return Case("route_one", size, "bf16" if quant is None else "fp8", call, parts)
