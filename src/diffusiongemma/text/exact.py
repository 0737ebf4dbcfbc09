"""Text and tokens that stand for each other byte for byte: what holes and edits are built on.

`Tokenizer.encode` may rewrite a character (Gemma's turns U+2581 into a space) and `Tokenizer.decode` shows U+FFFD for
half a character. Here neither happens: text that cannot be held is refused, and tokens that are no text are None.
"""

from __future__ import annotations

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
