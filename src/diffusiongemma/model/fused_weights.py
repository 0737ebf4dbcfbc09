"""The weights of a `DiffusionGemma` as the operations of `FusedNetwork` take them: shared, never copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.config import LayerType
from diffusiongemma.model.backend import Ops, wants_fp8
from diffusiongemma.model.layers import MLP, Experts, Layer
from diffusiongemma.model.network import DiffusionGemma, Embedding
from diffusiongemma.model.packed import packed_of
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.packed import Packed
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear
from diffusiongemma.ops.vocab import Table


@dataclass(frozen=True)
class FusedMLP:
    up: Weight
    down: Weight

    def quant(self) -> torch.dtype | None:
        return quant_of(self.up)

    def __call__(self, ops: Ops, x: Rows, slim: bool = False) -> Tensor:
        """[N, D] -> [N, D]; `slim`: in programs that leave room for others on their multiprocessor"""
        hidden = ops.geglu(ops.rows_for(x, self.up), self.up, slim)
        return ops.linear(ops.rows_for(hidden, self.down), self.down, slim)


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer as the operations take them."""

    kind: LayerType
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    canvas_window: int | None
    qkv: Weight
    o: Weight
    mlp: FusedMLP
    up: Weight
    down: Weight
    packed: Packed | None  # up and down once more
    module: Layer

    @classmethod
    def of(cls, layer: Layer, packed: bool = False) -> FusedLayer:
        attention = layer.self_attn
        experts: Any = layer.experts
        return cls(
            attention.kind,
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.window,
            attention.canvas_window,
            _weight(attention.qkv_proj),
            _weight(attention.o_proj),
            mlp_of(layer.mlp),
            _expert_weight(experts, "gate_up_proj"),
            _expert_weight(experts, "down_proj"),
            packed_of(experts) if packed else None,
            layer,
        )


def table_of(model: DiffusionGemma) -> Table:
    """The embeddings as the vocabulary end reads them; 8-bit ones get their fp8 copy for the soft embedding."""
    embedding: Any = model.embed_tokens
    if isinstance(embedding, QuantEmbedding):
        return Table(embedding.weight.q, embedding.weight.scale).with_soft()
    assert isinstance(embedding, Embedding)
    return Table(embedding.weight.data)


def _weight(module: Any) -> Weight:
    if isinstance(module, QuantLinear):
        return module.weight.q, module.weight.scale
    assert isinstance(module, Linear), f"no fused product with a {type(module).__name__}"
    return module.weight.data, None


def _expert_weight(module: Any, name: str) -> Weight:
    weight = getattr(module, name)
    if isinstance(module, QuantExperts):
        return weight.q, weight.scale
    assert isinstance(module, Experts)
    return weight.data, None


def mlp_of(module: MLP) -> FusedMLP:
    return FusedMLP(_weight(module.gate_up_proj), _weight(module.down_proj))


def quant_of(weight: Weight) -> torch.dtype | None:
    """What the rows before a product are rounded to."""
    return FP8 if wants_fp8(weight) else None
