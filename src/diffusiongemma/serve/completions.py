"""`/v1/completions`: continue a text, or write what belongs between two."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diffusiongemma.engine import Commit, Draft, Engine, Metrics, Request, TokenLogprob
from diffusiongemma.engine.infill import infill_stream
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.serve import replies
from diffusiongemma.serve.errors import bad_request, from_engine
from diffusiongemma.serve.lifecycle import ServerState, server_of
from diffusiongemma.serve.logprobs import text_logprobs
from diffusiongemma.serve.route import RESPONSES, STREAM, JsonRoute
from diffusiongemma.serve.sampling import count_on, rows_of_holes, sampling_options, stop_texts, token_limit
from diffusiongemma.serve.schema import MAX_CHOICES, CompletionRequest
from diffusiongemma.serve.stream import ALIVE, Head, draft_event, new_id
from diffusiongemma.serve.usage import usage_of
from diffusiongemma.serve.work import Job, Stream

router = APIRouter(route_class=JsonRoute)
MIDDLE_TOKENS = 64  # of a middle, if the request does not say


@router.post(
    "/v1/completions",
    response_model=replies.Completion,
    responses=RESPONSES | STREAM,
    summary="Continue a text, or fill in its middle",
)
async def complete(body: CompletionRequest, http: HttpRequest) -> Response:
    server = server_of(http)
    engine = server.begin(http, body)
    limit = server.settings.max_tokens
    if body.suffix is None:
        groups = await run_in_threadpool(plan, engine, body, limit)
        job = await server.job(http, sum(map(len, groups)))
        answer = Answer(engine, body, server, job, sum(map(len, groups)), len(groups))
        return await server.respond(job, lambda: job.run(engine, groups), answer, bool(body.stream))
    scope = Scope()
    stream = await run_in_threadpool(plan_middle, engine, body, limit, scope)
    job = await server.job(http, rows_of_holes(engine, body), scope)
    answer = Answer(engine, body, server, job, 1, 1)
    return await server.respond(job, lambda: job.run_stream(server.executor, stream), answer, bool(body.stream))


# ---- asking ----------------------------------------------------------------------------------------------------------


def plan(engine: Engine, body: CompletionRequest, limit: int) -> list[list[Request]]:
    """For each prompt its choices."""
    options = sampling_options(engine, body)
    options["max_new_tokens"] = token_limit(body.max_tokens, engine.params.max_new_tokens, limit)
    options["stop"] = stop_texts(body.stop)
    options["logprobs"] = body.logprobs
    prompts = _prompts(body.prompt)
    count = body.n or 1
    if len(prompts) * count > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n {count} are more than {MAX_CHOICES} choices", "n")
    groups = []
    for i, prompt in enumerate(prompts):
        try:
            request = engine.request(prompt, raw=isinstance(prompt, str), drafts=body.drafts, **options)
            engine.check(request)
        except DiffusionGemmaError as error:
            raise from_engine(error, {"token": "prompt"}) from None
        seeds = [count_on(options["seed"], i * count + j) for j in range(count)]
        groups.append([replace(request, params=replace(request.params, seed=seed)) for seed in seeds])
    return groups


def _prompts(prompt: Any) -> list[Any]:
    """A list of token ids is one prompt; a list of texts, or of lists, is several."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def plan_middle(engine: Engine, body: CompletionRequest, limit: int, scope: Scope) -> Stream:
    if not isinstance(body.prompt, str):
        raise bad_request("with suffix, prompt must be one text", "prompt")
    for name in ("stop", "logprobs"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} has no effect on a middle: leave it out", name)
    if body.n not in (None, 1):
        raise bad_request("with suffix there is one choice; /v1/canvas/infill has candidates", "n")
    options = sampling_options(engine, body)
    options["max_new_tokens"] = token_limit(body.max_tokens, MIDDLE_TOKENS, limit)
    try:
        return infill_stream(engine, body.prompt, body.suffix or "", drafts=body.drafts, scope=scope, **options)
    except DiffusionGemmaError as error:
        raise from_engine(error) from None


# ---- answering -------------------------------------------------------------------------------------------------------


@dataclass
class Choice:
    text: str = ""
    scored: list[TokenLogprob] = field(default_factory=list)
    finish_reason: replies.FinishReason | None = None
    metrics: Metrics | None = None


class Answer:
    def __init__(
        self, engine: Engine, body: CompletionRequest, server: ServerState, job: Job, choices: int, prompts: int
    ) -> None:
        self._tokenizer, self._body, self._server, self._job = engine.tokenizer, body, server, job
        self._steps = (body.diffusion and body.diffusion.steps) or engine.params.steps
        self._choices, self._prompts = [Choice() for _ in range(choices)], prompts
        self._head = Head(new_id("cmpl"), "text_completion", int(time.time()), server.model_name)
        self._fingerprint = server.fingerprint

    async def whole(self) -> replies.Completion:
        async for index, event in self._job.events():
            choice = self._choices[index]
            if isinstance(event, Commit):
                choice.text += event.text
                choice.scored += event.logprobs or []
            elif not isinstance(event, Draft):
                choice.metrics = event.metrics
                choice.finish_reason = "length" if event.finish_reason == "length" else "stop"
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason is not None
            logprobs = None if self._body.logprobs is None else text_logprobs(self._tokenizer, choice.scored)
            choices.append(
                replies.TextChoice(index=index, text=choice.text, logprobs=logprobs, finish_reason=choice.finish_reason)
            )
        return replies.Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=self._usage(),
        )

    async def events(self) -> AsyncIterator[bytes]:
        async for found in self._job.events_and_beats():
            if found is None:
                yield ALIVE
                continue
            index, event = found
            choice = self._choices[index]
            if isinstance(event, Draft):
                skipped = self._job.skipped.pop(index, 0)
                yield draft_event(self._head, self._tokenizer, index, event, self._steps, skipped)
            elif isinstance(event, Commit):
                yield self._chunk(index, event.text, event.logprobs)
                choice.text += event.text
            else:
                choice.metrics = event.metrics
                yield self._chunk(index, "", finish_reason="length" if event.finish_reason == "length" else "stop")
        usage = self._usage()
        if self._body.usage_wanted:
            yield self._head.chunk(system_fingerprint=self._fingerprint, choices=[], usage=usage.model_dump())

    def _chunk(
        self, index: int, text: str, scored: list[TokenLogprob] | None = None, finish_reason: str | None = None
    ) -> bytes:
        logprobs = None
        if scored is not None:
            logprobs = text_logprobs(self._tokenizer, scored, len(self._choices[index].text)).model_dump()
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        extra = {"usage": None} if self._body.usage_wanted else {}
        return self._head.chunk(system_fingerprint=self._fingerprint, choices=[choice], **extra)

    def _usage(self) -> replies.Usage:
        parts = [choice.metrics for choice in self._choices if choice.metrics is not None]
        # The stream of a middle was made before it waited, so its times hold that already.
        waited = self._job.waited if self._body.suffix is None else 0.0
        usage = usage_of(parts, waited, prompts=self._prompts)
        self._server.metrics.answered(usage)
        return usage
