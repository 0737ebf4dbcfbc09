"""A tokenizer of single bytes, made without any file: what random models speak."""

from __future__ import annotations

import json
from functools import cache

from diffusiongemma.text.tokenizer import CONTROL_TOKENS, Tokenizer

# Where DiffusionGemma's own vocabulary has them.
CONTROL_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100,
    "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
FIRST_BYTE = 107
assert set(CONTROL_TOKENS) <= set(CONTROL_IDS)


@cache
def byte_tokenizer() -> Tokenizer:
    """256 byte tokens behind the control tokens, 363 ids in all."""
    names = {id: name for name, id in CONTROL_IDS.items()}
    added = [
        {"id": id, "content": names.get(id, f"<unused{id}>"), "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for id in range(FIRST_BYTE)
    ]  # fmt: skip
    vocab = {entry["content"]: entry["id"] for entry in added}
    vocab |= {symbol: FIRST_BYTE + byte for byte, symbol in enumerate(_byte_symbols())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    raw = {"version": "1.0", "added_tokens": added, "model": model, "decoder": byte_level, "pre_tokenizer": byte_level}
    return Tokenizer(json.dumps(raw))


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte that byte-level BPE uses: itself if visible, else from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
