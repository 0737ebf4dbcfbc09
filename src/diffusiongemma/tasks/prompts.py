"""A request as prompt tokens."""

from __future__ import annotations

from diffusiongemma.engine import Engine
from diffusiongemma.engine.prompt import build_prompt
from diffusiongemma.tasks import format


def chat_tokens(engine: Engine, request: str) -> tuple[int, ...]:
    """As the model wants chats: through its own template, in the embedded model's format where it has none."""
    if engine.template is None and engine.tokenizer.special.get("<|turn>") == format.TURN:
        return tuple(format.chat_prompt(engine.tokenizer.encode, request))
    return build_prompt(request, engine.tokenizer, engine.template).tokens
