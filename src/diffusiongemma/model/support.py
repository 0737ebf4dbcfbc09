"""Whether the kernels can run this network, and the preparation of its weights for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffusiongemma.model.backend import Ops
from diffusiongemma.model.fused_weights import FusedLayer
from diffusiongemma.model.network import DiffusionGemma
from diffusiongemma.ops import kernels, quantized
from diffusiongemma.ops.fused import Rows, summed
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quantized import QuantEmbedding, QuantWeight


def unsupported(model: DiffusionGemma) -> str | None:
    """Why the Triton kernels cannot run this network, or None."""
    if reason := kernels.unavailable(model.device):
        return reason
    from diffusiongemma.ops.product_triton import runs_in

    if reason := runs_in(model.dtype):
        return reason
    return next(filter(None, (*_shapes(model), *_weights(model))), None)


def _shapes(model: DiffusionGemma) -> list[str | None]:
    """What heads, experts and vocabulary may look like."""
    config = model.config
    found: list[str | None] = []
    for layer in range(config.num_hidden_layers):
        kv_heads, size = config.layer_heads(layer)
        group = config.num_attention_heads // kv_heads
        if size & (size - 1) or not 16 <= size <= 512:
            found.append(f"the head size must be a power of two from 16 to 512, not {size}")
        if group & (group - 1) or group > 16:
            found.append(f"the query heads of a K/V head must be a power of two up to 16, not {group}")
    if config.num_experts & (config.num_experts - 1) or config.num_experts < 2:
        found.append(f"the number of experts must be a power of two, not {config.num_experts}")
    for name in ("vocab_size", "hidden_size"):
        if getattr(config, name) % 16:
            found.append(f"{name} must be a multiple of 16, not {getattr(config, name)}")
    embedding: Any = model.embed_tokens
    if isinstance(embedding, QuantEmbedding) and embedding.weight.format.kind == "int4":
        found.append("there is no kernel for 4-bit embeddings")
    return found


def _weights(model: DiffusionGemma) -> list[str | None]:
    """What the products say of each weight; layers are alike, so that the first of each kind speak for all."""
    from diffusiongemma.ops import product_triton

    config, device = model.config, model.device
    modules: list[Any] = [model.layers[config.layer_types.index(kind)] for kind in dict.fromkeys(config.layer_types)]
    layers = [FusedLayer.of(module) for module in modules]
    found: list[str | None] = [
        weight.unfit() for weight in model.modules() if isinstance(weight, QuantWeight) and not weight.runtime
    ]
    for layer in layers:
        sized = (
            (layer.qkv, config.hidden_size, False),
            (layer.o, layer.heads * layer.head_dim, False),
            (layer.mlp.up, config.hidden_size, True),
            (layer.mlp.down, config.intermediate_size, False),
            (layer.up, config.hidden_size, True),
            (layer.down, config.moe_intermediate_size, False),
        )
        for (numbers, _), inputs, gated in sized:
            four_bits = numbers.dtype in (torch.int32, torch.uint8)  # stored, laid out: `unfit` has spoken for them
            if not four_bits and not (numbers.dtype == torch.float32 and kernels.interpreted()):
                found.append(product_triton.supported(device, numbers, inputs, gated))
    return found


def prepare(model: DiffusionGemma, ops: Ops) -> list[str]:
    """Lay 4-bit weights out for the kernels, and let the plain network use these products too -> what it cannot."""

    def linear(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
        weight: Weight = (q, scale)
        return ops.linear(ops.rows_for(Rows(x.contiguous()), weight), weight)

    def experts(x: Tensor, index: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        up, down = (parts[0], parts[1]), (parts[2], parts[3])
        pairs = ops.experts(ops.rows_for(Rows(x.contiguous()), up), index, weight.float(), up, down)
        return summed(pairs, len(x))

    return quantized.use_kernels(model, linear, experts)
