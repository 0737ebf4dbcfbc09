"""Compare what the headers say with what the network needs, before a single tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diffusiongemma.checkpoint.files import TensorInfo, read_headers
from diffusiongemma.checkpoint.layout import Slot, is_vision, stock_aliases, stock_layout
from diffusiongemma.checkpoint.quant_config import Quantization
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.ops.quant import Format, Kind

# The number formats that weights may have, by the file format's own names.
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
# And those that quantised weights have.
QUANT_DTYPES: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3", "int4": "I32"}
_COMPANIONS = (".weight_scale", ".weight_shape")
_SPLIT_EXPERT = re.compile(r"\.experts\.\d+\.")
_MAX_LINES = 100


@dataclass(frozen=True)
class Piece:
    """One stock tensor: where its numbers are and where they go. Quantised ones have scales, packed ones a shape."""

    slot: Slot
    info: TensorInfo
    format: Format | None = None
    scale: TensorInfo | None = None
    shape: TensorInfo | None = None

    @property
    def infos(self) -> list[TensorInfo]:
        return [info for info in (self.info, self.scale, self.shape) if info is not None]


@dataclass(frozen=True)
class Plan:
    """Which tensor of which file goes where. `copies` repeat what `weights` holds, and must not differ from it."""

    weights: list[Piece] = field(default_factory=list)
    copies: list[Piece] = field(default_factory=list)
    vision: list[TensorInfo] = field(default_factory=list)

    @property
    def formats(self) -> dict[str, set[Format | None]]:
        """Parameter -> the formats that its pieces are stored in (None: plain)."""
        found: dict[str, set[Format | None]] = {}
        for piece in self.weights:
            found.setdefault(piece.slot.parameter, set()).add(piece.format)
        return found


def make_plan(folder: Path, config: ModelConfig, quantization: Quantization | None = None) -> Plan:
    """Raises one CheckpointError that lists everything that does not fit."""
    tensors, problems = read_headers(folder)
    # A count that the files cannot hold is not laid out: it may be millions of experts from a damaged config.
    split = any(_SPLIT_EXPERT.search(name) for name in tensors)
    split &= config.num_experts * config.num_hidden_layers <= len(tensors)
    layout, aliases = stock_layout(config, split), stock_aliases(config, split)
    plan = Plan()
    filled: set[str] = set()
    unexpected: list[str] = []
    companions = _companions(tensors) if quantization else {}
    weight = {name: _weight(name) if quantization else name for name in tensors}
    # A tied copy comes after its original, so it can stand in for one that was left out: tools that drop one of two
    # tied tensors do not all keep the same one.
    for name in sorted(tensors.keys() - companions.keys(), key=lambda name: (weight[name] not in layout, name)):
        info, stock = tensors[name], aliases.get(weight[name], weight[name])
        if is_vision(name):
            plan.vision.append(info)
        elif stock not in layout:
            unexpected.append(name)
        else:
            slot = layout[stock]
            piece = Piece(slot, info) if quantization is None else _piece(slot, info, tensors, quantization, problems)
            if piece.format is None:
                problems += _misfits(info, slot)
            (plan.copies if stock in filled else plan.weights).append(piece)
            filled.add(stock)
    lonely = [name for name, owner in companions.items() if not is_vision(name) and owner not in tensors]
    plan.vision.extend(tensors[name] for name in companions if is_vision(name))
    problems += [f"missing: {line}" for line in by_layer(layout.keys() - filled)]
    problems += [f"unexpected: {line}" for line in by_layer([*unexpected, *lonely])]
    if len(problems) > _MAX_LINES:
        problems[_MAX_LINES:] = [f"and {len(problems) - _MAX_LINES} more"]
    if problems:
        raise CheckpointError(f"{folder} does not hold the network that its config.json describes", problems)
    return plan


def _misfits(info: TensorInfo, slot: Slot) -> list[str]:
    problems: list[str] = []
    if info.shape != slot.shape:
        problems.append(f"{info.name} has shape {list(info.shape)}, expected {list(slot.shape)}")
    if info.dtype not in FILE_DTYPES:
        problems.append(f"{info.name} has dtype {info.dtype}, expected one of {', '.join(FILE_DTYPES)}")
    return problems


# ---- quantised tensors: several in a file make one ---------------------------------------------------------------


def _weight(name: str) -> str:
    """The name that a plain weight would have."""
    return name.removesuffix("_packed") if name.endswith(".weight_packed") else name


def _companions(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Scales and shapes -> the tensor that they belong to."""
    found: dict[str, str] = {}
    for name in tensors:
        for suffix in _COMPANIONS:
            if name.endswith(suffix):
                base = name.removesuffix(suffix)
                found[name] = base + (".weight_packed" if base + ".weight_packed" in tensors else ".weight")
    return found


def _piece(
    slot: Slot, info: TensorInfo, tensors: Mapping[str, TensorInfo], quantization: Quantization, problems: list[str]
) -> Piece:
    base = _weight(info.name).removesuffix(".weight")
    scale, shape = (tensors.get(base + suffix) for suffix in _COMPANIONS)
    if scale is None and info.dtype in FILE_DTYPES and not info.name.endswith("_packed"):
        return Piece(slot, info)  # kept as it was
    fmt = quantization.format_of(base)
    if fmt is None:
        problems.append(f"{info.name} is stored as {info.dtype}, but no group of quantization_config targets it")
        return Piece(slot, info, Format("int8"), scale)
    packed = fmt.kind == "int4"
    if not fmt.fits(slot.shape[-1]):
        problems.append(f"{info.name}: rows of {slot.shape[-1]} do not divide into {fmt}")
    if info.name.endswith("_packed") != packed or info.dtype != QUANT_DTYPES[fmt.kind]:
        expected = f"{base}.weight{'_packed' * packed} with dtype {QUANT_DTYPES[fmt.kind]}"
        problems.append(f"{info.name} has dtype {info.dtype}, expected {expected} for {fmt}")
    elif info.shape != fmt.q_shape(slot.shape):
        problems.append(f"{info.name} has shape {list(info.shape)}, expected {list(fmt.q_shape(slot.shape))}")
    if scale is None:
        problems.append(f"missing: {base}.weight_scale, the scales of {info.name}")
    else:
        wanted = fmt.scale_shape(slot.shape)
        # A channel's scales may be written flat, and one scale may serve the whole tensor.
        allowed = [wanted] if fmt.group else [wanted, wanted[:1], (1, 1), (1,), ()]
        if scale.shape not in allowed:
            problems.append(f"{scale.name} has shape {list(scale.shape)}, expected {list(wanted)}")
        if scale.dtype not in FILE_DTYPES:
            problems.append(f"{scale.name} has dtype {scale.dtype}, expected one of {', '.join(FILE_DTYPES)}")
    if packed and (shape is None or shape.dtype not in ("I32", "I64") or shape.shape != (2,)):
        problems.append(f"{base}.weight_shape must be there and hold two integers")
    return Piece(slot, info, fmt, scale, shape)


def by_layer(names: Iterable[str]) -> list[str]:
    """Tensor names with the numbers of their layers put together: `model.layers.{0-3,7}.norm`."""
    groups: dict[tuple[str, str], list[int]] = {}
    lines: list[str] = []
    for name in sorted(names):
        if match := re.fullmatch(r"(.*?layers\.)(0|[1-9][0-9]{0,6})(\..*)", name, re.DOTALL):
            groups.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            lines.append(name)
    return lines + [f"{head}{_ranges(sorted(layers))}{tail}" for (head, tail), layers in groups.items()]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
