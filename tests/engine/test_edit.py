"""Edits: what is kept stays, byte for byte; what is noised is refined; the rest of the world does not notice."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import Commit, Draft, collect
from diffusiongemma.engine.edit import add_noise, mark
from diffusiongemma.errors import ConfigError, InputError
from diffusiongemma.text.exact import exact_text
from engine.holes import FIM, PLAIN, engine, new_engine, tokenizer

KINDS = (*PLAIN, FIM[0])
LONG = "Größe, 東京 and Привет; def add(a, b): return a + b. " * 2  # several canvases of bytes
WIDE = 32


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data(), text=st.text(min_size=1, max_size=30), strength=st.floats(0.01, 1), seed=st.integers(0, 99))
@example(data=None, text="a\u2581é\U0001f600b\ufffd", strength=1.0, seed=0)
def test_kept_spans_stay(kind: str, data: st.DataObject | None, text: str, strength: float, seed: int) -> None:
    spans = [(0, 2), (3, 4)]
    if data is not None:
        ends = st.integers(0, len(text))
        pairs = data.draw(st.lists(st.tuples(ends, ends), max_size=3))
        spans = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    result = engine(kind).edit(text, strength, keep=spans, seed=seed, steps=2)
    assert [result.text[a:b] for a, b in result.keep] == [text[a:b] for a, b in spans]
    assert exact_text(tokenizer(kind), result.tokens) == result.text == tokenizer(kind).decode(result.tokens)
    pinned = mark(tokenizer(kind), text, spans)
    assert all(new == old for new, old, pin in zip(result.tokens, pinned.tokens, pinned.pinned, strict=True) if pin)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(text=st.text(max_size=40))
def test_nothing_changes_without_strength_or_without_anything_free(kind: str, text: str) -> None:
    for result in (engine(kind).edit(text, 0), engine(kind).edit(text, 1.0, keep=[(0, len(text))] if text else [])):
        assert (result.text, result.changed, result.noised) == (text, 0, 0)
        assert result.metrics.decoder_forwards == result.metrics.encoder_forwards == result.metrics.steps == 0
        assert result.keep in ((), ((0, len(text)),))


def test_a_token_that_shares_a_character_with_a_kept_span_is_pinned() -> None:
    marked = mark(tokenizer("bytes"), "a東b", [(1, 2)])
    assert marked.pinned == (False, True, True, True, False)
    assert marked.breaks == (0, 1, 4, 5)
    assert marked.parts == (False, True, True, True, False)
    text = "The quick brown fox"
    marked = mark(tokenizer("byte_level"), text, [(5, 6)])
    (at,) = [i for i, pin in enumerate(marked.pinned) if pin]
    before = exact_text(tokenizer("byte_level"), marked.tokens[:at])
    whole = exact_text(tokenizer("byte_level"), marked.tokens[: at + 1])
    assert before is not None
    assert whole is not None
    assert len(before) <= 5 < len(whole)


@given(st.text(max_size=60), st.integers(4, 16))
def test_blocks_cut_no_character(text: str, size: int) -> None:
    marked = mark(tokenizer("bytes"), text, [])
    blocks = [marked.tokens[part] for part in marked.blocks(size)]
    assert sum(blocks, ()) == marked.tokens
    assert all(0 < len(block) <= size for block in blocks)
    assert all(exact_text(tokenizer("bytes"), block) is not None for block in blocks)


def test_noise_is_seeded_and_of_the_strength_asked_for() -> None:
    tokens, pinned = [7] * 4000, [i % 4 == 0 for i in range(4000)]
    canvas, hit = add_noise(tokens, pinned, 0.3, 5, 512)
    assert abs(hit / 3000 - 0.3) < 0.03
    assert all(token == 7 for token, pin in zip(canvas, pinned, strict=True) if pin)
    assert sum(token != 7 for token in canvas) <= hit < 1.02 * sum(token != 7 for token in canvas) + 10
    assert add_noise(tokens, pinned, 0.3, 5, 512) == (canvas, hit)
    assert add_noise(tokens, pinned, 0.3, 6, 512)[0] != canvas
    assert add_noise(tokens, pinned, 1.0, 5, 512)[1] == 3000


@pytest.mark.parametrize(("strength", "steps"), [(0.1, 30), (0.5, 10), (1.0, 7), (0.01, 10), (0.34, 3)])
def test_as_many_steps_are_taken_as_the_noise_calls_for(strength: float, steps: int) -> None:
    text = "a plain text of one canvas, no more."[:WIDE]
    tokens = mark(tokenizer("bytes"), text, []).tokens
    seed = next(seed for seed in range(99) if add_noise(tokens, [False] * WIDE, strength, seed, 768)[1])
    options = {"steps": steps, "early_stop": False, "seed": seed}
    result = engine("bytes").edit(text, strength, **options)
    remaining = math.ceil(round(strength * steps, 9))
    assert result.metrics.steps == remaining * result.metrics.blocks
    drafts = [e for e in engine("bytes").edit_stream(text, strength, **options) if e.kind == "draft"]
    assert drafts[0].step == steps - remaining + 1
    assert drafts[-1].step == steps


def test_a_long_text_is_edited_block_after_block() -> None:
    own = new_engine("bytes")
    result = own.edit(LONG, 0.6, keep=[(0, 5), (60, 90)], seed=2, steps=2)
    assert len(result.tokens) == len(LONG.encode()) > 3 * WIDE
    assert result.metrics.new_tokens == len(result.tokens)
    assert result.changed > 0
    assert result.text != LONG
    # Each block reuses what the blocks before it have encoded: every token once, the last block never.
    encoded = result.metrics.prompt_tokens - result.metrics.reused_tokens
    assert encoded <= 1 + len(result.tokens) - 1
    again = engine("bytes").edit(LONG, 0.6, keep=iter([(0, 5), (60, 90)]), seed=2, steps=2)
    assert (again.text, again.tokens, again.keep) == (result.text, result.tokens, result.keep)
    assert result.tokens != own.edit(LONG, 0.6, keep=[(0, 5), (60, 90)], seed=3, steps=2).tokens


def test_an_edit_that_breaks_characters_is_done_again_and_leaves_split_ones_alone() -> None:
    """Of bytes at random hardly any canvas is text, so the second try decides; what is not ASCII then stays."""
    result = engine("bytes").edit("東京abcdefgh東京", 1.0, seed=0, steps=1)
    assert result.metrics.blocks == 2
    assert result.text.startswith("東京")
    assert result.text.endswith("東京")
    assert result.text[2:-2].isascii()
    assert result.text[2:-2] != "abcdefgh"


def test_the_stream_adds_up_to_the_result() -> None:
    events = list(engine("bytes").edit_stream(LONG, 0.5, [(3, 9)], seed=1, steps=2))
    result = engine("bytes").edit(LONG, 0.5, [(3, 9)], seed=1, steps=2)
    assert collect(events).text == result.text
    order = [e.block for e in events if isinstance(e, Draft | Commit)]
    assert order == sorted(order)
    assert [e.kind for e in events].count("end") == 1
    assert events[-1].kind == "end"


def test_an_instruction_comes_before_the_text() -> None:
    with_wish = engine("bytes").edit("abcdefgh" * 2, 0.8, seed=1, steps=2, instruction="Make it shorter.")
    without = engine("bytes").edit("abcdefgh" * 2, 0.8, seed=1, steps=2)
    extra = len("Make it shorter.") + len("\n\n") + 16 + len("\n\n")
    rounds = with_wish.metrics.blocks
    assert with_wish.metrics.prompt_tokens == rounds * (1 + extra)
    assert without.metrics.prompt_tokens == without.metrics.blocks
    assert with_wish.tokens != without.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -0.1}, "strength must be"),
        ({"strength": 1.01}, "strength must be"),
        ({"strength": math.nan}, "strength must be"),
        ({"strength": "0.5"}, "strength must be"),
        ({"strength": True}, "strength must be"),
        ({"keep": [(0, 4)]}, "within the 3 characters"),
        ({"keep": [(2, 1)]}, "within the 3 characters"),
        ({"keep": [(1, 1)]}, "within the 3 characters"),
        ({"keep": [(-1, 2)]}, "within the 3 characters"),
        ({"keep": [(0, 1.5)]}, "two numbers"),
        ({"keep": [3]}, "two numbers"),
        ({"instruction": ""}, "an instruction is"),
        ({"mode": "ar"}, "left to right"),
        ({"canvas": 16}, "canvas has no effect"),
        ({"max_new_tokens": 5}, "max_new_tokens has no effect"),
        ({"redo": 1}, "redo has no effect"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        engine("bytes").edit_stream("abc", **options)


def test_only_a_text_that_fits_can_be_edited() -> None:
    with pytest.raises(InputError, match="a text is needed"):
        engine("bytes").edit(b"abc")
    with pytest.raises(InputError, match="4096 positions"):
        engine("bytes").edit("a" * 4096)
