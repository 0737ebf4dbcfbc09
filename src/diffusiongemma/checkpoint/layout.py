"""The name map: which stock tensor is which rows of which parameter of the network. Pure data, no files.

The stock layout keeps q, k, v and gate, up apart; the network fuses each group into one parameter, so a stock tensor
is a run of rows there. The encoder's copy of a tied weight is an alias: it may be in a file, but holds nothing new.
Quantised checkpoints also keep the experts apart, as published ones do: `split_experts` is the map for those.

Legend: D hidden, F feed-forward, V vocabulary, E experts, I expert size, H query heads, Hkv K/V heads, Dh head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diffusiongemma.config import ModelConfig

VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_DECODER = "model.decoder."
_ENCODER = "model.encoder.language_model."
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


@dataclass(frozen=True)
class Slot:
    """Where one stock tensor lives: `shape[0]` rows of `parameter` (or of one expert of it) from row `start` on."""

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The rows of the (perhaps fused) parameter that this stock tensor is; a view."""
        rows = parameter if self.expert is None else parameter[self.expert]
        return rows.narrow(0, self.start, self.shape[0])


def is_vision(name: str) -> bool:
    return name.startswith(VISION)


def stock_layout(config: ModelConfig, split_experts: bool = False) -> dict[str, Slot]:
    """Stock tensor name -> its place in the network, for everything that a checkpoint must hold."""
    d, f = config.hidden_size, config.intermediate_size
    layout = {
        _DECODER + "embed_tokens.weight": Slot("embed_tokens.weight", (config.vocab_size, d)),
        _DECODER + "norm.weight": Slot("norm.weight", (d,)),
        _DECODER + "self_conditioning.pre_norm.weight": Slot("self_conditioning.pre_norm.weight", (d,)),
    }
    _add_mlp(layout, _DECODER + "self_conditioning.", "self_conditioning.", d, f)
    for i in range(config.num_hidden_layers):
        _add_layer(layout, config, i)
        if split_experts:
            _split_experts(layout, f"{_DECODER}layers.{i}.experts.", config.moe_intermediate_size)
    return layout


def stock_aliases(config: ModelConfig, split_experts: bool = False) -> dict[str, str]:
    """Names of tied copies that may be in a file -> the stock name that they repeat."""
    aliases = {"lm_head.weight": _DECODER + "embed_tokens.weight"}
    for name in stock_layout(config, split_experts):
        # The encoder has every weight of the decoder but self-conditioning; its layer scalars are its own.
        inner = name.removeprefix(_DECODER)
        if inner != name and not inner.startswith("self_conditioning.") and not inner.endswith(".layer_scalar"):
            aliases[_ENCODER + inner] = name
    return aliases


def _add_layer(layout: dict[str, Slot], config: ModelConfig, i: int) -> None:
    stock, ours = f"{_DECODER}layers.{i}.", f"layers.{i}."
    d, heads = config.hidden_size, config.num_attention_heads
    e, inner = config.num_experts, config.moe_intermediate_size
    kv_heads, dh = config.layer_heads(i)

    projections = {"q_proj": (heads * dh, d), "k_proj": (kv_heads * dh, d)}
    if config.is_sliding(i):
        projections["v_proj"] = (kv_heads * dh, d)  # full layers use their keys as values
    _add_fused(layout, stock + "self_attn.", ours + "self_attn.qkv_proj.weight", projections)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (d, heads * dh),
        "self_attn.q_norm.weight": (dh,),
        "self_attn.k_norm.weight": (dh,),
        "router.proj.weight": (e, d),
        "router.scale": (d,),
        "router.per_expert_scale": (e,),
        "experts.gate_up_proj": (e, 2 * inner, d),
        "experts.down_proj": (e, d, inner),
        **{f"{norm}.weight": (d,) for norm in _NORMS},
    }
    for name, shape in shapes.items():
        layout[stock + name] = Slot(ours + name, shape)
    _add_mlp(layout, stock + "mlp.", ours + "mlp.", d, config.intermediate_size)
    layout[stock + "layer_scalar"] = Slot(ours + "decoder_scalar", (1,))
    layout[f"{_ENCODER}layers.{i}.layer_scalar"] = Slot(ours + "encoder_scalar", (1,))


def _split_experts(layout: dict[str, Slot], stock: str, inner: int) -> None:
    up, down = layout.pop(stock + "gate_up_proj"), layout.pop(stock + "down_proj")
    experts, d = up.shape[0], up.shape[2]
    for e in range(experts):
        layout[f"{stock}{e}.gate_proj.weight"] = Slot(up.parameter, (inner, d), 0, e)
        layout[f"{stock}{e}.up_proj.weight"] = Slot(up.parameter, (inner, d), inner, e)
        layout[f"{stock}{e}.down_proj.weight"] = Slot(down.parameter, (d, inner), 0, e)


def _add_mlp(layout: dict[str, Slot], stock: str, ours: str, d: int, f: int) -> None:
    _add_fused(layout, stock, ours + "gate_up_proj.weight", {"gate_proj": (f, d), "up_proj": (f, d)})
    layout[stock + "down_proj.weight"] = Slot(ours + "down_proj.weight", (d, f))


def _add_fused(layout: dict[str, Slot], stock: str, parameter: str, parts: dict[str, tuple[int, int]]) -> None:
    start = 0
    for name, shape in parts.items():
        layout[f"{stock}{name}.weight"] = Slot(parameter, shape, start)
        start += shape[0]
