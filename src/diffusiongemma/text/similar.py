"""How near two texts are: the edit distance."""

from __future__ import annotations

import numpy as np


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and replacements. One row of the table at a time."""
    if len(a) < len(b):
        a, b = b, a
    if not b:
        return len(a)
    letters = np.frombuffer(b.encode("utf-32-le", "surrogatepass"), np.uint32)
    at = np.arange(len(b) + 1)
    row = at.copy()
    for i, letter in enumerate(a, 1):
        new = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        new = np.concatenate([[i], new])
        # An insertion adds one to the left neighbour: a running minimum of what each would be without its own offset.
        row = np.minimum.accumulate(new - at) + at
    return int(row[-1])


def similarity(a: str, b: str) -> float:
    """1: equal, 0: nothing in common."""
    if a == b:
        return 1.0
    return 1.0 - edit_distance(a, b) / max(len(a), len(b))
