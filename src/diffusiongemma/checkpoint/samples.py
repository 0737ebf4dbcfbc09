"""Samples of what a network works on: a prompt, and a canvas behind it as the sampler would meet it.

A quantised network is fitted to them, and compared on them. A canvas must be there: its positions see both directions,
most of its tokens may be noise, and what is fitted to texts alone serves it hardly better than plain rounding.

Legend: T prompt, L canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import InputError

PROMPT = 256  # tokens, as many as a canvas has
SHORTEST = 32  # tokens that make a sample


@dataclass(frozen=True)
class Sample:
    prompt: Tensor  # [T]
    noisy: Tensor  # [L]
    believed: Tensor  # [L]: what a step before it took for right


def prompt_for(config: ModelConfig) -> int:
    """Tokens of a prompt, so that a canvas fits behind it."""
    most = config.max_position_embeddings - config.canvas_length
    if most < 1:
        raise InputError(
            f"this model's {config.max_position_embeddings} positions have no room for a prompt and a canvas"
        )
    return min(PROMPT, most)


def random_samples(vocabulary: int, count: int, prompt: int = 48, canvas: int = 32, seed: int = 0) -> list[Sample]:
    """Random tokens throughout: they need no tokenizer and no text."""
    if min(count, prompt, canvas) < 1:
        raise InputError("a comparison needs at least one prompt, one token of prompt and one of canvas")
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        tokens = torch.randint(vocabulary, (prompt + canvas,), generator=generator)
        guess = torch.randint(vocabulary, (canvas,), generator=generator)
        samples.append(Sample(tokens[:prompt], tokens[prompt:], guess))
    return samples


def text_samples(
    texts: Sequence[Sequence[int]],
    vocabulary: int,
    count: int,
    canvas: int,
    prompt: int = PROMPT,
    bos: int | None = None,
    seed: int = 0,
) -> list[Sample]:
    """So many samples (or as many as there are) from all over these texts in tokens, without overlap, in random order.

    The canvas is what follows the prompt, each token a random one with a probability of its canvas; a short text is cut
    in the middle. The step before it believed the right tokens. `bos`: what every prompt begins with, wherever in a
    text it stands.
    """
    head = [] if bos is None else [bos]
    length = prompt + canvas - len(head)
    spans: list[list[int]] = []
    for text in texts:
        body = list(text[1:] if head and list(text[:1]) == head else text)
        spans += [head + body[at : at + length] for at in range(0, len(body), length)]
    spans = [span for span in spans if len(span) >= SHORTEST]
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in torch.randperm(len(spans), generator=generator)[:count].tolist():
        tokens = torch.tensor(spans[i])
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise InputError(
                f"token ids must be from 0 to {vocabulary - 1}: tokenizer and model do not belong together"
            )
        right = tokens[-(canvas if len(tokens) == prompt + canvas else min(canvas, len(tokens) // 2)) :]
        hit = torch.rand(len(right), generator=generator) < torch.rand(1, generator=generator)
        noise = torch.randint(vocabulary, right.shape, generator=generator)
        samples.append(Sample(tokens[: -len(right)], torch.where(hit, noise, right), right))
    return samples
