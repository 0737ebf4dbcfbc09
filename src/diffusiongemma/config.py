"""The shape of a DiffusionGemma network: one dataclass that checks itself, and the stock `config.json` it stands for.

Unknown keys are errors, because a key that this package does not know may change what the network computes. Keys
that are known not to matter for inference are listed in `_IGNORED`; keys of the wider Gemma 4 family are accepted
only at the value that DiffusionGemma has (`_NEUTRAL`).
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from diffusiongemma.errors import ConfigError

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

# Files come from strangers: what is larger than this is damaged or hostile, and must not make us hang.
MAX_JSON_BYTES = 64 << 20
MAX_LAYERS = 1 << 10
MAX_SIZE = 1 << 24  # of one dimension
MAX_TENSOR = 1 << 40  # numbers in one parameter

_IGNORED = frozenset(
    "_name_or_path architectures attention_dropout chunk_size_feed_forward dtype id2label initializer_range "
    "is_encoder_decoder keys_to_ignore_at_inference label2id model_type output_attentions output_hidden_states "
    "problem_type return_dict torch_dtype transformers_version use_cache".split()
)
_IGNORED_TOP = _IGNORED | frozenset(
    "audio_config audio_token_id boa_token_id bos_token_id eoa_token_id eoa_token_index eos_token_id pad_token_id "
    "video_token_id vision_soft_tokens_per_image".split()
)
# Gemma 4 options that DiffusionGemma does not use: fine when absent or off, an error otherwise.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_k_eq_v": (True, None),
    "attn_logit_softcapping": (None,),
    "enable_moe_block": (True, None),
    "hidden_size_per_layer_input": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "rope_scaling": (None,),
    "tie_word_embeddings": (True, None),
    "use_bidirectional_attention": (None, "vision"),
    "use_double_wide_mlp": (False, None),
    "vocab_size_per_layer_input": (None,),
}


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
                found.append(f"{f.name} must be an integer >= 0, got {_show(value)}")
            elif f.type == "int" and value > _limit(f.name):
                found.append(f"{f.name} is implausibly large: {_show(value)}")
            elif f.name in (*floats, "final_logit_softcapping") and not _is_positive(value):
                found.append(f"{f.name} must be a positive finite number, got {_show(value)}")
            elif f.type == "bool" and type(value) is not bool:
                found.append(f"{f.name} must be true or false, got {_show(value)}")
            elif f.name in ("layer_types", "eos_token_ids") and not isinstance(value, tuple):
                found.append(f"{f.name} must be a tuple, got {_show(value)}")
            elif f.name == "vision_config" and not isinstance(value, Mapping | None):
                found.append(f"vision_config must be a mapping, got {_show(value)}")
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
        if bad := sorted({_show(t) for t in self.layer_types if t not in (SLIDING, FULL)}):
            found.append(f"layer_types may hold {SLIDING!r} and {FULL!r} only, got {_show(bad)}")
        elif self.layer_types and self.layer_types[-1] != FULL:
            found.append("the last layer must be full_attention")
        if self.hidden_activation != "gelu_pytorch_tanh":
            found.append(f"hidden_activation must be 'gelu_pytorch_tanh', got {_show(self.hidden_activation)}")
        if not all(_is_token(t) for t in self.eos_token_ids):
            found.append(f"eos_token_ids must hold token ids only, got {_show(self.eos_token_ids)}")
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
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            if not file.exists():
                raise ConfigError(f"no config.json at {path}: give a checkpoint folder, or a preset name")
            if not file.is_file() or file.stat().st_size > MAX_JSON_BYTES:  # a pipe would keep us waiting
                raise ConfigError(f"{file} is not a plain file of sensible size")
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> ModelConfig:
        """Build from the stock layout: a top level with a `text_config` (and perhaps a `vision_config`)."""
        try:
            return cls(**_read_stock(data))
        except RecursionError:
            raise ConfigError("config.json is nested too deeply") from None

    def to_dict(self) -> dict[str, Any]:
        """The stock `config.json`, as Transformers reads it."""
        full_layers = [i for i, t in enumerate(self.layer_types) if t == FULL]
        override = {"head_dim": self.global_head_dim, "num_key_value_heads": self.num_global_key_value_heads}
        text: dict[str, Any] = {name: getattr(self, name) for name in _TEXT_FIELDS}
        text |= {
            "model_type": "diffusion_gemma_text",
            "layer_types": list(self.layer_types),
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "per_layer_config": {str(i): override for i in full_layers},
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": self.rope_theta},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": self.global_rope_theta,
                    "partial_rotary_factor": self.global_partial_rotary_factor,
                },
            },
        }
        top: dict[str, Any] = {name: getattr(self, name) for name in _TOP_FIELDS}
        top |= {
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "model_type": "diffusion_gemma",
            "tie_word_embeddings": True,
            "text_config": text,
        }
        if self.canvas_sees_full_window:
            top["canvas_sees_full_window"] = True
        if self.vision_config is not None:
            top["vision_config"] = dict(self.vision_config)
        return top

    def replace(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)


_TEXT_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "num_experts top_k_experts moe_intermediate_size sliding_window max_position_embeddings rms_norm_eps "
    "final_logit_softcapping hidden_activation pad_token_id bos_token_id"
).split()
_TOP_FIELDS = "canvas_length image_token_id boi_token_id eoi_token_id".split()
_AT_LEAST_ONE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "num_global_key_value_heads global_head_dim num_experts top_k_experts moe_intermediate_size canvas_length "
    "max_position_embeddings"
).split()

# Values that Transformers' own classes assume where a file is silent.
_STOCK_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "bos_token_id": 2,
}

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


def _is_positive(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    except OverflowError:  # an integer beyond what a float can hold
        return False


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _limit("token")


def _limit(name: str) -> int:
    """The largest sensible value of an integer field."""
    if name == "num_hidden_layers":
        return MAX_LAYERS
    return MAX_SIZE if name in _AT_LEAST_ONE and name != "max_position_embeddings" else (1 << 31) - 1


def _show(value: Any) -> str:
    """A value for a message: never long, however long or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer too long to be written
        return f"a huge {type(value).__name__}"


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


def _read_stock(data: Any) -> dict[str, Any]:
    """Stock JSON -> constructor arguments; raises one ConfigError that lists every problem."""
    if not isinstance(data, dict):
        raise ConfigError(f"config.json must hold a JSON object, got {type(data).__name__}")
    if data.get("model_type") != "diffusion_gemma":
        found = _show(data.get("model_type"))
        raise ConfigError(f"not a DiffusionGemma checkpoint: model_type is {found}, expected 'diffusion_gemma'")
    text = data.get("text_config", {})
    vision = data.get("vision_config")
    problems: list[str] = []
    if not isinstance(text, dict):
        raise ConfigError("text_config must be a JSON object")
    if vision is not None and not isinstance(vision, dict):
        problems.append("vision_config must be a JSON object")

    args: dict[str, Any] = {}
    for name, default in _STOCK_DEFAULTS.items():
        args[name] = text.get(name, default)
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        args[name] = text.get(name)
    for name in _TOP_FIELDS:
        if data.get(name) is not None:
            args[name] = data[name]
    args["vision_config"] = vision
    args["canvas_sees_full_window"] = data.get("canvas_sees_full_window", False)
    args["eos_token_ids"] = _read_eos(text.get("eos_token_id", 1), problems)
    args["layer_types"] = _read_layer_types(text, args["num_hidden_layers"], problems)
    args |= _read_global_heads(text, args, problems)
    args |= _read_rope(text.get("rope_parameters"), problems)
    args["pad_token_id"] = 0 if args["pad_token_id"] is None else args["pad_token_id"]
    args["bos_token_id"] = 2 if args["bos_token_id"] is None else args["bos_token_id"]

    for where, keys, known, ignored in (
        ("text_config", text, _KNOWN_TEXT, _IGNORED),
        ("config", data, _KNOWN_TOP, _IGNORED_TOP),
    ):
        for key in sorted(set(keys) - known - ignored, key=str):
            if key not in _NEUTRAL:
                problems.append(f"{where}.{key}: unknown key, which may change the result")
            elif not any(keys[key] is ok or keys[key] == ok for ok in _NEUTRAL[key]):
                problems.append(f"{where}.{key}={_show(keys[key])} is not supported")
    if problems:
        raise ConfigError("this config.json asks for something the network does not do", problems)
    return args


_KNOWN_TEXT = frozenset(
    [*_STOCK_DEFAULTS, "num_experts", "top_k_experts", "moe_intermediate_size", "layer_types", "eos_token_id"]
    + ["global_head_dim", "num_global_key_value_heads", "per_layer_config", "rope_parameters"]
)
_KNOWN_TOP = frozenset([*_TOP_FIELDS, "text_config", "vision_config", "canvas_sees_full_window", "quantization_config"])


def _read_eos(value: Any, problems: list[str]) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_token(t) for t in ids):
        problems.append(f"text_config.eos_token_id must be token ids, got {_show(value)}")
        return ()
    return tuple(ids)


def _read_layer_types(text: Mapping[str, Any], layers: Any, problems: list[str]) -> tuple[Any, ...]:
    types = text.get("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        problems.append(f"text_config.layer_types must be a list of names, got {type(types).__name__}")
        return ()
    if types and types[-1] == SLIDING and len(types) == layers:
        types = [*types[:-1], FULL]  # Transformers forces the last layer to be full
    return tuple(types)


def _read_global_heads(text: Mapping[str, Any], args: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Heads of the full layers: the released spelling, or `per_layer_config` as `save_pretrained` writes it."""
    per_layer = text.get("per_layer_config")
    if per_layer is None:
        kv_heads = text.get("num_global_key_value_heads")
        return {
            "global_head_dim": text.get("global_head_dim", 512),
            "num_global_key_value_heads": args["num_key_value_heads"] if kv_heads is None else kv_heads,
        }
    entries: list[Any] = list(per_layer.values()) if isinstance(per_layer, dict) else [None]
    if not all(isinstance(e, dict) and e == entries[0] for e in entries):
        problems.append("text_config.per_layer_config must give every full layer the same heads")
        return {"global_head_dim": 512, "num_global_key_value_heads": 1}
    entry: dict[str, Any] = entries[0] if entries else {}
    types = args["layer_types"]
    full = {str(i) for i, t in enumerate(types) if t == FULL}
    if types and entries and {str(key).lstrip("0") or "0" for key in per_layer} != full:  # written "05" beside "11"
        problems.append("text_config.per_layer_config must name exactly the full_attention layers")
    if extra := sorted(set(entry) - {"head_dim", "num_key_value_heads"}, key=str):
        problems.append(f"text_config.per_layer_config: unknown keys {_show(extra)}")
    return {
        "global_head_dim": entry.get("head_dim", args["head_dim"]),
        "num_global_key_value_heads": entry.get("num_key_value_heads", args["num_key_value_heads"]),
    }


def _read_rope(value: Any, problems: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    expected: dict[str, tuple[str, set[str]]] = {
        SLIDING: ("default", {"rope_type", "rope_theta"}),
        FULL: ("proportional", {"rope_type", "rope_theta", "partial_rotary_factor"}),
    }
    out: dict[str, Any] = {}
    where = "text_config.rope_parameters"
    if not isinstance(value, dict) or set(value) - set(expected):
        problems.append(f"{where} must hold {SLIDING!r} and {FULL!r}")
        return {}
    for layer_type, (rope_type, keys) in expected.items():
        entry = value.get(layer_type)
        if entry is None:
            continue
        if not isinstance(entry, dict) or entry.get("rope_type", rope_type) != rope_type or set(entry) - keys:
            problems.append(f"{where}.{layer_type} must be of type {rope_type!r} with {', '.join(sorted(keys))} only")
            continue
        prefix = "" if layer_type == SLIDING else "global_"
        if "rope_theta" in entry:
            out[f"{prefix}rope_theta"] = entry["rope_theta"]
        if "partial_rotary_factor" in entry:
            out["global_partial_rotary_factor"] = entry["partial_rotary_factor"]
    return out
