"""The small operations of a layer, put together as one kernel each would do them: the definitions, in plain torch.

`norm_triton`, `heads_triton` and `router_triton` hold their twins. A layer is then: `split_heads` after the product
that makes queries, keys and values; `after_attention`; `route`; and `after_feed_forward`, with which the next begins.

Legend: N tokens, D hidden, H query heads, K key/value heads, Dh head size, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.quant import Format, dequantize, quantize, quantize_tokens
from diffusiongemma.ops.rope import Rope, apply_rope


@dataclass(frozen=True)
class Rows:
    """Activations, quantised or not: one scale a row."""

    values: Tensor  # [N, D]
    scale: Tensor | None = None  # [N, 1] float32

    def wide(self) -> Tensor:
        return self.values if self.scale is None else dequantize(self.values, self.scale)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N, D] -> int8 or fp8 [N, D], scale [N, 1] float32"""
    return quantize(x.float(), Format("int8")) if dtype == torch.int8 else quantize_tokens(x)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float, quant: torch.dtype | None = None) -> Rows:
    """x [N, D], weight [D] -> RMS norm, quantised to `quant` (int8 or fp8) where that is given"""
    y = rms_norm(x, weight, eps)
    return Rows(y) if quant is None else Rows(*quantize_rows(y, quant))


def after_attention(
    x: Tensor, branch: Tensor, post: Tensor, dense: Tensor, sparse: Tensor, eps: float, quant: torch.dtype | None = None
) -> tuple[Tensor, Rows, Rows]:
    """x, branch [N, D]; weights [D] -> x + norm(branch), and its norms for the dense MLP and for the experts"""
    x = x + rms_norm(branch, post, eps)
    return x, norm_rows(x, dense, eps, quant), norm_rows(x, sparse, eps, quant)


def after_feed_forward(
    x: Tensor,
    dense: Tensor,
    sparse: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scalar: Tensor,
    following: Tensor,
    eps: float,
    quant: torch.dtype | None = None,
    behind: tuple[int, Tensor] | None = None,
) -> tuple[Tensor, Rows]:
    """x, dense [N, D], sparse [N m, D] -> the layer's output, and its norm, with which the next layer (or the head)
    begins. A token's m rows of `sparse`, its experts' one by one or their sum, are summed in order.

    `weights`: [D] each, of the norms after the dense MLP, after the experts, and after their sum; scalar [1]. `behind`:
    from this row on another scalar.
    """
    after_dense, after_sparse, after_sum = weights
    sparse = summed(sparse, len(x))
    both = rms_norm(dense, after_dense, eps) + rms_norm(sparse, after_sparse, eps)
    x = x + rms_norm(both, after_sum, eps)
    x = x * scalar if behind is None else torch.cat([x[: behind[0]] * scalar, x[behind[0] :] * behind[1]])
    return x, norm_rows(x, following, eps, quant)


def forget(tensors: Sequence[Tensor]) -> None:
    """Nobody reads these any more, and what they hold means nothing from here on: NaN, so that a reader would show"""
    for t in tensors:
        t.fill_(torch.nan)


def summed(pairs: Tensor, tokens: int) -> Tensor:
    """pairs [N m, D] -> each token's sum [N, D], made in float32 or wider, one after another"""
    if len(pairs) == tokens:
        return pairs
    each = pairs.view(tokens, -1, pairs.shape[1])
    total = each[:, 0].to(torch.promote_types(pairs.dtype, torch.float32), copy=True)
    for slot in range(1, each.shape[1]):
        total += each[:, slot]
    return total.to(pairs.dtype)


# ---- heads -------------------------------------------------------------------------------------------------------


def rope_frequency(head_dim: int, theta: float, rotary_factor: float, device: torch.device | str = "cpu") -> Tensor:
    """[Dh / 2] float32, as `rope.rope_tables` has them: computed once, used at every position"""
    turning = int(rotary_factor * head_dim // 2)
    exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device=device) / head_dim
    return F.pad(1.0 / theta**exponent, (0, head_dim // 2 - turning))


def rope_at(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> Rope:
    """positions [N], frequency [Dh / 2] -> cos, sin [N, Dh / 2]"""
    angle = positions[:, None].float() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def split_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Rope, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [N, (H + K + K) Dh], or [N, (H + K) Dh] where keys are values too -> q [N, H, Dh], k and v [N, K, Dh]

    All are normed (v without a weight), q and k turned.
    """
    parts = qkv.view(qkv.shape[0], -1, q_weight.shape[0])
    q, k = parts[:, :heads], parts[:, heads : heads + kv_heads]
    v = parts[:, heads + kv_heads :] if parts.shape[1] > heads + kv_heads else k
    turned = [apply_rope(rms_norm(x, w, eps), rope) for x, w in ((q, q_weight), (k, k_weight))]
    return turned[0], turned[1], rms_norm(v, None, eps)


# ---- router ------------------------------------------------------------------------------------------------------


def route(
    x: Tensor, proj: Tensor, scale: Tensor, per_expert_scale: Tensor, top_k: int, eps: float
) -> tuple[Tensor, Tensor]:
    """x [N, D], proj [E, D], scale [D], per_expert_scale [E] -> expert index [N, k] int64, weight [N, k] float32"""
    scores = F.linear(rms_norm(x, None, eps) * scale * x.shape[1] ** -0.5, proj)
    weight, index = F.softmax(scores, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    return index, weight * per_expert_scale[index]
