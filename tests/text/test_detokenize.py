"""Text from a stream of tokens equals the text of the whole, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.errors import TokenizerError
from diffusiongemma.text import Detokenizer, Tokenizer
from diffusiongemma.text.tokenizer import Entry
from text.fixtures import KINDS, SPECIAL_IDS, make_tokenizer


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]]]:
    """A tokenizer and chunks of ids: real text, random ids, or a mixture rich in parts of characters."""
    tokenizer = make_tokenizer(draw(st.sampled_from(KINDS)))
    partial = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.piece(id)]
    any_id = st.integers(0, tokenizer.vocab_size + 3)
    noise = st.lists(any_id | st.sampled_from(partial) | st.sampled_from(sorted(SPECIAL_IDS.values())), max_size=12)
    words = st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from("é東😀▁ a")).map(tokenizer.encode)
    ids = [id for part in draw(st.lists(noise | words, max_size=6)) for id in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return tokenizer, [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(stream=streams(), skip_special=st.booleans())
def test_pieces_together_are_the_whole(stream: tuple[Tokenizer, list[list[int]]], skip_special: bool) -> None:
    tokenizer, chunks = stream
    detokenizer = Detokenizer(tokenizer, skip_special)
    for _ in range(2):  # after finish it is ready for a new stream
        pieces = [detokenizer.push(chunk) for chunk in chunks]
        whole = tokenizer.decode([id for chunk in chunks for id in chunk], skip_special)
        assert "".join(pieces) + detokenizer.finish() == whole
        so_far: list[int] = []
        for chunk, piece in zip(chunks, pieces, strict=True):
            so_far += chunk
            assert not piece.endswith("\ufffd") or "\ufffd" in tokenizer.decode(so_far, skip_special)


@given(text=st.text(), kind=st.sampled_from(KINDS))
def test_token_by_token_never_shows_part_of_a_character(text: str, kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for id in tokenizer.encode(text):
        shown += detokenizer.push([id])
        assert text.replace("▁", " ").startswith(shown.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_waits_for_its_last_byte(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in ids[:3]] == ["", "", ""]
    assert detokenizer.push([ids[3], *tokenizer.encode("a")]) == "😀a"
    detokenizer.push(ids[:2])
    assert set(detokenizer.finish()) == {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["word ", "😀"])
def test_every_token_is_looked_at_once(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(kind)
    ids = (tokenizer.encode(text) * 10_000)[:10_000]
    looks, decoded = 0, 0
    entries, decode = tokenizer.entries, tokenizer.decode

    def counted_entries(ids: list[int], skip_special: bool = False) -> list[Entry]:
        nonlocal looks
        looks += len(ids)
        return entries(ids, skip_special)

    def counted_decode(ids: list[int], skip_special: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "entries", counted_entries)
    monkeypatch.setattr(tokenizer, "decode", counted_decode)
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join([detokenizer.push([id]) for id in ids]) + detokenizer.finish()
    assert looks == len(ids)
    assert decoded <= len(set(ids))  # once a distinct token, then remembered
    assert streamed == decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_model_alone_are_nothing_and_cost_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = make_tokenizer(kind), list[int]()
    compute = tokenizer._compute_entry
    monkeypatch.setattr(tokenizer, "_compute_entry", lambda id: (asked.append(id), compute(id))[1])
    ids = [i for a in tokenizer.encode("word ") for i in (a, tokenizer.vocab_size + a)]
    before = len(tokenizer._entries)
    assert Detokenizer(tokenizer).push(ids) == "word "
    assert max(asked, default=0) < tokenizer.vocab_size
    assert len(tokenizer._entries) <= before + len(set(ids[::2]))
    for wrong in (-1, 1 << 32):
        with pytest.raises(TokenizerError, match="is not a token id"):
            tokenizer.token_bytes(wrong)


@given(stream=streams(), skip_special=st.booleans())
def test_a_text_at_once_is_its_tokens_one_by_one(stream: tuple[Tokenizer, list[list[int]]], skip_special: bool) -> None:
    tokenizer, chunks = stream
    ids = [id for chunk in chunks for id in chunk]
    whole, single = Detokenizer(tokenizer, skip_special), Detokenizer(tokenizer, skip_special)
    assert whole.push(ids) == "".join([single.push([id]) for id in ids])
    assert whole.finish() == single.finish()
    kept = [id for id in ids if not (skip_special and tokenizer.is_special(id))]
    assert tokenizer.entries(ids, skip_special) == [(tokenizer.token_bytes(id), tokenizer.is_byte(id)) for id in kept]
