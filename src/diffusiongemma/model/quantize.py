"""Which weights of the network are quantised, and the exchange of its modules for quantised ones.

Quantised: attention, dense MLP, experts; embeddings (also the LM head) in 8 bits. Kept: router, norms, scalars and
self-conditioning, as published quantised checkpoints of this model keep them; together they are 0.2 % of the 26B.
Of a 4-bit network only the experts, nine tenths of all weights, have 4 bits. Attention and dense MLP, which every token
goes through, are fp8: that adds 0.8 GB to the 26B's 13.8, loses less, and their products are the faster ones.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import ConfigError, DeviceError
from diffusiongemma.model.layers import Experts
from diffusiongemma.model.network import DiffusionGemma, Embedding
from diffusiongemma.ops.int8_cpu import use_int8
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.quant import Format, pack_int4, parse_format, quantize_into
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear, QuantWeight

EMBEDDINGS = "embed_tokens.weight"
_STEPS = 3.0  # of a 4-bit scale in one standard deviation: near the best for normal numbers
_EXPERTS = re.compile(r"layers\.\d+\.experts\.(gate_up|down)_proj")
_DENSE = re.compile(r"layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)\.weight")


@dataclass(frozen=True)
class Scheme:
    """The number formats of the experts, of the matrices that every token meets, and of the embeddings if not kept."""

    experts: Format
    dense: Format
    embeddings: Format | None

    @classmethod
    def parse(cls, kind: str, group: int | None = None, embeddings: bool = True) -> Scheme:
        """`kind`: int8, fp8 or int4. Embeddings are int8: at 8 bits a row, its error is a third of fp8's."""
        fmt = parse_format(kind, group)
        return cls(fmt, Format("fp8") if kind == "int4" else fmt, Format("int8") if embeddings else None)

    def format_of(self, parameter: str) -> Format | None:
        if parameter == EMBEDDINGS:
            return self.embeddings
        if _EXPERTS.fullmatch(parameter):
            return self.experts
        return self.dense if _DENSE.fullmatch(parameter) else None

    def formats(self, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, Format]:
        """Parameter -> format for what is quantised, of these names and shapes."""
        chosen = {name: fmt for name in parameters if (fmt := self.format_of(name)) is not None}
        misfits = [
            f"{n} has rows of {parameters[n][-1]}" for n, fmt in chosen.items() if not fmt.fits(parameters[n][-1])
        ]
        if misfits:
            wrong = describe(fmt for name, fmt in chosen.items() if not fmt.fits(parameters[name][-1]))
            raise ConfigError(f"rows must divide into {wrong}, and some here do not: try a smaller group", misfits)
        return chosen


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape, without allocating anything."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DiffusionGemma(config).state_dict().items()}


def replace_modules(model: DiffusionGemma, formats: Mapping[str, Format]) -> DiffusionGemma:
    """Exchange the modules of these parameters for quantised ones, empty, on the device that they were on."""
    parameters = dict(model.named_parameters())
    names = dict.fromkeys(name.rpartition(".")[0] for name in formats)
    for name in names:
        module = model.get_submodule(name)
        kinds = {formats.get(n) for n in parameters if n.rpartition(".")[0] == name}
        assert len(kinds) == 1, f"{name} cannot hold weights in different formats"
        fmt = kinds.pop()
        assert fmt is not None
        parent, _, last = name.rpartition(".")
        with next(module.parameters()).device:
            setattr(model.get_submodule(parent), last, _twin(module, fmt, last == "gate_up_proj"))
    return model


def _twin(module: nn.Module, fmt: Format, gated: bool) -> nn.Module:
    if isinstance(module, Linear):
        rows, columns = module.weight.shape
        return QuantLinear(columns, rows, fmt, gated)
    if isinstance(module, Experts):
        experts, hidden, width = module.down_proj.shape
        return QuantExperts(experts, hidden, width, fmt)
    assert isinstance(module, Embedding), f"no quantised twin of {type(module).__name__}"
    vocab, hidden = module.weight.shape
    return QuantEmbedding(vocab, hidden, fmt, module.dtype)


def formats_in(model: DiffusionGemma) -> dict[str, Format]:
    """Parameter -> format of what is quantised in this network; empty for a plain one."""
    return {name: module.format for name, module in model.named_modules() if isinstance(module, QuantWeight)}


def count_parameters(model: DiffusionGemma) -> int:
    """How many weights it has, whatever they are stored as: quantised ones are no parameters of torch."""
    quantised = (math.prod(module.shape) for module in model.modules() if isinstance(module, QuantWeight))
    return sum(parameter.numel() for parameter in model.parameters()) + sum(quantised)


def int8_runs(device: torch.device, dtype: torch.dtype, formats: Iterable[Format | None]) -> bool:
    """Can products of integers (ops/int8_cpu.py) compute a network with weights in these formats?"""
    return device.type == "cpu" and dtype == torch.float32 and set(formats) == {Format("int8")}


def use_fast_products(model: DiffusionGemma) -> None:
    """Let it multiply integers where it can, instead of dequantising its weights at every step."""
    if int8_runs(model.device, model.dtype, formats_in(model).values()):
        use_int8(model)


def describe(formats: Iterable[Format | None]) -> str:
    """In a word or two, for people: 'int4 in groups of 64, fp8, int8'."""
    return ", ".join(dict.fromkeys(str(fmt) for fmt in formats if fmt is not None)) or "not quantised"


@torch.no_grad()
def random_network(
    config: ModelConfig,
    scheme: Scheme | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    std: float = 0.02,
) -> DiffusionGemma:
    """Random weights, quantised as they are made, so that the plain network is never in memory.

    4-bit numbers are drawn as such: to search the best scale of every group of 25 B weights would take long.
    """
    with torch.device("meta"):
        model = DiffusionGemma(config).to(dtype)
        if scheme is not None:
            replace_modules(model, scheme.formats({n: tuple(t.shape) for n, t in model.state_dict().items()}))
    ensure_room(_size(model), device)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:  # norms, scales and scalars; every weight is a matrix
            tensor.fill_(1.0)
        elif name.rpartition(".")[2] not in ("q", "scale"):
            tensor.normal_(0.0, std, generator=generator)
    for module in model.modules():
        if isinstance(module, QuantWeight):
            for q, scale in zip(
                *(part.view(-1, part.shape[-1]).split(1 << 12) for part in (module.q, module.scale)), strict=True
            ):
                rows = torch.empty(q.shape[0], module.shape[-1], device=device).normal_(0.0, std, generator=generator)
                if module.format.kind == "int4":
                    q.copy_(pack_int4(rows.mul_(_STEPS / std).round_().clamp_(-8, 7).to(torch.int8)))
                    scale.fill_(std / _STEPS)
                else:
                    quantize_into(rows, module.format, q, scale)
    return model


def footprint(config: ModelConfig, scheme: Scheme | None, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the network's weights and scales in memory; counted on the network itself, on the meta device."""
    with torch.device("meta"):
        model = DiffusionGemma(config).to(dtype)
        if scheme is not None:
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            replace_modules(model, scheme.formats(shapes))
    return _size(model)


def _size(model: DiffusionGemma) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def ensure_room(size: int, device: torch.device | str) -> None:
    """Refuse weights that are more than a CPU's whole memory. It is handed out when it is first written to, so asking
    for it succeeds, and nothing is said while it fills up."""
    if torch.device(device).type == "cpu" and (most := _memory()) is not None and size > most:
        raise DeviceError(
            f"{size / 1e9:.1f} GB of weights do not fit into this machine's {most / 1e9:.1f} GB of memory: "
            "take a smaller model, one in int8 (dgemma quantize --format int8; on a CPU others are widened), "
            "dtype bfloat16, or another device"
        )


def _memory() -> int | None:
    """Bytes of this machine, where the system tells"""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
