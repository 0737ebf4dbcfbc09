"""What a model with fill-in-the-middle tokens sees of the text around a hole:

    RUN-IN eos  PASSAGE eos PASSAGE eos …  bos <|fim_suffix|> SUFFIX <|fim_prefix|> PREFIX

or the other order (text/fim.py). The text next to the hole has at most `context` tokens. Before it stand passages from
elsewhere in the text that look like the place of the hole (text/alike.py), with what closes them at most `far` tokens,
and before all of it the end of something else, as far as the model was trained: up to `context + far` tokens if there
are passages, else up to `context`. train/infill.py makes the same rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from diffusiongemma.errors import ConfigError
from diffusiongemma.text.alike import REACH, alike, line_breaks
from diffusiongemma.text.exact import encode_end, encode_exact, encode_start
from diffusiongemma.text.fim import FimTokens
from diffusiongemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine

CONTEXT = 384  # prompt tokens at most for models of the suffix-first order that do not say what they were trained with,
AFTER = 0.4  # … and the part of them, or of what is said, that the suffix may take
STEP = 16  # tokens by which a run-in gets shorter


def hole_prompt(
    engine: Engine, fim: FimTokens, prefix: str, suffix: str, room: int, context: int | None, far: int | None
) -> tuple[int, ...]:
    """At most `room` tokens; `context` and `far` None: what the model was trained with."""
    hole = engine.hole
    far = hole.far if far is None else far
    before, after = _near_sides(engine.tokenizer, fim, prefix, suffix, context or hole.context)
    prompt = fim.prompt(before, after, room)  # if something had to be left out, there is no room for passages either
    passages = _passages(engine, prefix, suffix, (len(before), len(after)), min(far, room - len(prompt)))
    trained = (hole.context or 0) + (hole.far if passages else 0)
    return _with_run_in(engine, (*passages, *prompt), min(trained, room))


def _near_sides(
    tokenizer: Tokenizer, fim: FimTokens, prefix: str, suffix: str, context: int | None
) -> tuple[list[int], list[int]]:
    """As much of both sides as the model was trained with: the suffix its part at most, the prefix the rest."""
    if context is None and fim.middle is not None:
        return encode_exact(tokenizer, prefix), encode_exact(tokenizer, suffix)
    room = (context or CONTEXT) - len(fim.prompt((), (), 0))
    after = encode_start(tokenizer, suffix, int(AFTER * (context or CONTEXT)))
    return encode_end(tokenizer, prefix, room - len(after)), after


def _passages(engine: Engine, prefix: str, suffix: str, near: tuple[int, int], room: int) -> list[int]:
    """What looks like the place of the hole, of the text beyond the `near` tokens, each closed."""
    if room <= 0:
        return []
    tokenizer = engine.tokenizer
    before, after = encode_end(tokenizer, prefix, REACH), encode_start(tokenizer, suffix, REACH)
    found = alike(np.array(before, np.int64), np.array(after, np.int64), near, line_breaks(tokenizer), room)
    return [token for one in found for token in (*one.tolist(), _end(engine))]


def _with_run_in(engine: Engine, prompt: tuple[int, ...], size: int) -> tuple[int, ...]:
    """A prompt shorter than `size`, after the end of something else, closed, as in training. In steps: a prompt that
    grows by a word still begins as before, and what is cached of it is of use."""
    missing = (size - len(prompt)) // STEP * STEP
    if not engine.hole.run_in or missing <= 0:
        return prompt
    return (*(*_run_in_tokens(engine.tokenizer, engine.hole.run_in), _end(engine))[-missing:], *prompt)


def _end(engine: Engine) -> int:
    """What closes a run-in and a passage."""
    end = engine.tokenizer.special.get("eos", next(iter(engine.ends), None))
    if end is None:
        raise ConfigError("this model has no end-of-text token, which must close what comes before its holes")
    return end


@lru_cache(maxsize=8)
def _run_in_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Kept: the text is the model's own and comes before every hole with a short prompt."""
    return tuple(encode_exact(tokenizer, text))
