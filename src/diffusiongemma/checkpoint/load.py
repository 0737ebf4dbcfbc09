"""Load a checkpoint: check every header, then stream tensor by tensor into a network made empty on its device.

Shards are mapped into memory one at a time, so the host never holds more than the network and one shard. What is
quantised or dequantised on the way is so block by block on the target device: nowhere is there a second network.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.checkpoint.files import TensorInfo, open_tensors
from diffusiongemma.checkpoint.hub import resolve
from diffusiongemma.checkpoint.plan import Piece, Plan, make_plan
from diffusiongemma.checkpoint.progress import byte_bar
from diffusiongemma.checkpoint.quant_config import Quantization, read_quantization
from diffusiongemma.checkpoint.target import empty_model, pick_device, pick_dtype
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, describe, formats_in, int8_runs, shapes_of, use_fast_products
from diffusiongemma.ops.linear import rows_are_steady
from diffusiongemma.ops.quant import Format, dequantize_into, quantize_into

log = logging.getLogger(__name__)
_SOURCE = "checkpoint_source"


@dataclass(frozen=True)
class Source:
    """Where a network came from; `save_model` takes vision tensors and tokenizer files from there."""

    folder: Path
    vision: tuple[str, ...]


def source_of(model: DiffusionGemma) -> Source | None:
    source: Source | None = getattr(model, _SOURCE, None)
    return source


def load_config(
    path_or_id: str | os.PathLike[str], *, revision: str | None = None, offline: bool | None = None
) -> ModelConfig:
    """The configuration alone; of a hub id, only `config.json` is downloaded."""
    return ModelConfig.from_pretrained(resolve(path_or_id, revision, offline, patterns=("config.json",)))


def load_quantization(folder: Path) -> Quantization | None:
    """How the weights of a folder are stored; its config.json has been read before, so it is JSON."""
    return read_quantization(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def load_model(
    path_or_id: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    *,
    quantize: str | None = None,
    group: int | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool | None = None,
) -> DiffusionGemma:
    """A DiffusionGemma in eval mode, without gradients, from a folder or a hub id.

    `device`: "auto" is the GPU where there is one. `dtype`: "auto" is the checkpoint's on a GPU, float32 on a CPU; of a
    quantised network, what it computes in. `progress`: a bar on stderr; None shows it on terminals only.
    `quantize`: "int8", "fp8" or "int4" (in groups of `group`) keeps the weights so in memory, and quantises a plain
    checkpoint while loading; "none" keeps nothing quantised. None: fp8 and int4 folders stay so on a GPU, int8 folders
    on a CPU that computes in float32; all else is dequantised, since only there is a product of small numbers the
    faster one. A CPU multiplies int8 weights with activations that it rounds to int8 as well (ops/int8_cpu.py).
    """
    target = pick_device(device)
    folder = resolve(path_or_id, revision, offline)
    config = ModelConfig.from_pretrained(folder)
    plan = make_plan(folder, config, load_quantization(folder))
    computes_in = pick_dtype(dtype, target, [piece.info for piece in plan.weights])
    formats = _formats(plan, config, target, computes_in, quantize, group)
    model = empty_model(config, target, computes_in, formats)
    _fill(model, plan, progress)
    _check_copies(model, plan)
    use_fast_products(model)
    if target.type == "cpu" and computes_in == torch.float32:
        rows_are_steady()
    if plan.vision:
        log.info("%d vision tensors are kept aside: this version reads text, images come later", len(plan.vision))
    setattr(model, _SOURCE, Source(folder.absolute(), tuple(sorted(info.name for info in plan.vision))))
    return model.requires_grad_(False).eval()


def _formats(
    plan: Plan, config: ModelConfig, device: torch.device, dtype: torch.dtype, quantize: str | None, group: int | None
) -> dict[str, Format]:
    """Parameter -> the format that it is to have in memory; what is not there is plain."""
    if group is not None and quantize in (None, "none"):
        raise ConfigError(f"group={group} has no effect without quantize='int4': leave it out")
    stored = {name: found for name, found in plan.formats.items() if found != {None}}
    if quantize is None:
        found_formats = [fmt for found in stored.values() for fmt in found]
        small = device.type != "cpu" and any(fmt is not None and fmt.kind != "int8" for fmt in found_formats)
        quantize = "stored" if small or int8_runs(device, dtype, found_formats) else "none"
    if quantize == "none":
        return {}
    if not stored:
        return Scheme.parse(quantize, group).formats(shapes_of(config))
    has = describe(fmt for found in stored.values() for fmt in found)
    experts = {fmt for name, found in stored.items() if ".experts." in name for fmt in found}
    if quantize != "stored" and Scheme.parse(quantize, group).experts not in experts:
        raise CheckpointError(
            f"this checkpoint is quantised already ({has}), and quantising twice only loses: load it as it is, or "
            f"quantise the original to {quantize}"
        )
    formats: dict[str, Format] = {}
    mixed: list[str] = []
    for name, found in stored.items():
        fmt = next(iter(found))
        if len(found) == 1 and fmt is not None:
            formats[name] = fmt
        else:
            mixed.append(f"{name} is stored in parts as {describe(found)} and plain")
    if mixed:
        raise CheckpointError("weights that the network fuses have different formats: use quantize='none'", mixed)
    return formats


def _fill(model: DiffusionGemma, plan: Plan, progress: bool | None) -> None:
    parameters, formats = model.state_dict(), formats_in(model)
    names = {piece.slot.parameter for piece in plan.weights}
    held = names - formats.keys() | {f"{name}.{part}" for name in formats for part in ("q", "scale")}
    assert held == parameters.keys(), "the name map misses a parameter"
    total = sum(info.nbytes for piece in plan.weights for info in piece.infos)
    with byte_bar("loading", total, progress) as advance:
        fill(model, plan.weights, advance)


def fill(model: DiffusionGemma, pieces: list[Piece], advance: Callable[[int], None] | None = None) -> None:
    """Read these, and no others, into the network."""
    parameters, formats = model.state_dict(), formats_in(model)
    for piece, tensor, scale in _read(pieces):
        _put(piece, tensor, scale, parameters, formats.get(piece.slot.parameter))
        if advance is not None:
            advance(sum(info.nbytes for info in piece.infos))


def _put(
    piece: Piece, tensor: Tensor, scale: Tensor | None, parameters: Mapping[str, Tensor], kept: Format | None
) -> None:
    """Into its place in the network, which is plain or has the format `kept`."""
    slot = piece.slot
    if kept is None:
        place = slot.of(parameters[slot.parameter])
        if scale is None:
            place.copy_(tensor)
        else:
            dequantize_into(tensor, scale, place)
        return
    q, s = (slot.of(parameters[f"{slot.parameter}.{part}"]) for part in ("q", "scale"))
    if scale is None:
        quantize_into(tensor, kept, q, s)
        if not s.isfinite().all():
            raise CheckpointError(
                f"{piece.info.name} holds infinities or numbers that are none: it cannot be quantised"
            )
    else:
        q.copy_(tensor)
        s.copy_(scale)


def _check_copies(model: DiffusionGemma, plan: Plan) -> None:
    """Tied copies that differ mean another network: Transformers would untie them, this one cannot."""
    parameters, formats = model.state_dict(), formats_in(model)
    different: list[str] = []
    for piece, tensor, scale in _read(plan.copies):
        name, kept = piece.slot.parameter, formats.get(piece.slot.parameter)
        ours = {n: piece.slot.of(parameters[n]) for n in ([f"{name}.q", f"{name}.scale"] if kept else [name])}
        copy = {n: torch.empty_like(tensor) for n, tensor in ours.items()}
        _put(replace(piece, slot=replace(piece.slot, start=0, expert=None)), tensor, scale, copy, kept)
        if not all(torch.equal(_bits(ours[n]), _bits(copy[n])) for n in ours):
            different.append(f"{piece.info.name} differs from the weight that it should repeat")
    if different:
        raise CheckpointError("encoder and decoder must share their weights, but here they do not", different)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # NaN equals itself


def _read(pieces: list[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor | None]]:
    """Tensors one by one with their scales, file by file; each file is closed before the next is opened."""
    for file in dict.fromkeys(piece.info.file for piece in pieces):
        with open_tensors(file) as tensors:
            for piece in pieces:
                if piece.info.file == file:
                    yield piece, tensors.get_tensor(piece.info.name), _read_scale(piece, tensors)


def _read_scale(piece: Piece, tensors: Any) -> Tensor | None:
    """The scales of a quantised piece in the shape that its format has; they may lie in another file."""
    if piece.format is None or piece.scale is None:
        return None
    scale = _get(piece.scale, piece.info.file, tensors)
    if not scale.isfinite().all():
        raise CheckpointError(f"{piece.scale.name} holds infinities or numbers that are none: the file is damaged")
    if piece.shape is not None:
        shape = _get(piece.shape, piece.info.file, tensors).tolist()
        if shape != list(piece.slot.shape):
            raise CheckpointError(f"{piece.shape.name} says {shape}, expected {list(piece.slot.shape)}")
    wanted = piece.format.scale_shape(piece.slot.shape)
    return scale.reshape(1, 1).expand(wanted) if scale.numel() == 1 else scale.reshape(wanted)


def _get(info: TensorInfo, file: Path, tensors: Any) -> Tensor:
    if info.file == file:
        tensor: Tensor = tensors.get_tensor(info.name)
        return tensor
    with open_tensors(info.file) as others:
        tensor = others.get_tensor(info.name)
        return tensor.clone()  # the original keeps the whole file mapped
