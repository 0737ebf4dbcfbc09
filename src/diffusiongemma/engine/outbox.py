"""What is told to listeners, in order, when there is time for it.

A text takes the host a while to put together, and a listener that wakes up takes more. Where a card waits for its next
work meanwhile, the outbox is held: what is to be told stays in it until that work is under way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Outbox:
    def __init__(self) -> None:
        self._letters: deque[Callable[[], None]] = deque()
        self._held = False

    def put(self, letter: Callable[[], None]) -> None:
        """Tell this, at once unless held; what waits is told before it."""
        self._letters.append(letter)
        if not self._held:
            self.deliver()

    def deliver(self, careful: bool = False) -> None:
        """Tell all that waits. `careful`: what raises is logged, and the others are told all the same."""
        while self._letters:
            letter = self._letters.popleft()
            try:
                letter()
            except Exception:
                if not careful:
                    raise
                log.exception("something could not be told")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """What is put in here waits for `deliver`, or for what is told at once after it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
