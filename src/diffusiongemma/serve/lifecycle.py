"""The server's state: which model is served, whether it may take requests, and how it starts and ends."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from diffusiongemma import __version__
from diffusiongemma.engine import Engine, Limits, prepare
from diffusiongemma.engine.worker import Scope
from diffusiongemma.model.packed import packings
from diffusiongemma.serve.errors import ApiError, bad_request, unavailable
from diffusiongemma.serve.limits import Gate
from diffusiongemma.serve.metrics import ServerMetrics
from diffusiongemma.serve.replies import Failure, Health
from diffusiongemma.serve.schema import Common
from diffusiongemma.serve.settings import Settings
from diffusiongemma.serve.stream import EventStream
from diffusiongemma.serve.work import Job

log = logging.getLogger(__name__)
FAILING = 3  # steps that failed in a row: the next will, too
Status = Literal["ok", "loading", "failing", "draining"]


class Answer(Protocol):
    async def whole(self) -> BaseModel: ...

    def events(self) -> AsyncIterator[bytes]: ...


class ServerState:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.started = time.time()
        self.draining = False
        self.load_error: BaseException | None = None
        self.fingerprint = ""
        self._engine: Engine | None = None
        self._gate = Gate(1, settings.queue)
        self._jobs: set[Job] = set()
        self._executor: ThreadPoolExecutor | None = None

    # ---- the engine --------------------------------------------------------------------------------------------------

    def load(self) -> Engine:
        """Takes as long as the model does; run it on a thread."""
        from diffusiongemma.checkpoint import pick_device

        given = self.settings
        batch = given.batch or (4 if pick_device(given.device).type == "cpu" else 16)
        limits = Limits(batch, given.cache, packed=given.packed)
        engine = Engine.load(given.model, given.device, given.dtype, limits=limits)
        prepare(engine)
        engine.tokenizer.encode("ready")
        return engine

    def serve(self, engine: Engine) -> None:
        """From now on requests are taken."""
        rows = engine.scheduler.limits.max_rows
        self._executor = ThreadPoolExecutor(rows, "diffusiongemma-stream")
        self._gate = Gate(rows, self.settings.queue, self._count)
        self._engine = engine
        identity = f"{__version__} {engine.model.config} {engine.params} {engine.model.dtype} {packings(engine.model)}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
        self.metrics.watch(engine)
        if self.draining:
            self.drain()

    @property
    def engine(self) -> Engine:
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self._engine is None:
            raise unavailable("the model is being loaded", "loading", 2)
        return self._engine

    @property
    def executor(self) -> ThreadPoolExecutor:
        assert self._executor is not None
        return self._executor

    @property
    def model_name(self) -> str:
        """As clients call it. The path of a folder is nobody's business."""
        given = self.settings
        if given.name is not None:
            return given.name
        folder = Path(given.model).expanduser()
        return folder.resolve().name if folder.is_dir() else given.model

    def engine_for(self, model: str) -> Engine:
        engine = self.engine
        if model != self.model_name:
            raise ApiError(
                404, f"there is no model {model!r}, only {self.model_name!r}", param="model", code="model_not_found"
            )
        return engine

    # ---- requests ----------------------------------------------------------------------------------------------------

    def begin(self, http: HttpRequest, body: Common) -> Engine:
        """Refuse at once what would be refused after its prompt was read."""
        engine = self.engine_for(body.model)
        if body.user is not None:
            http.scope["log"] = {"user": body.user}
        if body.stream_options and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        self._gate.check(client_of(http))
        return engine

    async def job(self, http: HttpRequest, cost: int, scope: Scope | None = None) -> Job:
        """A place at the engine; waits for it. `respond` ends the job. `scope`: of a stream."""
        job = Job(http, self._gate, client_of(http), self.settings.request_seconds, scope)
        self._jobs.add(job)
        try:
            await job.enter(cost)
        except BaseException:
            self.end(job)
            raise
        return job

    async def respond(self, job: Job, start: Callable[[], None], answer: Answer, stream: bool) -> Response:
        """Start the job, and answer whole or as a stream; the job ends with it, whatever happens."""
        try:
            start()
            if stream:
                return await EventStream.open(answer.events(), lambda: self.end(job))
            whole = JSONResponse((await answer.whole()).model_dump())
        except BaseException:
            self.end(job)
            raise
        self.end(job)
        return whole

    def end(self, job: Job) -> None:
        job.close()
        self._jobs.discard(job)

    def _count(self) -> None:
        self.metrics.running.set(self._gate.running)
        self.metrics.waiting.set(self._gate.waiting)

    # ---- health ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        if self.draining:
            return "draining"
        if self._engine is None:
            return "loading"
        return "failing" if self._engine.worker.failed_in_a_row >= FAILING else "ok"

    def health(self) -> Health:
        worker = self._engine.worker if self._engine else None
        last = worker.last_failure if worker else None
        # What an error says may hold what a request said: its kind alone is told.
        failure = last and Failure(error=last[1].partition(":")[0], seconds_ago=round(time.monotonic() - last[0], 3))
        return Health(
            status=self.status,
            version=__version__,
            uptime_seconds=round(time.time() - self.started, 3),
            running=self._gate.running,
            waiting=self._gate.waiting,
            engine_failures=worker.failures if worker else 0,
            last_failure=failure or None,
        )

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse what is new and what waits; what runs may finish, within the time of grace."""
        if not self.draining:
            asyncio.get_running_loop().call_later(self.settings.grace, self.cut)
        self.draining = True
        self._gate.close(unavailable("the server is shutting down", "shutting_down"))

    def cut(self) -> None:
        if self._jobs:
            log.warning("%d requests were still running when the time of grace ended", len(self._jobs))
        for job in list(self._jobs):
            job.stop(unavailable("the server is shutting down", "shutting_down"))

    def close(self) -> None:
        """Blocks until the engine's thread has ended."""
        if self._engine is not None:
            self._engine.close()
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def client_of(http: HttpRequest) -> str:
    """Whom a request belongs to: the key that it came with, or else its address."""
    return str(http.scope.get("client_name") or (http.client.host if http.client else "local"))


def server_of(http: HttpRequest) -> ServerState:
    state: ServerState = http.app.state.server
    return state
