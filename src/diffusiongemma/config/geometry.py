"""The shape of a DiffusionGemma network: one dataclass that checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from diffusiongemma.config.presets import PRESETS
from diffusiongemma.config.stock import read_file, read_stock, write_stock
from diffusiongemma.config.values import (
    FULL,
    MAX_INTEGER,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TENSOR,
    SLIDING,
    LayerType,
    is_positive,
    is_token,
    show,
)
from diffusiongemma.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of the network. Names follow the stock `text_config`, so the two read side by side."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_global_key_value_heads: int
    global_head_dim: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    sliding_window: int
    layer_types: tuple[LayerType, ...] = ()
    canvas_length: int = 256
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_partial_rotary_factor: float = 0.25
    final_logit_softcapping: float = 30.0
    hidden_activation: str = "gelu_pytorch_tanh"
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_ids: tuple[int, ...] = (1,)
    image_token_id: int = 258_880
    boi_token_id: int = 255_999
    eoi_token_id: int = 258_882
    # Prefix tokens a sliding layer shows to the canvas: Transformers keeps window - 1, Google's JAX mask window.
    canvas_sees_full_window: bool = False
    vision_config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        layers = self.num_hidden_layers
        if self.layer_types == () and type(layers) is int and 0 < layers <= MAX_LAYERS:
            pattern = tuple(SLIDING if (i + 1) % 6 else FULL for i in range(layers))
            object.__setattr__(self, "layer_types", (*pattern[:-1], FULL))
        problems = self._problems()
        if problems:
            raise ConfigError("this model configuration cannot be used", problems)

    def _problems(self) -> list[str]:
        found: list[str] = []
        floats = ("rms_norm_eps", "rope_theta", "global_rope_theta", "global_partial_rotary_factor")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and (type(value) is not int or value < 0):
                found.append(f"{f.name} must be an integer >= 0, got {show(value)}")
            elif f.type == "int" and value > _limit(f.name):
                found.append(f"{f.name} is implausibly large: {show(value)}")
            elif f.name in (*floats, "final_logit_softcapping") and not is_positive(value):
                found.append(f"{f.name} must be a positive finite number, got {show(value)}")
            elif f.type == "bool" and type(value) is not bool:
                found.append(f"{f.name} must be true or false, got {show(value)}")
            elif f.name in ("layer_types", "eos_token_ids") and not isinstance(value, tuple):
                found.append(f"{f.name} must be a tuple, got {show(value)}")
            elif f.name == "vision_config" and not isinstance(value, Mapping | None):
                found.append(f"vision_config must be a mapping, got {show(value)}")
        if found:
            return found  # the checks below compute with these fields
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                found.append(f"{name} must be at least 1, got {getattr(self, name)}")
        if found:
            return found
        if self.sliding_window < 2:
            found.append(f"sliding_window must be at least 2, got {self.sliding_window}")
        if self.top_k_experts > self.num_experts:
            found.append(f"top_k_experts {self.top_k_experts} is more than num_experts {self.num_experts}")
        for name in ("num_key_value_heads", "num_global_key_value_heads"):
            if self.num_attention_heads % getattr(self, name):
                found.append(f"num_attention_heads {self.num_attention_heads} is not a multiple of {name}")
        for name in ("head_dim", "global_head_dim"):
            if getattr(self, name) % 2:
                found.append(f"{name} must be even for rotary embeddings, got {getattr(self, name)}")
        if self.global_partial_rotary_factor > 1:
            found.append(f"global_partial_rotary_factor must be at most 1, got {self.global_partial_rotary_factor}")
        if len(self.layer_types) != self.num_hidden_layers:
            found.append(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if bad := sorted({show(t) for t in self.layer_types if t not in (SLIDING, FULL)}):
            found.append(f"layer_types may hold {SLIDING!r} and {FULL!r} only, got {show(bad)}")
        elif self.layer_types and self.layer_types[-1] != FULL:
            found.append("the last layer must be full_attention")
        if self.hidden_activation != "gelu_pytorch_tanh":
            found.append(f"hidden_activation must be 'gelu_pytorch_tanh', got {show(self.hidden_activation)}")
        if not all(is_token(t) for t in self.eos_token_ids):
            found.append(f"eos_token_ids must hold token ids only, got {show(self.eos_token_ids)}")
        heads = self.num_attention_heads * max(self.head_dim, self.global_head_dim)
        rows = max(self.vocab_size, 2 * self.intermediate_size, 3 * heads)
        largest = self.hidden_size * max(rows, 2 * self.num_experts * self.moe_intermediate_size)
        if largest > MAX_TENSOR:
            found.append(f"one parameter would hold {largest} numbers, which is implausibly large")
        return found

    # ---- derived facts -------------------------------------------------------------------------------------------

    def is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """K/V heads and head size of one layer."""
        if self.is_sliding(layer):
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads, self.global_head_dim

    @property
    def canvas_window(self) -> int:
        """How many of the last prefix tokens a sliding layer shows to every canvas position."""
        return self.sliding_window if self.canvas_sees_full_window else self.sliding_window - 1

    # ---- where configs come from ---------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        if name not in PRESETS:
            raise ConfigError(f"no preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
        unknown = sorted(set(overrides) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"preset {name!r} cannot take {', '.join(unknown)}: no such field")
        return cls(**{**PRESETS[name], **overrides})

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` from a checkpoint folder (or the file itself)."""
        return cls.from_dict(read_file(Path(path)))

    @classmethod
    def from_dict(cls, data: Any) -> ModelConfig:
        """Build from the stock layout: a top level with a `text_config` (and perhaps a `vision_config`)."""
        try:
            return cls(**read_stock(data))
        except RecursionError:
            raise ConfigError("config.json is nested too deeply") from None

    def to_dict(self) -> dict[str, Any]:
        """The stock `config.json`, as Transformers reads it."""
        return write_stock(self)

    def replace(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)


_AT_LEAST_ONE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "num_global_key_value_heads global_head_dim num_experts top_k_experts moe_intermediate_size canvas_length "
    "max_position_embeddings"
).split()


def _limit(name: str) -> int:
    """The largest sensible value of an integer field."""
    if name == "num_hidden_layers":
        return MAX_LAYERS
    return MAX_SIZE if name in _AT_LEAST_ONE and name != "max_position_embeddings" else MAX_INTEGER
