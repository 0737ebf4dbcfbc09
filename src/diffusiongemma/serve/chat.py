"""`/v1/chat/completions`: a conversation in, one or several replies out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diffusiongemma.engine import Commit, Draft, End, Engine, Metrics, TokenLogprob
from diffusiongemma.serve import replies
from diffusiongemma.serve.conversation import plan
from diffusiongemma.serve.lifecycle import ServerState, server_of
from diffusiongemma.serve.logprobs import chat_logprobs
from diffusiongemma.serve.reader import Delta, ReplyReader
from diffusiongemma.serve.route import RESPONSES, STREAM, JsonRoute
from diffusiongemma.serve.schema import ChatRequest
from diffusiongemma.serve.stream import ALIVE, Head, draft_event, new_id
from diffusiongemma.serve.usage import usage_of
from diffusiongemma.serve.work import Job
from diffusiongemma.text import ToolCall

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=replies.ChatCompletion,
    responses=RESPONSES | STREAM,
    summary="Answer a conversation",
)
async def chat(body: ChatRequest, http: HttpRequest) -> Response:
    server = server_of(http)
    engine = server.begin(http, body)
    requests = await run_in_threadpool(plan, engine, body, server.settings.max_tokens)
    job = await server.job(http, len(requests))
    answer = Answer(engine, body, server, job, len(requests))
    return await server.respond(job, lambda: job.run(engine, [requests]), answer, bool(body.stream))


@dataclass
class Choice:
    """What is known of one reply."""

    reader: ReplyReader
    content: str = ""
    reasoning: str = ""
    calls: int = 0
    finish_reason: replies.FinishReason | None = None
    metrics: Metrics | None = None

    def take(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.calls += len(delta.calls)


class Answer:
    def __init__(self, engine: Engine, body: ChatRequest, server: ServerState, job: Job, count: int) -> None:
        self._tokenizer, self._body, self._server, self._job = engine.tokenizer, body, server, job
        self._steps = (body.diffusion and body.diffusion.steps) or engine.params.steps
        self._choices = [Choice(ReplyReader(engine.tokenizer)) for _ in range(count)]
        self._head = Head(new_id("chatcmpl"), "chat.completion.chunk", int(time.time()), server.model_name)
        self._fingerprint = server.fingerprint

    def _take(self, choice: Choice, event: Commit | End) -> Delta:
        """What became certain of a reply."""
        if isinstance(event, Commit):
            delta = choice.reader.push(event)
            choice.take(delta)
            return delta
        delta = choice.reader.finish()
        choice.take(delta)
        choice.metrics = event.metrics
        reason: replies.FinishReason = "length" if event.finish_reason == "length" else "stop"
        choice.finish_reason = "tool_calls" if choice.calls and reason == "stop" else reason
        return delta

    async def whole(self) -> replies.ChatCompletion:
        found: list[tuple[list[ToolCall], list[TokenLogprob]]] = [([], []) for _ in self._choices]
        async for index, event in self._job.events():
            assert not isinstance(event, Draft)
            delta = self._take(self._choices[index], event)
            found[index][0].extend(delta.calls)
            found[index][1].extend(delta.logprobs)
        choices = []
        for index, (choice, (calls, scored)) in enumerate(zip(self._choices, found, strict=True)):
            assert choice.finish_reason is not None
            message = replies.ChatMessage(
                content=choice.content if choice.content or not calls else None,
                reasoning_content=choice.reasoning or None,
                tool_calls=[tool_call(call) for call in calls] or None,
            )
            logprobs = chat_logprobs(self._tokenizer, scored) if self._body.logprobs else None
            choices.append(
                replies.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=choice.finish_reason)
            )
        head = self._head
        return replies.ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=self._usage(),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The same as server-sent events."""
        begun: set[int] = set()
        async for found in self._job.events_and_beats():
            if found is None:
                yield ALIVE
                continue
            index, event = found
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""})
            if isinstance(event, Draft):
                skipped = self._job.skipped.pop(index, 0)
                yield draft_event(self._head, self._tokenizer, index, event, self._steps, skipped)
                continue
            choice = self._choices[index]
            if delta := self._take(choice, event):
                yield self._chunk(index, self._fields(delta, choice), delta.logprobs)
            if choice.finish_reason is not None:
                yield self._chunk(index, {}, finish_reason=choice.finish_reason)
        usage = self._usage()
        if self._body.usage_wanted:
            yield self._head.chunk(system_fingerprint=self._fingerprint, choices=[], usage=usage.model_dump())

    def _fields(self, delta: Delta, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            first = choice.calls - len(delta.calls)
            fields["tool_calls"] = [
                {"index": first + i, **tool_call(call).model_dump()} for i, call in enumerate(delta.calls)
            ]
        return fields

    def _chunk(
        self,
        index: int,
        fields: dict[str, Any],
        scored: list[TokenLogprob] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        logprobs = chat_logprobs(self._tokenizer, scored).model_dump() if scored else None
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish_reason}
        extra = {"usage": None} if self._body.usage_wanted else {}
        return self._head.chunk(system_fingerprint=self._fingerprint, choices=[choice], **extra)

    def _usage(self) -> replies.Usage:
        parts = [choice.metrics for choice in self._choices if choice.metrics is not None]
        thought = sum(choice.reader.thought_tokens for choice in self._choices)
        usage = usage_of(parts, self._job.waited, thought)
        self._server.metrics.answered(usage)
        return usage


def tool_call(call: ToolCall) -> replies.ToolCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = replies.CalledFunction(name=call.name, arguments=arguments)
    return replies.ToolCall(id=new_id("call"), function=function)
