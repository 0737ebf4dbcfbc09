"""One accepted request while it runs: its place at the engine, its events, its time limit, its client.

Rows are given back when the engine is done, not when the client has read the answer, so a slow reader holds nothing
but its own buffer; of drafts that it does not take, the oldest are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from diffusiongemma.engine import Draft, End, Engine, Event, Metrics, Request
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import ConfigError, DiffusionGemmaError, InputError
from diffusiongemma.serve.errors import CLIENT_GONE, ApiError, engine_failed, from_engine, too_slow, unavailable
from diffusiongemma.serve.limits import Gate, Turn

log = logging.getLogger(__name__)
MAX_DRAFTS = 64  # that wait for a reader
BEAT = 10.0  # seconds of silence after which a stream says that it is alive
T = TypeVar("T")
Stream = Generator[Event, None, Any]


class Job:
    """Make it, `enter` the queue, `run`, iterate over `events`, and `close` it, whatever happens."""

    def __init__(self, http: HttpRequest, gate: Gate, client: str, seconds: float, scope: Scope | None = None) -> None:
        self._gate, self._client, self._seconds = gate, client, seconds
        self._loop = asyncio.get_running_loop()
        self._turn: Turn | None = None
        self._inbox: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._waiting_drafts = 0
        self._live = 0  # streams of events that have not ended
        self.skipped: dict[int, int] = {}  # drafts dropped, by choice, since the last that was told
        self.scope = scope or Scope()
        self.result: Any = None  # what a stream returned
        self._failure: ApiError | None = None
        self._deadline = self._loop.call_later(seconds, self.stop, too_slow(seconds))
        self._watch = asyncio.create_task(self._watch_client(http))

    async def enter(self, cost: int) -> None:
        self._turn = await self._unless_stopped(self._gate.enter(self._client, cost))

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return 0.0 if self._turn is None else self._turn.waited

    # ---- starting ----------------------------------------------------------------------------------------------------

    def run(self, engine: Engine, groups: Sequence[Sequence[Request]]) -> None:
        """Hand requests in. A group has the same prompt; choices are numbered through all groups."""
        for group in groups:
            try:
                handles = engine.submit_group(group, self._forward(self._live))
            except DiffusionGemmaError:  # all was checked before: it was closed meanwhile
                raise unavailable("the engine is closed", "shutting_down") from None
            self._live += len(handles)  # their events cannot come before this function returns
            for handle in handles:
                self.scope.add(handle)

    def run_stream(self, executor: Executor, stream: Stream) -> None:
        """Follow a stream of the engine on a thread; its end comes when it has returned its result."""
        self._live = 1
        executor.submit(self._follow, stream)

    def _follow(self, stream: Stream) -> None:
        end = End("error", Metrics(), "the stream broke off")
        try:
            while True:
                event = next(stream)
                if isinstance(event, End):
                    end = event
                else:
                    self._post(0, event)
        except StopIteration as stop:
            self.result = stop.value
        except (InputError, ConfigError) as error:
            end = End("error", Metrics(), str(error), refused=True)
        except Exception as error:
            log.exception("a stream of the engine broke off")
            end = End("error", Metrics(), f"{type(error).__name__}: {error}")
        finally:
            self._post(0, end)

    def _forward(self, first: int) -> Callable[[int, Event], None]:
        return lambda i, event: self._post(first + i, event)

    def _post(self, index: int, event: Event) -> None:
        """From the engine's thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if isinstance(event, End):
            self._live -= 1
            if not self._live:
                self._leave()
        if isinstance(event, Draft):
            if self._waiting_drafts >= MAX_DRAFTS:
                self._drop_oldest_draft()
            self._waiting_drafts += 1
        self._inbox.append((index, event))
        self._arrived.set()

    def _drop_oldest_draft(self) -> None:
        at = next(at for at, (_, event) in enumerate(self._inbox) if isinstance(event, Draft))
        index = self._inbox[at][0]
        del self._inbox[at]
        self._waiting_drafts -= 1
        self.skipped[index] = self.skipped.get(index, 0) + 1

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Every event with the number of its choice, until all have ended. What went wrong is raised."""
        async for found in self.events_and_beats(beats=False):
            assert found is not None
            yield found

    async def events_and_beats(self, beats: bool = True) -> AsyncIterator[tuple[int, Event] | None]:
        """The same, and None whenever nothing came for a while: a stream says then that it is alive."""
        open_ends = self._live
        while open_ends or self._inbox:
            while not self._inbox:
                if self._failure is not None:
                    raise self._failure
                self._arrived.clear()
                try:
                    await asyncio.wait_for(self._arrived.wait(), BEAT if beats else None)
                except TimeoutError:
                    yield None
            index, event = self._inbox.popleft()
            if isinstance(event, Draft):
                self._waiting_drafts -= 1
            if isinstance(event, End):
                open_ends -= 1
                if event.finish_reason == "error":
                    raise refused(str(event.error)) if event.refused else self._failure or engine_failed()
                if event.finish_reason == "cancelled":
                    raise self._failure or engine_failed()
            if self._failure is not None:
                raise self._failure
            yield index, event

    # ---- ending ------------------------------------------------------------------------------------------------------

    def stop(self, error: ApiError) -> None:
        """The first reason counts. The engine stops before its next step."""
        if self._failure is None:
            self._failure = error
            self.scope.cancel()
            self._arrived.set()

    def close(self) -> None:
        """Nobody reads any more: what still runs is stopped."""
        self._deadline.cancel()
        self._watch.cancel()
        self.scope.cancel()
        if not self._live:  # otherwise the last end gives the rows back
            self._leave()

    def _leave(self) -> None:
        if self._turn is not None:
            self._gate.leave(self._turn)

    async def _watch_client(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.stop(ApiError(CLIENT_GONE, "the client went away"))

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """Wait for it, but no longer than the client and the time limit do."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                if self._failure is not None:
                    raise self._failure
                self._arrived.clear()
                waker = asyncio.create_task(self._arrived.wait())
                await asyncio.wait({task, waker}, return_when=asyncio.FIRST_COMPLETED)
                waker.cancel()
            return task.result()
        finally:
            task.cancel()


def refused(message: str) -> ApiError:
    """What came out as a mistake of the request only when its turn had come, such as a hole that has no room."""
    return from_engine(InputError(message), {"a": "template"})
