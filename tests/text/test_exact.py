"""Exact text: tokens that stand for a text byte for byte, or none."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diffusiongemma.errors import InputError, TokenizerError
from diffusiongemma.text.exact import encode_exact, exact_bytes, exact_text, partial_tokens
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
