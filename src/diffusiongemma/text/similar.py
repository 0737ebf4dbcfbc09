"""How near two texts are, by the edit distance (`similarity`) or by what they have in common (`ratio`).

Benchmarks of code completion mean one or the other by "edit similarity". The second is never below the first: to
replace a character is two of its edits, but it divides by both lengths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and replacements. One row of the table at a time."""
    if len(a) < len(b):
        a, b = b, a
    if not b:
        return len(a)
    letters = _letters(b)
    at = np.arange(len(b) + 1)
    row = at.copy()
    for i, letter in enumerate(a, 1):
        new = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        new = np.concatenate([[i], new])
        # An insertion adds one to the left neighbour: a running minimum of what each would be without its own offset.
        row = np.minimum.accumulate(new - at) + at
    return int(row[-1])


def common_length(a: str, b: str) -> int:
    """Length of the longest common subsequence: what is left of both if characters are only taken out."""
    if len(a) < len(b):
        a, b = b, a
    letters = _letters(b)
    row = np.zeros(len(b) + 1, np.int64)
    for letter in a:
        row[1:] = np.maximum(row[1:], row[:-1] + (letters == ord(letter)))
        row = np.maximum.accumulate(row)
    return int(row[-1])


def similarity(a: str, b: str) -> float:
    """1 - edit distance / length of the longer. 1: equal, 0: nothing in common."""
    if a == b:
        return 1.0
    return 1.0 - edit_distance(a, b) / max(len(a), len(b))


def ratio(a: str, b: str) -> float:
    """2 * common length / sum of the lengths: `fuzz.ratio` of rapidfuzz and thefuzz, from 0 to 1. (That of fuzzywuzzy
    needs python-Levenshtein for it; without, it is difflib's, which finds less in common.)"""
    if a == b:
        return 1.0
    return 2.0 * common_length(a, b) / (len(a) + len(b))


def _letters(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
