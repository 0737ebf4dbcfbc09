from __future__ import annotations

import torch

from diffusiongemma.checkpoint.layout import is_vision, stock_aliases, stock_layout
from diffusiongemma.checkpoint.plan import by_layer
from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma


def test_the_map_covers_every_row_of_the_network_once() -> None:
    config = ModelConfig.preset("26b-a4b")
    with torch.device("meta"):
        parameters = DiffusionGemma(config).state_dict()
    parts: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for slot in stock_layout(config).values():
        parts.setdefault(slot.parameter, []).append((slot.start, slot.shape))
    assert parts.keys() == parameters.keys()
    for name, pieces in parts.items():
        row = 0
        for start, shape in sorted(pieces):
            assert start == row, name
            assert shape[1:] == parameters[name].shape[1:], name
            row += shape[0]
        assert row == parameters[name].shape[0], name


def test_the_released_names() -> None:
    """The tensors that the released 26B-A4B checkpoint is known to hold."""
    layout = stock_layout(ModelConfig.preset("26b-a4b"))
    assert layout["model.decoder.layers.29.experts.gate_up_proj"].shape == (128, 2 * 704, 2816)
    assert layout["model.decoder.layers.0.experts.down_proj"].shape == (128, 2816, 704)
    assert layout["model.decoder.embed_tokens.weight"].shape == (262_144, 2816)
    assert layout["model.decoder.layers.0.self_attn.q_proj.weight"].shape == (16 * 256, 2816)
    assert layout["model.decoder.layers.0.self_attn.v_proj.weight"].shape == (8 * 256, 2816)
    assert layout["model.decoder.layers.5.self_attn.q_proj.weight"].shape == (16 * 512, 2816)
    assert layout["model.decoder.layers.5.self_attn.k_proj.weight"].shape == (2 * 512, 2816)
    assert "model.decoder.layers.5.self_attn.v_proj.weight" not in layout
    for part in ("pre_norm", "gate_proj", "up_proj", "down_proj"):
        assert f"model.decoder.self_conditioning.{part}.weight" in layout
    for part in ("router.proj.weight", "router.scale", "router.per_expert_scale", "layer_scalar"):
        assert f"model.decoder.layers.17.{part}" in layout
    assert layout["model.encoder.language_model.layers.17.layer_scalar"].parameter == "layers.17.encoder_scalar"
    assert is_vision("model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight")
    assert is_vision("model.encoder.embed_vision.embedding_projection.weight")


def test_aliases_repeat_what_the_two_stacks_share() -> None:
    config = ModelConfig.preset("tiny")
    layout, aliases = stock_layout(config), stock_aliases(config)
    assert not layout.keys() & aliases.keys()
    assert set(aliases.values()) <= layout.keys()
    assert aliases["lm_head.weight"] == "model.decoder.embed_tokens.weight"
    assert aliases["model.encoder.language_model.norm.weight"] == "model.decoder.norm.weight"
    assert not any("self_conditioning" in alias or "layer_scalar" in alias for alias in aliases)


def test_names_are_put_together_by_layer() -> None:
    names = ["a.layers.0.x", "a.layers.1.x", "a.layers.2.x", "a.layers.10.x", "a.layers.4.y", "norm", "layers.007.z"]
    assert by_layer(names) == ["layers.007.z", "norm", "a.layers.{0-2,10}.x", "a.layers.4.y"]
