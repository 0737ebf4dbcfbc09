"""The stock `config.json`: a top level with a `text_config` and perhaps a `vision_config`.

Unknown keys are errors, because a key that this package does not know may change what the network computes. Keys
that are known not to matter for inference are listed in `_IGNORED`; keys of the wider Gemma 4 family are accepted
only at the value that DiffusionGemma has (`_NEUTRAL`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusiongemma.config.values import FULL, MAX_JSON_BYTES, SLIDING, is_token, show
from diffusiongemma.errors import ConfigError

if TYPE_CHECKING:
    from diffusiongemma.config.geometry import ModelConfig

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

_TEXT_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "num_experts top_k_experts moe_intermediate_size sliding_window max_position_embeddings rms_norm_eps "
    "final_logit_softcapping hidden_activation pad_token_id bos_token_id"
).split()
_TOP_FIELDS = "canvas_length image_token_id boi_token_id eoi_token_id".split()

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


def read_file(path: Path) -> Any:
    """What the `config.json` of a checkpoint folder holds, or the file itself."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if not file.exists():
            raise ConfigError(f"no config.json at {path}: give a checkpoint folder, or a preset name")
        if not file.is_file() or file.stat().st_size > MAX_JSON_BYTES:  # a pipe would keep us waiting
            raise ConfigError(f"{file} is not a plain file of sensible size")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None


def write_stock(config: ModelConfig) -> dict[str, Any]:
    """As Transformers reads it."""
    full_layers = [i for i, t in enumerate(config.layer_types) if t == FULL]
    override = {"head_dim": config.global_head_dim, "num_key_value_heads": config.num_global_key_value_heads}
    text: dict[str, Any] = {name: getattr(config, name) for name in _TEXT_FIELDS}
    text |= {
        "model_type": "diffusion_gemma_text",
        "layer_types": list(config.layer_types),
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "per_layer_config": {str(i): override for i in full_layers},
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": config.rope_theta},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": config.global_rope_theta,
                "partial_rotary_factor": config.global_partial_rotary_factor,
            },
        },
    }
    top: dict[str, Any] = {name: getattr(config, name) for name in _TOP_FIELDS}
    top |= {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "tie_word_embeddings": True,
        "text_config": text,
    }
    if config.canvas_sees_full_window:
        top["canvas_sees_full_window"] = True
    if config.vision_config is not None:
        top["vision_config"] = dict(config.vision_config)
    return top


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


def read_stock(data: Any) -> dict[str, Any]:
    """Stock JSON -> constructor arguments; raises one ConfigError that lists every problem."""
    if not isinstance(data, dict):
        raise ConfigError(f"config.json must hold a JSON object, got {type(data).__name__}")
    if data.get("model_type") != "diffusion_gemma":
        found = show(data.get("model_type"))
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
                problems.append(f"{where}.{key}={show(keys[key])} is not supported")
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
    if not all(is_token(t) for t in ids):
        problems.append(f"text_config.eos_token_id must be token ids, got {show(value)}")
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
        problems.append(f"text_config.per_layer_config: unknown keys {show(extra)}")
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
