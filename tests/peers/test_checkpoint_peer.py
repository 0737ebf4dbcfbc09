"""Checkpoints equal Transformers': what it writes is read and written back bit for bit, and it reads what we write."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, Gemma4VisionConfig

import diffusiongemma as dg
from diffusiongemma.checkpoint.layout import is_vision, stock_aliases, stock_layout

from .stock import CONFIGS, StockRun, save_stock, stock_model

pytestmark = pytest.mark.peer

# Buffers that Transformers computes and never saves.
NOT_SAVED = re.compile(
    r"model\.(decoder|encoder\.language_model)\.(embed_tokens\.embed_scale|rotary_emb\.\w+_inv_freq)"
    r"|model\.encoder\.vision_tower\.encoder\.rotary_emb\.(original_)?inv_freq"
)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits(model: DiffusionGemmaForBlockDiffusion) -> list[torch.Tensor]:
    """Encode, and denoise with and without self-conditioning."""
    tokens = torch.arange(14)[None] * 7 % 320
    canvas = torch.arange(8)[None] * 11 % 320
    run = StockRun(model)
    encoded = run.encode(tokens)
    first = run.denoise(canvas)
    return [encoded, first, run.denoise(canvas, first)]


def assert_same_model(one: DiffusionGemmaForBlockDiffusion, two: DiffusionGemmaForBlockDiffusion) -> None:
    """Weights, buffers and logits equal to the last bit."""
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    buffers = dict(two.named_buffers())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in one.named_buffers())
    # Weights mapped from a file lie at odd addresses, where MKL sums in another order: compare fresh copies.
    for left, right in zip(logits(deepcopy(one)), logits(deepcopy(two)), strict=True):
        assert torch.equal(left, right)


def test_every_name_of_the_26b_model_is_known() -> None:
    config = dg.ModelConfig.preset("26b-a4b")
    vision = Gemma4VisionConfig(hidden_size=1152, num_hidden_layers=27)
    stock = DiffusionGemmaConfig.from_dict({**config.to_dict(), "vision_config": vision.to_dict()})
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(stock)
    saved = model.state_dict()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert saved.keys() <= tensors.keys()

    layout, aliases = stock_layout(config), stock_aliases(config)
    unknown = []
    for name, tensor in tensors.items():
        if name in layout or name in aliases:
            assert tuple(tensor.shape) == layout[aliases.get(name, name)].shape, name
            assert name in saved
        elif NOT_SAVED.fullmatch(name):
            assert name not in saved
        elif not is_vision(name):
            unknown.append(name)
    assert unknown == []
    assert layout.keys() | aliases.keys() <= saved.keys(), "the map has names that Transformers does not"
    # Copies are the same tensor there, so a file needs only one of them.
    assert all(tensors[alias] is tensors[name] for alias, name in aliases.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_round_trip_through_both(tmp_path: Path, shard: str, dtype: torch.dtype) -> None:
    stock = stock_model(seed=5, **CONFIGS["base"]).to(dtype)
    theirs = save_stock(stock, tmp_path / "theirs", max_shard_size=shard)
    assert (len(list(theirs.glob("*.safetensors"))) > 1) is (shard == "60KB")
    model = dg.load_model(theirs, dtype=dtype)
    dg.save_model(model, tmp_path / "ours", max_shard_bytes=60_000 if shard == "60KB" else 5_000_000_000)

    before, after = read_all(theirs), read_all(tmp_path / "ours")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert (tmp_path / "ours" / "generation_config.json").read_bytes() == (
        theirs / "generation_config.json"
    ).read_bytes()
    assert dg.ModelConfig.from_pretrained(tmp_path / "ours") == model.config

    again, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert again.dtype == dtype
    if dtype == torch.float32:
        assert_same_model(stock, again.eval())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_transformers_reads_what_we_write(tmp_path: Path, name: str) -> None:
    """Every config: from our config.json and weights, the logits of the model that they came from."""
    stock = stock_model(seed=6, **CONFIGS[name])
    dg.save_model(dg.load_model(save_stock(stock, tmp_path / "theirs")), tmp_path / "ours")
    again = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "ours").eval()
    assert_same_model(stock, again)
