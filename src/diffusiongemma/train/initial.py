"""The weights that training begins with."""

from __future__ import annotations

from dataclasses import replace

import torch

from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.recipe import Recipe


def first_weights(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> DiffusionGemma:
    """The network that training begins with: a checkpoint's, or a random one prepared for training."""
    if recipe.init_from:
        from diffusiongemma.checkpoint import load_model

        model = load_model(recipe.init_from, device, dtype, quantize="none")
        if recipe.sliding_window:
            model = with_window(model, recipe.sliding_window)
        return model.requires_grad_(True).train()
    assert recipe.model is not None
    model = DiffusionGemma(recipe.model).init_weights(recipe.run.seed)
    prepare(model)
    return model.to(device, dtype)


def with_window(model: DiffusionGemma, window: int) -> DiffusionGemma:
    """The same weights, in a network whose sliding layers see so many tokens."""
    weight = model.embed_tokens.weight
    other = DiffusionGemma(replace(model.config, sliding_window=window)).to(weight.device, weight.dtype)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def prepare(model: DiffusionGemma) -> None:
    """Scores are not scaled in this architecture, so the norms must begin with the scale that lets attention spread;
    and routers divide by sqrt(D), which would leave them without an opinion for long."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(parameter.numel() ** -0.25)
        elif name.endswith("router.scale"):
            parameter.fill_(parameter.numel() ** 0.5)
