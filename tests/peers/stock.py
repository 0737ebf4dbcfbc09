"""Small random models made by Transformers: the executable specification that the network is checked against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
    Gemma4VisionConfig,
)

BASE: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
    sliding_window=8,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=24,
    max_position_embeddings=2048,
)

# Each varies what the network has to get right: experts, windows, heads, canvases, the layer pattern.
CONFIGS: dict[str, dict[str, Any]] = {
    "base": dict(canvas_length=16),
    "one-expert": dict(num_experts=1, top_k_experts=1, canvas_length=8),
    "many-experts": dict(num_experts=32, top_k_experts=8, moe_intermediate_size=8, canvas_length=32),
    "wide-window": dict(sliding_window=256, canvas_length=16),
    "narrow-window": dict(sliding_window=2, canvas_length=12),
    "twelve-layers": dict(num_hidden_layers=12, canvas_length=16, num_attention_heads=8, num_key_value_heads=8),
    "odd-pattern": dict(
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_global_key_value_heads=2,
        sliding_window=5,
        canvas_length=7,
    ),
}


def stock_config(canvas_length: int = 16, **changes: Any) -> DiffusionGemmaConfig:
    text = DiffusionGemmaTextConfig(**{**BASE, **changes})
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, position_embedding_size=32,
    )  # fmt: skip
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=canvas_length)


def stock_model(
    seed: int = 0, canvas_length: int = 16, gain: float = 1.5, **changes: Any
) -> DiffusionGemmaForBlockDiffusion:
    """Weights large enough that every part matters, and no two layers, norms or scalars alike."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(stock_config(canvas_length, **changes)).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "layer_scalar" in name:  # the encoder's and the decoder's differ, in every layer
                tensor.copy_(torch.empty_like(tensor).uniform_(0.7, 1.3, generator=generator))
            elif "norm" in name or (name.endswith("scale") and "embed" not in name):
                tensor.copy_(torch.empty_like(tensor).uniform_(0.6, 1.3, generator=generator))
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.mul_(gain if "embed_tokens" not in name else 2 * gain)
    return model


def save_stock(model: DiffusionGemmaForBlockDiffusion, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


class StockRun:
    """Transformers' two modes with the cache between them, one call each."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config())
        self.mask: torch.Tensor | None = None
        for layer in self.cache.layers:  # an empty prefix is allowed once the layers know their dtype
            nothing = torch.empty(1, 1, 0, 1, dtype=model.dtype)
            layer.lazy_initialization(nothing, nothing)

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [B, T] -> logits [B, T, V] of the causal path"""
        if mask is not None:
            self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        elif self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)
        out = self.model.model.encoder(input_ids=tokens, attention_mask=self.mask, past_key_values=self.cache)
        raw = self.model.lm_head(out.last_hidden_state).float()
        cap = self.model.final_logit_softcapping
        return torch.tanh(raw / cap) * cap

    @torch.no_grad()
    def denoise(self, canvas: torch.Tensor, conditioning: torch.Tensor | None = None) -> torch.Tensor:
        """canvas [B, L] -> logits [B, L, V]"""
        mask = None
        if self.mask is not None:
            mask = torch.cat([self.mask, torch.ones_like(canvas)], dim=1)
        return self.model(
            decoder_input_ids=canvas,
            past_key_values=self.cache,
            self_conditioning_logits=conditioning,
            decoder_attention_mask=mask,
        ).logits
