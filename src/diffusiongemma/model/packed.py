"""The experts' weights a second time, packed (`ops/packed.py`), for passes that wait for them to come from memory.

A pass of one to three users reads the packed ones, all others the plain ones. Both are the same numbers, so that no
text depends on who else writes: what has no place in a packed row is rounded in the plain one, too. Of rows that are
about normally distributed that changes less than a hundredth of what their number format itself has lost; a layer of
which it would change a tenth stays as it is (`Packing.most`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffusiongemma.model.backend import Ops
from diffusiongemma.model.layers import Experts
from diffusiongemma.model.network import DiffusionGemma
from diffusiongemma.ops.memory import is_out_of_memory
from diffusiongemma.ops.packed import Packed, Packing, bytes_of, fits, lost, round_and_pack
from diffusiongemma.ops.quantized import QuantExperts

log = logging.getLogger(__name__)
_packed: WeakKeyDictionary[nn.Module, Packed] = WeakKeyDictionary()  # by experts: as long as they live


class _Plain(NamedTuple):
    """The experts of a layer"""

    module: nn.Module
    packing: Packing
    up: Tensor  # [E, 2 I, D]
    up_scale: Tensor | None
    down: Tensor  # [E, D, I]
    down_scale: Tensor | None


def packed_of(experts: nn.Module) -> Packed | None:
    return _packed.get(experts)


def packings(model: DiffusionGemma) -> list[str]:
    """How the experts of this network are packed, in words; empty: they are not"""
    found = (packed_of(plain.module) for plain in _plain(model))
    return list(dict.fromkeys(packed.packing.name for packed in found if packed is not None))


def unpackable(model: DiffusionGemma, ops: Ops) -> str | None:
    """Why packed experts would be read nowhere, or None"""
    if (plain := next(_plain(model), None)) is None:
        return "experts are neither fp8 nor bfloat16, or their rows do not divide into tiles"
    weights = (plain.up, plain.up_scale), (plain.down, plain.down_scale)
    streamed = ops.streams(model.config.canvas_length, model.config.top_k_experts, *weights)
    return None if streamed else "experts are not streamed here: that takes a Hopper card and a known version of Triton"


def packed_bytes(model: DiffusionGemma) -> int:
    """What packed experts take, or would; 0: they cannot be packed"""
    return sum(bytes_of(w, plain.packing) for plain in _plain(model) for w in (plain.up, plain.down))


@torch.inference_mode()
def pack_experts(model: DiffusionGemma) -> int:
    """Pack the experts of every layer in which that changes hardly anything -> in how many layers they are packed.
    Where memory runs out, what is left stays as it is."""
    count, left = 0, list[str]()
    for at, plain in enumerate(_plain(model)):
        if plain.module not in _packed:
            changes = [lost(w, plain.packing) for w in (plain.up, plain.down)]
            if not all(change <= plain.packing.most for change in changes):  # NaN is never within a limit
                left.append(f"{at} by {changes[0]:.2%} and {changes[1]:.2%}")
                continue
            try:
                _packed[plain.module] = round_and_pack(*plain[1:])
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("there is no memory to pack the experts of layer %d, nor of those behind it", at)
                break
        count += 1
    if left:
        log.warning("packing would change experts too much, of layers %s: these are not packed", ", ".join(left))
    return count


def _plain(model: DiffusionGemma) -> Iterator[_Plain]:
    """Of all layers whose experts can be packed"""
    for layer in model.layers:
        experts: Any = layer.experts
        up, down = experts.gate_up_proj, experts.down_proj
        if isinstance(experts, QuantExperts):
            weights: tuple[Any, ...] = (up.q, up.scale, down.q, down.scale)
        else:
            assert isinstance(experts, Experts)
            weights = (up.data, None, down.data, None)
        if packing := fits(weights[0], weights[2]):
            yield _Plain(experts, packing, *weights)
