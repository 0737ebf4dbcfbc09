"""Prefixes worth keeping: cache rows of earlier requests, found again by their tokens.

A row can stand in for any beginning of its tokens that its sliding layers still remember. Least recently used rows go
first when memory is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from diffusiongemma.model import CacheRow


class PrefixStore:
    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, ...], CacheRow] = OrderedDict()  # oldest use first

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, tokens: Seq[int], row: CacheRow) -> None:
        """Keep this row, which holds exactly these tokens. The caller gives it away."""
        key = tuple(tokens)
        assert row.length == len(key)
        if not key:
            return
        for known in [k for k in self._rows if len(k) < len(key) and key[: len(k)] == k]:
            if row.can_truncate(len(known)):  # the longer row can do what the shorter one could
                del self._rows[known]
        self._rows[key] = row
        self._rows.move_to_end(key)

    def find(self, tokens: Seq[int], at_most: int) -> tuple[CacheRow, int] | None:
        """The row that shares the longest beginning with these tokens, and how long that is (`at_most` or less)."""
        best: tuple[tuple[int, ...], int] | None = None
        for key, row in self._rows.items():
            shared = min(common(key, tokens), at_most)
            if shared > (best[1] if best else 0) and row.can_truncate(shared):
                best = (key, shared)
        if best is None:
            return None
        self._rows.move_to_end(best[0])
        return self._rows[best[0]], best[1]

    def evict(self) -> bool:
        """Forget the row that was not used for longest; False if there is none."""
        if not self._rows:
            return False
        self._rows.popitem(last=False)
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
