"""What a pass of the fast runner did: which experts it reached, and whether it computed numbers at all.

Looked at in the very pass that is timed, run once more without its graph. A pass of the plain network would not do: a
kernel that makes NaN sends every token to the same experts, which is fast, and the plain network does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from diffusiongemma.engine.draw import DrawLane, Kind
from diffusiongemma.model.fused import FusedNetwork
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.vocab import Reading


@dataclass(frozen=True)
class Look:
    shares: list[float]  # of the experts that were reached, layer by layer
    trouble: str | None  # what is no number, if anything


def look(network: FusedNetwork, step: Callable[[], object]) -> Look:
    """Run this step of a lane, and look at what it routes and reads."""
    ops, shares, lost = network.ops, list[float](), list[str]()

    def experts(x: Rows, index: Tensor, *args: Any) -> Tensor:
        """However they were picked, the experts are told here."""
        shares.append(index.unique().numel() / network.config.num_experts)
        return ops.experts(x, index, *args)

    def vocab_end(hidden: Tensor, *args: Any, **options: Any) -> Reading:
        reading = ops.vocab_end(hidden, *args, **options)
        read = {"hidden states": hidden, "entropies": reading.entropy, "soft embeddings": reading.soft}
        lost.extend(name for name, values in read.items() if values is not None and not values.isfinite().all())
        return reading

    network.ops = replace(ops, experts=experts, vocab_end=vocab_end)
    try:
        step()
    finally:
        network.ops = ops
    assert len(shares) == network.config.num_hidden_layers
    return Look(shares, f"not to be believed: {', '.join(lost)} with NaN or infinity" if lost else None)


@contextmanager
def watched(lane: DrawLane) -> Iterator[list[tuple[int, Look]]]:
    """Inside, passes of this lane are looked at instead of replayed: how many rows each had, and what it showed."""
    found: list[tuple[int, Look]] = []

    def recorded(kind: Kind) -> Callable[[], None]:
        return lambda: found.append((kind.rows, look(lane.network, partial(lane.step, kind))))

    lane.recorded = recorded  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del lane.recorded
