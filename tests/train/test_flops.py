"""The FLOP count is the parameter count where every weight is met once."""

import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.flops import layer_products, peak_flops, row_flops, score_products
from diffusiongemma.train.recipe import ObjectiveConfig, TaskConfig


def test_a_token_meets_every_matrix_once_when_all_experts_are_chosen() -> None:
    config = ModelConfig.preset("tiny", top_k_experts=8)
    model = DiffusionGemma(config)
    matrices = sum(p.numel() for name, p in model.layers.named_parameters() if p.ndim >= 2)
    assert layer_products(config) == matrices
    fewer = ModelConfig.preset("tiny", top_k_experts=2)
    saved = 6 * 6 * 3 * config.hidden_size * config.moe_intermediate_size  # six experts less in six layers
    assert layer_products(config) - layer_products(fewer) == saved


def test_a_row_without_belief_is_three_forwards() -> None:
    config = ModelConfig.preset("tiny")
    task = TaskConfig("x", "y", 1.0, prefix=30, canvas=10)
    head, layers = config.vocab_size * config.hidden_size, layer_products(config)
    conditioning = 3 * config.hidden_size * config.intermediate_size
    encoder = 40 * (layers + head + score_products(config, 20))
    decoder = 10 * (layers + head + conditioning + score_products(config, 40))
    assert row_flops(config, task, ObjectiveConfig(self_conditioning=0.0)) == 6.0 * (encoder + decoder)
    assert row_flops(config, task, ObjectiveConfig()) > 6.0 * (encoder + decoder)
    assert peak_flops(torch.device("cpu")) is None
