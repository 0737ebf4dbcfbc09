"""Reading the text side of a checkpoint folder: every damaged or missing file becomes a TokenizerError."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusiongemma.errors import TokenizerError

# The attributes that Transformers hands to a chat template by name.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(f"{path.name} is missing from {path.parent}; download or copy the whole folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8 text: {error}") from error


def parse_object(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not valid JSON, so the file is damaged: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{name} must hold a JSON object, not {type(data).__name__}")
    return data


def read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where the file does not exist."""
    return parse_object(read_text(path), str(path)) if path.exists() else {}


@dataclass(frozen=True)
class TokenNames:
    """What tokenizer_config.json and special_tokens_map.json say about special tokens."""

    named: dict[str, str]  # "bos_token" -> "<bos>", ...
    extra: frozenset[str]  # every other string declared special

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> TokenNames:
        config = read_optional(Path(folder) / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # the newer form makes Transformers ignore the older file
            config |= read_optional(Path(folder) / "special_tokens_map.json")
        named: dict[str, str] = {}
        extra: set[str] = set()
        for key, value in config.items():
            if key in NAMED_TOKENS:
                if value is not None:
                    named[key] = _content(key, value)
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                if not isinstance(value, list | dict | None):
                    raise TokenizerError(f"{key} must be a list or an object, got {value!r}")
                entries = value.values() if isinstance(value, dict) else value or ()
                extra.update(_content(key, entry) for entry in entries)
            elif key.endswith("_token") and isinstance(value, str):
                extra.add(value)
        return cls(named, frozenset(extra))


def _content(key: str, value: object) -> str:
    """The text of a token written as a string or as an AddedToken object."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise TokenizerError(f"{key} must be a token's text or an object with its content, got {value!r}")
    return content
