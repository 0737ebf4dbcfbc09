"""Compare what the headers say with what the network needs, before a single tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diffusiongemma.checkpoint.files import TensorInfo, read_headers
from diffusiongemma.checkpoint.layout import Slot, is_vision, stock_aliases, stock_layout
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError

# The number formats that weights may have, by the file format's own names.
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_MAX_LINES = 100


@dataclass(frozen=True)
class Plan:
    """Which tensor of which file goes where. `copies` repeat what `weights` holds, and must not differ from it."""

    weights: list[tuple[Slot, TensorInfo]] = field(default_factory=list)
    copies: list[tuple[Slot, TensorInfo]] = field(default_factory=list)
    vision: list[TensorInfo] = field(default_factory=list)


def make_plan(folder: Path, config: ModelConfig) -> Plan:
    """Raises one CheckpointError that lists everything that does not fit."""
    layout, aliases = stock_layout(config), stock_aliases(config)
    tensors, problems = read_headers(folder)
    plan = Plan()
    filled: set[str] = set()
    unexpected: list[str] = []
    # A tied copy comes after its original, so it can stand in for one that was left out: tools that drop one of two
    # tied tensors do not all keep the same one.
    for name in sorted(tensors, key=lambda name: name not in layout):
        info, stock = tensors[name], aliases.get(name, name)
        if is_vision(name):
            plan.vision.append(info)
        elif stock not in layout:
            unexpected.append(name)
        else:
            problems += _misfits(info, layout[stock])
            (plan.copies if stock in filled else plan.weights).append((layout[stock], info))
            filled.add(stock)
    problems += [f"missing: {line}" for line in by_layer(layout.keys() - filled)]
    problems += [f"unexpected: {line}" for line in by_layer(unexpected)]
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
