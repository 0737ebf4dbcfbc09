"""`dgemma inspect`: what a checkpoint, a hub id or a preset is and what it costs, without loading a weight."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusiongemma.cli.options import DEFAULT_MODEL
from diffusiongemma.config import PRESETS, ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Weights:
    """What the headers of the safetensors files say."""

    files: int
    bytes_on_disk: int
    tensors: int
    vision_tensors: int
    parameters_by_dtype: dict[str, int]
    format: str  # of quantised weights, or that there are none


def run(
    target: Annotated[str, typer.Argument(metavar="PATH|ID|PRESET", help=f"nano, or a preset: {', '.join(PRESETS)}.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show configuration, parameters, memory and cache of a model.

    Reads config.json and the headers of the safetensors files only. For a hub id, nothing but its config is
    downloaded. A folder that is called nano, or as a preset, is ./NAME.
    """
    config, weights = _look_up(target, revision)

    from diffusiongemma.model.summary import summarise  # only here: torch takes seconds to import

    summary = summarise(config)
    if as_json:
        facts = {"target": target, "revision": revision, "config": config.to_dict(), **summary.to_dict()}
        typer.echo(json.dumps(facts | {"checkpoint": asdict(weights) if weights else None}, indent=2))
        return

    from rich.console import Console
    from rich.text import Text

    from diffusiongemma.cli import tables

    console = Console(highlight=False)
    sizes = f"{tables.human_count(summary.parameters)} parameters, {tables.human_count(summary.active)} active"
    console.print(Text(f"{target}: {sizes}", style="bold"), soft_wrap=True)
    shown = [
        tables.config_table(config),
        tables.parameters_table(summary, console.width),
        tables.memory_table(summary),
        tables.cache_table(summary, config),
    ]
    if weights is not None:
        shown.append(_weights_table(weights))
    for table in shown:
        console.print("", table, sep="\n")
    if weights is None and target not in PRESETS:
        console.print("\nThe weights are not on this machine: only the configuration was read.")


def _look_up(target: str, revision: str | None) -> tuple[ModelConfig, Weights | None]:
    if target in PRESETS:
        if revision is not None:
            raise ConfigError(f"{target} is a preset, so revision {revision!r} means nothing: leave it out")
        return ModelConfig.preset(target), None

    from diffusiongemma.checkpoint import resolve
    from diffusiongemma.checkpoint.files import INDEX

    if target == DEFAULT_MODEL:
        if revision is not None:
            raise ConfigError(f"{target} is the embedded model, so revision {revision!r} means nothing: leave it out")
        from diffusiongemma.engine.engine import ASSETS

        target = str(ASSETS / target)
    try:
        folder = resolve(target, revision, patterns=("config.json", INDEX))
    except CheckpointError as error:
        raise CheckpointError(f"{error}\npresets: {', '.join(PRESETS)}; nano is the embedded model") from None
    return ModelConfig.from_pretrained(folder), _read_weights(folder)


def _read_weights(folder: Path) -> Weights | None:
    """None where there are no weights (yet), as after looking at a hub id; damaged ones are an error."""
    from diffusiongemma.checkpoint.files import read_headers
    from diffusiongemma.checkpoint.layout import is_vision
    from diffusiongemma.checkpoint.load import load_quantization
    from diffusiongemma.model.quantize import describe

    if not any(folder.glob("*.safetensors")):
        return None
    tensors, problems = read_headers(folder)
    if problems:
        raise CheckpointError(f"the weights in {folder} cannot be used", problems)
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += prod(info.shape)
    files = {info.file for info in tensors.values()}
    quantization = load_quantization(folder)
    return Weights(
        files=len(files),
        bytes_on_disk=sum(file.stat().st_size for file in files),
        tensors=len(tensors),
        vision_tensors=sum(map(is_vision, tensors)),
        parameters_by_dtype=dict(sizes.most_common()),
        format=describe(quantization.formats if quantization else ()),
    )


def _weights_table(weights: Weights) -> Table:
    from diffusiongemma.cli.tables import human_bytes, human_count, make_table

    vision = f"{weights.vision_tensors:,} tensors, kept aside" if weights.vision_tensors else "none"
    rows = [
        ("on disk", f"{human_bytes(weights.bytes_on_disk)} in {weights.files} file{'s' * (weights.files != 1)}"),
        ("format", weights.format),
        ("tensors", f"{weights.tensors:,}"),
        ("vision", vision),
        *((name, f"{human_count(count)} numbers") for name, count in weights.parameters_by_dtype.items()),
    ]
    return make_table("Checkpoint", ("", ""), rows)
