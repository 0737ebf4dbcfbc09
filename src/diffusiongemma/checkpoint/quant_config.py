"""`quantization_config` of a config.json, as compressed-tensors defines it: how quantised weights are to be read.

That a tensor is quantised is seen in its file (integers or fp8, with scales beside them); how its numbers are meant is
said here and nowhere else. What this package cannot honour (other bits, zero points, static activations, a quantised
cache, transforms) is refused. Targets are class names (`Linear`, `Embedding`), module names, or `re:` patterns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusiongemma.errors import ConfigError
from diffusiongemma.model.quantize import Scheme
from diffusiongemma.ops.quant import NIBBLES, Format, Kind

METHOD = "compressed-tensors"
# kind: the name of its storage, type, bits
STORAGE: dict[Kind, tuple[str, str, int]] = {
    "int8": ("int-quantized", "int", 8),
    "fp8": ("float-quantized", "float", 8),
    "int4": ("pack-quantized", "int", 4),
}
_EXPERTS = r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"
_DENSE = r"re:.*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj$"
_IGNORED = ["lm_head", "re:.*router.*", "re:.*self_conditioning.*", "re:.*vision.*"]  # what we keep, for other readers
_KNOWN = frozenset(
    "config_groups format global_compression_ratio ignore kv_cache_scheme quant_method quantization_status "
    "sparsity_config moe_sparsity_config transform_config version run_compressed".split()
)
_MAX_PATTERN, _MAX_STARS, _MAX_GROUPS, _MAX_GROUP = 256, 3, 16, 1 << 16


@dataclass(frozen=True)
class Quantization:
    """Which modules are stored in which format: the first group with a target that matches."""

    groups: tuple[tuple[tuple[str, ...], Format], ...]

    def format_of(self, module: str) -> Format | None:
        """`module`: the name of a tensor without its `.weight`."""
        kind = "Embedding" if module.endswith("embed_tokens") or module == "lm_head" else "Linear"
        for targets, fmt in self.groups:
            if any(_matches(target, module, kind) for target in targets):
                return fmt
        return None

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(fmt for _, fmt in self.groups)


def write_quantization(scheme: Scheme) -> dict[str, Any]:
    """The JSON for a checkpoint that we write."""
    targets: dict[Format, list[str]] = {scheme.experts: ["Linear"]}
    if scheme.dense != scheme.experts:  # names that need no order: other readers may take the last group that matches
        targets = {scheme.experts: [_EXPERTS], scheme.dense: [_DENSE]}
    if scheme.embeddings is not None:
        targets.setdefault(scheme.embeddings, []).append("re:.*embed_tokens$")
    groups = {f"group_{i}": _write_group(fmt, names) for i, (fmt, names) in enumerate(targets.items())}
    storages = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": storages.pop() if len(storages) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _IGNORED if scheme.embeddings is not None else [*_IGNORED, "re:.*embed_tokens$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _write_group(fmt: Format, targets: list[str]) -> dict[str, Any]:
    storage, kind, bits = STORAGE[fmt.kind]
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": fmt.group} if fmt.group else {"strategy": "channel"}
    tokens = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    activations = tokens if fmt.kind == "fp8" else None
    return {"targets": targets, "format": storage, "weights": weights, "input_activations": activations}


# ---- reading -----------------------------------------------------------------------------------------------------


def read_quantization(data: Mapping[str, Any]) -> Quantization | None:
    """From the whole of config.json; None for a plain checkpoint. Raises a ConfigError that lists every problem."""
    quant = data.get("quantization_config")
    if quant is None:
        return None
    if not isinstance(quant, dict) or quant.get("quant_method") != METHOD:
        found = str(quant.get("quant_method") if isinstance(quant, dict) else quant)[:40]
        raise ConfigError(f"quantization_config: only {METHOD!r} checkpoints can be read, this one is {found!r}")
    unknown = sorted((key for key in quant if key not in _KNOWN and quant[key] is not None), key=str)
    problems = [f"{key}: unknown key, which may change the result" for key in unknown]
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if quant.get(key):
            problems.append(f"{key} is not supported: only weights may be quantised")
    if quant.get("quantization_status", "compressed") != "compressed":
        problems.append("quantization_status must be 'compressed': save the model compressed")
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= _MAX_GROUPS:
        problems.append(f"config_groups must hold 1 to {_MAX_GROUPS} groups that say how weights are stored")
        groups = {}
    read = [_read_group(str(name)[:40], group, quant.get("format"), problems) for name, group in groups.items()]
    if problems:
        raise ConfigError("this quantization_config cannot be honoured", problems)
    return Quantization(tuple(group for group in read if group is not None))


def _read_group(name: str, group: Any, outer: Any, problems: list[str]) -> tuple[tuple[str, ...], Format] | None:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        problems.append(f"{name} must be an object with the numbers of its weights")
        return None
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        problems.append(f"{name}.targets must be a list of names")
        return None
    problems += [f"{name}.targets: {t[:40]!r} is not a pattern that can be used" for t in targets if not _is_safe(t)]
    storage = group.get("format") or outer
    fmt = _read_format(group["weights"], storage)
    if fmt is None:
        problems.append(
            f"{name} stores {_say(group['weights'])} as {str(storage)[:40]!r}; what can be read is symmetric: int8 "
            "(int-quantized) or fp8 (float-quantized) a channel or tensor, int4 (pack-quantized) in groups"
        )
        return None
    activations = group.get("input_activations")
    if activations is not None and not (isinstance(activations, dict) and activations.get("dynamic") is True):
        problems.append(f"{name}.input_activations must be dynamic: static scales are not supported")
    if fmt.kind == "fp8" and not (isinstance(activations, dict) and activations.get("strategy") == "token"):
        problems.append(f"{name}.input_activations must be fp8 with one scale a token, as the fp8 products compute")
    if group.get("output_activations") is not None:
        problems.append(f"{name}.output_activations are not supported")
    return tuple(targets), fmt


def _read_format(weights: Mapping[str, Any], storage: Any) -> Format | None:
    if weights.get("symmetric", True) is not True or weights.get("dynamic") or weights.get("actorder"):
        return None
    strategy, group = weights.get("strategy"), weights.get("group_size")
    for kind, (name, type_, bits) in STORAGE.items():
        if storage not in (name, *(["naive-quantized"] if kind != "int4" else [])):
            continue
        if weights.get("type") != type_ or weights.get("num_bits") != bits:
            continue
        if kind != "int4":
            return Format(kind) if strategy in ("channel", "tensor") else None
        if strategy != "group" or type(group) is not int or not 0 < group <= _MAX_GROUP or group % NIBBLES:
            return None
        return Format(kind, group)
    return None


def _say(weights: Mapping[str, Any]) -> str:
    parts = [f"{key}={weights[key]}" for key in ("type", "num_bits", "strategy", "group_size") if key in weights]
    return (", ".join(parts) or "weights")[:100]


def _matches(target: str, module: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (module, kind)


def _is_safe(target: str) -> bool:
    """Patterns come with the file: none may make the matcher run for ever (nested or many repetitions)."""
    if not target.startswith("re:"):
        return True
    pattern = target[3:]
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_STARS or re.search(r"\)[*+?{]", pattern):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python is not sure how to read
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning):
        return False
    return True
