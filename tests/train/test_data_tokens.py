from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from diffusiongemma.errors import DataError
from diffusiongemma.tasks.sudoku_gen import generate
from diffusiongemma.train.data import bpe, transport
from diffusiongemma.train.data.__main__ import main
from diffusiongemma.train.data.extract import Document, read_documents, write_documents
from diffusiongemma.train.data.icons import Icon
from diffusiongemma.train.data.shards import EOS, Encoder, write_icons

TEXTS = [
    "def total(self, values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n",
    '<svg viewBox="0 0 24 24"><path fill="currentColor" d="M12 2.5a-3 3 0 0 1 3-3.5"/></svg>',
    "Some plain words about a tokenizer, with 1234 digits.\n",
] * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bpe.train(TEXTS, 500)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    bpe.save(tokenizer, path)
    return path


def test_special_tokens_have_the_ids_of_diffusiongemma(tokenizer: Tokenizer) -> None:
    expected = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<|tool>": 46, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100,
                "<channel|>": 101, "<|turn>": 105, "<turn|>": 106}  # fmt: skip
    assert {text: tokenizer.token_to_id(text) for text in expected} == expected
    assert tokenizer.encode("<|turn>user").ids[0] == 105
    texts = bpe.special_tokens()
    assert len(texts) == len(set(texts)) == 107


@pytest.mark.parametrize(
    "text", [*TEXTS[:3], "tabs\t\tand  spaces \n\n\n  x", "é 日本 \U0001f600 \r\n", "<eos><pad>", ""]
)
def test_round_trip_and_text_never_becomes_control_tokens(folder: Path, text: str) -> None:
    loaded = bpe.load(folder)
    ids = loaded.encode(text, add_special_tokens=False).ids
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert min(ids, default=200) > 106


def test_a_token_holds_one_digit_and_a_line_break_takes_its_indent(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("0123456789" * 8 + "0").ids) == 81
    assert len(set(tokenizer.encode("0123456789").ids)) == 10
    assert all(sum(ch.isdigit() for ch in token) <= 1 for token in tokenizer.get_vocab() if token[0] != "<")
    tokens = tokenizer.encode("for value in values:\n        result").tokens
    assert "ĊĠĠĠĠĠĠĠĠ" in tokens
    assert sum("Ċ" in token for token in tokenizer.encode("a\n\n    b\n").tokens) == 3


def test_documents_round_trip_and_are_written_the_same_twice(tmp_path: Path) -> None:
    documents = [Document("p", "a.py", "code", "x = 'é'\n"), Document("p", "b.md", "docs", "words\n")]
    for name in ("one", "two"):
        write_documents(tmp_path / name, documents)
    assert list(read_documents(tmp_path / "one")) == documents
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_shards_hold_every_document_with_its_end(folder: Path, tmp_path: Path) -> None:
    counts = Encoder(folder).write(TEXTS, tmp_path, "code")
    tokens, offsets = np.load(tmp_path / "code.npy"), np.load(tmp_path / "code_offsets.npy")
    assert counts == {"documents": len(TEXTS), "tokens": len(tokens)}
    assert tokens.dtype == np.uint16
    loaded = bpe.load(folder)
    for i, text in enumerate(TEXTS):
        row = tokens[offsets[i] : offsets[i + 1]].tolist()
        assert row[-1] == EOS
        assert loaded.decode(row[:-1], skip_special_tokens=False) == text


def test_icon_shards_say_whose_prompt_is_whose(folder: Path, tmp_path: Path) -> None:
    icons = [Icon("s", "a", "bell", ("outline",), (), TEXTS[1]), Icon("s", "b", "pen", (), (), TEXTS[1])]
    assert write_icons(Encoder(folder), icons, tmp_path, "icons")["prompts"] == 3
    assert np.load(tmp_path / "icons_prompt_of.npy").tolist() == [0, 0, 1]


def test_boards_pack_and_unpack() -> None:
    boards = np.random.default_rng(0).integers(0, 10, (17, 81)).astype(np.uint8)
    assert np.array_equal(transport.unpack_boards(transport.pack_boards(boards)), boards)


def test_what_is_packed_comes_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_PIECE", 300)  # several files an array
    monkeypatch.setattr(transport, "PART_BYTES", 800)  # several parts
    puzzles = generate(5, np.zeros(12, np.uint8))
    np.savez(tmp_path / "sudoku.npz", puzzle=puzzles.puzzle)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    Encoder(folder).write(TEXTS, tokens, "code")
    (tokens / "meta.json").write_text("{}")
    report = transport.pack(tokens, tmp_path / "sudoku.npz", tmp_path / "transport")
    assert len(report["parts"]) > 1
    assert max(report["bytes"]) <= 800
    transport.unpack([tmp_path / "transport"], tmp_path / "out", workers=1)
    for name in ("code.npy", "code_offsets.npy"):
        before, after = np.load(tokens / name), np.load(tmp_path / "out" / name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
    with np.load(tmp_path / "out" / "sudoku.npz") as arrays:
        for name in ("puzzle", "solution", "guesses"):
            assert np.array_equal(arrays[name], getattr(puzzles, name))
    assert (tmp_path / "out" / "meta.json").read_text() == "{}"


@pytest.mark.parametrize(("name", "other"), [("code", "docs"), ("docs", "code")])
def test_part_of_a_text_is_packed_in_whole_documents(folder: Path, tmp_path: Path, name: str, other: str) -> None:
    np.savez(tmp_path / "sudoku.npz", puzzle=generate(5, np.zeros(2, np.uint8)).puzzle)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for text in (name, other):
        Encoder(folder).write(TEXTS, tokens, text)
    (tokens / "meta.json").write_text(json.dumps({name: {"documents": 9, "tokens": 9}, other: {}}))
    offsets = np.load(tokens / f"{name}_offsets.npy")
    for most, documents in ((int(offsets[2]), 2), (int(offsets[3]) - 1, 2), (int(offsets[-1]), len(TEXTS))):
        transport.pack(tokens, tmp_path / "sudoku.npz", tmp_path / "transport", {name: most})
        transport.unpack([tmp_path / "transport"], tmp_path / "out", workers=1)
        kept, ends = (np.load(tmp_path / "out" / f"{stem}.npy") for stem in (name, f"{name}_offsets"))
        assert np.array_equal(ends, offsets[: documents + 1])
        assert np.array_equal(kept, np.load(tokens / f"{name}.npy")[: ends[-1]])
        assert np.array_equal(np.load(tmp_path / "out" / f"{other}.npy"), np.load(tokens / f"{other}.npy"))
        meta = json.loads((tmp_path / "out" / "meta.json").read_text())
        assert meta == {name: {"documents": documents, "tokens": int(ends[-1])}, other: {}}
    with pytest.raises(DataError, match=f"the first document of {name} has"):
        transport.pack(tokens, tmp_path / "sudoku.npz", tmp_path / "transport", {name: 1})


def test_the_command_packs_parts_of_both_texts_and_tells_their_size(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "sudoku.npz", puzzle=generate(5, np.zeros(2, np.uint8)).puzzle)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for text in ("code", "docs"):
        Encoder(folder).write(TEXTS, tokens, text)
    (tokens / "meta.json").write_text("{}")
    ends = np.load(tokens / "code_offsets.npy")
    options = ["--code", str(ends[3] / 1e6), "--docs", str(ends[2] / 1e6), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["data", "pack", *options])
    assert main() == 0
    size = sum(path.stat().st_size for path in (tmp_path / "transport").rglob("*.xz")) / (1 << 20)
    assert capsys.readouterr().out.splitlines()[-1] == f"part1: {size:.1f} MiB, in all: {size:.1f} MiB"
    transport.unpack([tmp_path / "transport"], tmp_path / "out", workers=1)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert {name: counts["documents"] for name, counts in meta.items()} == {"code": 3, "docs": 2}


def test_unpack_without_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.xz files"):
        transport.unpack([tmp_path], tmp_path / "out", workers=1)
