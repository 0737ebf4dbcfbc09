"""Errors as OpenAI's clients expect them: every one has the same body, whatever went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from diffusiongemma.errors import ConfigError, DiffusionGemmaError, LengthError
from diffusiongemma.serve.schema import Diffusion

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OURS = {"max_new_tokens": "max_tokens"}  # the engine's names for fields of the API
_FIELDS = frozenset("prompt stop seed logprobs candidates strategy strength".split())
CLIENT_GONE = 499  # as nginx has it: nobody is there to read the answer


class ApiError(HTTPException):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, dict(self.headers or {}))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def busy(seconds: float) -> ApiError:
    return ApiError(
        429, "the queue is full: try again later", code="queue_full", headers={"Retry-After": str(math.ceil(seconds))}
    )


def unavailable(message: str, code: str, seconds: int = 1) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(seconds)})


def engine_failed() -> ApiError:
    return unavailable("the engine failed under this request and was restarted: try again", "engine_failed")


def too_slow(seconds: float) -> ApiError:
    # Clients retry a 504 on their own; this one would take as long again.
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s: ask for fewer tokens",
        code="time_limit",
        headers={"x-should-retry": "false"},
    )


def from_engine(error: DiffusionGemmaError, words_of: Mapping[str, str] | None = None) -> ApiError:
    """A mistake that the engine found, with the field it is in where the message's first word tells.

    `words_of`: first words that are no names of fields, and the fields that they speak of.
    """
    message, words = str(error), str(error).split()
    if isinstance(error, ConfigError) and error.problems:
        message, words = "; ".join(error.problems), error.problems[0].split()
    word = words[0].rstrip(":") if words else ""
    param = (_OURS | dict(words_of or {})).get(word)
    if param is None:
        param = f"diffusion.{word}" if word in Diffusion.model_fields else word if word in _FIELDS else None
    for theirs, ours in _OURS.items():
        message = message.replace(theirs, ours)
    # As OpenAI calls it: clients shorten a conversation when they see it.
    return bad_request(message, param, "context_length_exceeded" if isinstance(error, LengthError) else None)


def from_validation(problems: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Pydantic's list as one error. A field of several kinds has an entry for each: that of the kind that was meant."""
    first = max(problems, key=lambda one: (not one["type"].endswith("_type"), (_path(one, body) or "").count(".")))
    param = _path(first, body)
    if first["type"] == "not_honoured":
        return bad_request(first["msg"], param, "not_honoured")
    if first["type"] == "extra_forbidden":
        return bad_request(f"there is no field {param}", param, "unknown_field")
    if first["type"] == "missing" and param is None:
        return bad_request("a JSON object is needed as the body")
    said = list(dict.fromkeys(p["msg"] for p in problems if _path(p, body) == param))
    what = f"{param}: " if param else ""
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    return bad_request(what + ", or ".join(said[:3]), param, code)


def _path(problem: Mapping[str, Any], body: Any) -> str | None:
    """The field's path. Where a field may be of several kinds, pydantic's has the kind's name in it: left out."""
    at, kept = body, list[str]()
    places = list(problem["loc"])[1:]
    for i, part in enumerate(places):
        if isinstance(at, list) and isinstance(part, int) and part < len(at):
            kept.append(str(part))
            at = at[part]
        elif isinstance(at, dict) and (part in at or (i == len(places) - 1 and problem["type"] == "missing")):
            kept.append(str(part))
            at = at.get(part)
    if problem["type"] == "not_honoured":
        kept.append(str(problem["ctx"]["field"]))
    return ".".join(kept)[:256] or None
