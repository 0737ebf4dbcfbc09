"""What a network is, before there is one: its geometry, checked, from a preset or the stock `config.json`."""

from diffusiongemma.config.geometry import ModelConfig
from diffusiongemma.config.presets import PRESETS
from diffusiongemma.config.values import FULL, MAX_JSON_BYTES, MAX_LAYERS, MAX_SIZE, MAX_TENSOR, SLIDING, LayerType

__all__ = [
    "FULL", "MAX_JSON_BYTES", "MAX_LAYERS", "MAX_SIZE", "MAX_TENSOR", "PRESETS", "SLIDING", "LayerType", "ModelConfig",
]  # fmt: skip
