"""`/v1/canvas/infill` and `/v1/canvas/edit`: what a canvas can do that a stream of tokens cannot."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diffusiongemma.engine import Commit, Draft, EditResult, Engine, FillResult, Hole, Metrics
from diffusiongemma.engine.edit import edit_stream
from diffusiongemma.engine.fill import fill_stream, parse_template
from diffusiongemma.engine.form import form_stream
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.serve import replies
from diffusiongemma.serve.conversation import plain_message
from diffusiongemma.serve.errors import bad_request, engine_failed, from_engine
from diffusiongemma.serve.lifecycle import ServerState, server_of
from diffusiongemma.serve.route import RESPONSES, STREAM, JsonRoute
from diffusiongemma.serve.sampling import rows_of_holes, sampling_options, token_limit
from diffusiongemma.serve.schema import EditRequest, InfillRequest
from diffusiongemma.serve.stream import ALIVE, Head, draft_event, event, new_id
from diffusiongemma.serve.usage import usage_of
from diffusiongemma.serve.work import Job, Stream
from diffusiongemma.text.exact import encode_exact

router = APIRouter(route_class=JsonRoute)
HOLE_TOKENS = 64  # of a hole that states no size, if the request does not either
Plan = Callable[[Engine, Any, int, Scope], Stream]


@router.post(
    "/v1/canvas/infill", response_model=replies.Infill, responses=RESPONSES | STREAM, summary="Fill the holes of a text"
)
async def infill(body: InfillRequest, http: HttpRequest) -> Response:
    return await _answer(body, http, "infill", plan_infill)


@router.post(
    "/v1/canvas/edit", response_model=replies.Edit, responses=RESPONSES | STREAM, summary="Rewrite part of a text"
)
async def edit(body: EditRequest, http: HttpRequest) -> Response:
    return await _answer(body, http, "edit", plan_edit)


async def _answer(
    body: InfillRequest | EditRequest, http: HttpRequest, kind: Literal["infill", "edit"], plan: Plan
) -> Response:
    server = server_of(http)
    engine = server.begin(http, body)
    scope = Scope()
    stream = await run_in_threadpool(plan, engine, body, server.settings.max_tokens, scope)
    job = await server.job(http, rows_of_holes(engine, body) if isinstance(body, InfillRequest) else 1, scope)
    answer = Answer(engine, body, server, job, kind)
    return await server.respond(job, lambda: job.run_stream(server.executor, stream), answer, bool(body.stream))


# ---- asking ----------------------------------------------------------------------------------------------------------


def plan_infill(engine: Engine, body: InfillRequest, limit: int, scope: Scope) -> Stream:
    options: dict[str, Any] = sampling_options(engine, body) | {"drafts": body.drafts, "scope": scope}
    template: Any = body.template
    try:
        if isinstance(template, list):
            parts = [part if isinstance(part, str) else Hole(part.max_tokens, part.min_tokens) for part in template]
            template = parts
        if body.messages is None:
            most = _most_of_a_hole(template, body.max_tokens, limit)
            strategy = body.strategy or "auto"
            return fill_stream(
                engine, template, max_new_tokens=most, candidates=body.candidates, strategy=strategy, **options
            )
        if body.strategy is not None:
            raise bad_request("strategy has no effect on a form, which is always one canvas", "strategy")
        if body.max_tokens is not None:
            raise bad_request("max_tokens has no effect on a form, whose holes state their sizes", "max_tokens")
        if engine.template is None:
            raise bad_request("this model has no chat template: leave messages out", "messages")
        _check_holes(sum(hole.max_tokens or 0 for hole in parse_template(template)[1]), limit)
        messages = [plain_message(message, i) for i, message in enumerate(body.messages)]
        return form_stream(engine, messages, template, candidates=body.candidates, **options)
    except DiffusionGemmaError as error:
        speaks_of = {"the": "template", "a": "template", "message": "messages", "this": "strategy"}
        raise from_engine(error, speaks_of) from None


def _most_of_a_hole(template: Any, wanted: int | None, limit: int) -> int:
    """Tokens of a hole that states no size: what the request says, else as many as there is room for in all of them"""
    sizes = [hole.max_tokens for hole in parse_template(template)[1]]
    stated, unsized = sum(size or 0 for size in sizes), sizes.count(None)
    most = token_limit(wanted, HOLE_TOKENS, limit)
    if wanted is None and unsized:
        most = min(most, max(1, (limit - stated) // unsized))
    _check_holes(stated + unsized * most, limit)
    return most


def _check_holes(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise bad_request(f"the holes may take {tokens} tokens in all, this server allows {limit}", "template")


def plan_edit(engine: Engine, body: EditRequest, limit: int, scope: Scope) -> Stream:
    options = sampling_options(engine, body)
    try:
        if (wanted := len(encode_exact(engine.tokenizer, body.text))) > limit:
            raise bad_request(f"the text has {wanted} tokens, this server allows {limit}", "text")
        return edit_stream(
            engine,
            body.text,
            body.strength,
            [(start, end) for start, end in body.keep],
            instruction=body.instruction,
            drafts=body.drafts,
            scope=scope,
            **options,
        )
    except DiffusionGemmaError as error:
        raise from_engine(error, {"a": "keep"}) from None


# ---- answering -------------------------------------------------------------------------------------------------------


class Answer:
    def __init__(
        self,
        engine: Engine,
        body: InfillRequest | EditRequest,
        server: ServerState,
        job: Job,
        kind: Literal["infill", "edit"],
    ) -> None:
        self._tokenizer, self._body, self._server, self._job, self._kind = engine.tokenizer, body, server, job, kind
        self._steps = (body.diffusion and body.diffusion.steps) or engine.params.steps
        self._head = Head(new_id(kind), f"canvas.{kind}.chunk", int(time.time()), server.model_name)

    async def whole(self) -> replies.Infill | replies.Edit:
        async for _ in self._job.events():
            pass
        return self._reply()

    async def events(self) -> AsyncIterator[bytes]:
        async for told in self._job.events_and_beats():
            if told is None:
                yield ALIVE
                continue
            index, found = told
            if isinstance(found, Draft):
                skipped = self._job.skipped.pop(index, 0)
                yield draft_event(self._head, self._tokenizer, index, found, self._steps, skipped)
            elif isinstance(found, Commit):
                yield self._head.chunk(choices=[], text=found.text)
        yield event(self._reply().model_dump())

    def _reply(self) -> replies.Infill | replies.Edit:
        head, result = self._head, self._job.result
        if result is None:
            raise engine_failed()
        usage = self._usage(result.metrics)
        reason: replies.FinishReason = "length" if result.finish_reason == "length" else "stop"
        same: dict[str, Any] = {"id": head.id, "created": head.created, "model": head.model, "text": result.text}
        same |= {"finish_reason": reason, "usage": usage}
        if isinstance(result, FillResult):
            candidates = [
                replies.CandidateReply(
                    seed=one.seed,
                    holes=None if one.texts is None else list(one.texts),
                    score=one.score,
                    finish_reason=one.finish_reason,
                )
                for one in result.candidates
            ]
            return replies.Infill(holes=list(result.holes), score=result.score, candidates=candidates, **same)
        assert isinstance(result, EditResult)
        keep = [list(span) for span in result.keep]
        return replies.Edit(keep=keep, noised=result.noised, changed=result.changed, **same)

    def _usage(self, metrics: Metrics) -> replies.Usage:
        # The stream was made before it waited, so its times hold that already.
        usage = usage_of([metrics])
        self._server.metrics.answered(usage)
        return usage
