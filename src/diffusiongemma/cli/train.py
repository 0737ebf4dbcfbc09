"""`dgemma train RECIPE.toml`: train a network, or fine-tune a checkpoint, from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; see recipes/.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is there is resumed.")],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    max_minutes: Annotated[float | None, typer.Option(help="Stop after so long, with a checkpoint.")] = None,
    total_minutes: Annotated[float | None, typer.Option(help="Length of the schedule, over all resumed parts.")] = None,
    total_steps: Annotated[int | None, typer.Option(help="The same in steps.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder with token arrays.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder with tokenizer.json, or `bytes`.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="Folder with test sets.")] = None,
    init_from: Annotated[str | None, typer.Option(help="A checkpoint folder to begin with.")] = None,
    benchmark: Annotated[float | None, typer.Option(help="Only measure speed, for about so many seconds.")] = None,
) -> None:
    """Train a network from a recipe; killed runs resume where their last checkpoint is."""
    from diffusiongemma.train.__main__ import train

    train(
        recipe, out, device, max_minutes, benchmark, total_minutes=total_minutes, total_steps=total_steps, data=data,
        tokenizer=tokenizer, evaluation=evaluation, init_from=init_from,
    )  # fmt: skip
