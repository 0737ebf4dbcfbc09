"""A user's file of texts in tokens: plain text, or JSON lines with `text` or `messages`."""

from __future__ import annotations

import json
from pathlib import Path

from diffusiongemma.errors import DiffusionGemmaError, InputError
from diffusiongemma.text.chat import ChatTemplate
from diffusiongemma.text.tokenizer import Tokenizer


def read_corpus(file: Path, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> list[list[int]]:
    """Each text in tokens, the first of them bos where the tokenizer has one. A file that ends in .jsonl has an object
    a line: a `text`, or a conversation in `messages` as the chat template writes it; any other is one text."""
    try:
        raw = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as text: {error}") from None
    add_bos = "bos" in tokenizer.special
    if file.suffix.lower() == ".json":
        raise InputError(f"{file} is no text: give plain text, or a .jsonl file with an object a line")
    if file.suffix.lower() != ".jsonl":
        return [tokenizer.encode(raw, add_bos=add_bos)] if raw.strip() else []
    texts: list[list[int]] = []
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, dict) or ("text" in data) == ("messages" in data):
            raise InputError(f"{where} must be an object with `text` or with `messages`")
        if "text" in data and not isinstance(data["text"], str):
            raise InputError(f"{where}: `text` must be a string")
        try:
            if "text" in data:
                texts.append(tokenizer.encode(data["text"], add_bos=add_bos))
            elif template is None:
                raise InputError("it has messages, but the checkpoint has no chat template: give `text`")
            else:
                texts.append(template.encode(tokenizer, data["messages"], add_generation_prompt=False))
        except DiffusionGemmaError as error:
            raise InputError(f"{where}: {error}") from None
    return texts
