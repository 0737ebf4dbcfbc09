"""A draft as coloured text: settled tokens solid, uncertain ones shaded by entropy, noise dim.

Pure functions, so that a terminal, a recording and a test see the same. What a model writes never reaches a terminal
as it is: control characters become visible symbols, so no escape sequence of a model is ever obeyed.
"""

from __future__ import annotations

import codecs
import unicodedata
from bisect import bisect
from functools import lru_cache
from typing import Protocol

from rich.text import Text

from diffusiongemma.engine.events import Draft

# From sure to lost. The colours are of middling lightness: they read on light and on dark backgrounds.
SETTLED, NOISE, CONTROL = "", "dim", "dim italic"
SHADES = ("#2aa198", "#268bd2", "#7a78d0", "#a0699f")
LEVELS = (0.1, 0.5, 1.5, 3.0)  # nats: one shade below each, noise from the last on
STYLES = (SETTLED, *SHADES, NOISE)

UNKNOWN = "·"  # an id that the tokenizer has no text for
STRAY = "◇"  # a control token amid noise, where its name would only take room
_BREAKS = {"\n": "↵", "\t": "⇥"}  # while they are uncertain; settled ones break the line
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_INVISIBLE = frozenset(("Cc", "Cs", "Co", "Cn", "Zl", "Zp"))


class Pieces(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, id: int, /) -> bytes | None: ...

    def is_special(self, id: int, /) -> bool: ...


def sanitise(text: str) -> str:
    """Text that does nothing to a terminal but appear: only line feeds and tabs are obeyed."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


@lru_cache(maxsize=4096)
def _visible(character: str) -> str:
    code = ord(character)
    if character in _BREAKS:
        return character
    if code < 0x20:
        return chr(0x2400 + code)  # the symbol of the control character, such as ␛
    if code == 0x7F:
        return "␡"
    if character in _BIDI or unicodedata.category(character) in _INVISIBLE:
        return "\ufffd"
    return character


def level(entropy: float, accepted: bool) -> int:
    """0: settled … len(STYLES) - 1: noise"""
    return 0 if accepted else 1 + bisect(LEVELS, entropy)


def render(draft: Draft, pieces: Pieces, text: str = "") -> Text:
    """`text` is what was committed before; the draft follows it. Runs of one control token are shown once."""
    out = Text(sanitise(text), overflow="fold", tab_size=4)
    held, held_level = b"", 0  # part of a character whose other bytes are in the next tokens
    run_token, run = -1, 0
    for token, entropy, accepted in zip(draft.tokens, draft.entropy, draft.accepted, strict=True):
        at = level(entropy, accepted)
        special, noise = pieces.is_special(token), STYLES[at] == NOISE
        data = pieces.token_bytes(token)
        if held and (special or data is None):
            out.append("\ufffd", STYLES[held_level])
            held, held_level = b"", 0
        if run > 1 and token != run_token:
            out.append(f"×{run}", CONTROL)
        run_token, run = (token, run + 1 if token == run_token else 1) if special and not noise else (-1, 0)
        if special and noise:
            out.append(STRAY, NOISE)
        elif special:
            if run == 1:
                out.append(sanitise((data or b"").decode(errors="replace")), CONTROL)
        elif data is None:
            out.append(UNKNOWN, STYLES[at])
        else:
            at = max(at, held_level)
            decoded, used = codecs.utf_8_decode(held + data, "replace", False)
            held = (held + data)[used:]
            held_level = at if held else 0
            out.append(_show(decoded, settled=at == 0), STYLES[at])
    if run > 1:
        out.append(f"×{run}", CONTROL)
    if held:
        out.append("\ufffd", STYLES[held_level])
    return out


def _show(text: str, settled: bool) -> str:
    text = sanitise(text)
    if not settled:
        for symbol, mark in _BREAKS.items():
            text = text.replace(symbol, mark)
    return text


def describe(draft: Draft, steps: int) -> str:
    """The line below the canvas."""
    mean = sum(draft.entropy) / len(draft.entropy)
    settled = f"{sum(draft.accepted)}/{len(draft.accepted)} accepted"
    return f"block {draft.block + 1} · step {draft.step}/{steps} · {settled} · entropy {mean:.2f}"
