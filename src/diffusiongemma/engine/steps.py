"""Which steps of a lane are recorded, and when: one for every number of canvases and reach, and for what is encoded in
the same pass. On the H200 a step whose kernels are launched one by one takes 60 ms, recording it three times that."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from diffusiongemma.engine.shelf import Shelf, Shelves, Work
from diffusiongemma.engine.slate import Kind as Encoding
from diffusiongemma.ops.memory import is_out_of_memory

log = logging.getLogger(__name__)
FEW_ROWS = 8  # steps of so many canvases are recorded at once
SELDOM = 4  # … of more, after so many that were not
OFTEN = 16  # … with tokens that may never come in this number again, when that has been wanted so often
AGE = 1024  # steps after which half of what was wanted is forgotten: what comes seldom is never worth recording


@dataclass(frozen=True)
class Kind:
    """What a step is recorded for. With our own kernels nothing of it shows in a canvas: its bits do not depend on its
    neighbours."""

    rows: int
    reach: int  # `CachePool.reach_for` the longest cache row
    before: Encoding | None = None  # what is encoded in the same pass: blocks or prompts, mostly of these canvases

    def __str__(self) -> str:
        return f"a step of {self.rows} over {self.reach} tokens{f', and {self.before}' if self.before else ''}"


class Stepper(Protocol):
    """Whose steps these are. It is handed in with every call, not held: a lane that is dropped goes at once."""

    def step(self, kind: Kind) -> None:
        """Take one."""

    def record(self, kind: Kind) -> Work:
        """Make one ready to be replayed."""


class Steps:
    def __init__(self, shelves: Shelves, usual: bool) -> None:
        """`usual`: the lane's canvases are sure to come again."""
        self._usual = usual
        self.shelf = Shelf[Kind](shelves)
        self._wanted: dict[Kind, int] = {}  # how often, before it was worth recording; anew, if that was given up
        self._taken = 0
        self._without: set[Kind] = set()  # those for which there was no memory

    def work(self, kind: Kind, lane: Stepper) -> Work:
        """A step of this kind: the function itself, until it has been wanted often enough."""
        self._taken += 1
        if self._taken % AGE == 0:
            self._wanted = {kind: half for kind, times in self._wanted.items() if (half := times // 2)}
        if self._is_due(kind):
            return self.recorded(kind, lane)
        self._want(kind)
        return partial(lane.step, kind)

    def recorded(self, kind: Kind, lane: Stepper) -> Work:
        work = self.shelf.get(kind, partial(lane.record, kind))
        self._wanted.pop(kind, None)
        return work

    def takes(self, kind: Kind, lane: Stepper) -> bool:
        """Should what is encoded in a step of this kind go with it? Else it has a pass of its own, which is recorded
        for all steps."""
        if kind in self._without:
            return False
        if self._is_due(kind):
            return self._can_record(kind, lane)
        if not self._is_odd(kind):
            return True  # not recorded yet, but one pass: `work` counts it
        self._want(kind)
        return False

    def _can_record(self, kind: Kind, lane: Stepper) -> bool:
        try:
            self.recorded(kind, lane)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("two passes instead of one: no memory to record %s", kind)
            self._without.add(kind)
        return kind not in self._without

    def _want(self, kind: Kind) -> None:
        self._wanted[kind] = self._wanted.get(kind, 0) + 1

    def _is_due(self, kind: Kind) -> bool:
        """Is it worth recording?"""
        often = OFTEN if self._is_odd(kind) else SELDOM if kind.rows > FEW_ROWS else 0
        return kind in self.shelf or self._wanted.get(kind, 0) >= often

    def _is_odd(self, kind: Kind) -> bool:
        """Does it take along tokens of other rows, or of some of its own, or may its canvases never come again?"""
        return kind.before is not None and (kind.before.rows != kind.rows or not self._usual)
