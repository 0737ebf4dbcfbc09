"""What a network weighs: parameters by part, bytes of its weights in each number format, bytes of its cache.

Nothing is allocated: the network is built on the meta device and its own tensors are counted, so the figures cannot
drift from the code. The formats:

- bf16: two bytes a parameter.
- fp8: one byte, and one fp32 scale a row (output channel) of each matrix; router, norms, scalars and self-conditioning
  stay bf16.
- 4-bit: experts have half a byte, and one bf16 scale a group of 64 along a row; all else is as in fp8.

`model/quantize.py` does what these sizes say; a test holds them equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma

GROUP = 64
FORMATS = ("bf16", "fp8", "4-bit")
NORMS = "norms and scalars"
KEPT = ("router", "self-conditioning", NORMS)  # never quantised

# First match wins, so that the norms inside attention and self-conditioning count as norms.
_PARTS = (
    (NORMS, r"(norm|layernorm(_[12])?)\.weight$|^layers\.\d+\.(encoder|decoder)_scalar$"),
    ("embeddings", r"^embed_tokens\."),
    ("attention", r"^layers\.\d+\.self_attn\."),
    ("dense MLP", r"^layers\.\d+\.mlp\."),
    ("experts", r"^layers\.\d+\.experts\."),
    ("router", r"^layers\.\d+\.router\."),
    ("self-conditioning", r"^self_conditioning\."),
)
PARTS = ("embeddings", "attention", "dense MLP", "experts", "router", "self-conditioning", NORMS)


@dataclass(frozen=True)
class Part:
    """One part of the network. `active`: the parameters that one token meets."""

    name: str
    parameters: int
    active: int
    bytes: dict[str, int]  # by format


@dataclass(frozen=True)
class CacheCost:
    """Bytes of the bf16 K/V cache of one sequence."""

    window: int  # tokens a sliding layer keeps
    sliding_bytes_per_token: int  # all sliding layers; paid until the window is full
    full_bytes_per_token: int  # all full layers; paid for every token

    def bytes_at(self, tokens: int) -> int:
        return self.full_bytes_per_token * tokens + self.sliding_bytes_per_token * min(tokens, self.window)


@dataclass(frozen=True)
class ModelSummary:
    """Everything `dgemma inspect` says about a geometry."""

    parts: tuple[Part, ...]
    cache: CacheCost

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        return sum(part.active for part in self.parts)

    @property
    def bytes(self) -> dict[str, int]:
        return {name: sum(part.bytes[name] for part in self.parts) for name in FORMATS}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `dgemma inspect --json` prints it."""
        cache = self.cache
        return {
            "parameters": self.parameters,
            "active_parameters": self.active,
            "parts": [
                {"name": p.name, "parameters": p.parameters, "active_parameters": p.active, "bytes": p.bytes}
                for p in self.parts
            ],
            "weight_bytes": self.bytes,
            "kv_cache": {
                "dtype": "bf16",
                "window": cache.window,
                "bytes_per_token_growing": cache.sliding_bytes_per_token + cache.full_bytes_per_token,
                "bytes_per_token_window_full": cache.full_bytes_per_token,
                "sliding_bytes_window_full": cache.sliding_bytes_per_token * cache.window,
            },
        }


def summarise(config: ModelConfig) -> ModelSummary:
    with torch.device("meta"):
        tensors = DiffusionGemma(config).state_dict()
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in PARTS}
    for name, tensor in tensors.items():
        shapes[_part_of(name)].append(tuple(tensor.shape))
    parts = []
    for name in PARTS:
        count = sum(prod(shape) for shape in shapes[name])
        active = count * config.top_k_experts // config.num_experts if name == "experts" else count
        sizes = {fmt: sum(_bytes(name, shape, fmt) for shape in shapes[name]) for fmt in FORMATS}
        parts.append(Part(name, count, active, sizes))
    return ModelSummary(tuple(parts), _cache_cost(config))


def _part_of(name: str) -> str:
    for part, pattern in _PARTS:
        if re.search(pattern, name):
            return part
    raise AssertionError(f"{name} belongs to no part: add it to _PARTS")


def _bytes(part: str, shape: tuple[int, ...], fmt: str) -> int:
    count, columns = prod(shape), shape[-1]
    rows = count // columns
    if fmt == "bf16" or part in KEPT:
        return 2 * count
    if fmt == "fp8" or part != "experts":
        return count + 4 * rows
    return ceil(columns / 2) * rows + 2 * ceil(columns / GROUP) * rows


def _cache_cost(config: ModelConfig) -> CacheCost:
    sliding = full = 0
    for layer in range(config.num_hidden_layers):
        heads, head_dim = config.layer_heads(layer)
        cost = 2 * 2 * heads * head_dim  # keys and values, two bytes each
        if config.is_sliding(layer):
            sliding += cost
        else:
            full += cost
    return CacheCost(max(config.sliding_window - 1, config.canvas_window), sliding, full)
