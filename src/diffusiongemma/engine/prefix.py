"""Prefixes worth keeping: cache rows of earlier requests, found again by their tokens.

A row can stand in for any beginning of its tokens that its sliding layers still remember. Least recently used rows go
first when memory is short.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from diffusiongemma.model import CacheRow


class PrefixStore:
    def __init__(self) -> None:
        # Oldest use first. No dict: whoever looks goes over all of them, and the hash of a long text takes a while.
        self._rows: list[tuple[tuple[int, ...], CacheRow]] = []

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for _, row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, tokens: Seq[int], row: CacheRow) -> None:
        """Keep this row, which holds exactly these tokens. The caller gives it away."""
        key = tuple(tokens)
        assert row.length == len(key)
        if not key:
            return

        def replaces(known: tuple[int, ...]) -> bool:
            """Can the new row do what that one could?"""
            return key[: len(known)] == known and (len(known) == len(key) or row.can_truncate(len(known)))

        self._rows = [kept for kept in self._rows if not replaces(kept[0])]
        self._rows.append((key, row))

    def find(self, tokens: Seq[int], at_most: int) -> tuple[CacheRow, int] | None:
        """The row that shares the longest beginning with these tokens, and how long that is (`at_most` or less)."""
        best, longest = None, 0
        for at, (key, row) in enumerate(self._rows):
            shared = min(common(key, tokens), at_most)
            if shared > longest and row.can_truncate(shared):
                best, longest = at, shared
        if best is None:
            return None
        self._rows.append(self._rows.pop(best))
        return self._rows[-1][1], longest

    def evict(self) -> bool:
        """Forget the row that was not used for longest; False if there is none."""
        if not self._rows:
            return False
        del self._rows[0]
        return True

    def clear(self) -> None:
        self._rows.clear()


def common(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common beginning, by halving: slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:  # most have nothing in common
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(a[low:middle]) == tuple(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
