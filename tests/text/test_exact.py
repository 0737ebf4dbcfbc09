"""Exact text: tokens that stand for a text byte for byte, or none."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import InputError, TokenizerError
from diffusiongemma.text import Tokenizer, exact
from diffusiongemma.text.exact import encode_end, encode_exact, encode_start, exact_bytes, exact_text, partial_tokens
from diffusiongemma.train.data import bpe
from text.fixtures import KINDS, make_tokenizer


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30))
@example(text="a \u2581\u2581b")  # which Gemma's normaliser turns into spaces
@example(text="<eos>\ufffd")
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = encode_exact(tokenizer, text)
    assert exact_text(tokenizer, ids) == text == tokenizer.decode(ids)
    assert b"".join(exact_bytes(tokenizer, ids)) == text.encode()
    assert not any(tokenizer.is_special(id) for id in ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whole_tokens_are_text_in_any_order(kind: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(kind)
    whole = sorted(set(range(tokenizer.vocab_size)) - set(partial_tokens(tokenizer)))
    ids = data.draw(st.lists(st.sampled_from(whole), max_size=20))
    assert exact_text(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_is_no_text(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = encode_exact(tokenizer, "\U0001f600")
    assert len(ids) == 4
    assert exact_text(tokenizer, ids[:3]) is None
    assert exact_text(tokenizer, ids[1:]) is None
    assert set(ids) <= set(partial_tokens(tokenizer))
    assert len(partial_tokens(tokenizer)) >= 128


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TokenizerError):
        encode_exact(make_tokenizer("byte_level"), "\ud800")
    with pytest.raises(InputError, match="not NoneType"):
        encode_exact(make_tokenizer("byte_level"), None)


# ---- a part of a long text -------------------------------------------------------------------------------------------

LINES = st.lists(
    st.sampled_from(["\n", "\r\n", "\r", "\t", "    ", " ", "a", "def", "x1", " =", "é\u2028", "\n\n", "::", "\x0b"])
)


@cache
def embedded() -> Tokenizer:
    return Tokenizer.from_pretrained(ASSETS / "nano")


@cache
def breaker() -> Tokenizer:
    """One whose tokens are line breaks of both kinds, with their indents, and runs of \\r"""
    text = "a\r\n    b\r\r\rc\n\td\r\r\n  " * 20
    return Tokenizer(bpe.train([text], len(bpe.special_tokens()) + 256 + 40).to_str())


@pytest.mark.parametrize("tokenizer", [embedded, breaker])
@settings(max_examples=300)
@given(pieces=LINES, long=st.integers(1, 4), kept=st.sampled_from([3, exact.KEPT_LINE]))
@example(pieces=["a\r\r\r\n    b\r\r", "\r\n\n\td\r"], long=2, kept=exact.KEPT_LINE)
def test_a_line_at_a_time_gives_the_tokens_of_the_whole(
    tokenizer: Callable[[], Tokenizer], pieces: list[str], long: int, kept: int
) -> None:
    text = "".join(pieces) * long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "KEPT_LINE", kept)  # so that some are not kept
        assert encode_exact(tokenizer(), text) == exact._encode_whole(tokenizer(), text) == tokenizer().encode(text)


def test_a_text_that_comes_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """… but for the lines that are new, and long ones, which are not kept."""
    read, real, long = list[str](), Tokenizer.encode, "\n" + "z" * exact.KEPT_LINE
    lines = [f"\nx{i} = y{i}" for i in range(1_000)]
    exact._line_tokens.cache_clear()
    first = encode_exact(embedded(), "".join(lines))
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: read.append(text) or real(self, text))
    assert encode_exact(embedded(), "".join(lines)) == first
    assert read == []
    text = "".join(["a = 1", *lines[:500], "\nb = 2", *lines[500:], long])
    assert encode_exact(embedded(), text) == encode_exact(embedded(), text) == real(embedded(), text)
    assert read == ["a = 1", "\nb = 2", long, long]
    many = "\nc = 3" * exact.KEPT_LINES  # none of which would still be kept when its turn comes again
    assert encode_exact(embedded(), many) == real(embedded(), many)
    assert read[4:] == [many]


@pytest.mark.parametrize("kind", ["nano", *KINDS])
@settings(max_examples=150)
@given(pieces=LINES, count=st.integers(0, 12), long=st.integers(1, 6))
def test_both_ends_are_those_of_the_whole(kind: str, pieces: list[str], count: int, long: int) -> None:
    tokenizer, text = embedded() if kind == "nano" else make_tokenizer(kind), "".join(pieces) * long
    ids = encode_exact(tokenizer, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CHARACTERS_A_TOKEN", 1)  # so that short texts are cut, too
        assert encode_start(tokenizer, text, count) == ids[:count]
        assert encode_end(tokenizer, text, count) == ids[len(ids) - min(count, len(ids)) :]


def test_a_long_text_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = "    x = [1, 2]\r\n" * 2_000, []
    whole = encode_exact(embedded(), text)
    real = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: read.append(len(text)) or real(self, text))
    assert encode_start(embedded(), text, 100) == whole[:100]
    assert encode_end(embedded(), text, 100) == whole[-100:]
    assert sum(read) < 2_000
    for kind in KINDS:  # of which nobody knows where they could be cut
        read.clear()
        encode_end(make_tokenizer(kind), text, 100)
        assert read == [len(text)]
