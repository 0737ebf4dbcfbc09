"""Filling in the middle with a model that was trained for it: the tokens' names and the two orders of the prompt.

With `<|fim_middle|>` the order is    bos <|fim_prefix|> PREFIX <|fim_suffix|> SUFFIX <|fim_middle|>
without it the suffix comes first:    bos <|fim_suffix|> SUFFIX <|fim_prefix|> PREFIX
and the canvas holds                  MIDDLE eos pad pad …

The second order lets the canvas continue the prefix at its natural positions. Models of that order (the embedded one)
know holes that begin with a line break and its indent, so a line that is open where the hole begins is moved from the
prompt to the beginning of the canvas, where it is pinned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diffusiongemma.text.tokenizer import Tokenizer

PREFIX, SUFFIX, MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
CANVASES = (64, 128, 256)  # widths that a middle is trained and written in

_OPEN_LINE = re.compile(r"\r?\n[ \t]*\Z")


@dataclass(frozen=True)
class FimTokens:
    """The ids of one tokenizer's hole tokens."""

    prefix: int
    suffix: int
    middle: int | None
    bos: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FimTokens | None:
        """None: this model was not trained to fill in the middle."""
        special = tokenizer.special
        if PREFIX not in special or SUFFIX not in special:
            return None
        return cls(special[PREFIX], special[SUFFIX], special.get(MIDDLE), special.get("bos"))

    def split(self, prefix: str) -> tuple[str, str]:
        """Text before a hole -> what the prompt holds of it, and what the canvas must begin with."""
        found = _OPEN_LINE.search(prefix) if self.middle is None else None
        return (prefix, "") if found is None else (prefix[: found.start()], found[0])

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int], budget: int) -> tuple[int, ...]:
        """At most `budget` tokens; of a long prefix or suffix the end far from the hole is left out."""
        before, after = share(prefix, suffix, max(0, budget - 4))
        start = () if self.bos is None else (self.bos,)
        if self.middle is None:
            return (*start, self.suffix, *after, self.prefix, *before)
        return (*start, self.prefix, *before, self.suffix, *after, self.middle)


def share(prefix: Sequence[int], suffix: Sequence[int], budget: int) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens next to the hole, `budget` in all: a quarter for the suffix, more if the prefix leaves it."""
    after = min(len(suffix), max(budget // 4, budget - len(prefix)))
    before = min(len(prefix), budget - after)
    return prefix[len(prefix) - before :], suffix[:after]
