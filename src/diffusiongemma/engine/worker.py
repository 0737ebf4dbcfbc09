"""One thread owns the model. Requests come through one queue; each gets a queue of its own back."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from diffusiongemma.engine.events import End, Event
from diffusiongemma.engine.scheduler import Scheduler
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.errors import DiffusionGemmaError

log = logging.getLogger(__name__)


class Handle:
    """One request as its caller sees it: iterate over its events, cancel it at any time."""

    def __init__(self, forward: Callable[[Event], None] | None = None, owner: object = None) -> None:
        self._owner = owner  # an engine is closed when nobody holds it; a request that runs holds its engine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._forward = forward or self._events.put
        self._broken = False
        self.sequence: Sequence | None = None
        self._wake: Callable[[], None] = lambda: None

    def emit(self, event: Event) -> None:
        """Called by the engine's thread. A receiver that raises ends its own request, not its neighbours'."""
        if isinstance(event, End):
            self._owner = None
        if self._broken:
            return
        try:
            self._forward(event)
        except Exception:
            log.exception("the receiver of a request's events failed; the request is cancelled")
            self._broken = True
            self.cancel()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, End):
                return

    def cancel(self) -> None:
        """Takes effect before the next step. The end event still comes."""
        if self.sequence is not None and self.sequence.phase != "ended":
            self.sequence.cancelled = True
            self._wake()


class Worker:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._inbox: queue.SimpleQueue[tuple[Sequence, Handle] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failures = 0  # steps that raised; their requests ended with an error

    def submit(self, sequence: Sequence, handle: Handle) -> None:
        with self._lock:
            if self._closed:
                raise DiffusionGemmaError("the engine is closed")
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="diffusiongemma-engine", daemon=True)
                self._thread.start()
            handle.sequence, handle._wake = sequence, lambda: self._inbox.put(None)
            self._inbox.put((sequence, handle))

    def close(self) -> None:
        """End what runs, refuse what is new, wait for the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while self._take(wait=not self._scheduler.busy):
                self._tick()
        finally:  # whatever happens, every request gets its end, those still in the queue included
            self._closed = True
            self._scheduler.abort("the engine was closed")
            with contextlib.suppress(queue.Empty):
                while True:
                    if (item := self._inbox.get_nowait()) is not None:
                        item[0].fail("the engine was closed")

    def _take(self, wait: bool) -> bool:
        """Move what has come in to the scheduler; block for the first if nothing else is to do. False: closed."""
        while not self._closed:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is not None:
                try:
                    self._scheduler.add(item[0])
                except DiffusionGemmaError as error:
                    item[0].fail(str(error))
                except Exception as error:
                    log.exception("a request could not be taken in")
                    item[0].fail(f"{type(error).__name__}: {error}")
        return False

    def _tick(self) -> None:
        try:
            self._scheduler.tick()
        except Exception as error:
            # The rows of this step may be half written, so all that ran is ended; the engine itself goes on.
            self.failures += 1
            log.exception("a step failed; its requests are ended")
            self._scheduler.abort(f"{type(error).__name__}: {error}")
