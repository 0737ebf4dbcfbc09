"""From a chat request to the engine's requests, one a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from diffusiongemma.engine import Engine, Request
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.serve.errors import bad_request, from_engine
from diffusiongemma.serve.models import can_think, takes_tools
from diffusiongemma.serve.reader import OPEN_CALL
from diffusiongemma.serve.sampling import count_on, sampling_options, stop_texts, token_limit
from diffusiongemma.serve.schema import ChatRequest, Message, NamedTool
from diffusiongemma.text import Tokenizer


def plan(engine: Engine, body: ChatRequest, limit: int) -> list[Request]:
    """The choices as checked requests of the engine."""
    if engine.template is None:
        raise bad_request("this model has no chat template: use /v1/completions", "messages")
    options = sampling_options(engine, body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens are two names for one limit", "max_tokens")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    options["max_new_tokens"] = token_limit(getattr(body, name), engine.params.max_new_tokens, limit, name)
    options["stop"] = stop_texts(body.stop)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    thinking = body.reasoning_effort == "high"
    if thinking and not can_think(engine):
        raise bad_request("this model does not think: its chat template has no place for it", "reasoning_effort")
    if body.tools and not takes_tools(engine):
        raise bad_request("this model takes no tools: its chat template has no place for them", "tools")
    forbidden, pins = _tool_choice(engine.tokenizer, body, thinking)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    messages = [plain_message(message, i) for i, message in enumerate(body.messages)]
    try:
        request = engine.request(
            messages,
            thinking=thinking or None,
            tools=tools if tools and body.tool_choice != "none" else None,
            drafts=body.drafts,
            pins=pins,
            **options,
        )
        request = replace(request, forbidden=forbidden)
        engine.check(request)
    except DiffusionGemmaError as error:
        raise from_engine(error, {"message": "messages"}) from None
    seeds = [count_on(options["seed"], i) for i in range(body.n or 1)]
    return [replace(request, params=replace(request.params, seed=seed)) for seed in seeds]


def _tool_choice(tokenizer: Tokenizer, body: ChatRequest, thinking: bool) -> tuple[tuple[int, ...], dict[int, int]]:
    """-> tokens that may not be written, and what the answer must begin with"""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        known = OPEN_CALL in tokenizer.special
        return ((tokenizer.special[OPEN_CALL],) if choice == "none" and known else ()), {}
    if not body.tools:
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")
    if thinking:
        raise bad_request("a forced call leaves no room for thinking: leave reasoning_effort out", "tool_choice")
    names = [tool.function.name for tool in body.tools]
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    if wanted is not None and wanted not in names:
        raise bad_request(f"there is no tool {wanted!r} among tools", "tool_choice")
    if wanted is None and len(names) == 1:
        wanted = names[0]
    begin = "call:" if wanted is None else f"call:{wanted}{{"  # of several, the model writes the name
    return (), dict(enumerate([tokenizer.special[OPEN_CALL], *tokenizer.encode(begin)]))


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """A message as the chat template wants it: content as one text, arguments as values."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    for i, call in enumerate(message.tool_calls or []):
        try:
            arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
            if not isinstance(arguments, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            param = f"messages.{index}.tool_calls.{i}.function.arguments"
            raise bad_request(f"{param} must be a JSON object as a string: {error}", param) from None
        plain["tool_calls"][i]["function"]["arguments"] = arguments
    return plain
