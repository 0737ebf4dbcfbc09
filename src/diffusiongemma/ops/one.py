"""A layer in a pass where each of a few rows has one new token, in three operations between its products: definitions.

Each is a chain of others, made of what is given: of torch functions it is the definition of the kernels
(`attention_one_triton`, `router_one_triton`, `experts_one_triton`), of single kernels what they replace.

`counters` are zeros, and zeros again afterwards: kernels count their programs in them, a chain has no use for them.

Legend: N tokens, one a row; D hidden, H query heads, K key/value heads, Dh head size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.rope import Rope


class Router(NamedTuple):
    proj: Tensor  # [E, D]
    scale: Tensor  # [D]
    per_expert: Tensor  # [E]
    top_k: int


class Ends(NamedTuple):
    """What follows the products of a feed-forward: `fused.after_feed_forward`."""

    norms: tuple[Tensor, Tensor, Tensor]
    scalar: Tensor
    following: Tensor
    eps: float
    quant: torch.dtype | None


Routed = tuple[Tensor, Rows, Rows, Tensor, Tensor]


def attend(split_heads: Callable[..., Any], attend_rows: Callable[..., Rows]) -> Callable[..., Tensor]:
    def run(
        qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Rope, heads: int, kv_heads: int, eps: float,
        prefix: Prefix, new: New, window: int | None, counters: Tensor,
    ) -> Tensor:  # fmt: skip
        """qkv [N, (H + 2 K) Dh], or (H + K) Dh -> [N, H Dh]; the tokens are put into the cache"""
        q, k, v = split_heads(qkv, q_weight, k_weight, rope, heads, kv_heads, eps)
        return attend_rows(q, k, v, prefix, new, True, window, None, keep=True).values

    return run


def route(after_attention: Callable[..., Any], pick: Callable[..., Any]) -> Callable[..., Routed]:
    def run(
        x: Tensor, branch: Tensor, norms: tuple[Tensor, Tensor, Tensor], router: Router, eps: float,
        quant: torch.dtype | None, counters: Tensor,
    ) -> Routed:  # fmt: skip
        """x, attention's contribution [N, D] -> as `fused.after_attention`, and the experts and weights [N, k]"""
        x, to_dense, to_sparse = after_attention(x, branch, *norms, eps, quant)
        return x, to_dense, to_sparse, *pick(x, *router, eps)

    return run


def feed_forward(
    geglu: Callable[..., Rows], linear: Callable[..., Tensor], experts: Callable[..., Tensor],
    after_feed_forward: Callable[..., tuple[Tensor, Rows]],
) -> Callable[..., tuple[Tensor, Rows]]:  # fmt: skip
    def run(
        x: Tensor, to_dense: Rows, to_sparse: Rows, index: Tensor, weight: Tensor, dense: tuple[Weight, Weight],
        sparse: tuple[Weight, Weight], ends: Ends, counters: Tensor,
    ) -> tuple[Tensor, Rows]:  # fmt: skip
        """What `route` gives, and the weights of the dense MLP and of the experts -> as `fused.after_feed_forward`"""
        one = linear(geglu(to_dense, dense[0]), dense[1])
        return after_feed_forward(x, one, experts(to_sparse, index, weight, *sparse), *ends)

    return run
