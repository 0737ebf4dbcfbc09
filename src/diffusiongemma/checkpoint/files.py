"""The safetensors files of a folder: one file or shards with an index, and what their headers say.

Files come from strangers: names may not leave the folder, only safetensors is ever opened, and a damaged file is a
`CheckpointError` before a single tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from diffusiongemma.config import MAX_JSON_BYTES
from diffusiongemma.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Bytes of one number, by the file format's names.
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. `dtype` is the file format's name for it: F32, BF16, I64..."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES.get(self.dtype, 1)


def read_headers(folder: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Every tensor of the folder's safetensors files, and what is wrong with the files."""
    if (folder / WEIGHTS).exists():
        weight_map: dict[str, str] | None = None
        names = [WEIGHTS]
    elif (folder / INDEX).exists():
        weight_map = _read_index(folder / INDEX)
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(_no_weights(folder))

    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name in names:
        try:
            found = read_header(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for twice in sorted(found.keys() & tensors.keys()):
            problems.append(f"{twice} is in two files, {tensors[twice].file.name} and {name}")
        tensors |= found
    if weight_map is not None and not problems:  # an unread shard would only repeat itself here
        for tensor, name in weight_map.items():
            if tensor not in tensors or tensors[tensor].file.name != name:
                problems.append(f"{INDEX} puts {tensor} into {name}, which does not hold it")
        for tensor in sorted(tensors.keys() - weight_map.keys()):
            problems.append(f"{tensors[tensor].file.name} holds {tensor}, which {INDEX} does not know")
    return tensors, problems


def read_header(file: Path) -> dict[str, TensorInfo]:
    with open_tensors(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
        return {n: TensorInfo(file, n, str(s.get_dtype()), tuple(s.get_shape())) for n, s in slices.items()}


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """An open safetensors file; whatever is wrong with it becomes a CheckpointError."""
    if not file.is_file():  # also keeps us from waiting for a pipe
        raise CheckpointError(f"{file.name} is missing in {file.parent}: copy or download the checkpoint again")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CheckpointError(
            f"{file.name} in {file.parent} cannot be read: it is cut short, damaged or not ours to open ({error})"
        ) from None


def _read_index(file: Path) -> dict[str, str]:
    try:
        if not file.is_file() or file.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is not a plain file of sensible size")
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map that says which tensor is in which file")
    problems = []
    for name in sorted({repr(v) for v in weight_map.values() if not _is_plain_name(v)}):
        problems.append(f"{name} is not the name of a safetensors file in this folder")
    if problems:
        raise CheckpointError(f"{file} points to files that may not be opened", problems)
    return weight_map


def _is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return name.isprintable() and not set(name) & set("/\\:\0") and not name.startswith(".")


def _no_weights(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds pickle files only ({', '.join(pickles[:3])}), which can run code and are never opened: "
            "get the safetensors version, or convert it with Transformers' save_pretrained"
        )
    return f"{folder} holds neither {WEIGHTS} nor {INDEX}: it is not a checkpoint, or the download is not complete"
