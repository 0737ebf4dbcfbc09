"""`dgemma demo`: the engine at work on the default model. What `make run` runs."""

from __future__ import annotations

from typing import Annotated

import typer

from diffusiongemma.cli.options import DEFAULT_MODEL, INTERRUPTED, Settings

STAND_IN = "random:tiny"  # while no trained model is embedded
PROMPT = "A canvas of noise becomes text."


def run(
    prompt: Annotated[str, typer.Option(help="What to answer.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    """Write a short text with the default model, and show the canvas while it settles."""
    import torch

    from diffusiongemma.cli.show import follow, tell
    from diffusiongemma.engine.engine import ASSETS

    torch.set_num_threads(1)  # a network this small is much slower on several
    embedded = (ASSETS / DEFAULT_MODEL).is_dir()
    settings = Settings(model=DEFAULT_MODEL if embedded else STAND_IN)
    if not embedded:
        tell(f"No trained model comes with the package yet. {STAND_IN} has random weights: what it writes is noise.")
    with settings.load() as engine:
        request = engine.request(prompt, max_new_tokens=max_new_tokens, seed=seed)
        if follow(engine, request, settings).cancelled:
            raise typer.Exit(INTERRUPTED)
