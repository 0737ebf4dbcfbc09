"""One line a request, for people or as JSON; never a text, never a key. A full disk loses lines, not requests."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusiongemma.errors import ConfigError
from diffusiongemma.serve.errors import CLIENT_GONE
from diffusiongemma.serve.metrics import ServerMetrics

log = logging.getLogger("diffusiongemma.serve.access")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: no character of a client can forge a line


class Lines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        said = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if value is not None)
        return _escaped(super().formatMessage(record)) + (f" {said}" if said else "")


def _plain(value: Any) -> str:
    text = _escaped(str(value))
    return json.dumps(text) if " " in text else text


def _escaped(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class Careful(logging.StreamHandler[Any]):
    """A handler that counts what it cannot write, and tries the next line anew."""

    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost += 1


def set_up(as_json: bool, file: Path | None, metrics: ServerMetrics) -> Careful:
    """Send the package's and uvicorn's log lines to the file, or else to stderr."""
    stream = sys.stderr
    if file is not None:
        try:
            # Lines of a disk that was full are not kept for later: each is written at once, or lost.
            stream = file.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"cannot write the log file {file}: {error}") from None
    handler = Careful(stream)
    handler.setFormatter(JsonLines() if as_json else Lines())
    for name in ("diffusiongemma", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "diffusiongemma" else logging.WARNING)
    metrics.lost_log_lines.set_function(lambda: handler.lost)
    return handler


class AccessLog:
    """Gives each request its id, and writes its line when it is over."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = scope["request_id"] = f"req_{secrets.token_hex(10)}"
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            ended = scope.get("ended_as") or status or CLIENT_GONE
            seconds = time.perf_counter() - began
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(ended)).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            client = scope.get("client_name") or (scope["client"][0] if scope.get("client") else None)
            fields = {
                "request_id": request_id, "method": scope["method"], "path": scope["path"][:256], "status": ended,
                "seconds": round(seconds, 4), "client": client, **scope.get("log", {}),
            }  # fmt: skip
            log.info("request", extra={"fields": fields})
