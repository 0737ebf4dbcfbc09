"""Editing in place: part of a text becomes noise again, and denoising goes on from there.

Each token outside the kept spans is replaced by a random one with probability `strength`. The canvas then looks as it
would with that share of the steps still to go, so that many are taken. A kept span is pinned token by token, and with
it every token that shares a character with it. A text longer than a canvas is edited block after block, what was
edited before being the prompt.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from diffusiongemma.diffusion import SeededDraws
from diffusiongemma.engine.candidates import Tally, Try, best_of, forbidden_tokens, sampling, with_end
from diffusiongemma.engine.events import Commit, Event, Result
from diffusiongemma.engine.infill import fresh, plain_prompt, refuse_for_canvas
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.prompt import build_prompt
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import InputError, LengthError
from diffusiongemma.text.exact import encode_exact, exact_bytes, exact_text

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine
    from diffusiongemma.text import Tokenizer

Span = tuple[int, int]
NOISE = 0x5EED5EED  # noise and denoising of one seed must not be the same random numbers


@dataclass(frozen=True)
class EditResult(Result):
    keep: tuple[Span, ...] = ()  # where the kept spans are in the new text
    noised: int = 0  # tokens that were replaced by noise
    changed: int = 0  # tokens that are others than before


@dataclass(frozen=True)
class Marked:
    """A text in tokens, with what must stay."""

    tokens: tuple[int, ...]
    pinned: tuple[bool, ...]
    parts: tuple[bool, ...]  # tokens that are not whole characters
    breaks: tuple[int, ...]  # where it can be cut without cutting a character, 0 and the end among them

    def blocks(self, size: int) -> list[slice]:
        """As few as possible, each of `size` tokens at most."""
        found, start = list[slice](), 0
        while start < len(self.tokens):
            stop = self.breaks[bisect_right(self.breaks, start + size) - 1]
            if stop == start:
                raise InputError(f"a canvas of {size} tokens is too narrow to edit this text: a character takes more")
            found.append(slice(start, stop))
            start = stop
        return found


def edit_stream(
    engine: Engine,
    text: str,
    strength: float = 0.5,
    keep: Iterable[Span] = (),
    *,
    seed: int | None = 0,
    instruction: str | None = None,
    drafts: bool = True,
    scope: Scope | None = None,
    **options: Any,
) -> Generator[Event, None, EditResult | None]:
    """Drafts and a commit for each block, an end. `keep`: spans of characters, (start, end).

    `instruction`: what is wanted; it and the text as it was are then the prompt. Without it the model sees only what
    is left of the text.
    """
    if type(strength) not in (int, float) or not 0 <= strength <= 1:
        raise InputError(f"strength must be from 0 (nothing changes) to 1 (nothing is left), got {strength!r}")
    params = sampling(engine.params, ("max_new_tokens", "canvas", "redo"), options | {"seed": fresh(seed)})
    refuse_for_canvas(params)
    spans = check_spans(text, keep)
    marked = mark(engine.tokenizer, text, spans)
    prompt = _prompt(engine, instruction, text)
    if len(prompt) + len(marked.tokens) > (most := engine.model.config.max_position_embeddings):
        raise LengthError(f"{len(prompt)} prompt tokens and {len(marked.tokens)} of the text exceed {most} positions")
    tally = Tally(params.seed or 0, scope)
    return with_end(_edit(engine, prompt, marked, spans, text, strength, params, drafts, tally), tally)


def _edit(
    engine: Engine,
    prompt: tuple[int, ...],
    marked: Marked,
    spans: Sequence[Span],
    text: str,
    strength: float,
    params: SamplingParams,
    drafts: bool,
    tally: Tally,
) -> Generator[Event, None, EditResult]:
    tokens, noised = list[int](), 0
    new = ""
    for i, part in enumerate(marked.blocks(engine.model.config.canvas_length)):
        mine = replace(params, seed=((params.seed or 0) + i) % (1 << 63))
        old, pinned = marked.tokens[part], marked.pinned[part]
        start, hit = add_noise(old, pinned, strength, mine.seed or 0, engine.model.config.vocab_size)
        block, written = old, exact_text(engine.tokenizer, old)
        if hit:
            request = _request(engine, (*prompt, *tokens), old, pinned, start, strength, mine, drafts)
            # Should the edit break a character, characters of several tokens are left alone in the second try.
            careful = [pin or split for pin, split in zip(pinned, marked.parts[part], strict=True)]
            spare = replace(request, pins=_pins(old, careful))
            found = yield from best_of(engine, [Try(request, (slice(None),), block=i, spare=spare)], tally)
            assert found[0].texts is not None
            block, written = found[0].fillings[0], found[0].texts[0]
        assert written is not None
        noised += hit
        tokens += block
        new += written
        tally.commit(len(block))
        yield Commit(i, list(block), written)
    changed = sum(a != b for a, b in zip(tokens, marked.tokens, strict=True))
    moved = tuple(move_spans(engine.tokenizer, spans, text, marked.tokens, tokens))
    return EditResult(new, tokens, "stop", tally.metrics(), None, moved, noised, changed)


def _request(
    engine: Engine,
    prompt: tuple[int, ...],
    old: Sequence[int],
    pinned: Sequence[bool],
    start: tuple[int, ...],
    strength: float,
    params: SamplingParams,
    drafts: bool,
) -> Request:
    remaining = max(1, math.ceil(strength * params.steps - 1e-9))  # 0.1 * 30 is a little more than 3
    return Request(
        prompt,
        replace(params, max_new_tokens=len(old), canvas=len(old)),
        pins=_pins(old, pinned),
        start=start,
        start_step=params.steps - remaining,
        forbidden=forbidden_tokens(engine),
        drafts=drafts,
        ends=False,
    )


def _pins(tokens: Sequence[int], pinned: Sequence[bool]) -> dict[int, int]:
    return {at: token for at, token in enumerate(tokens) if pinned[at]}


def _prompt(engine: Engine, instruction: str | None, text: str) -> tuple[int, ...]:
    if instruction is None:
        return plain_prompt(engine, "") if text else ()
    given: Any = instruction  # callers are not always type-checked
    if not isinstance(given, str) or not given:
        raise InputError(f"an instruction is a text that is not empty, got {instruction!r}")
    wanted = f"{instruction}\n\n{text}" + ("" if engine.template else "\n\n")
    return build_prompt(wanted, engine.tokenizer, engine.template).tokens


def add_noise(
    tokens: Sequence[int], pinned: Sequence[bool], strength: float, seed: int, vocab_size: int
) -> tuple[tuple[int, ...], int]:
    """-> the canvas to start from, and how many of its tokens are noise"""
    draws = SeededDraws(seed ^ NOISE)
    hit = (draws.uniforms(len(tokens)) < strength) & ~torch.tensor(pinned, dtype=torch.bool)
    canvas = torch.where(hit, draws.tokens(len(tokens), vocab_size), torch.tensor(tokens))
    return tuple(canvas.tolist()), int(hit.sum())


# ---- characters and tokens -------------------------------------------------------------------------------------------


def check_spans(text: str, keep: Iterable[Any]) -> list[Span]:
    """The spans to keep, if they are spans of this text."""
    spans = []
    for span in keep:
        if not isinstance(span, tuple | list) or len(span) != 2 or not all(type(end) is int for end in span):
            raise InputError(f"a span to keep is two numbers, (start, end), got {span!r}")
        if not 0 <= span[0] < span[1] <= len(text):
            raise InputError(f"a span to keep must lie within the {len(text)} characters of the text, got {span!r}")
        spans.append((span[0], span[1]))
    return spans


def mark(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Marked:
    """The text's tokens; those that share a character with a kept span are pinned."""
    tokens = encode_exact(tokenizer, text)
    edges = _edges(tokenizer, tokens)
    inside = {0, *itertools.accumulate(len(char.encode()) for char in text)}
    breaks = [at for at, edge in enumerate(edges) if edge in inside]
    kept = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
    pinned, parts = [False] * len(tokens), [False] * len(tokens)
    for first, last in itertools.pairwise(breaks):  # tokens between two breaks are whole characters, and stay together
        if any(edges[first] < b and a < edges[last] for a, b in kept):
            pinned[first:last] = [True] * (last - first)
        if last - first > 1:
            parts[first:last] = [True] * (last - first)
    return Marked(tuple(tokens), tuple(pinned), tuple(parts), tuple(breaks))


def move_spans(
    tokenizer: Tokenizer, spans: Iterable[Span], text: str, old: Sequence[int], new: Sequence[int]
) -> list[Span]:
    """Where spans of the old text, whose tokens are the same in the new one, have gone."""
    before, after = _edges(tokenizer, old), _edges(tokenizer, new)
    data, found = b"".join(exact_bytes(tokenizer, new)), []
    for start, end in spans:
        at = len(text[:start].encode())
        token = bisect_right(before, at) - 1
        moved = len(data[: after[token] + at - before[token]].decode())
        found.append((moved, moved + end - start))
    return found


def _edges(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in the text's bytes, and where the last one ends."""
    return [0, *itertools.accumulate(len(data) for data in exact_bytes(tokenizer, tokens))]
