"""What training leaves behind: a folder in the stock layout that every other command loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme
from diffusiongemma.ops.quant import dequantize, quantize

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SETTINGS_FILES = ("generation_config.json", "dgemma.json")  # how a checkpoint wants to be used
SHARD_BYTES = 15 << 20
_SCALE = ".scale"  # raw shards: after the name of a weight in int8


def rebuild(config: ModelConfig, weights: dict[str, Tensor]) -> DiffusionGemma:
    """A float32 network on the CPU with these parameters; the layer scalars stay 1 unless they are among them."""
    model = DiffusionGemma(config)
    state = model.state_dict()
    for name, tensor in weights.items():
        if name not in state:
            raise CheckpointError(f"{name} is no parameter of this network")
        state[name].copy_(tensor.detach().to("cpu", torch.float32))
    return model


def export(
    model: DiffusionGemma,
    folder: Path,
    tokenizer: str,
    shard_bytes: int = SHARD_BYTES,
    int8: bool = False,
    init_from: str = "",
) -> None:
    """Write shards in bfloat16 or int8, config and tokenizer, and the settings of the checkpoint that was begun with.
    Without what the checkpoint package needs: raw shards."""
    try:
        from diffusiongemma.checkpoint import save_model
    except ImportError as error:
        print(f"the stock layout needs a package that is missing here ({error}): writing raw shards", flush=True)
        save_raw(model, folder, shard_bytes, int8)
    else:
        quant = "int8" if int8 else None
        save_model(model, folder, dtype="bfloat16", max_shard_bytes=shard_bytes, overwrite=True, quantize=quant)
    if tokenizer != "bytes":
        _copy(Path(tokenizer), TOKENIZER_FILES, folder)
    if init_from:
        _copy(Path(init_from), SETTINGS_FILES, folder)


def _copy(source: Path, names: Sequence[str], folder: Path) -> None:
    """Those that are there"""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def save_raw(model: DiffusionGemma, folder: Path, shard_bytes: int = SHARD_BYTES, int8: bool = False) -> None:
    """Shards under our own parameter names, with the configuration beside them; needs torch and safetensors only.

    bfloat16, or with `int8` what `model/quantize.py` names in int8 and everything else in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("raw-*.safetensors"):  # of an export with more shards than this one
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        parts = _raw_parts(name, tensor.detach(), int8)
        nbytes = sum(part.nbytes for part in parts.values())
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1] |= parts
        size += nbytes
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"raw-{number:02d}.safetensors")
    (folder / "raw.json").write_text(json.dumps(model.config.to_dict()) + "\n", encoding="utf-8")


def _raw_parts(name: str, tensor: Tensor, int8: bool) -> dict[str, Tensor]:
    if not int8:
        return {name: tensor.to("cpu", torch.bfloat16).contiguous()}
    fmt = Scheme.parse("int8").format_of(name)
    if fmt is None:
        return {name: tensor.to("cpu", torch.float32).contiguous()}
    q, scale = quantize(tensor, fmt)
    return {name: q.cpu(), name + _SCALE: scale.cpu()}


def load_raw(folder: Path) -> DiffusionGemma:
    """What `save_raw` wrote, as a float32 network."""
    if not (folder / "raw.json").is_file():
        raise CheckpointError(f"no raw.json in {folder}: these are not raw shards")
    config = ModelConfig.from_dict(json.loads((folder / "raw.json").read_text(encoding="utf-8")))
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("raw-*.safetensors")):
        weights |= load_file(path)
    for name in [name for name, tensor in weights.items() if tensor.dtype == torch.int8]:
        scale = weights.pop(name + _SCALE, None)
        if scale is None or scale.shape != (*weights[name].shape[:-1], 1):
            raise CheckpointError(f"{name} is int8, but its scales are missing or of another shape: copy all shards")
        weights[name] = dequantize(weights[name], scale)
    model = rebuild(config, weights)
    if lost := sorted(model.state_dict().keys() - weights.keys()):
        raise CheckpointError(f"{folder} lacks weights of the network: copy all shards", lost)
    return model
