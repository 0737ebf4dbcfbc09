"""Where the time of a step on the plain path goes: hooks on the modules, on any device.

On a GPU every hook waits for the card, so the parts are right and their sum is longer than an undisturbed step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from diffusiongemma.bench.floor import ATTENTION, CONDITIONING, DENSE, EXPERTS, REST, VOCABULARY
from diffusiongemma.bench.timing import synchronise
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.layers import Attention, Experts, Layer
from diffusiongemma.ops.quantized import QuantExperts


def parts_of_plain(model: DiffusionGemma, step: Callable[[], float], steps: int) -> dict[str, float]:
    """Milliseconds of each part of one step, where `step` takes `steps` of them, no other pass, and tells the seconds.

    What is not in the network, from its first module to its last, is the vocabulary end: head, sampler, soft embedding.
    """
    taken: defaultdict[str, float] = defaultdict(float)
    with _timed(model, taken):
        whole = step()
    network = taken.pop("network")
    parts = {part: taken[part] for part in (EXPERTS, ATTENTION, DENSE, CONDITIONING)}
    parts[VOCABULARY] = whole - network
    parts[REST] = network - sum(taken.values())
    return {part: round(1e3 * seconds / steps, 4) for part, seconds in parts.items()}


@contextmanager
def _timed(model: DiffusionGemma, taken: defaultdict[str, float]) -> Iterator[None]:
    device = model.device
    began: dict[str, float] = {}

    def start(part: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            synchronise(device)
            began[part] = time.perf_counter()

        return note

    def stop(part: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            synchronise(device)
            taken[part] += time.perf_counter() - began[part]

        return note

    hooks = [
        model.self_conditioning.register_forward_pre_hook(start("network")),
        model.norm.register_forward_hook(stop("network")),
    ]
    timed: list[tuple[nn.Module, str]] = [(model.self_conditioning, CONDITIONING)]
    for module in model.modules():
        if isinstance(module, Layer):
            timed.append((module.mlp, DENSE))
        elif isinstance(module, Attention):
            timed.append((module, ATTENTION))
        elif isinstance(module, Experts | QuantExperts):
            timed.append((module, EXPERTS))
    for module, part in timed:
        hooks += [module.register_forward_pre_hook(start(part)), module.register_forward_hook(stop(part))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
