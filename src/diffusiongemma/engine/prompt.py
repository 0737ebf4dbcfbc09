"""From what a caller hands in to prompt tokens.

A text is one user's turn if the model has a chat template (`raw=True`: continue it as it is). A list of messages is a
conversation. A list of token ids is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusiongemma.errors import InputError
from diffusiongemma.text import ChatTemplate, Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True)
class PromptTokens:
    tokens: tuple[int, ...]
    stable: int  # how many of them a later turn of the conversation will repeat


def build_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    raw: bool = False,
) -> PromptTokens:
    chat: list[Mapping[str, Any]] | None
    if isinstance(prompt, str):
        chat = None if raw or template is None else [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence):
        raise InputError(f"a prompt is a text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    else:
        chat = [item for item in prompt if isinstance(item, Mapping)]
        if chat and len(chat) != len(prompt):
            raise InputError("a prompt is all messages or all token ids, not a mixture")
    if chat:
        if template is None:
            raise InputError("this model has no chat template: give a text or token ids instead of messages")
        if raw:
            raise InputError("raw=True is for a text, not for messages")
        options: dict[str, Any] = {"tools": tools, "thinking": bool(thinking)}
        tokens = template.encode(tokenizer, chat, **options)
        repeated = template.encode(tokenizer, chat, add_generation_prompt=False, **options)
        return PromptTokens(tuple(tokens), _common(tokens, repeated))
    if thinking is not None or tools is not None:
        raise InputError("thinking and tools need a conversation: they have no effect on a plain text or token ids")
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt, add_bos="bos" in tokenizer.special)
    else:
        if not all(type(token) is int for token in prompt):
            raise InputError("token ids must be integers")
        tokens = [token for token in prompt if isinstance(token, int)]
    return PromptTokens(tuple(tokens), len(tokens))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
