"""Answers in a given form: the texts stay, the holes have their sizes, the end is where the template's is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import Draft, Hole
from diffusiongemma.errors import ConfigError, InputError
from engine.holes import PLAIN, engine

WIDE = engine().model.config.canvas_length
texts = st.text("abc 1é\n", max_size=3)  # at most 31 tokens in all, one a byte, and the end
holes = st.tuples(st.integers(1, 2), st.integers(0, 1)).map(lambda t: Hole(t[0] + t[1], t[0]))


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=25)
@given(st.lists(st.tuples(texts, holes), min_size=1, max_size=3), texts, st.integers(1, 3))
def test_texts_stay_and_holes_have_their_sizes(
    kind: str, parts: list[tuple[str, Hole]], last: str, candidates: int
) -> None:
    template = [*(piece for pair in parts for piece in pair), last]
    own = engine(kind)
    found = own.form("question", template, steps=2, seed=1, candidates=candidates)
    assert found.text == "".join(text + filling for (text, _), filling in zip(parts, found.holes, strict=True)) + last
    assert found.finish_reason == "stop"
    best = found.candidates[0]
    for (_, hole), filling in zip(parts, best.fillings, strict=True):
        assert hole.min_tokens <= len(filling) <= (hole.max_tokens or 0)


def test_the_canvas_holds_the_form_its_end_and_padding() -> None:
    own = engine()
    special = own.tokenizer.special
    drafts = [e for e in own.form_stream("q", "12[[?1]]4", steps=3, canvas=9) if isinstance(e, Draft)]
    digits = own.tokenizer.encode("124")
    for draft in drafts:
        assert len(draft.tokens) == 9
        assert [*draft.tokens[:2], draft.tokens[3]] == digits
        assert draft.tokens[4:] == [special["eos"], *[special["pad"]] * 4]
        assert draft.entropy[:2] == [0.0, 0.0]
    full = [e for e in own.form_stream("q", "12[[?1]]4", steps=1) if isinstance(e, Draft)]
    assert len(full[0].tokens) == WIDE


def test_the_prompt_counts_and_a_seed_repeats() -> None:
    own = engine()
    ask = {"steps": 6, "seed": 3}
    first = own.form("one question", "[[?6]]", **ask)
    assert own.form("one question", "[[?6]]", **ask).tokens == first.tokens
    others = {tuple(own.form(f"another {i}", "[[?6]]", **ask).tokens) for i in range(4)}
    assert others != {tuple(first.tokens)}


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("no hole", {}, "has no hole"),
        ("[[?]]", {}, "must state its size"),
        (f"[[?{WIDE}]]", {}, "the form takes"),
        ("abc[[?3]]", {"canvas": 6}, "the form takes"),
        ("[[?1]]", {"mode": "ar"}, "cannot honour a form"),
        ("[[?1]]", {"canvas": "adaptive"}, "no effect on a form"),
        ("[[?1]]", {"canvas": 1 << 12}, "wider than the model"),
        ("[[?1]]", {"candidates": 0}, "candidates must be"),
        ("[[?1]]", {"max_new_tokens": 3}, "max_new_tokens has no effect"),
        ("[[?1]]", {"redo": 1}, "redo has no effect"),
        ("[[?1]]", {"stop": "x"}, "stop has no effect"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(template: str, options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        engine().form_stream("q", template, **options)
