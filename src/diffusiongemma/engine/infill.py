"""A hole of unknown length between two texts.

Two ways. A model with fill-in-the-middle tokens gets both sides as its prompt and ends the middle itself; candidates
differ in canvas width and seed. Any other model gets the prefix as its prompt, and a canvas that begins with the hole
and goes on with the suffix, pinned; candidates differ in the length of the hole.

The score is the mean log-probability of the filling and of what follows next to it, in one more pass over the finished
canvas. The mean, because a sum would favour short fillings by construction: every token adds a negative number. Next
to it, because a filling must lead into the suffix, while suffix positions far away are pinned, alike in all candidates,
and would only water the difference down, the more the shorter the filling.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from diffusiongemma.engine.candidates import (
    Candidate,
    Order,
    Tally,
    Try,
    best_of,
    forbidden_tokens,
    sampling,
    with_end,
)
from diffusiongemma.engine.choice import Check, Choice, Choose
from diffusiongemma.engine.events import Commit, Event, Result
from diffusiongemma.engine.hole import hole_prompt
from diffusiongemma.engine.params import LEAST_CONTEXT, SamplingParams, is_far
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import InputError
from diffusiongemma.text.alike import LEAST
from diffusiongemma.text.exact import encode_exact
from diffusiongemma.text.fim import CANVASES, FimTokens

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine

Strategy = Literal["auto", "fim", "canvas"]
LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of a hole; the largest allowed one is always tried
NEAR = 16  # tokens behind a hole that its score looks at, and that a canvas has room for
MAX_CANDIDATES = 16
SEEDS = 2  # tries a canvas width, where the model ends the middle itself


@dataclass(frozen=True)
class InfillResult(Result):
    score: float | None = None
    candidates: tuple[Candidate, ...] = ()  # the best first


def infill_stream(
    engine: Engine,
    prefix: str,
    suffix: str,
    *,
    max_new_tokens: int = 64,
    seed: int | None = 0,
    candidates: int | None = None,
    strategy: Strategy = "auto",
    context: int | None = None,
    far: int | None = None,
    check: Check = "none",
    choose: Choose = "likeliest",
    drafts: bool = True,
    scope: Scope | None = None,
    **options: Any,
) -> Generator[Event, None, InfillResult | None]:
    """Drafts, one commit with the middle, an end. `max_new_tokens` is the most a middle may have.

    `candidates`: how many to try (default: what the strategy suggests). `strategy`: "fim" for a model with
    fill-in-the-middle tokens, "canvas" for any; "auto" takes the first that the model can do. `context`: tokens of the
    text around the hole at most, with strategy "fim", and `far`: tokens for passages from elsewhere in the text that
    look like the place of the hole, 0 for none (defaults: what the model was trained with). `check`, `choose`: which
    one wins, see choice.py.
    """
    choice = Choice(check, choose)
    params = sampling(
        engine.hole.sampling(engine.params), (), options | {"max_new_tokens": max_new_tokens, "seed": fresh(seed)}
    )
    tries = plan_infill(engine, prefix, suffix, params, candidates, strategy, drafts, context=context, far=far)
    choice.refuse_without_effect(len(tries), params.mode)
    tally = Tally(params.seed or 0, scope)
    return with_end(_infill(engine, tries, tally, partial(choice.order, texts=(prefix, suffix))), tally)


def _infill(engine: Engine, tries: list[Try], tally: Tally, order: Order) -> Generator[Event, None, InfillResult]:
    found = yield from best_of(engine, tries, tally, order)
    best = found[0]
    assert best.texts is not None
    tokens, text = list(best.fillings[0]), best.texts[0]
    tally.commit(len(tokens))
    yield Commit(0, tokens, text)
    metrics = tally.metrics()
    return InfillResult(text, tokens, best.finish_reason, metrics, None, best.score, tuple(found))


def plan_infill(
    engine: Engine,
    prefix: str,
    suffix: str,
    params: SamplingParams,
    candidates: int | None = None,
    strategy: Strategy = "auto",
    drafts: bool = True,
    min_tokens: int = 1,
    context: int | None = None,
    far: int | None = None,
) -> list[Try]:
    """The candidates for one hole of `min_tokens` to `params.max_new_tokens`."""
    check_choices(candidates, strategy)
    if context is not None and (type(context) is not int or context < LEAST_CONTEXT):
        raise InputError(f"context must be an integer of at least {LEAST_CONTEXT} tokens, got {context!r}")
    if far is not None and not is_far(far):
        raise InputError(f"far must be 0 or an integer of at least {LEAST} tokens, got {far!r}")
    fim = FimTokens.of(engine.tokenizer)
    if strategy == "fim" and fim is None:
        raise InputError("this model has no fill-in-the-middle tokens: use strategy 'canvas'")
    if strategy == "fim" and min_tokens > 1:
        raise InputError(f"min_tokens {min_tokens} has no effect with strategy 'fim': the model ends the hole itself")
    if params.mode == "ar" and candidates not in (None, 1):
        raise InputError(f"candidates {candidates} has no effect in mode 'ar': it writes one")
    if strategy != "canvas" and fim is not None and min_tokens == 1:
        return _plan_fim(engine, fim, prefix, suffix, params, candidates, drafts, context, far)
    if context is not None:
        raise InputError("context has no effect with strategy 'canvas': the prompt is the prefix alone")
    if far is not None:
        raise InputError("far has no effect with strategy 'canvas': the prompt is the prefix, whole")
    return _plan_canvas(engine, prefix, suffix, params, candidates, drafts, min_tokens)


def check_choices(candidates: int | None, strategy: Strategy) -> None:
    if candidates is not None and (type(candidates) is not int or not 1 <= candidates <= MAX_CANDIDATES):
        raise InputError(f"candidates must be an integer from 1 to {MAX_CANDIDATES}, got {candidates!r}")
    if strategy not in ("auto", "fim", "canvas"):
        raise InputError(f"strategy must be 'auto', 'fim' or 'canvas', got {strategy!r}")


def _plan_fim(
    engine: Engine,
    fim: FimTokens,
    prefix: str,
    suffix: str,
    params: SamplingParams,
    candidates: int | None,
    drafts: bool,
    context: int | None,
    far: int | None,
) -> list[Try]:
    if far and fim.middle is not None and context is None and engine.hole.context is None:
        raise InputError("far has no effect without context: this model's prompt holds the whole text")
    config, tokenizer, ar = engine.model.config, engine.tokenizer, params.mode == "ar"
    body, opening = _open_line(fim, prefix, suffix)
    lead = encode_exact(tokenizer, opening)
    most = len(lead) + params.max_new_tokens
    widths = widths_to_try(most, params, config.canvas_length)
    prompt = hole_prompt(engine, fim, body, suffix, config.max_position_embeddings - most, context, far)
    pads = [tokenizer.special["pad"]] if "pad" in tokenizer.special else []
    forbidden = forbidden_tokens(engine, allowed=[*engine.ends, *pads])
    # A line break with an indent is one token: if only the break is given, the model writes both, and the break is cut
    # off its text. Where the indent is given too, it is known where the text begins.
    unindented = bool(opening) and not opening.strip("\r\n")
    tries = []
    for i in range(1 if ar else candidates or SEEDS * len(widths)):
        mine = replace(params, max_new_tokens=most, seed=_next_seed(params, i), stop_tokens=tuple(pads))
        if not ar and params.canvas != "adaptive":
            width = widths[i % len(widths)]
            # A narrow canvas holds the whole middle or none: a second one would not know that it is the same hole.
            mine = replace(mine, canvas=width, max_new_tokens=most if width == widths[-1] else min(most, width))
        request = Request(prompt, mine, forbidden=forbidden, drafts=drafts, score=not ar)
        if unindented:
            tries.append(Try(request, (slice(0, None),), lead=opening))
        elif ar:  # the causal path cannot pin an open line: it is the end of the prompt
            cut = replace(mine, max_new_tokens=params.max_new_tokens)
            tries.append(Try(replace(request, prompt=(*prompt, *lead), params=cut), (slice(0, None),)))
        else:
            middle = slice(len(lead), None)
            tries.append(Try(replace(request, pins=dict(enumerate(lead))), (middle,), window=middle))
    return tries


def _open_line(fim: FimTokens, prefix: str, suffix: str) -> tuple[str, str]:
    """What the prompt holds of the prefix, and what the canvas begins with; inside a line nothing is moved."""
    return fim.split(prefix) if not suffix or suffix[0] in "\r\n" else (prefix, "")


def widths_to_try(most: int, params: SamplingParams, widest: int) -> list[int]:
    """Canvases to try: those that a middle is trained in, up to the first that has room for so many tokens and eos."""
    if isinstance(params.canvas, int):
        return [params.canvas]
    trained = [width for width in CANVASES if width <= widest] or [widest]
    enough = [i for i, width in enumerate(trained) if width > most]
    return trained[: enough[0] + 1] if enough else trained


def _plan_canvas(
    engine: Engine,
    prefix: str,
    suffix: str,
    params: SamplingParams,
    candidates: int | None,
    drafts: bool,
    min_tokens: int,
) -> list[Try]:
    refuse_for_canvas(params)
    wide = engine.model.config.canvas_length
    prompt, after = plain_prompt(engine, prefix), encode_exact(engine.tokenizer, suffix)
    most = min(params.max_new_tokens, wide - near(after, wide))
    if min_tokens > most:
        raise InputError(f"a hole of at least {min_tokens} tokens does not fit: a canvas of {wide} has room for {most}")
    tries = []
    for i, length in enumerate(spread(ladder(min_tokens, most), candidates or MAX_CANDIDATES)):
        mine = replace(params, seed=_next_seed(params, i))
        one = canvas_try(engine, prompt, [length, after[: wide - length]], mine, drafts)
        tries.append(replace(one, window=one.holes[0]))
    return tries


def canvas_try(
    engine: Engine,
    prompt: tuple[int, ...],
    segments: Sequence[int | Sequence[int]],
    params: SamplingParams,
    drafts: bool,
) -> Try:
    """A canvas of holes (their lengths) and fixed tokens."""
    at, pins, holes, scored = 0, dict[int, int](), [], set[int]()
    for segment in segments:
        if isinstance(segment, int):
            holes.append(slice(at, at + segment))
            scored |= set(range(at, at + segment + NEAR))
            at += segment
        else:
            pins |= dict(enumerate(segment, at))
            at += len(segment)
    request = Request(
        prompt,
        replace(params, max_new_tokens=at, canvas=at),
        pins,
        forbidden=forbidden_tokens(engine),
        drafts=drafts,
        ends=False,
        score=True,
        score_at=frozenset(scored),
    )
    return Try(request, tuple(holes))


def plain_prompt(engine: Engine, text: str) -> tuple[int, ...]:
    """Beginning of text and the text; of a very long one, the end that the model's positions leave room for."""
    config, special = engine.model.config, engine.tokenizer.special
    ids = encode_exact(engine.tokenizer, text)
    room = config.max_position_embeddings - config.canvas_length - 1
    start = [special["bos"]] if "bos" in special else []
    if not start and not ids:
        raise InputError("this model has no beginning-of-text token, so some text must come before the canvas")
    return (*start, *ids[max(0, len(ids) - room) :])


def refuse_for_canvas(params: SamplingParams) -> None:
    if params.mode == "ar":
        raise InputError("mode 'ar' writes from left to right: it cannot honour a text behind a hole, nor kept spans")
    if params.canvas is not None:
        raise InputError("canvas has no effect here: the width follows from the text and the holes")


def near(after: Sequence[int], wide: int) -> int:
    """How much of the text behind the last hole a canvas must have room for."""
    return min(len(after), NEAR, wide // 2)


def ladder(low: int, high: int) -> list[int]:
    """Lengths worth trying from `low` to `high`, both among them."""
    return sorted({min(low, high), high} | {n for n in LENGTHS if low < n < high})


def spread(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly, first and last among them (the last alone if one is all)."""
    if count >= len(values):
        return values
    if count == 1:
        return values[-1:]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def fresh(seed: int | None) -> int:
    return secrets.randbits(31) if seed is None else seed


def _next_seed(params: SamplingParams, i: int) -> int:
    """Candidates count on from the seed that was given."""
    assert params.seed is not None
    return (params.seed + i) % (1 << 63)
