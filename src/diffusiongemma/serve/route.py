"""What all endpoints share: how a body is read, and which answers the OpenAPI document promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from diffusiongemma.serve.errors import bad_request
from diffusiongemma.serve.replies import ErrorBody


class JsonRequest(Request):
    async def json(self) -> Any:
        """Strict JSON: bounded nesting, whole characters, no NaN."""
        if not hasattr(self, "_json"):
            try:
                self._json = from_json(await self.body(), allow_inf_nan=False)
            except ValueError as error:
                raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        return self._json


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return read_strictly


_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}}
_MEANINGS = {
    400: "The request is wrong, or asks for what is not honoured.",
    401: "No valid API key.",
    403: "A foreign origin or host.",
    404: "No such path or model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON by its Content-Type.",
    429: "The queue is full.",
    500: "A mistake of the server.",
    503: "Loading, shutting down, or the engine failed under this request.",
    504: "The request took longer than its time limit.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} | ({"headers": _RETRY} if status in (429, 503) else {})
    for status, text in _MEANINGS.items()
}
GET_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: RESPONSES[status] for status in (400, 401, 403, 404, 500, 503)
}
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream: true` as server-sent events.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}
