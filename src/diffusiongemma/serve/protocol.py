"""HTTP connections with limits in time and number, on top of uvicorn's protocol.

A request must arrive whole in time, a reader must read, and there are only so many connections. What is no HTTP at all
is answered with the same error body as everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusiongemma.serve.errors import ApiError, unavailable
from diffusiongemma.serve.settings import Settings


class Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """A timer that runs goes on as it is."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._then()


class LimitedProtocol(H11Protocol):
    settings: Settings  # given by `limited`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival = Timer(self.loop, self.settings.receive_seconds, self._too_late)
        self._stall = Timer(self.loop, self.settings.stall_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.connections:
            self._refuse(unavailable("too many connections", "too_many_connections"))
        else:
            self._arrival.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.stop()
        self._stall.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            self._arrival.start()
        super().data_received(data)
        # A request that is whole, or that was answered before it was: nothing to wait for.
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._arrival.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP request, or its headers are too large", code="bad_http"))

    def _too_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "the request did not arrive in time", code="too_slow"))
        else:
            self.transport.abort() if self.conn.their_state is h11.SEND_BODY else self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(error.body)
            phrase = HTTPStatus(error.status_code).phrase
            lines = [f"HTTP/1.1 {error.status_code} {phrase}", "Content-Type: application/json", "Connection: close"]
            lines += [f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in (error.headers or {}).items())]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def limited(settings: Settings) -> type[LimitedProtocol]:
    """uvicorn makes the protocol objects itself, so the settings come with the class."""
    return type("Protocol", (LimitedProtocol,), {"settings": settings})
