"""What training leaves behind: a folder in the stock layout that every other command loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = 15 << 20


def rebuild(config: ModelConfig, weights: dict[str, Tensor]) -> DiffusionGemma:
    """A float32 network on the CPU with these parameters; the layer scalars stay 1 unless they are among them."""
    model = DiffusionGemma(config)
    state = model.state_dict()
    for name, tensor in weights.items():
        if name not in state:
            raise CheckpointError(f"{name} is no parameter of this network")
        state[name].copy_(tensor.detach().to("cpu", torch.float32))
    return model


def export(model: DiffusionGemma, folder: Path, tokenizer: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write bfloat16 shards, config and tokenizer. Where the checkpoint package cannot be imported, raw shards."""
    try:
        from diffusiongemma.checkpoint import save_model
    except ImportError as error:
        print(f"the stock layout needs a package that is missing here ({error}): writing raw shards", flush=True)
        save_raw(model, folder, shard_bytes)
    else:
        save_model(model, folder, dtype="bfloat16", max_shard_bytes=shard_bytes, overwrite=True)
    if tokenizer != "bytes":
        for name in TOKENIZER_FILES:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, folder / name)


def save_raw(model: DiffusionGemma, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Shards under our own parameter names, with the configuration beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        half = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if shards[-1] and size + half.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = half
        size += half.nbytes
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"raw-{number:02d}.safetensors")
    (folder / "raw.json").write_text(json.dumps(model.config.to_dict()) + "\n", encoding="utf-8")


def load_raw(folder: Path) -> DiffusionGemma:
    """What `save_raw` wrote."""
    if not (folder / "raw.json").is_file():
        raise CheckpointError(f"no raw.json in {folder}: these are not raw shards")
    config = ModelConfig.from_dict(json.loads((folder / "raw.json").read_text(encoding="utf-8")))
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("raw-*.safetensors")):
        weights |= load_file(path)
    return rebuild(config, weights)
