"""Files into a network and back: the stock safetensors layout, shards, hub ids, quantised weights."""

from diffusiongemma.checkpoint.hub import resolve
from diffusiongemma.checkpoint.load import load_config, load_model
from diffusiongemma.checkpoint.quantize import quantize_folder
from diffusiongemma.checkpoint.save import save_model
from diffusiongemma.checkpoint.target import pick_device, pick_dtype

__all__ = ["load_config", "load_model", "pick_device", "pick_dtype", "quantize_folder", "resolve", "save_model"]
