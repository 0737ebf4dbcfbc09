"""One micro-batch, and how a task's arrays become one.

Legend: B rows, P prefix, L canvas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffusiongemma.tasks.format import PAD
from diffusiongemma.train.recipe import TaskConfig
from diffusiongemma.train.sources import Ids


@dataclass(frozen=True)
class Rows:
    """One micro-batch: every row with the same P and L."""

    task: str
    prefix: Tensor  # [B, P]
    canvas: Tensor  # [B, L], clean
    pinned: Tensor  # [B, L] bool: never corrupted
    weight: Tensor  # [B, L] float: how much a canvas position counts
    encoder_weight: Tensor  # [B, P + L] float: how much being predicted counts; the first is never predicted

    def tensors(self) -> tuple[Tensor, ...]:
        return self.prefix, self.canvas, self.pinned, self.weight, self.encoder_weight

    def to(self, device: torch.device) -> Rows:
        """There, with tokens as int64, which is twice as much as needs to travel."""
        prefix, canvas, *rest = (t.to(device, non_blocking=True) for t in self.tensors())
        return Rows(self.task, prefix.long(), canvas.long(), *rest)

    def pin_memory(self) -> Rows:  # a DataLoader asks for this
        return Rows(self.task, *(t.pin_memory() for t in self.tensors()))


def to_rows(
    config: TaskConfig, prefix: Ids, canvas: Ids, pinned: npt.NDArray[np.bool_] | None, read: npt.NDArray[np.bool_]
) -> Rows:
    """prefix [B, P], canvas and pinned [B, L]; read [B, P]: prefix tokens that the encoder learns to predict"""
    assert (prefix.shape[1], canvas.shape[1]) == (config.prefix, config.canvas)
    weight = np.tile(np.linspace(1.0, config.tail_weight, config.canvas, dtype=np.float32), (len(canvas), 1))
    if pinned is None:
        pinned = np.zeros(canvas.shape, bool)
    weight[pinned] = 0.0
    encoder = np.concatenate([read, canvas != PAD], axis=1).astype(np.float32)
    arrays = (prefix.astype(np.int32), canvas.astype(np.int32), pinned, weight, encoder)
    return Rows(config.name, *(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
