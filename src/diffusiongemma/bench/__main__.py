"""`python -m diffusiongemma.bench NAME`: the measurements, one command each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


class Peer(StrEnum):
    transformers = "transformers"


@app.command("cpu-step")
def cpu_step_command(
    preset: Annotated[str, typer.Option(help="which geometry")] = "100m",
    prefix: Annotated[int, typer.Option(min=1, help="cached prompt tokens")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds, alternating")] = 9,
    peer: Annotated[Peer | None, typer.Option(help="whom to measure beside us")] = None,
) -> None:
    """One denoising step on a CPU with random weights."""
    from diffusiongemma.bench.cpu_step import cpu_step

    cpu_step(preset, prefix, rounds, None if peer is None else peer.value)


@app.command("engine")
def engine_command(
    preset: Annotated[str, typer.Option(help="which geometry")] = "100m",
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds, alternating")] = 3,
) -> None:
    """What the engine costs and saves on a CPU: overhead, batches, second turns, short answers."""
    from diffusiongemma.bench.engine import engine_bench

    engine_bench(preset, rounds)


if __name__ == "__main__":
    app()
