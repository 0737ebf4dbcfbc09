"""Geometries by name."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # google/diffusiongemma-26B-A4B-it
    "26b-a4b": dict(
        vocab_size=262_144, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, num_global_key_value_heads=2, global_head_dim=512, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704, sliding_window=1024, eos_token_ids=(1, 106, 50),
    ),
    # 100M parameters: what `dgemma bench cpu-step` measures
    "100m": dict(
        vocab_size=16_384, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, num_global_key_value_heads=2, global_head_dim=128, num_experts=16,
        top_k_experts=4, moe_intermediate_size=224, sliding_window=256, max_position_embeddings=32_768,
    ),
    # small enough for a test to build in milliseconds
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_global_key_value_heads=1, global_head_dim=32, num_experts=8,
        top_k_experts=2, moe_intermediate_size=32, sliding_window=16, canvas_length=32, max_position_embeddings=4096,
    ),
}  # fmt: skip
