"""Text and tokens that stand for each other byte for byte: what holes and edits are built on.

`Tokenizer.encode` may rewrite a character (Gemma's turns U+2581 into a space) and `Tokenizer.decode` shows U+FFFD for
half a character. Here neither happens: text that cannot be held is refused, and tokens that are no text are None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

from diffusiongemma.errors import InputError
from diffusiongemma.text.tokenizer import Tokenizer


def exact_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str | None:
    """The text of these tokens, special ones left out; None if they hold a broken character."""
    try:
        return b"".join(exact_bytes(tokenizer, ids)).decode()
    except UnicodeDecodeError:
        return None


def exact_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> list[bytes]:
    """What each token adds to the text."""
    return [b"" if tokenizer.is_special(id) else tokenizer.token_bytes(id) or b"" for id in ids]


def encode_exact(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens whose text is `text`, whatever is in it."""
    if not isinstance(text, str):
        raise InputError(f"a text is needed, not {type(text).__name__}")
    if not 0 < text.count("\n") < KEPT_LINES or not _is_linewise(tokenizer):
        return _encode_whole(tokenizer, text)  # of more lines the last would push out the first before they come again
    ids: list[int] = []
    for line in _LINE.findall(text):
        ids += _line_tokens(tokenizer, line) if len(line) <= KEPT_LINE else _encode_whole(tokenizer, line)
    return ids


def _encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    if exact_text(tokenizer, ids) == text:
        return ids
    rewritten = {c for c in set(text) if exact_text(tokenizer, tokenizer.encode(c)) != c}
    ids = []
    for spelled, run in groupby(text, rewritten.__contains__):
        piece = "".join(run)
        ids += _spell(tokenizer, piece) if spelled else tokenizer.encode(piece)
    if exact_text(tokenizer, ids) != text:
        raise InputError(f"this model's tokenizer cannot hold the text as it is: it rewrites {sorted(rewritten)[:5]}")
    return ids


# Where a tokenizer splits text before it merges anything. In these patterns (the embedded model's) a line break, with
# its \r, is always the beginning of a piece: no other alternative takes one, none looks back, and what looks ahead sees
# the same in a line break as in the end of the text. So text is cut there without any token changing.
LINEWISE = (r"[ .\-]?\p{N}|\r?\n[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+",)
CHARACTERS_A_TOKEN = 5  # to begin with; if they hold too few tokens, twice as many
KEPT_LINES, KEPT_LINE = 8192, 256  # lines whose tokens are kept, for all tokenizers together; characters of one at most
_LINE = re.compile(r"(?:\r?\n)?[^\r\n]*(?:\r+(?!\n)[^\r\n]*)*")  # from a line break up to before the next


@lru_cache(maxsize=KEPT_LINES)
def _line_tokens(tokenizer: Tokenizer, line: str) -> tuple[int, ...]:
    """Kept: a file comes again with every hole in it, and hardly a line of it is new."""
    return tuple(_encode_whole(tokenizer, line))


def encode_start(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first `count` tokens of `encode_exact`, without reading a long text to its end where that is possible."""
    size = CHARACTERS_A_TOKEN * count
    while count > 0 and size < len(text) and _is_linewise(tokenizer):
        at = _line_break(text, text.find("\n", size))
        if at is None:
            break
        if len(ids := encode_exact(tokenizer, text[:at])) >= count:
            return ids[:count]
        size *= 2
    return encode_exact(tokenizer, text)[: max(0, count)]


def encode_end(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The last `count` tokens of `encode_exact`, without reading a long text from its beginning where possible."""
    size = CHARACTERS_A_TOKEN * count
    while count > 0 and size < len(text) and _is_linewise(tokenizer):
        at = _line_break(text, text.rfind("\n", 0, len(text) - size))
        if at is None:
            break
        if len(ids := encode_exact(tokenizer, text[at:])) >= count:
            return ids[-count:]
        size *= 2
    ids = encode_exact(tokenizer, text)
    return ids[len(ids) - max(0, min(count, len(ids))) :]


def _line_break(text: str, at: int) -> int | None:
    """Where the line break begins whose \\n was found there; None: none was"""
    return None if at < 0 else at - (text[at - 1 : at] == "\r")


@lru_cache(maxsize=8)
def _is_linewise(tokenizer: Tokenizer) -> bool:
    """Is the text split by one of `LINEWISE`, and by nothing else, before its pieces become tokens?"""
    if not tokenizer.byte_level:
        return False
    data = json.loads(tokenizer.to_json())
    # Added tokens are found before anything is split, unless they are special: those are spelled out in plain text.
    added = [token for token in data["added_tokens"] if not tokenizer.is_special(token["id"])]
    match data["pre_tokenizer"]:
        case {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]}:  # fmt: skip
            return pattern in LINEWISE and not added and data["normalizer"] is None
    return False


def _spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte by byte, where the tokenizer has byte tokens; else nothing."""
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode())
    return [id for id in found if id is not None and tokenizer.is_byte(id)]


@lru_cache(maxsize=8)
def partial_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that are no text on their own. Text written without them is whole, whatever its order."""
    return tuple(
        id for id in range(tokenizer.vocab_size) if not tokenizer.is_special(id) and _is_partial(tokenizer, id)
    )


def _is_partial(tokenizer: Tokenizer, id: int) -> bool:
    return tokenizer.is_byte(id) or exact_text(tokenizer, [id]) is None
