"""One thread owns the model. Requests come through one queue; each gets a queue of its own back."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from diffusiongemma.engine.events import End, Event
from diffusiongemma.engine.scheduler import Scheduler
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.ops.kernels import current

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

    @property
    def begun(self) -> bool:
        """Does it have its row?"""
        return self.sequence is not None and self.sequence.phase not in ("waiting", "join")

    def cancel(self) -> None:
        """Takes effect before the next step. The end event still comes."""
        if self.sequence is not None and self.sequence.phase != "ended":
            self.sequence.cancelled = True
            self._wake()


class Scope:
    """Requests that are cancelled together, those that are handed in after that included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[Handle] = []
        self.cancelled = False

    def add(self, handle: Handle) -> None:
        with self._lock:
            self._handles.append(handle)
            late = self.cancelled
        if late:
            handle.cancel()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()


class Worker:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._inbox: queue.SimpleQueue[tuple[Sequence, Handle] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failures = 0  # steps that raised, and deaths of the thread; their requests ended with an error
        self.failed_in_a_row = 0  # … since the last step that went well
        self.last_failure: tuple[float, str] | None = None  # when, by time.monotonic(), and what

    def submit(self, sequence: Sequence, handle: Handle) -> None:
        with self._lock:
            if self._closed:
                raise DiffusionGemmaError("the engine is closed")
            if self._thread is None:
                self._start()
            handle.sequence, handle._wake = sequence, lambda: self._inbox.put(None)
            self._inbox.put((sequence, handle))

    def _start(self) -> None:
        # As many as who asks has: a new thread would take those of another engine's pass (`ops/threads.py`).
        many = torch.get_num_threads()
        thread = threading.Thread(target=self._run, args=(many,), name="diffusiongemma-engine", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """End what runs, refuse what is new, wait for the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        message = "the engine was closed"
        try:
            with current(self._scheduler.runner.device):
                while self._take(wait=not self._scheduler.busy):
                    self._tick()
        except BaseException as error:  # even the thread's own end: another takes its place
            message = self._note(error)
            log.exception("the engine's thread died; its requests are ended")
        finally:  # whatever happens, every request gets its end
            self._scheduler.abort(message)
            with self._lock:
                self._thread, left = None, self._drain() if self._closed else []
                if not self._closed and not self._inbox.empty():
                    self._start()  # who was only in the queue has not suffered
            for sequence in left:
                sequence.fail(message)

    def _drain(self) -> list[Sequence]:
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._inbox.get_nowait()) is not None:
                    left.append(item[0])
        return left

    def _note(self, error: BaseException) -> str:
        self.failures += 1
        self.failed_in_a_row += 1
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        self.last_failure = time.monotonic(), message
        return message

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
                    item[0].fail(str(error), refused=True)
                except Exception as error:
                    log.exception("a request could not be taken in")
                    item[0].fail(f"{type(error).__name__}: {error}")
        return False

    def _tick(self) -> None:
        try:
            self._scheduler.tick()
            self.failed_in_a_row = 0
        except Exception as error:
            # The rows of this step may be half written, so all that ran is ended; the engine itself goes on.
            message = self._note(error)
            log.exception("a step failed; its requests are ended")
            self._scheduler.abort(message)
