"""Passages of a long text that look like the place of a hole in it: what is missing often stands elsewhere, too.

A line is a bag of tokens, of which rare ones count more. A line elsewhere is a likely model for the hole if the lines
around it are like those around the hole, the nearest most. It is handed out with the lines next to it.

Only ids are compared, so training and inference find the same passages (train/infill.py, engine/hole.py).

Legend: T tokens of a stretch of text, S its lines that are not blank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from diffusiongemma.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

AROUND = (1.0, 0.7, 0.5)  # what likeness of the first, second and third line next to a hole counts, on either side,
OWN = 1.5  # … and of what is left of a line that the hole is in the middle of
BESIDE = 2  # lines of a passage on either side of its likeliest
LONGEST = 96  # tokens of a passage
LEAST = 24  # tokens below which the rest of the room is left empty
TRIED = 12  # likeliest lines of a side that are considered
REACH = 16384  # tokens on either side of a hole that are searched


@lru_cache(maxsize=8)
def line_breaks(tokenizer: Tokenizer) -> Flags:
    """[V]: tokens that are a line break and perhaps the indent after it. Training has the same in train/sources.py."""
    texts = [tokenizer.token_bytes(id) or b"" for id in range(tokenizer.vocab_size)]
    return np.array([text[:1] in (b"\n", b"\r") and b"\n" in text for text in texts], bool)


@dataclass(frozen=True)
class Lines:
    """The lines of a stretch of text that are more than a line break and its indent."""

    tokens: Ids  # [T]
    first: Ids  # [S]: where each begins, with its line break,
    start: Ids  # [S]: … and without
    end: Ids  # [S]

    @classmethod
    def of(cls, tokens: Ids, breaks: Flags) -> Lines:
        """`breaks` [V]: tokens that begin a line"""
        breaking = breaks[tokens]
        first = np.flatnonzero(breaking)
        if len(tokens) and not breaking[0]:
            first = np.concatenate([[0], first])  # the rest of a line
        end = np.append(first[1:], len(tokens))[: len(first)]
        start = first + breaking[first]
        filled = end > start
        return cls(tokens, first[filled], start[filled], end[filled])

    def __len__(self) -> int:
        return len(self.first)

    def content(self, line: int) -> Ids:
        return self.tokens[self.start[line] : self.end[line]]

    def sums(self, value: Numbers) -> Numbers:
        """[T] -> [S]"""
        total = np.concatenate([[0.0], np.cumsum(value)])
        sums: Numbers = total[self.end] - total[self.start]
        return sums


def alike(before: Ids, after: Ids, near: tuple[int, int], breaks: Flags, room: int) -> list[Ids]:
    """Passages from the text before and after a hole, of which the prompt holds the `near` tokens next to it already.
    Together with a token that closes each they have at most `room` tokens; the likeliest is the last."""
    before, after = before[-REACH:], after[:REACH]
    far = (before[: max(0, len(before) - near[0])], after[near[1] :])
    if room < LEAST or not (len(far[0]) or len(far[1])):
        return []
    count = np.bincount(np.concatenate([before, after]), minlength=len(breaks))
    worth = 1.0 / np.sqrt(np.maximum(count, 1))
    around = list(_around(Lines.of(before, breaks), Lines.of(after, breaks), len(after) > 0 and not breaks[after[0]]))
    sides = [Lines.of(part, breaks) for part in far]
    found = []
    for side, lines in enumerate(sides):
        score = _scores(lines, around, worth)
        found += [(-score[i], side, int(i)) for i in np.argsort(-score, kind="stable")[:TRIED] if score[i] > 0]
    return [
        sides[one.side].tokens[sides[one.side].first[one.low] : sides[one.side].end[one.high]]
        for one in _merged(sides, _picked(sides, [(side, i) for _, side, i in sorted(found)], room))
    ]


def _around(before: Lines, after: Lines, inside: bool) -> Iterator[tuple[int, Ids, float]]:
    """The lines around a hole: where they stand, seen from it, what they hold, and what their likeness counts"""
    skip = int(inside)
    if inside:
        parts = [before.content(-1)] if len(before) else []
        yield 0, np.concatenate([*parts, after.content(0)]), OWN
    for i, counts in enumerate(AROUND):
        if i + skip < len(before):
            yield -1 - i, before.content(-1 - i - skip), counts
        if i + skip < len(after):
            yield 1 + i, after.content(i + skip), counts


def _scores(lines: Lines, around: Sequence[tuple[int, Ids, float]], worth: Numbers) -> Numbers:
    """[S]: how much the lines around each are like those around the hole"""
    score = np.zeros(len(lines))
    size = lines.sums(worth[lines.tokens])
    for place, wanted, counts in around:
        shared = np.zeros(len(worth))
        shared[wanted] = worth[wanted]
        common, own = lines.sums(shared[lines.tokens]), worth[wanted].sum()
        likeness = np.minimum(1.0, common / (size + own - np.minimum(common, own)))
        to, of = slice(max(0, -place), len(lines) - max(0, place)), slice(max(0, place), len(lines) - max(0, -place))
        if to.start < to.stop:
            score[to] += counts * likeness[of]
    return score


@dataclass(frozen=True)
class _Passage:
    """Lines `low` to `high` of a side; the one of the smallest `rank` is the likeliest."""

    side: int
    low: int
    high: int
    rank: int


def _picked(sides: Sequence[Lines], found: Sequence[tuple[int, int]], room: int) -> list[_Passage]:
    """The likeliest lines, with those beside them, as long as there is room; no line twice"""
    picked: list[_Passage] = []
    taken: set[tuple[int, int]] = set()
    for side, line in found:
        lines, low, high = sides[side], line, line
        for near in range(1, BESIDE + 1):  # what follows, then what comes before, as far as it is free and short enough
            if high == line + near - 1 and _free(lines, low, high + 1) and (side, high + 1) not in taken:
                high += 1
            if low == line - near + 1 and _free(lines, low - 1, high) and (side, low - 1) not in taken:
                low -= 1
        size = lines.end[high] - lines.first[low]
        if (side, line) in taken or size > LONGEST or size >= room:
            continue
        taken |= {(side, one) for one in range(low, high + 1)}
        picked.append(_Passage(side, low, high, len(picked)))
        room -= size + 1
        if room < LEAST:
            break
    return picked


def _free(lines: Lines, low: int, high: int) -> bool:
    return low >= 0 and high < len(lines) and lines.end[high] - lines.first[low] <= LONGEST


def _merged(sides: Sequence[Lines], picked: Sequence[_Passage]) -> list[_Passage]:
    """Passages with at most one token between them, in whose stead nothing need close the first, as one; the likeliest
    last"""
    whole: list[_Passage] = []
    for one in sorted(picked, key=lambda one: (one.side, one.low)):
        lines = sides[one.side]
        follows = whole and (whole[-1].side, whole[-1].high + 1) == (one.side, one.low)
        if follows and lines.first[one.low] - lines.end[whole[-1].high] <= 1:
            one = _Passage(one.side, whole[-1].low, one.high, min(whole.pop().rank, one.rank))
        whole.append(one)
    return sorted(whole, key=lambda one: -one.rank)
