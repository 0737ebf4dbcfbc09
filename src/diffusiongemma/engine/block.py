"""The next canvas of a request: how wide it is, and by which rules it is denoised."""

from __future__ import annotations

from collections.abc import Collection

from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion import (
    Acceptance,
    ConfidenceThreshold,
    Constraint,
    Denoiser,
    EntropyBound,
    Forbidden,
    LinearTemperature,
    Pins,
    StableAndConfident,
)
from diffusiongemma.engine.params import WIDTHS
from diffusiongemma.engine.request import Request


def block_width(request: Request, config: ModelConfig, offset: int) -> int:
    """`offset`: tokens of the reply before this block."""
    params = request.params
    if request.start is not None and not offset:
        return len(request.start)
    if params.canvas == "adaptive":
        wanted, limit = params.max_new_tokens - offset, config.canvas_length
        return next((w for w in WIDTHS if wanted <= w <= limit), limit)
    return params.canvas or config.canvas_length


def block_denoiser(
    request: Request, config: ModelConfig, ends: Collection[int], offset: int, width: int, redos: int
) -> Denoiser:
    """`ends`: tokens that end the reply; `redos`: how often this block came out as garbage."""
    p = request.params
    # Done again after garbage: fewer positions are trusted at once.
    bound = p.entropy_bound * 0.5**redos
    acceptance: Acceptance = EntropyBound(bound)
    if p.threshold is not None:
        acceptance = ConfidenceThreshold(1 - (1 - p.threshold) * 0.5**redos)
    stop = StableAndConfident(p.stability, p.confidence) if p.early_stop else None
    constraints: list[Constraint] = []
    if request.forbidden:
        constraints.append(Forbidden(request.forbidden))
    last_pin = max(request.pins, default=-1) - offset
    if last_pin > 0 and ends:  # the answer cannot end before it has held its pins
        constraints.append(Forbidden(tuple(sorted(ends)), until=last_pin))
    pins = {at - offset: token for at, token in request.pins.items() if offset <= at < offset + width}
    if pins:
        constraints.append(Pins(pins))
    schedule = LinearTemperature(p.t_min, p.t_max, p.steps)
    return Denoiser(config.vocab_size, schedule, acceptance, stop, constraints, p.forget)
