"""From attention to the experts where each of a few rows has one new token: one operation. Its definition.

It is a chain of two, made of what is given: of torch functions it is what `router_one_triton` computes, of single
kernels what that replaces. `counters` are zeros, and zeros again afterwards: the kernel counts its programs in them, a
chain has no use for them.

Legend: N tokens, one a row; D hidden, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusiongemma.ops.fused import Rows


class Router(NamedTuple):
    proj: Tensor  # [E, D]
    scale: Tensor  # [D]
    per_expert: Tensor  # [E]
    top_k: int


Routed = tuple[Tensor, Rows, Rows, Tensor, Tensor]


def route(after_attention: Callable[..., Any], pick: Callable[..., Any]) -> Callable[..., Routed]:
    def run(
        x: Tensor, branch: Tensor, norms: tuple[Tensor, Tensor, Tensor], router: Router, eps: float,
        quant: torch.dtype | None, counters: Tensor,
    ) -> Routed:  # fmt: skip
        """x, attention's contribution [N, D] -> as `fused.after_attention`, and the experts and weights [N, k]"""
        x, to_dense, to_sparse = after_attention(x, branch, *norms, eps, quant)
        return x, to_dense, to_sparse, *pick(x, *router, eps)

    return run
