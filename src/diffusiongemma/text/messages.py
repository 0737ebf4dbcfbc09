"""Checking a conversation before a template sees it, and copying it into plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diffusiongemma.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "file")

Message = Mapping[str, Any]


def plain(value: Any, what: str) -> Any:
    """A copy of `value` in JSON types only: an object with methods has no business in a template."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} must be plain JSON values: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as plain data; an InputError names the first message that cannot be used."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    if not messages:
        raise InputError("the conversation is empty; give at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {index} must be an object with role and content, not {type(message).__name__}")
        copy = plain(dict(message), f"message {index}")
        _check_role(copy, index)
        _check_content(copy, index)
        _check_tool_calls(copy, index)
        checked.append(_with_reasoning(copy))
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InputError("tools must be a list of function declarations")
    copies: list[dict[str, Any]] = plain(list(tools), "tools")
    for index, tool in enumerate(copies):
        if _function(tool) is None:
            raise InputError(f"tool {index} must be a function declaration with a name")
    return copies


def _function(entry: Any) -> dict[str, Any] | None:
    """The function of a declaration or a call, with or without the wrapping object of OpenAI's format."""
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _check_role(message: dict[str, Any], index: int) -> None:
    if message.get("role") not in ROLES:
        raise InputError(f"message {index} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}")


def _check_content(message: dict[str, Any], index: int) -> None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, str) or (role == "tool" and isinstance(content, dict)):
        return
    if content is None and (role in ("assistant", "model")):
        if message.get("tool_calls") or _reasoning(message) is not None:
            return
    elif isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _MEDIA:
                raise InputError(
                    f"message {index} has a part of type {kind!r}; images come later, this version reads text"
                )
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InputError(f'message {index} must have parts such as {{"type": "text", "text": "Hello"}}')
        return
    raise InputError(f"message {index} ({role}) must have content: a string or a list of text parts")


def _check_tool_calls(message: dict[str, Any], index: int) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    for call in calls if isinstance(calls, list) else [None]:
        if (function := _function(call)) is None:
            raise InputError(f"message {index} must have tool_calls that each hold a function with a name")
        if not isinstance(function.get("arguments"), dict | str | None):
            raise InputError(f"message {index}: the arguments of {function['name']} must be an object")


def _reasoning(message: dict[str, Any]) -> Any:
    return next((message[key] for key in _REASONING if message.get(key) is not None), None)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read the thinking of a message under one of two names; give it under both, as Transformers does."""
    if (found := _reasoning(message)) is None:
        return message
    if not isinstance(found, str):
        raise InputError("the thinking of a message must be a string")
    return {"thinking": found, **message, "reasoning_content": found}
