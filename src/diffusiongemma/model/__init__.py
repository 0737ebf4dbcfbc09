"""The network and its K/V cache: plain `nn.Module`s that know no request, no sampler and no file."""

from diffusiongemma.model.cache import CacheRow, KVCache
from diffusiongemma.model.network import DiffusionGemma

__all__ = ["CacheRow", "DiffusionGemma", "KVCache"]
