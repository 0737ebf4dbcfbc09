"""The answer to a prompt in a given form: fixed texts and holes on one canvas.

The texts are pinned token by token, each encoded on its own, and behind the last comes the end of the text, pinned too.
A Sudoku is such a form: its givens, and a hole of one token for each empty cell.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diffusiongemma.engine.candidates import Tally, Try, best_of, sampling, with_end
from diffusiongemma.engine.events import Commit, Event
from diffusiongemma.engine.fill import FillResult, Hole, Template, combinations, parse_template
from diffusiongemma.engine.infill import canvas_try, check_choices, fresh
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.prompt import Prompt, build_prompt
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import InputError
from diffusiongemma.text.exact import encode_exact

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine


def form_stream(
    engine: Engine,
    prompt: Prompt,
    template: Template,
    *,
    seed: int | None = 0,
    candidates: int | None = None,
    drafts: bool = True,
    scope: Scope | None = None,
    **options: Any,
) -> Generator[Event, None, FillResult | None]:
    """Drafts of the whole canvas, one commit with the answer, an end. Every hole must state its size.

    `candidates` (default 1): tries with seeds that count on, and with other lengths for holes that leave a choice; the
    likeliest wins. `canvas`: its width (default: the model's own).
    """
    texts, holes = parse_template(template)
    check_choices(candidates, "canvas")
    params = sampling(engine.params, ("max_new_tokens", "redo"), options | {"seed": fresh(seed)})
    if params.mode == "ar":
        raise InputError("mode 'ar' writes from left to right: it cannot honour a form")
    if params.canvas == "adaptive":
        raise InputError("canvas 'adaptive' has no effect on a form: give its width, or nothing")
    if any(hole.max_tokens is None for hole in holes):
        raise InputError("a hole of a form must state its size, such as [[?12]]")
    tokens = build_prompt(prompt, engine.tokenizer, engine.template).tokens
    tries = _plan(engine, tokens, texts, holes, params, candidates or 1, drafts)
    for one in tries:
        engine.check(one.request)
    tally = Tally(params.seed or 0, scope)
    return with_end(_form(engine, texts, tries, tally), tally)


def _plan(
    engine: Engine,
    prompt: tuple[int, ...],
    texts: list[str],
    holes: list[Hole],
    params: SamplingParams,
    candidates: int,
    drafts: bool,
) -> list[Try]:
    fixed = [encode_exact(engine.tokenizer, text) for text in texts]
    most = [hole.max_tokens or 0 for hole in holes]
    wide = params.canvas if isinstance(params.canvas, int) else engine.model.config.canvas_length
    if (needed := sum(map(len, fixed)) + sum(most) + 1) > wide:
        raise InputError(f"the form takes {needed} tokens with its end, the canvas has {wide}")
    lengths = combinations([hole.min_tokens for hole in holes], most, candidates)
    tries = []
    for i in range(candidates):
        mine = replace(params, seed=((params.seed or 0) + i) % (1 << 63))
        segments: list[int | Sequence[int]] = [fixed[0]]
        for length, text in zip(lengths[i % len(lengths)], fixed[1:], strict=True):
            segments += [length, text]
        taken = sum(part if isinstance(part, int) else len(part) for part in segments)
        one = canvas_try(engine, prompt, [*segments, ending(engine, wide - taken)], mine, drafts)
        tries.append(one)
    return tries


def ending(engine: Engine, count: int) -> list[int]:
    """What a canvas holds behind an answer: its end, then padding."""
    special = engine.tokenizer.special
    end = special.get("eos", engine.ends[0] if engine.ends else None)
    if end is None:
        raise InputError("this model has no end-of-text token, which a form needs")
    return [end, *[special.get("pad", end)] * (count - 1)]


def _form(engine: Engine, texts: list[str], tries: list[Try], tally: Tally) -> Generator[Event, None, FillResult]:
    found = yield from best_of(engine, tries, tally)
    best = found[0]
    assert best.texts is not None
    tokens = encode_exact(engine.tokenizer, texts[0])
    text = texts[0]
    for filling, written, after in zip(best.fillings, best.texts, texts[1:], strict=True):
        tokens += [*filling, *encode_exact(engine.tokenizer, after)]
        text += written + after
    tally.commit(sum(map(len, best.fillings)))
    yield Commit(0, tokens, text)
    return FillResult(text, tokens, best.finish_reason, tally.metrics(), None, best.texts, best.score, tuple(found))
