"""A text with several holes.

If it all fits, one canvas holds every hole and every fixed part between them, pinned, so that each hole is filled in
sight of the others; candidates are combinations of lengths. Otherwise hole after hole, from left to right.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusiongemma.engine.candidates import Candidate, Tally, Try, best_of, sampling, with_end
from diffusiongemma.engine.choice import Check, Choice, Choose
from diffusiongemma.engine.events import Commit, Event, Result
from diffusiongemma.engine.infill import (
    MAX_CANDIDATES,
    Strategy,
    canvas_try,
    check_choices,
    fresh,
    ladder,
    near,
    plain_prompt,
    plan_infill,
    refuse_for_canvas,
    spread,
)
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import InputError
from diffusiongemma.text.exact import encode_exact

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine

MARKER = re.compile(r"\[\[\?([0-9]*)\]\]")
FAIR_SHARE = 8  # a hole of no stated size that cannot have this many tokens in one canvas gets a canvas of its own


@dataclass(frozen=True)
class Hole:
    """`max_tokens` None: as many as the call allows each hole."""

    max_tokens: int | None = None
    min_tokens: int = 1

    def __post_init__(self) -> None:
        most = self.min_tokens if self.max_tokens is None else self.max_tokens
        if type(self.min_tokens) is not int or type(most) is not int or not 1 <= self.min_tokens <= most:
            raise InputError(
                f"a hole takes from min_tokens (1 or more) to max_tokens tokens, got {self.min_tokens!r} to {most!r}"
            )


Template = str | Sequence[str | Hole]


@dataclass(frozen=True)
class FillResult(Result):
    holes: tuple[str, ...] = ()
    score: float | None = None  # over several canvases: the mean of theirs
    candidates: tuple[Candidate, ...] = ()


def parse_template(template: Template) -> tuple[list[str], list[Hole]]:
    """-> the fixed texts around the holes, one more than there are holes"""
    parts: list[str | Hole] = list(template) if not isinstance(template, str) else _split(template)
    texts, holes = [""], list[Hole]()
    for part in parts:
        if isinstance(part, Hole):
            holes.append(part)
            texts.append("")
        elif isinstance(part, str):
            texts[-1] += part
        else:
            raise InputError(f"a template is made of texts and holes, not {type(part).__name__}")
    if not holes:
        raise InputError("the template has no hole: mark one as [[?]], or [[?12]] for at most 12 tokens")
    return texts, holes


def _split(text: str) -> list[str | Hole]:
    pieces: list[str | Hole] = [*MARKER.split(text)]
    for i in range(1, len(pieces), 2):
        digits = str(pieces[i])
        pieces[i] = Hole(int(digits[:9])) if digits else Hole()
    return pieces


def fill_stream(
    engine: Engine,
    template: Template,
    *,
    max_new_tokens: int = 64,
    seed: int | None = 0,
    candidates: int | None = None,
    strategy: Strategy = "auto",
    check: Check = "none",
    choose: Choose = "likeliest",
    drafts: bool = True,
    scope: Scope | None = None,
    **options: Any,
) -> Generator[Event, None, FillResult | None]:
    """Drafts and commits of the whole text, an end. `max_new_tokens` is for each hole that says nothing else.

    `check`, `choose`: which candidate wins (choice.py). Hole after hole, only the last is checked: before it, the text
    is not whole.
    """
    choice = Choice(check, choose)
    texts, holes = parse_template(template)
    for text in texts:
        encode_exact(engine.tokenizer, text)  # refuse now, not after half of the holes
    params = sampling(
        engine.hole.sampling(engine.params), (), options | {"max_new_tokens": max_new_tokens, "seed": fresh(seed)}
    )
    if wrong := [hole for hole in holes if hole.max_tokens is None and hole.min_tokens > max_new_tokens]:
        raise InputError(f"a hole of at least {wrong[0].min_tokens} tokens needs a larger max_new_tokens")
    check_choices(candidates, strategy)
    tally = Tally(params.seed or 0, scope)
    together = None
    if len(holes) > 1 and strategy != "fim" and params.mode == "diffusion":
        together = plan_together(engine, texts, holes, params, candidates or MAX_CANDIDATES, drafts)
    if together is not None:
        choice.refuse_without_effect(len(together), params.mode)
        return with_end(_fill_together(engine, texts, together, tally, choice), tally)
    # What the first hole cannot honour, none can: said at once. A choice also depends on how many tries the others get.
    counts = []
    for i, hole in enumerate(holes if choice != Choice() else holes[:1]):
        mine, before = _for_hole(params, hole, i), "".join(texts[: i + 1])
        tries = plan_infill(engine, before, texts[i + 1], mine, candidates, strategy, drafts, hole.min_tokens)
        counts.append(len(tries))
    replace(choice, choose="likeliest").refuse_without_effect(counts[-1], params.mode)
    replace(choice, check="none").refuse_without_effect(max(counts), params.mode)
    return with_end(_fill_in_turn(engine, texts, holes, params, candidates, strategy, drafts, tally, choice), tally)


# ---- all holes in one canvas -----------------------------------------------------------------------------------------


def plan_together(
    engine: Engine, texts: list[str], holes: list[Hole], params: SamplingParams, candidates: int, drafts: bool
) -> list[Try] | None:
    """Candidates for one canvas that holds everything; None if it does not fit."""
    refuse_for_canvas(params)
    wide = engine.model.config.canvas_length
    first, *between, last = (encode_exact(engine.tokenizer, text) for text in texts)
    fixed = sum(map(len, between))
    most = _sizes(holes, wide - fixed - near(last, wide), params.max_new_tokens)
    if most is None:
        return None
    prompt, tries = plain_prompt(engine, texts[0]), []
    for i, lengths in enumerate(combinations([hole.min_tokens for hole in holes], most, candidates)):
        tail = last[: wide - fixed - sum(lengths)]
        segments: list[int | Sequence[int]] = [lengths[0]]
        for text, length in zip(between, lengths[1:], strict=True):
            segments += [text, length]
        mine = replace(params, seed=((params.seed or 0) + i) % (1 << 63))
        one = canvas_try(engine, prompt, [*segments, tail], mine, drafts)
        tries.append(replace(one, before=tuple(first), after=tuple(last[len(tail) :])))
    return tries


def _sizes(holes: list[Hole], room: int, default: int) -> list[int] | None:
    """How large each hole may be, so that all fit; holes that state no size share what the others leave."""
    stated = sum(hole.max_tokens for hole in holes if hole.max_tokens is not None)
    open_ended = sum(hole.max_tokens is None for hole in holes)
    share = min(default, (room - stated) // open_ended) if open_ended else 0
    sizes = [share if hole.max_tokens is None else hole.max_tokens for hole in holes]
    small = open_ended and share < min(default, FAIR_SHARE)
    if sum(sizes) > room or small or any(h.min_tokens > size for h, size in zip(holes, sizes, strict=True)):
        return None
    return sizes


def combinations(least: list[int], most: list[int], limit: int) -> list[tuple[int, ...]]:
    """At most `limit` choices of lengths: combinations of a few each or, for many holes, all small to all large."""
    ladders = [ladder(low, high) for low, high in zip(least, most, strict=True)]
    each = max(k for k in range(1, limit + 1) if k ** len(ladders) <= limit)
    if each > 1:
        return list(itertools.product(*(spread(values, each) for values in ladders)))
    levels = [1.0] if limit == 1 else [i / (limit - 1) for i in range(limit)]
    return sorted({tuple(values[round(level * (len(values) - 1))] for values in ladders) for level in levels})


def _fill_together(
    engine: Engine, texts: list[str], tries: list[Try], tally: Tally, choice: Choice
) -> Generator[Event, None, FillResult]:
    found = yield from best_of(engine, tries, tally, partial(choice.order, texts=texts))
    best = found[0]
    assert best.texts is not None
    fixed = [encode_exact(engine.tokenizer, text) for text in texts]
    tokens = [*fixed[0]]
    for filling, ids in zip(best.fillings, fixed[1:], strict=True):
        tokens += [*filling, *ids]
    text = texts[0] + "".join(filling + after for filling, after in zip(best.texts, texts[1:], strict=True))
    tally.commit(sum(map(len, best.fillings)))
    yield Commit(0, tokens, text)
    metrics = tally.metrics()
    return FillResult(text, tokens, best.finish_reason, metrics, None, best.texts, best.score, tuple(found))


# ---- hole after hole -------------------------------------------------------------------------------------------------


def _for_hole(params: SamplingParams, hole: Hole, i: int) -> SamplingParams:
    most = params.max_new_tokens if hole.max_tokens is None else hole.max_tokens
    return replace(params, max_new_tokens=most, seed=((params.seed or 0) + i * MAX_CANDIDATES) % (1 << 63))


def _fill_in_turn(
    engine: Engine,
    texts: list[str],
    holes: list[Hole],
    params: SamplingParams,
    candidates: int | None,
    strategy: Strategy,
    drafts: bool,
    tally: Tally,
    choice: Choice,
) -> Generator[Event, None, FillResult]:
    text, tokens, every = "", list[int](), list[Candidate]()
    chosen: list[Candidate] = []
    for i, hole in enumerate(holes):
        text += texts[i]
        mine = _for_hole(params, hole, i)
        tries = plan_infill(engine, text, texts[i + 1], mine, candidates, strategy, drafts, hole.min_tokens)
        before = encode_exact(engine.tokenizer, texts[i])
        tries = [replace(one, before=tuple(before), block=i) for one in tries]
        here = choice if i == len(holes) - 1 else replace(choice, check="none")
        found = yield from best_of(engine, tries, tally, partial(here.order, texts=(text, texts[i + 1])))
        best = found[0]
        assert best.texts is not None
        every += found
        chosen.append(best)
        text += best.texts[0]
        rest = texts[-1] if i == len(holes) - 1 else ""
        new = [*before, *best.fillings[0], *encode_exact(engine.tokenizer, rest)]
        tokens += new
        tally.commit(len(best.fillings[0]))
        yield Commit(i, new, texts[i] + best.texts[0] + rest)
    scores = [one.score for one in chosen if one.score is not None]
    return FillResult(
        text + texts[-1],
        tokens,
        "stop" if all(one.finish_reason == "stop" for one in chosen) else "length",
        tally.metrics(),
        None,
        tuple(one.texts[0] for one in chosen if one.texts is not None),
        sum(scores) / len(scores) if scores else None,
        tuple(every),
    )
