"""What the server says of its model."""

from __future__ import annotations

from diffusiongemma.engine import Engine
from diffusiongemma.serve.models import describe


def test_how_a_model_draws_icons_is_told() -> None:
    with Engine.load("random:tiny") as engine:
        assert describe(engine, "m", 0).abilities.svg_mode == "diffusion"
        engine.svg_mode = "ar"  # as a file `dgemma.json` beside the weights may say
        assert describe(engine, "m", 0).abilities.svg_mode == "ar"


def test_a_quantised_model_is_as_large_as_it_was() -> None:
    """Its weights are no parameters of torch any more; people ask for how many there are."""
    with Engine.load("random:tiny") as plain, Engine.load("random:tiny", quantize="int8") as small:
        told = [describe(engine, "m", 0).parameters for engine in (plain, small)]
    assert told[0] == told[1] > 100_000
