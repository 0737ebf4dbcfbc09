"""Which model is served, and what it can do."""

from __future__ import annotations

from dataclasses import asdict

from diffusiongemma.engine import Engine
from diffusiongemma.model.quantize import count_parameters
from diffusiongemma.serve.replies import Abilities, Model
from diffusiongemma.serve.schema import Diffusion
from diffusiongemma.text.fim import FimTokens

EMBEDDED = (
    "The embedded model: Sudoku, games with digits, holes in Python, SVG icons. No assistant: it knows nothing of the "
    "world."
)
RANDOM = "Random weights, for trials: it writes noise."


def describe(engine: Engine, name: str, created: int) -> Model:
    config = engine.model.config
    nano, random = engine.name == "nano", engine.name.startswith("random:")
    defaults = {key: value for key, value in asdict(engine.params).items() if key in Diffusion.model_fields}
    return Model(
        id=name,
        created=created,
        owned_by="diffusiongemma",
        description=EMBEDDED if nano else RANDOM if random else "A DiffusionGemma checkpoint.",
        parameters=count_parameters(engine.model),
        canvas_length=config.canvas_length,
        context_length=config.max_position_embeddings,
        abilities=Abilities(
            chat=engine.template is not None,
            tools=takes_tools(engine),
            thinking=can_think(engine),
            infill="fim" if FimTokens.of(engine.tokenizer) else "canvas",
            svg_mode=engine.svg_mode,
            tasks=["sudoku", "infill", "svg", "arithmetic"] if nano else [],
        ),
        sampling=defaults,
    )


def can_think(engine: Engine) -> bool:
    return _template_reads(engine, "enable_thinking")


def takes_tools(engine: Engine) -> bool:
    return _template_reads(engine, "tools") and "<|tool_call>" in engine.tokenizer.special


def _template_reads(engine: Engine, variable: str) -> bool:
    return engine.template is not None and any(variable in source for source in engine.template.sources.values())
