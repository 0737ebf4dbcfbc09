"""The experts' weights a second time, as passes of few users read them best, which wait for them to come from memory.

They are laid out by side (`ops/sides.py`): each multiprocessor reads what is near. Those in fp8 and bfloat16 are also
packed, in 7 and 12 bits (`ops/packed.py`). A pass of one to three users (of 4 bits: of one) reads these, others the
plain ones. Both are the same numbers, so that no text depends on who else writes: what has no place in a packed row is
rounded in the plain one, too. Of rows that are about normally distributed that changes less than a hundredth of what
their number format itself has lost; a layer of which it would change a tenth stays as it is (`Packing.most`).

The plain weights are changed where they lie, so nobody else may be at work with them meanwhile.
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
from diffusiongemma.ops.packed import Packed, Packing, bytes_of, fits, lie_in_pairs, lost, once_more
from diffusiongemma.ops.quantized import QuantExperts
from diffusiongemma.ops.sides import Sides, sides_of

log = logging.getLogger(__name__)
_packed: WeakKeyDictionary[nn.Module, Packed] = WeakKeyDictionary()  # by experts: as long as they live


class _Plain(NamedTuple):
    """The experts of a layer"""

    module: nn.Module
    packing: Packing | None  # None: of 4-bit weights, which are not packed
    up: Tensor  # [E, 2 I, D], or tiles
    up_scale: Tensor | None
    down: Tensor  # [E, D, I]
    down_scale: Tensor | None

    def lost(self) -> float:
        """What packing changes, of the norm of the expert that loses most; NaN, where there is one"""
        if self.packing is None:
            return 0.0
        return float(torch.tensor([lost(w, self.packing) for w in (self.up, self.down)]).max())

    def packed(self, sides: Sides) -> Packed:
        return once_more(self.up, self.up_scale, self.down, self.down_scale, sides)


def packed_of(experts: nn.Module) -> Packed | None:
    return _packed.get(experts)


def drop_packed(model: DiffusionGemma) -> None:
    """Packed experts are not wanted any more: their memory is free when the engines that read them are gone. The plain
    ones stay as they are, rounded."""
    for layer in model.layers:
        experts: Any = layer.experts
        _packed.pop(experts, None)


def packings(model: DiffusionGemma) -> list[str]:
    """How the experts of this network lie in memory once more, in words; empty: they do not"""
    found = (packed_of(plain.module) for plain in _plain(model))
    return list(dict.fromkeys(packed.name for packed in found if packed is not None))


def unpackable(model: DiffusionGemma, ops: Ops) -> str | None:
    """Why packed experts would be read nowhere, or gain nothing, or None"""
    if (plain := next(_plain(model), None)) is None:
        return "experts are neither fp8 nor bfloat16 nor of 4 bits in groups of 64, or do not divide into tiles"
    weights = (plain.up, plain.up_scale), (plain.down, plain.down_scale)
    if not ops.streams(model.config.canvas_length, model.config.top_k_experts, *weights):
        return "experts are not streamed here: that takes a Hopper card and a known version of Triton"
    if plain.packing is None and not sides_of(model.device).both:
        return "4-bit experts gain nothing where the L2 cache has no sides, or they could not be found"
    return None


def packed_bytes(model: DiffusionGemma) -> int:
    """What packed experts take, or would; 0: they cannot be packed"""
    return sum(bytes_of(w, plain.packing) for plain in _plain(model) for w in (plain.up, plain.down))


@torch.inference_mode()
def pack_experts(model: DiffusionGemma) -> int:
    """Pack the experts of every layer in which that changes hardly anything -> in how many layers they are packed.
    Where memory runs out, what is left stays as it is."""
    count, left, sides = 0, list[str](), sides_of(model.device)
    for at, plain in enumerate(_plain(model)):
        if plain.module not in _packed:
            if plain.packing is not None and not (change := plain.lost()) <= plain.packing.most:  # NaN never is
                left.append(f"{at} by {change:.2%}")
                continue
            try:
                _packed[plain.module] = plain.packed(sides)
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
        packing = fits(weights[0], weights[2])
        if packing is not None or lie_in_pairs(weights[0], weights[2]):
            yield _Plain(experts, packing, *weights)
