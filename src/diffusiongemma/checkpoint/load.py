"""Load a checkpoint: check every header, then stream tensor by tensor into a network made empty on its device.

Shards are mapped into memory one at a time, so the host never holds more than the network and one shard.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from diffusiongemma.checkpoint.files import TensorInfo, open_tensors
from diffusiongemma.checkpoint.hub import resolve
from diffusiongemma.checkpoint.layout import Slot
from diffusiongemma.checkpoint.plan import FILE_DTYPES, Plan, make_plan
from diffusiongemma.checkpoint.target import empty_model, pick_device, pick_dtype
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma

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


def load_model(
    path_or_id: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool | None = None,
) -> DiffusionGemma:
    """A DiffusionGemma in eval mode, without gradients, from a folder or a hub id.

    `device`: "auto" is the GPU where there is one. `dtype`: "auto" is the checkpoint's on a GPU, float32 on a CPU.
    `progress`: a bar on stderr; None shows it on terminals only.
    """
    target = pick_device(device)
    folder = resolve(path_or_id, revision, offline)
    config = ModelConfig.from_pretrained(folder)
    plan = make_plan(folder, config)
    model = empty_model(config, target, pick_dtype(dtype, target, [info for _, info in plan.weights]))
    _fill(model, plan, progress)
    _check_copies(model, plan)
    if plan.vision:
        log.info("%d vision tensors are kept aside: this version reads text, images come later", len(plan.vision))
    setattr(model, _SOURCE, Source(folder.absolute(), tuple(sorted(info.name for info in plan.vision))))
    return model.requires_grad_(False).eval()


def _fill(model: DiffusionGemma, plan: Plan, progress: bool | None) -> None:
    parameters = model.state_dict()
    assert {slot.parameter for slot, _ in plan.weights} == parameters.keys(), "the name map misses a parameter"
    assert {name for name, _ in model.named_buffers()} <= parameters.keys(), "a buffer would stay uninitialised"
    total = sum(torch.Size(info.shape).numel() * FILE_DTYPES[info.dtype].itemsize for _, info in plan.weights)
    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal, disable=not show) as bar:
        task = bar.add_task("loading", total=total)
        for slot, _, tensor in _read(plan.weights):
            slot.of(parameters[slot.parameter]).copy_(tensor)
            bar.advance(task, tensor.nbytes)


def _check_copies(model: DiffusionGemma, plan: Plan) -> None:
    """Tied copies that differ mean another network: Transformers would untie them, this one cannot."""
    parameters = model.state_dict()
    different: list[str] = []
    for slot, info, tensor in _read(plan.copies):
        ours = slot.of(parameters[slot.parameter])
        copy = tensor.to(ours.device, ours.dtype)
        if not torch.equal(ours.view(torch.uint8), copy.view(torch.uint8)):  # bits: NaN equals itself
            different.append(f"{info.name} differs from the weight that it should repeat")
    if different:
        raise CheckpointError("encoder and decoder must share their weights, but here they do not", different)


def _read(entries: list[tuple[Slot, TensorInfo]]) -> Iterator[tuple[Slot, TensorInfo, Tensor]]:
    """Tensors one by one, file by file; each file is closed before the next is opened."""
    for file in dict.fromkeys(info.file for _, info in entries):
        with open_tensors(file) as tensors:
            for slot, info in entries:
                if info.file == file:
                    yield slot, info, tensors.get_tensor(info.name)
