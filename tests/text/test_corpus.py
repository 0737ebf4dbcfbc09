"""A user's file of texts: plain, JSON lines, conversations, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import DiffusionGemmaError, InputError
from diffusiongemma.text import ChatTemplate, Tokenizer
from diffusiongemma.text.corpus import read_corpus


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(ASSETS / "nano")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_pretrained(ASSETS / "nano")


def lines(file: Path, *rows: object) -> Path:
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return file


def test_a_plain_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\ufeffdef f():\n    return '<|turn>'\n", encoding="utf-8")
    (text,) = read_corpus(tmp_path / "a.txt", tokenizer)
    assert text[0] == tokenizer.special["bos"]
    assert tokenizer.special["<|turn>"] not in text  # what a file holds is never a control token
    assert tokenizer.decode(text) == "def f():\n    return '<|turn>'\n"
    (tmp_path / "b.txt").write_text(" \n")
    assert read_corpus(tmp_path / "b.txt", tokenizer) == []


def test_json_lines(tmp_path: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four.\u2028So"}]
    file = lines(tmp_path / "a.jsonl", {"text": "x = 1", "source": "mine"}, {"messages": messages})
    one, two = read_corpus(file, tokenizer, template)
    assert tokenizer.decode(one) == "x = 1"
    assert two == template.encode(tokenizer, messages, add_generation_prompt=False)
    assert tokenizer.special["<|turn>"] in two


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2 .* is not JSON"),
        ("[1]", "must be an object with `text` or with `messages`"),
        ('{"content": "x"}', "must be an object with `text` or with `messages`"),
        ('{"text": "x", "messages": []}', "must be an object with `text` or with `messages`"),
        ('{"text": 3}', "line 2 .*`text` must be a string"),
        ('{"text": "\\ud800"}', "line 2 .*cannot be tokenized"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 2 "),
        ('{"messages": []}', "line 2 .*conversation is empty"),
        ('{"messages": "hello"}', "line 2 .*messages must be a list"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "line 2 "),
    ],
)
def test_lines_that_cannot_be_used(
    row: str, words: str, tmp_path: Path, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + row, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_corpus(tmp_path / "a.jsonl", tokenizer, template)


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none.txt", tmp_path, tmp_path / "bytes.txt"):
        with pytest.raises(InputError, match="cannot be read as text"):
            read_corpus(file, tokenizer)
    with pytest.raises(InputError, match="give plain text, or a .jsonl file"):
        read_corpus(lines(tmp_path / "a.JSON", {"text": "x"}), tokenizer)
    assert len(read_corpus(lines(tmp_path / "a.JSONL", {"text": "x"}, {"text": "y"}), tokenizer)) == 2
    conversation = lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(DiffusionGemmaError, match="no chat template"):
        read_corpus(conversation, tokenizer)
