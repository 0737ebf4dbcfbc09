"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusiongemma.engine import TokenLogprob
from diffusiongemma.serve import replies
from diffusiongemma.text import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[TokenLogprob]) -> replies.ChatLogprobs:
    def named(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        known = None if data is None else list(data)
        return {"token": tokenizer.piece(token), "logprob": _finite(logprob), "bytes": known}

    content = []
    for one in scored:
        top = [replies.TopLogprob(**named(token, logprob)) for token, logprob in one.top]
        content.append(replies.TokenLogprob(**named(one.token, one.logprob), top_logprobs=top))
    return replies.ChatLogprobs(content=content)


def text_logprobs(tokenizer: Tokenizer, scored: Sequence[TokenLogprob], offset: int = 0) -> replies.TextLogprobs:
    """`offset`: characters of the answer before these tokens. Control tokens are no part of it."""
    scored = [one for one in scored if not tokenizer.is_special(one.token)]
    tokens = [tokenizer.piece(one.token) for one in scored]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return replies.TextLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(one.logprob) for one in scored],
        top_logprobs=[{tokenizer.piece(token): _finite(value) for token, value in one.top} for one in scored],
        text_offset=offsets[:-1],
    )


def _finite(logprob: float) -> float:
    """JSON knows no infinity; OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)
