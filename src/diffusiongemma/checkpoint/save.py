"""Save a network in the stock layout, as Transformers reads it: whole or not at all.

Everything is written into a hidden folder beside the target, which takes the target's name only when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffusiongemma.checkpoint.entries import Entry, network_entries
from diffusiongemma.checkpoint.files import INDEX, WEIGHTS, TensorInfo, open_tensors, read_headers
from diffusiongemma.checkpoint.load import Source, source_of
from diffusiongemma.checkpoint.quant_config import write_quantization
from diffusiongemma.checkpoint.target import parse_dtype
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import EMBEDDINGS, Scheme, describe, formats_in
from diffusiongemma.ops.quant import Format

log = logging.getLogger(__name__)

# Files of the source that belong to the model but are not the network: they are copied as they are.
SIDE_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json "
    "chat_template.jinja chat_template.json generation_config.json dgemma.json processor_config.json "
    "preprocessor_config.json"
).split()


def save_model(
    model: DiffusionGemma,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    quantize: str | Scheme | None = None,
) -> None:
    """Write `config.json` and safetensors, and what came with the source: vision tensors, tokenizer, chat template.

    `dtype`: None keeps the network's own; of a quantised one, for what is not quantised. `overwrite`: replace a
    checkpoint that is there; other files in that folder stay, and a folder that is no checkpoint is never touched.
    `quantize`: "int8", "fp8", "int4" or a Scheme. A network that is quantised already is written as it is.
    """
    chosen = None if dtype is None else parse_dtype(dtype)
    scheme = Scheme.parse(quantize) if isinstance(quantize, str) else quantize
    held = formats_in(model)
    if held and scheme is not None:
        raise CheckpointError(f"this network is quantised already ({describe(held.values())}): leave `quantize` out")
    source = source_of(model)
    entries = [*network_entries(model, chosen, scheme), *_vision(source)]
    config = model.config.to_dict() | {"dtype": str(chosen or model.dtype).removeprefix("torch.")}
    if held or scheme is not None:
        config["quantization_config"] = write_quantization(scheme or _scheme_of(held))
    write_checkpoint(path, config, entries, source.folder if source else None, max_shard_bytes, overwrite)


def write_checkpoint(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    entries: list[Entry],
    source: Path | None,
    max_shard_bytes: int,
    overwrite: bool,
) -> None:
    """Configuration, weights and the side files of `source`, all or nothing."""
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    target = Path(path).expanduser().resolve()  # a link keeps pointing at the folder, which is replaced
    try:
        check_target(target, overwrite)
        with _atomic_folder(target) as folder:
            _write_json(folder / "config.json", config)
            _write_shards(folder, _into_shards(entries, max_shard_bytes))
            if source is not None:
                _copy_side_files(source, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from None


# ---- what to write -----------------------------------------------------------------------------------------------


def _scheme_of(held: dict[str, Format]) -> Scheme:
    experts = {fmt for name, fmt in held.items() if ".experts." in name}
    dense = {fmt for name, fmt in held.items() if ".experts." not in name and name != EMBEDDINGS}
    if len(experts) != 1 or len(dense) != 1:
        found = f"{describe(experts)} and {describe(dense)}"
        raise CheckpointError(f"a checkpoint has one format for all experts and one for other matrices, this {found}")
    return Scheme(experts.pop(), dense.pop(), held.get(EMBEDDINGS))


def _vision(source: Source | None) -> list[Entry]:
    if source is None or not source.vision:
        return []
    try:
        tensors, _ = read_headers(source.folder)
    except CheckpointError:
        tensors = {}
    if lost := [name for name in source.vision if name not in tensors]:
        log.warning("%d vision tensors are not saved: %s no longer holds them", len(lost), source.folder)
    return [_vision_entry(tensors[name]) for name in source.vision if name in tensors]


def _vision_entry(info: TensorInfo) -> Entry:
    def fetch() -> Tensor:
        with open_tensors(info.file) as tensors:
            tensor: Tensor = tensors.get_tensor(info.name)
            return tensor.clone()  # the original keeps the whole file mapped

    with open_tensors(info.file) as tensors:
        nbytes = tensors.get_tensor(info.name).nbytes
    return Entry(info.name, nbytes, fetch)


# ---- how to write it ---------------------------------------------------------------------------------------------


def _into_shards(entries: list[Entry], limit: int) -> list[list[Entry]]:
    """In order, a new shard when the next tensor would go over the limit; a larger tensor has a shard alone."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_shards(folder: Path, shards: list[list[Entry]]) -> None:
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX, index)
    mode = (folder / "config.json").stat().st_mode
    for name, shard in zip(names, shards, strict=True):
        save_file({entry.name: entry.fetch() for entry in shard}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(mode)  # safetensors makes files that only their owner can read


def _write_json(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_side_files(source: Path, folder: Path) -> None:
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


# ---- where to write it -------------------------------------------------------------------------------------------


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a folder that may not be written."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir() or not (target / "config.json").is_file() or not _weights_in(target):
        raise CheckpointError(f"{target} is there and is not a checkpoint: give a new or an empty folder")
    if not overwrite:
        raise CheckpointError(f"{target} holds a checkpoint already: give another, or overwrite=True (--overwrite)")


def _weights_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.name == INDEX or file.match("model*.safetensors")}


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder that replaces the target when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    new, old = (target.with_name(f".{target.name}.{kind}-{token}") for kind in ("new", "old"))
    new.mkdir()
    try:
        yield new
        for file in new.iterdir():
            _fsync(file)
        _fsync(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        raise
    if old.exists():
        _keep_other_files(old, target)
        shutil.rmtree(old)
    _fsync(target.parent)


def _keep_other_files(old: Path, new: Path) -> None:
    """What else lay in the folder (a README, a training log) moves over; the old weights do not."""
    weights = _weights_in(old)
    for file in old.iterdir():
        if file.name not in weights and not (new / file.name).exists():
            file.rename(new / file.name)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
