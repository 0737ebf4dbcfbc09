"""Quantised checkpoints equal compressed-tensors': it reads our numbers as we do, and we read what it compresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.checkpoint.layout import stock_layout
from diffusiongemma.checkpoint.quant_config import write_quantization
from diffusiongemma.checkpoint.quantize import quantize_folder
from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils import is_match

pytestmark = pytest.mark.peer

CONFIG = ModelConfig.preset("tiny", num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))
SCHEMES = [Scheme.parse("int8"), Scheme.parse("fp8"), Scheme.parse("int4", 32)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.experts.kind)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer") / "plain"
    save_model(DiffusionGemma(CONFIG).init_weights(3, 0.05), folder, dtype="bfloat16")
    return folder


def groups_of(scheme: Scheme) -> dict[str, QuantizationScheme]:
    """Their reading of our config: parameter -> the scheme that their matching of targets finds for its module."""
    config = QuantizationConfig.model_validate(write_quantization(scheme))
    found: dict[str, QuantizationScheme] = {}
    for name in stock_layout(CONFIG, split_experts=True):
        module = torch.nn.Embedding(1, 1) if "embed_tokens" in name else torch.nn.Linear(1, 1)
        base = name.removesuffix(".weight")
        hits = [group for group in config.config_groups.values() if is_match(base, module, group.targets)]
        assert len(hits) <= 1, f"{name}: which of two groups counts depends on the reader"
        if hits:
            found[name] = hits[0]
    return found


@every_scheme
def test_they_read_our_numbers_as_we_do(scheme: Scheme, plain: Path, tmp_path: Path) -> None:
    quantize_folder(plain, tmp_path / "out", scheme)
    tensors, ours = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_model(tmp_path / "out", quantize="none").state_dict(),
    )
    groups, seen = groups_of(scheme), 0
    for name, slot in stock_layout(CONFIG, split_experts=True).items():
        if f"{name}_scale" not in tensors:
            continue
        base = name.removesuffix("weight")
        group = groups[name]
        parts = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
        parts["weight_scale"] = parts["weight_scale"].float()  # they dequantise in the dtype of the scales
        theirs = BaseCompressor.get_value_from_registry(group.format).decompress(parts, group)["weight"]
        assert torch.equal(theirs, slot.of(ours[slot.parameter])), name
        seen += 1
    assert seen == 2 * 8 * 3 + 2 * 3 + 4 + 3 + 1  # experts, dense MLPs, attention (a full layer has no v), embeddings


@every_scheme
def test_we_read_what_they_compress(scheme: Scheme, plain: Path, tmp_path: Path) -> None:
    original, layout = load_model(plain).state_dict(), stock_layout(CONFIG, split_experts=True)
    groups, tensors, expected = groups_of(scheme), {}, {}
    for name, slot in layout.items():
        weight = slot.of(original[slot.parameter]).bfloat16().clone()
        if scheme.format_of(slot.parameter) is None:
            tensors[name] = weight
            expected[name] = weight.float()
            continue
        group = groups[name]
        compressor = BaseCompressor.get_value_from_registry(group.format)
        state = {"weight": weight, "weight_scale": _scales(weight, group)}
        compressed = compressor.compress(state, group)
        wide = compressed | {"weight_scale": compressed["weight_scale"].float()}
        expected[name] = compressor.decompress(wide, group)["weight"]
        tensors |= {name.removesuffix("weight") + part: t.contiguous() for part, t in compressed.items()}
    folder = tmp_path / "theirs"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    quant = QuantizationConfig.model_validate(write_quantization(scheme))
    config["quantization_config"] = json.loads(quant.model_dump_json())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    ours = load_model(folder, quantize="none").state_dict()
    for name, slot in layout.items():
        assert torch.equal(slot.of(ours[slot.parameter]), expected[name]), name
    load_model(folder, quantize=scheme.experts.kind, group=scheme.experts.group or None)


def _scales(weight: Tensor, group: QuantizationScheme) -> Tensor:
    """As their min-max observer picks them."""
    args = group.weights
    assert args is not None
    blocks = weight.view(weight.shape[0], -1, args.group_size or weight.shape[1])
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return scale
