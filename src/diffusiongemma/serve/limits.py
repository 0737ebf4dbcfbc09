"""Who may run: a bounded queue in front of the engine's rows, fair between clients.

Of those that wait, the client with the fewest rows running comes first; between equals the one that was served longest
ago. If the queue is full, the client with most requests in it loses its newest to one with fewer, so nobody can fill it
for the others; else the newcomer is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diffusiongemma.serve.errors import ApiError, busy


@dataclass(eq=False)
class Turn:
    """One request's place: waiting, then running on `cost` rows until it leaves."""

    client: str
    cost: int
    admitted: asyncio.Future[None]
    asked: float = field(default_factory=time.monotonic)
    began: float | None = None
    left: bool = False

    @property
    def waited(self) -> float:
        return (time.monotonic() if self.began is None else self.began) - self.asked


class Gate:
    def __init__(self, rows: int, queue: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.rows, self.queue = rows, queue
        self._on_change = on_change
        self._waiting: dict[str, deque[Turn]] = {}  # in the order in which clients were served last
        self._running: dict[str, int] = {}  # rows of each client
        self._closed: ApiError | None = None
        self._mean_seconds = 1.0  # a request holds its rows, roughly

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def check(self, client: str) -> None:
        """Raise what `enter` would, before any work is done for the request."""
        if self._closed is not None:
            raise self._closed
        if self.waiting >= self.queue and self._gives_way(client) is None:
            raise busy(self.retry_after)

    async def enter(self, client: str, cost: int) -> Turn:
        """Wait for so many rows (all of them, if it is more). The caller must `leave`, whatever happens."""
        self.check(client)
        if self.waiting >= self.queue and (newest := self._gives_way(client)):
            self._evict(newest, busy(self.retry_after))
        turn = Turn(client, min(cost, self.rows), asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(turn)
        self._advance()
        try:
            await turn.admitted
        except BaseException:
            self.leave(turn)
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        if turn.left:
            return
        turn.left = True
        if turn.began is None:
            self._forget(turn)
        else:
            self._mean_seconds += 0.1 * (time.monotonic() - turn.began - self._mean_seconds)
            self._running[turn.client] -= turn.cost
            if not self._running[turn.client]:
                del self._running[turn.client]
        self._advance()

    def close(self, error: ApiError) -> None:
        """Refuse what waits and what comes; what runs may finish."""
        self._closed = error
        for turn in [turn for turns in self._waiting.values() for turn in turns]:
            self._evict(turn, error)
        self._on_change()

    @property
    def retry_after(self) -> float:
        """Seconds until the queue should have moved."""
        return min(60.0, max(1.0, self._mean_seconds * self.waiting / self.rows))

    def _gives_way(self, client: str) -> Turn | None:
        """Who leaves the full queue for this client: the newest of one that would still have as many in it."""
        most = max(self._waiting.values(), key=len)
        mine = len(self._waiting.get(client, ()))
        return most[-1] if len(most) >= mine + 2 else None

    def _evict(self, turn: Turn, error: ApiError) -> None:
        self._forget(turn)
        if not turn.admitted.done():
            turn.admitted.set_exception(error)

    def _forget(self, turn: Turn) -> None:
        turns = self._waiting.get(turn.client)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[turn.client]

    def _advance(self) -> None:
        while self._waiting:
            client = min(self._waiting, key=lambda name: self._running.get(name, 0))
            turn = self._waiting[client][0]
            if self.running + turn.cost > self.rows:
                break  # nobody overtakes: a large request must get its rows some day
            self._forget(turn)
            if rest := self._waiting.pop(client, None):  # served now: behind the others
                self._waiting[client] = rest
            if turn.admitted.done():  # it was cancelled meanwhile
                continue
            turn.began = time.monotonic()
            self._running[client] = self._running.get(client, 0) + turn.cost
            turn.admitted.set_result(None)
        self._on_change()
