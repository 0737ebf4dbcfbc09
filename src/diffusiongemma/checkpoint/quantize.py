"""Quantise a checkpoint ahead of time, folder to folder, tensor by tensor: it needs the memory of one shard, and where
weights are fitted to samples, of one layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diffusiongemma.checkpoint.calibrate import LayerWalk
from diffusiongemma.checkpoint.entries import Entry, TensorError, quantised_entries
from diffusiongemma.checkpoint.files import TensorInfo, open_tensors
from diffusiongemma.checkpoint.hub import resolve
from diffusiongemma.checkpoint.layout import Slot, stock_layout
from diffusiongemma.checkpoint.load import load_quantization
from diffusiongemma.checkpoint.plan import make_plan
from diffusiongemma.checkpoint.progress import byte_bar
from diffusiongemma.checkpoint.quant_config import write_quantization
from diffusiongemma.checkpoint.samples import Sample
from diffusiongemma.checkpoint.save import check_target, write_checkpoint
from diffusiongemma.checkpoint.target import majority_dtype, pick_device, pick_dtype
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model.quantize import Scheme, describe, shapes_of


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: Scheme,
    *,
    samples: Sequence[Sample] = (),
    device: str | torch.device = "cpu",
    revision: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: bool | None = None,
) -> list[TensorError]:
    """Write a quantised copy of a plain checkpoint; what is kept keeps its dtype. Says what every tensor lost.

    `samples`: what the weights of the layers are fitted to; without any, each number is rounded for itself. `device`:
    where the arithmetic is done. `progress`: a bar on stderr; None shows it on terminals only.
    """
    where = pick_device(device)
    folder = resolve(source, revision)
    goal = Path(target).expanduser().resolve()
    if goal == folder.resolve():
        raise CheckpointError(f"{folder} cannot be quantised into itself: give another folder")
    check_target(goal, overwrite)
    config = ModelConfig.from_pretrained(folder)
    if (found := load_quantization(folder)) is not None:
        raise CheckpointError(f"{folder} is quantised already ({describe(found.formats)}): quantise the original")
    plan = make_plan(folder, config)
    formats = scheme.formats(shapes_of(config))
    infos = {piece.slot: piece.info for piece in plan.weights}
    fused = {slot.parameter: info for slot, info in infos.items() if len(slot.shape) == 3}
    written = config.to_dict() | {
        "dtype": str(majority_dtype(infos.values())).removeprefix("torch."),
        "quantization_config": write_quantization(scheme),
    }
    errors: list[TensorError] = []
    walk: LayerWalk | None = None
    if samples:
        walk = LayerWalk(config, plan, formats, samples, where, pick_dtype("auto", where, infos.values()))
    with byte_bar("quantising", sum(info.nbytes for info in infos.values()), progress) as advance:
        entries: list[Entry] = []
        for name, slot in stock_layout(config, split_experts=True).items():
            info, read = _reader(infos, fused, slot, advance)
            if slot.parameter in formats:
                fitted = partial(walk.fitted, slot.parameter) if walk and slot.parameter in walk.formats else None
                entries += quantised_entries(name, slot, formats[slot.parameter], read, where, errors.append, fitted)
            else:
                entries.append(Entry(name, info.nbytes, read))
        entries += [Entry(info.name, info.nbytes, _whole(info)) for info in plan.vision]
        write_checkpoint(target, written, entries, folder, max_shard_bytes, overwrite)
    return errors


def _reader(
    infos: Mapping[Slot, TensorInfo], fused: Mapping[str, TensorInfo], slot: Slot, advance: Callable[[int], None]
) -> tuple[TensorInfo, Callable[[], Tensor]]:
    """What reads the numbers of this slot: a whole tensor, or one expert's rows of a fused one."""
    info = infos.get(slot) or fused[slot.parameter]
    part = None if slot in infos else (slot.expert, slice(slot.start, slot.start + slot.shape[0]))

    def read() -> Tensor:
        with open_tensors(info.file) as tensors:
            # The tensor itself keeps the whole file mapped, hence the copy.
            tensor: Tensor = tensors.get_tensor(info.name) if part is None else tensors.get_slice(info.name)[part]
            advance(tensor.nbytes)
            return tensor.clone()

    return info, read


def _whole(info: TensorInfo) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with open_tensors(info.file) as tensors:
            tensor: Tensor = tensors.get_tensor(info.name)
            return tensor.clone()

    return read
