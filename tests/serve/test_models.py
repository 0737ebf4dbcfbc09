"""What the server says of its model."""

from __future__ import annotations

from diffusiongemma.engine import Engine
from diffusiongemma.serve.models import describe


def test_a_quantised_model_is_as_large_as_it_was() -> None:
    """Its weights are no parameters of torch any more; people ask for how many there are."""
    with Engine.load("random:tiny") as plain, Engine.load("random:tiny", quantize="int8") as small:
        told = [describe(engine, "m", 0).parameters for engine in (plain, small)]
    assert told[0] == told[1] > 100_000
