"""Thinking and tool calls that a model writes of its own accord, as the unchanged client gets them.

The network's events are canned here: no small model thinks. All from the engine's events on is the server itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai import OpenAI

from diffusiongemma.engine import Commit, End, Event, Metrics, Request
from diffusiongemma.engine.worker import Handle
from serve.live import Live

REPLY = '<|channel>thought\nWhere is it?\n<channel|>Let me look.<|tool_call>call:look{at:<|"|>sky<|"|>}<tool_call|>'
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASK: list[Any] = [{"role": "user", "content": "Is it blue?"}]


@pytest.fixture
def prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every request is answered by REPLY in two blocks -> the prompts that came"""
    engine, came = live.engine, list[tuple[int, ...]]()
    ids = engine.tokenizer.encode(REPLY, allow_special=True)

    def submit_group(requests: Sequence[Request], forward: Callable[[int, Event], None]) -> list[Handle]:
        for i, request in enumerate(requests):
            came.append(request.prompt)
            for block, part in enumerate((ids[:9], ids[9:])):
                forward(i, Commit(block, part, engine.tokenizer.decode(part)))
            forward(i, End("stop", Metrics(new_tokens=len(ids), steps=2)))
        return [Handle(None) for _ in requests]

    monkeypatch.setattr(engine, "submit_group", submit_group)
    return came


def test_thoughts_and_calls_are_told_apart_from_the_answer(live: Live, prompts: list[tuple[int, ...]]) -> None:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": live.model, "messages": ASK, "tools": [TOOL], "reasoning_effort": "high"}
        reply = client.chat.completions.create(**options)
        message = reply.choices[0].message
        assert message.content == "Let me look."
        assert message.reasoning_content == "Where is it?"  # type: ignore[attr-defined]
        (call,) = message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "sky"}')  # type: ignore[union-attr]
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        thought = reply.usage.completion_tokens_details.reasoning_tokens
        assert thought is not None
        assert 0 < thought < reply.usage.completion_tokens

        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "Let me look."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Where is it?"
        (streamed,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert (streamed.index, streamed.function.name) == (0, "look")

        client.chat.completions.create(**options | {"reasoning_effort": "none"})
    think = live.engine.tokenizer.special["<|think|>"]
    assert [think in prompt for prompt in prompts] == [True, True, False]
