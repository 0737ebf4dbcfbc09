"""Encoding, decoding, special tokens, and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.errors import TokenizerError
from diffusiongemma.text import Tokenizer
from text.fixtures import KINDS, SPECIAL_IDS, make_tokenizer, tokenizer_json, write_folder

SPECIAL = st.sampled_from(sorted(SPECIAL_IDS))
HOSTILE = st.lists(st.text() | SPECIAL, max_size=8).map("".join)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return make_tokenizer(request.param)


@pytest.mark.parametrize("kind", KINDS)
@given(text=HOSTILE)
def test_text_survives_and_never_becomes_a_special_token(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(id) for id in ids)
    # Gemma's decoder writes a space for the character that stands for one.
    assert tokenizer.decode(ids) == (text if tokenizer.byte_level else text.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.tuples(SPECIAL, st.text(alphabet="ab é東😀1"))))
def test_allowed_special_tokens_become_their_ids(kind: str, parts: list[tuple[str, str]]) -> None:
    tokenizer = make_tokenizer(kind)
    text = "".join(special + plain for special, plain in parts)
    ids = tokenizer.encode(text, allow_special=True)
    assert [id for id in ids if tokenizer.is_special(id)] == [SPECIAL_IDS[special] for special, _ in parts]
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids) == "".join(plain for _, plain in parts)


def test_special_tokens_by_name(tokenizer: Tokenizer) -> None:
    assert {name: tokenizer.special[name] for name in SPECIAL_IDS} == SPECIAL_IDS
    assert [tokenizer.special[name] for name in ("pad", "eos", "bos", "unk")] == [0, 1, 2, 3]
    assert tokenizer.special.get("<|image|>") is None
    assert tokenizer.token_to_id("<|turn>") == 105
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.is_special(105)
    assert not tokenizer.is_special(tokenizer.encode("a")[0])
    assert tokenizer.encode("a", add_bos=True) == [2, *tokenizer.encode("a")]


def test_digits_are_single_tokens() -> None:
    tokenizer = make_tokenizer("byte_level")
    assert [tokenizer.piece(id) for id in tokenizer.encode("2046")] == ["2", "0", "4", "6"]


def test_batches_equal_single_calls(tokenizer: Tokenizer) -> None:
    texts = ["", "one", "two <|turn>", "três 😀"]
    rows = tokenizer.encode_batch(texts, add_bos=True)
    assert rows == [tokenizer.encode(text, add_bos=True) for text in texts]
    assert tokenizer.decode_batch(rows) == texts


def test_pieces_are_displayable(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
    assert pieces[105] == "<|turn>"
    assert "\ufffd" in pieces
    assert tokenizer.piece(tokenizer.vocab_size) == ""
    assert max(tokenizer.encode("zoë 😀 <|turn>", allow_special=True)) < tokenizer.vocab_size


def test_what_cannot_be_encoded_or_decoded(tokenizer: Tokenizer) -> None:
    for bad in ("\ud800", 3, None):
        with pytest.raises(TokenizerError):
            tokenizer.encode(bad)  # type: ignore[arg-type]
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(TokenizerError):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError):
        tokenizer.piece(-1)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


# ---- files -------------------------------------------------------------------------------------------------------


def edited(kind: str, **changes: object) -> str:
    return json.dumps(json.loads(tokenizer_json(kind)) | changes)


def test_control_tokens_are_special_even_when_the_file_does_not_say_so() -> None:
    added = json.loads(tokenizer_json("gemma_like"))["added_tokens"]
    quiet = [token | {"special": False} for token in added]
    tokenizer = Tokenizer(edited("gemma_like", added_tokens=quiet))
    assert tokenizer.is_special(105)
    assert 105 not in tokenizer.encode("<|turn>")
    assert tokenizer.encode("<|turn>", allow_special=True) == [105]


def test_names_come_from_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", "byte_level", eos_token={"content": "<turn|>"}, odd_token="<unused7>")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.special["eos"] == 106
    assert tokenizer.is_special(7)
    assert 7 not in tokenizer.encode("<unused7>")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|think|>"}')
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.special["bos"] == 98
    assert not tokenizer.is_special(7)


def test_a_tokenizer_that_forges_special_tokens_is_refused() -> None:
    data = json.loads(tokenizer_json("byte_level"))
    data["model"]["ignore_merges"] = True  # a whole word found in the vocabulary is taken as it is
    data["pre_tokenizer"] = None
    with pytest.raises(TokenizerError, match="ordinary text"):
        Tokenizer(json.dumps(data)).encode("<|turn>")


def test_no_bos(tmp_path: Path) -> None:
    added = [t for t in json.loads(tokenizer_json("byte_level"))["added_tokens"] if t["content"] != "<bos>"]
    data = json.loads(edited("byte_level", added_tokens=added, post_processor=None))
    del data["model"]["vocab"]["<bos>"]
    with pytest.raises(TokenizerError, match="add_bos"):
        Tokenizer(json.dumps(data)).encode("a", add_bos=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 200_000, b'{"bos_token": 3}'])
def test_damaged_files(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path, "byte_level")
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError):
        Tokenizer.from_pretrained(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, 3, {"type": "Fuse"}])
def test_unknown_decoders_are_refused(decoder: object) -> None:
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer(edited("byte_level", decoder=decoder))


LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(data=st.data())
def test_mangled_tokenizers_raise_our_error(data: st.DataObject) -> None:
    """Replace, drop or cut a random place of the file: it loads and works, or a TokenizerError says why not."""
    raw = tokenizer_json(data.draw(st.sampled_from(KINDS)))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(raw)))
        raw = raw[:at] + data.draw(st.text(max_size=3)) + raw[at + data.draw(st.integers(0, 50)) :]
    else:
        tree = json.loads(raw)
        place = tree
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
                place[key] = data.draw(JSON)
                break
            place = inner
        raw = json.dumps(tree)
    try:
        tokenizer = Tokenizer(raw)
        tokenizer.decode(tokenizer.encode("Hello <|turn> 12 é😀"))
    except TokenizerError:
        pass
