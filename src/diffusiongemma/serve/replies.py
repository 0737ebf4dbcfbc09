"""What a response holds: OpenAI's objects, with the figures of diffusion added where that does no harm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None = Field(description="The field of the request that is wrong.")
    code: str | None


class ErrorBody(Reply):
    error: ErrorDetail


# ---- usage -----------------------------------------------------------------------------------------------------------


class PromptDetails(Reply):
    cached_tokens: int = Field(description="Found in the prefix cache.")


class CompletionDetails(Reply):
    reasoning_tokens: int


class DiffusionUsage(Reply):
    """Counts are sums over the choices; times are seconds since the request was taken in."""

    seed: int = Field(description="Of the first choice; the others count on from it.")
    blocks: int
    blocks_settled: int = Field(description="Blocks that the stop rule ended; the others ran out of steps.")
    blocks_redone: int
    steps: int = Field(description="Denoising steps, or tokens drawn one by one.")
    decoder_forwards: int
    encoder_forwards: int
    positions: int = Field(description="Canvas positions computed, over all steps.")
    queue_seconds: float
    prefill_seconds: float
    first_draft_seconds: float | None
    first_text_seconds: float | None
    total_seconds: float
    tokens_per_forward: float
    tokens_per_second: float = Field(description="Over the whole time but waiting.")


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    diffusion: DiffusionUsage


# ---- chat ------------------------------------------------------------------------------------------------------------


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(description="What the model thought before it answered.")
    tool_calls: list[ToolCall] | None
    refusal: None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


# ---- completions -----------------------------------------------------------------------------------------------------


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(Reply):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


# ---- canvases --------------------------------------------------------------------------------------------------------


class CandidateReply(Reply):
    seed: int
    holes: list[str] | None = Field(description="null: it came out as broken characters.")
    score: float | None = Field(description="Mean log-probability of the fillings.")
    finish_reason: str


class Infill(Reply):
    id: str
    object: Literal["canvas.infill"] = "canvas.infill"
    created: int
    model: str
    text: str = Field(description="The whole text, holes filled.")
    holes: list[str]
    score: float | None
    candidates: list[CandidateReply] = Field(description="All that were tried, the best first.")
    finish_reason: FinishReason
    usage: Usage


class Edit(Reply):
    id: str
    object: Literal["canvas.edit"] = "canvas.edit"
    created: int
    model: str
    text: str
    keep: list[list[int]] = Field(description="Where the kept spans are in the new text.")
    noised: int = Field(description="Tokens that were replaced by noise.")
    changed: int = Field(description="Tokens that are others than before.")
    finish_reason: FinishReason
    usage: Usage


# ---- models, health --------------------------------------------------------------------------------------------------


class Abilities(Reply):
    """What this model can do, found out from its files."""

    chat: bool
    tools: bool
    thinking: bool
    infill: Literal["fim", "canvas"] = Field(description="fim: trained to fill holes; canvas: by pinning what follows.")
    svg_mode: Literal["diffusion", "ar"] = Field(
        description="How it draws icons best: on a canvas, or one token after another. For your `diffusion.mode`."
    )
    tasks: list[str] = Field(description="What the embedded model was trained for; empty if that is not known.")


class Model(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    description: str
    parameters: int
    canvas_length: int
    context_length: int
    abilities: Abilities
    sampling: dict[str, Any] = Field(description="The defaults of `diffusion`.")


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[Model]


class Failure(Reply):
    error: str
    seconds_ago: float


class Health(Reply):
    """ok: all is well. failing: the engine failed several times in a row. draining: shutting down."""

    status: Literal["ok", "loading", "failing", "draining"]
    version: str
    uptime_seconds: float
    running: int
    waiting: int
    engine_failures: int
    last_failure: Failure | None


class Ready(Reply):
    ready: bool
    status: str
