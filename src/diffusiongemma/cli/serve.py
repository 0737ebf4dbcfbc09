"""`dgemma serve`: the OpenAI API and the studio over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffusiongemma.cli.options import DEFAULT_MODEL
from diffusiongemma.errors import ConfigError

_NET, _LIMITS, _LOGS = "Network and keys", "Limits", "Logs"


def run(
    model: Annotated[
        str, typer.Argument(help="'nano', a checkpoint folder, a hub id, or random:PRESET.")
    ] = DEFAULT_MODEL,
    *,
    name: Annotated[str | None, typer.Option(help="What clients call the model (default: its own name).")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = "auto",
    dtype: Annotated[str, typer.Option(help="Number format of the weights: auto, float32, bfloat16, …")] = "auto",
    host: Annotated[
        str, typer.Option(help="Any other address than this machine's own demands API keys.", rich_help_panel=_NET)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", rich_help_panel=_NET)] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line; also: DGEMMA_API_KEYS.", rich_help_panel=_NET)
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may use the server.", rich_help_panel=_NET)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows at once (default: 4 on a CPU, 16 on a GPU).", rich_help_panel=_LIMITS)
    ] = None,
    cache_mib: Annotated[int, typer.Option(help="K/V cache, kept prefixes included.", rich_help_panel=_LIMITS)] = 2048,
    packed: Annotated[
        bool | None,
        typer.Option(
            "--packed/--no-packed",
            help="Experts a second time, as few users read them best; rounds some (default: if there is memory).",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that wait at most.", rich_help_panel=_LIMITS)] = 128,
    max_tokens: Annotated[int, typer.Option(help="New tokens of a request at most.", rich_help_panel=_LIMITS)] = 4096,
    request_seconds: Annotated[float, typer.Option(help="Time limit of a request.", rich_help_panel=_LIMITS)] = 300.0,
    max_body_mib: Annotated[float, typer.Option(help="Size of a body at most.", rich_help_panel=_LIMITS)] = 4.0,
    grace: Annotated[
        float, typer.Option(help="Seconds for what runs when the server is stopped.", rich_help_panel=_LIMITS)
    ] = 30.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="JSON lines.", rich_help_panel=_LOGS)] = False,
    log_file: Annotated[Path | None, typer.Option(help="Instead of stderr.", rich_help_panel=_LOGS)] = None,
) -> None:
    """Serve a model: the OpenAI API under /v1, the studio at /, figures at /metrics."""
    from diffusiongemma.serve import startup

    with startup.quick():
        try:
            from diffusiongemma.serve.server import run as serve
            from diffusiongemma.serve.settings import Settings, read_keys
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'diffusiongemma[serve]'") from None

        serve(
            Settings(
                model=model, name=name, device=device, dtype=dtype, host=host, port=port, keys=read_keys(api_key_file),
                cors_origins=tuple(cors_origin or ()), batch=batch, cache=cache_mib << 20, packed=packed,
                queue=queue, max_tokens=max_tokens, request_seconds=request_seconds,
                max_body=max_body_mib * (1 << 20), grace=grace, log_json=log_json, log_file=log_file,
            )
        )  # fmt: skip
