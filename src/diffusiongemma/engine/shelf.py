"""What has been recorded, by kind, and how much of it is kept.

Recorded passes share the memory of their tensors (`graphs.py`), which is as large as the largest of them needs; but
the driver keeps the kernels of each graph on the card (about 6 MiB for a step of the 26B), and kinds of passes come up
for as long as a server runs. So an engine keeps so many of all kinds, and who wants one more gives up what was not used
for longest. (The driver does not give back what that took: it has it for the next.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakSet

log = logging.getLogger(__name__)
Work = Callable[[], None]
K = TypeVar("K", bound=Hashable)
MOST = 128  # passes of an engine: steps of one to sixteen users over two reaches, alone, with blocks, with prompts: 96


class Shelves:
    """All shelves of an engine: no more than `most` passes are on them. That of a lane that is gone is gone."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.dropped, self.clock = most, 0, count()
        self._shelves: WeakSet[Shelf[Any]] = WeakSet()

    def __len__(self) -> int:
        return sum(map(len, self._shelves))

    def add(self, shelf: Shelf[Any]) -> None:
        self._shelves.add(shelf)

    def make_room(self) -> None:
        """For one more. Nothing that is under way is dropped: that was used last."""
        while len(self) >= self.most:
            kind = min((shelf for shelf in self._shelves if len(shelf)), key=lambda shelf: shelf.oldest).drop()
            self.dropped += 1
            log.info("dropped a recording that was not used for long: %s", kind)


class Shelf(Generic[K]):
    """The recorded passes of one owner."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._works: dict[K, tuple[int, Work]] = {}  # when each was used last, and the pass; the last used comes last
        shelves.add(self)

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[K]:
        return iter(self._works)

    def __contains__(self, kind: K) -> bool:
        return kind in self._works

    def get(self, kind: K, record: Callable[[], Work]) -> Work:
        """The pass of this kind, to be used now. There may have to be room for it before it is recorded: a graph that
        is destroyed while another is being recorded spoils that."""
        _, work = self._works.pop(kind, (0, None))
        if work is None:
            self._shelves.make_room()
            work = record()
        self._works[kind] = (next(self._shelves.clock), work)
        return work

    @property
    def oldest(self) -> int:
        """When the one was used that was not used for longest."""
        return next(iter(self._works.values()))[0]

    def drop(self) -> K:
        """Give that one up -> what it was"""
        kind = next(iter(self._works))
        del self._works[kind]
        return kind
