"""`dgemma bench`: the commands stand in `bench/`, where `python -m diffusiongemma.bench` finds them too."""

from diffusiongemma.bench.commands import app

__all__ = ["app"]
