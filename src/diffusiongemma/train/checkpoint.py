"""Checkpoints of a run: a folder appears whole or not at all, whatever kills the trainer.

FOLDER/step-00001200/ holds tensors.safetensors and state.json. It is written under another name, synced to the disk,
then renamed; the newest complete one is the one to resume from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.export import rebuild

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Saved:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):  # of a run that was killed while writing
        shutil.rmtree(left, ignore_errors=True)
    target, part = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    part.mkdir()
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, part / "tensors.safetensors")
    (part / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n", encoding="utf-8")
    for path in (*part.iterdir(), part):
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    part.rename(target)
    _sync(folder)
    for old in sorted(complete(folder))[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}")
    return target


def complete(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    if not folder.is_dir():
        return []
    return [int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]


def load_latest(folder: Path) -> Saved | None:
    """The newest checkpoint, None when there is none."""
    steps = complete(folder)
    if not steps:
        return None
    path = folder / f"step-{max(steps):08d}"
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return Saved(int(state["step"]), load_file(path / "tensors.safetensors"), state)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): delete it to resume from the one before") from None


def averaged(run: Path) -> DiffusionGemma:
    """The network of a run's newest checkpoint: its averaged weights where it kept an average, in float32."""
    saved = load_latest(run / "checkpoints")
    if saved is None:
        raise CheckpointError(f"there is no checkpoint in {run}")
    kinds: dict[str, dict[str, Tensor]] = {"ema": {}, "master": {}, "buffer": {}}
    for key, tensor in saved.tensors.items():
        kind, _, name = key.partition(".")
        if kind in kinds:
            kinds[kind][name] = tensor
    config = ModelConfig.from_dict(saved.state["model"])
    return rebuild(config, {**(kinds["ema"] or kinds["master"]), **kinds["buffer"]})


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
