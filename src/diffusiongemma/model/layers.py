"""The parts of one layer: attention, dense MLP, router, experts, and how they add up.

Tokens are packed: the rows of a batch lie one after another in x [N, D], without padding. Only attention knows
which token belongs to which row; a `Pass` tells it.

Legend: N tokens in the pass, D hidden, H query heads, K key/value heads, Dh head size, F dense width, E experts,
I expert width, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusiongemma.config import FULL, SLIDING, LayerType, ModelConfig
from diffusiongemma.model.cache import CacheRow
from diffusiongemma.ops.attention import attend_canvas, attend_causal
from diffusiongemma.ops.experts import experts_grouped, geglu
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.rope import Rope, apply_rope, rope_tables


@dataclass(frozen=True)
class Pass:
    """One pass through the layers: which rows, how many new tokens of each, and in which mode."""

    mode: Literal["encode", "denoise"]
    rows: list[CacheRow]
    counts: list[int]  # new tokens of each row; they sum to N
    rope: dict[LayerType, Rope]

    @classmethod
    def over(
        cls,
        mode: Literal["encode", "denoise"],
        rows: list[CacheRow],
        counts: list[int],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Pass:
        at = [torch.arange(row.length, row.length + n, device=device) for row, n in zip(rows, counts, strict=True)]
        positions = torch.cat(at)
        sliding = rope_tables(positions, config.head_dim, config.rope_theta, 1.0, dtype)
        full = rope_tables(
            positions, config.global_head_dim, config.global_rope_theta, config.global_partial_rotary_factor, dtype
        )
        return cls(mode, rows, counts, {SLIDING: sliding, FULL: full})


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """Dense GeGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]"""
        out: Tensor = self.down_proj(geglu(self.gate_up_proj(x)))
        return out


class Attention(nn.Module):
    """Grouped-query attention over the row's cache and its new tokens. Full layers use their keys as values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.kind: LayerType = config.layer_types[layer]
        self.window = config.sliding_window if self.kind == SLIDING else None
        self.canvas_window = config.canvas_window if self.kind == SLIDING else None
        self.heads = config.num_attention_heads
        self.kv_heads, self.head_dim = config.layer_heads(layer)
        projected = self.heads + self.kv_heads * (2 if self.kind == SLIDING else 1)
        self.qkv_proj = Linear(config.hidden_size, projected * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        self.k_norm = RMSNorm(self.head_dim, self.eps)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """[N, D] -> [N, D]"""
        q, k, v = self.project(x, run.rope[self.kind])
        attend = self.encode_row if run.mode == "encode" else self.denoise_row
        parts = zip(run.rows, q.split(run.counts), k.split(run.counts), v.split(run.counts), strict=True)
        mixed = torch.cat([attend(row, q_r, k_r.transpose(0, 1), v_r.transpose(0, 1)) for row, q_r, k_r, v_r in parts])
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out

    def remember(self, x: Tensor, run: Pass) -> None:
        """[N, D]: its keys and values go into the cache, as `forward` puts them there"""
        _, k, v = self.project(x, run.rope[self.kind])
        for row, k_r, v_r in zip(run.rows, k.split(run.counts), v.split(run.counts), strict=True):
            row.write(self.layer, k_r.transpose(0, 1), v_r.transpose(0, 1))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """[N, D] -> q [N, H, Dh], k and v [N, K, Dh], normed, q and k rotated."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q, k = heads[:, : self.heads], heads[:, self.heads : self.heads + self.kv_heads]
        v = heads[:, self.heads + self.kv_heads :] if self.kind == SLIDING else k
        return apply_rope(self.q_norm(q), rope), apply_rope(self.k_norm(k), rope), rms_norm(v, None, self.eps)

    def encode_row(self, row: CacheRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, Dh], k and v [K, T, Dh] -> [T, H, Dh]; causal; the new keys and values go into the cache."""
        keys, values = row.last(self.layer, row.length if self.window is None else self.window - 1)
        out = attend_causal(q, torch.cat([*keys, k], dim=1), torch.cat([*values, v], dim=1), row.length, self.window)
        row.write(self.layer, k, v)
        return out

    def denoise_row(self, row: CacheRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [L, H, Dh], k and v [K, L, Dh] -> [L, H, Dh]; all canvas positions see the same prefix and each other."""
        keys, values = row.last(self.layer, row.length if self.canvas_window is None else self.canvas_window)
        return attend_canvas(q, torch.cat([*keys, k], dim=1), torch.cat([*values, v], dim=1))


class Router(nn.Module):
    """Picks k experts for every token and says how much each counts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.eps, self.root = config.top_k_experts, config.rms_norm_eps, config.hidden_size**-0.5
        self.proj = Linear(config.hidden_size, config.num_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, D] -> expert index [N, k], weight [N, k] in float32"""
        scores = self.proj(rms_norm(x, None, self.eps) * self.scale * self.root)
        weight, index = F.softmax(scores, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        return index, weight * self.per_expert_scale[index]


class Experts(nn.Module):
    """The experts' weights, fused over experts as in the stock checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x [N, D], index and weight [N, k] -> [N, D]"""
        return experts_grouped(x, index, weight, self.gate_up_proj, self.down_proj)


class Layer(nn.Module):
    """Attention, then dense MLP and experts side by side; norms before and after each; one scalar at the end."""

    encoder_scalar: Tensor
    decoder_scalar: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(hidden, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)  # before the dense MLP
        self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)  # after it
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)  # before the experts
        self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)  # after them
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)  # after their sum
        # The one weight that the two modes do not share.
        self.register_buffer("encoder_scalar", torch.ones(1))
        self.register_buffer("decoder_scalar", torch.ones(1))

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """[N, D] -> [N, D]"""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), run))
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        index, weight = self.router(x)  # the router and the experts read the residual, not the MLP's output
        sparse = self.post_feedforward_layernorm_2(self.experts(self.pre_feedforward_layernorm_2(x), index, weight))
        x = x + self.post_feedforward_layernorm(dense + sparse)
        return x * (self.encoder_scalar if run.mode == "encode" else self.decoder_scalar)
