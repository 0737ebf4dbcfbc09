"""How much arithmetic a micro-batch is, so that speed can be compared with what the machine could do."""

from __future__ import annotations

import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.train.recipe import ObjectiveConfig, TaskConfig

# Dense bfloat16 products without sparsity, FLOP a second, by a part of the GPU's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}


def layer_products(config: ModelConfig) -> int:
    """Multiply-adds a token in the layers: weights that a token meets, without attention scores"""
    total = 0
    for layer in range(config.num_hidden_layers):
        kv_heads, head_dim = config.layer_heads(layer)
        kv = kv_heads * (2 if config.is_sliding(layer) else 1)
        attention = (2 * config.num_attention_heads + kv) * head_dim
        feed_forward = 3 * (config.intermediate_size + config.top_k_experts * config.moe_intermediate_size)
        total += config.hidden_size * (attention + feed_forward + config.num_experts)
    return total


def score_products(config: ModelConfig, keys: float) -> float:
    """Multiply-adds of one query with `keys` keys and values, in all layers"""
    sizes = (config.layer_heads(layer)[1] for layer in range(config.num_hidden_layers))
    return sum(2.0 * config.num_attention_heads * size * keys for size in sizes)


def row_flops(config: ModelConfig, task: TaskConfig, objective: ObjectiveConfig) -> float:
    """FLOP of one row in training: a multiply-add is two, backward is twice forward."""
    length, head = task.prefix + task.canvas, config.vocab_size * config.hidden_size
    layers = layer_products(config)
    encoder = length * (layers + head + score_products(config, length / 2))
    conditioning = 3 * config.hidden_size * config.intermediate_size
    canvases = task.canvas * task.views * task.rounds
    decoder = canvases * (layers + head + conditioning + score_products(config, length))
    belief = objective.self_conditioning * (decoder + canvases * head)
    if task.rounds > 1:  # what is believed comes from passes that are trained anyway
        belief = 2.0 * (canvases - task.canvas * task.views) * head
    return 2.0 * (3.0 * (encoder + decoder) + belief)


def peak_flops(device: torch.device) -> float | None:
    """What the GPU's data sheet promises for bfloat16; None where this is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
