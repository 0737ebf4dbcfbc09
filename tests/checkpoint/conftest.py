"""A checkpoint of a few kilobytes in the stock layout, with vision tensors, written without our own saver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffusiongemma.checkpoint.layout import stock_layout
from diffusiongemma.config import ModelConfig

VISION = {
    "model.encoder.vision_tower.patch_embedder.input_proj.weight": (4, 6),
    "model.encoder.embed_vision.embedding_projection.weight": (8, 4),
}


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    return ModelConfig.preset(
        "tiny",
        vocab_size=16,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        global_head_dim=6,
        num_experts=2,
        top_k_experts=1,
        moe_intermediate_size=4,
        vision_config={"model_type": "gemma4_vision"},
    )


@pytest.fixture(scope="session")
def stock_tensors(small_config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: slot.shape for name, slot in stock_layout(small_config).items()} | VISION
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def write_checkpoint(
    tmp_path: Path, small_config: ModelConfig, stock_tensors: dict[str, torch.Tensor]
) -> Callable[..., Path]:
    """Writes a folder: `tensors` replaces the stock ones, `shards` > 1 makes an index."""

    def write(tensors: dict[str, torch.Tensor] | None = None, shards: int = 1, name: str = "model") -> Path:
        tensors = stock_tensors if tensors is None else tensors
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(small_config.to_dict()))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        files = {t: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, t in enumerate(tensors)}
        for file in set(files.values()):
            save_file({t: tensors[t] for t in tensors if files[t] == file}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write
