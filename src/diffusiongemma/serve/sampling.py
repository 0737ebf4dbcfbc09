"""From the fields of a request to the engine's sampling options."""

from __future__ import annotations

import secrets
from typing import Any

from diffusiongemma.engine import Engine
from diffusiongemma.engine.infill import MAX_CANDIDATES
from diffusiongemma.engine.infill import SEEDS as TRIES
from diffusiongemma.engine.params import without_stop_rule
from diffusiongemma.serve.errors import bad_request
from diffusiongemma.serve.schema import SEEDS, ChatRequest, Common, CompletionRequest, InfillRequest
from diffusiongemma.text.fim import CANVASES, FimTokens


def sampling_options(engine: Engine, body: Common) -> dict[str, Any]:
    """What `diffusion`, `temperature`, `top_p` and `seed` ask for. Left out: the model's own."""
    options = body.diffusion.model_dump(exclude_none=True) if body.diffusion else {}
    mode = options.get("mode", engine.params.mode)
    top_p = body.top_p if isinstance(body, ChatRequest | CompletionRequest) else None
    if mode == "ar":
        options |= {"temperature": body.temperature} if body.temperature is not None else {}
        options |= {"top_p": top_p} if top_p is not None else {}
    else:
        if top_p not in (None, 1):
            raise bad_request("top_p has no effect on diffusion: leave it at 1, or ask for mode 'ar'", "top_p")
        if wrong := without_stop_rule(options):
            raise bad_request(f"{wrong[0]} has no effect without early_stop: leave it out", f"diffusion.{wrong[0]}")
        options |= _schedule(engine, body.temperature, options)
    options["seed"] = body.seed if body.seed is not None else _fresh_seed(body.temperature)
    return options


def _schedule(engine: Engine, temperature: float | None, options: dict[str, Any]) -> dict[str, float]:
    """1: the model's own schedule. Down to 0 its hot end sinks to its cool one; above 1 all of it is heated."""
    if temperature in (None, 1):
        return {}
    assert temperature is not None
    if options.keys() & {"t_min", "t_max"}:
        raise bad_request("temperature changes t_min and t_max: give either it or them", "temperature")
    low, high = engine.params.t_min, engine.params.t_max
    if temperature < 1:
        return {"t_min": low, "t_max": low + temperature * (high - low)}
    return {"t_min": low * temperature, "t_max": high * temperature}


def _fresh_seed(temperature: float | None) -> int:
    return 0 if temperature == 0 else secrets.randbits(31)


def count_on(seed: int, i: int) -> int:
    """The seed of choice i."""
    return (seed + i) & SEEDS


def token_limit(wanted: int | None, default: int, limit: int, param: str = "max_tokens") -> int:
    if wanted is not None and wanted > limit:
        raise bad_request(f"{param} is {wanted}, this server allows {limit}", param)
    return min(default, limit) if wanted is None else wanted


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def rows_of_holes(engine: Engine, body: CompletionRequest | InfillRequest) -> int:
    """Rows that filling holes may take at once: its candidates."""
    if body.diffusion is not None and body.diffusion.mode == "ar":
        return 1
    wanted = body.candidates if isinstance(body, InfillRequest) else None
    form = isinstance(body, InfillRequest) and body.messages is not None
    usual = 1 if form else TRIES * len(CANVASES) if FimTokens.of(engine.tokenizer) else MAX_CANDIDATES
    return wanted or usual
