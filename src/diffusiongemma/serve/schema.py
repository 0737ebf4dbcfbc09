"""What a request may hold. Types are strict and unknown fields are errors: nothing is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from diffusiongemma.serve import refused
from diffusiongemma.serve.refused import Refused, schema_of, without

MAX_CHOICES = 16
SEEDS = (1 << 63) - 1


def _whole(value: Any) -> Any:
    """JSON does not tell 3.0 from 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Text = Annotated[str, Field(max_length=1 << 24)]
Tokens = Annotated[int, Field(ge=1, le=1 << 20), WHOLE]
Seed = Annotated[int, Field(ge=0, le=SEEDS, description="The same seed gives the same text on one machine."), WHOLE]
Temperature = Annotated[
    float,
    Field(
        ge=0, le=2, description="1: the model's own schedule. Below, its first steps are cooled; above, all are heated."
    ),
]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
User = Annotated[str, Field(max_length=128, description="Written to the log line of this request, nothing else.")]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]


class Strict(BaseModel):
    """`not_honoured`: fields that are known and refused."""

    model_config = ConfigDict(extra="forbid", strict=True)
    not_honoured: ClassVar[Mapping[str, Refused]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        return without(cls.not_honoured, given)


class Diffusion(Strict):
    """Options of the sampler, as docs/sampling.md explains them. What is left out keeps the model's own value."""

    mode: Literal["diffusion", "ar"] | None = Field(None, description='"ar": one token after another.')
    steps: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    t_min: Annotated[float, Field(gt=0, le=10)] | None = None
    t_max: Annotated[float, Field(gt=0, le=10)] | None = None
    entropy_bound: Annotated[float, Field(gt=0, le=1e6)] | None = None
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    stability: Annotated[int, Field(ge=0, le=1000), WHOLE] | None = None
    confidence: Annotated[float, Field(gt=0, le=1e6)] | None = None
    early_stop: bool | None = None
    forget: Annotated[int, Field(ge=0, le=1000), WHOLE] | None = None
    canvas: Annotated[int, Field(ge=1, le=1 << 16), WHOLE] | Literal["adaptive"] | None = None
    redo: Annotated[int, Field(ge=0, le=10), WHOLE] | None = None


class StreamOptions(Strict):
    model_config = ConfigDict(json_schema_extra=schema_of(refused.STREAM))
    not_honoured = refused.STREAM
    include_usage: bool | None = None
    include_drafts: bool | None = Field(None, description="Add a `canvas.draft` event for every denoising step.")


class Common(Strict):
    """What every generating request has."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    diffusion: Diffusion | None = None
    user: User | None = None

    @property
    def drafts(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_drafts)

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


# ---- chat ------------------------------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class CalledFunction(Strict):
    name: Name
    arguments: Text = Field(description="A JSON object as a string.")


class Call(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    model_config = ConfigDict(json_schema_extra=schema_of(refused.MESSAGE))
    not_honoured = refused.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=1024)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = Field(None, description="What an assistant's message was thought with.")
    tool_calls: Annotated[list[Call], Field(min_length=1, max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class Function(Strict):
    model_config = ConfigDict(json_schema_extra=schema_of(refused.FUNCTION))
    not_honoured = refused.FUNCTION
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class ChatRequest(Common):
    model_config = ConfigDict(json_schema_extra=schema_of(refused.CHAT))
    not_honoured = refused.CHAT
    messages: Messages
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, description="Below 1 in mode `ar` alone.")] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning_effort: Literal["none", "high"] | None = Field(None, description="`high`: think before the answer.")


# ---- completions -----------------------------------------------------------------------------------------------------

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=1 << 24), WHOLE]], Field(min_length=1, max_length=1 << 20)]


class CompletionRequest(Common):
    model_config = ConfigDict(json_schema_extra=schema_of(refused.COMPLETION))
    not_honoured = refused.COMPLETION
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    suffix: Text | None = Field(None, description="What comes behind: the answer is the text between the two.")
    max_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, description="Below 1 in mode `ar` alone.")] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None


# ---- canvases --------------------------------------------------------------------------------------------------------


class HolePart(Strict):
    max_tokens: Tokens | None = None
    min_tokens: Tokens = 1


class InfillRequest(Common):
    template: Text | Annotated[list[Text | HolePart], Field(min_length=1, max_length=4096)] = Field(
        description="A text with holes, `[[?]]` or `[[?12]]` (at most 12 tokens), or a list of texts and holes."
    )
    messages: Messages | None = Field(
        None, description="A conversation: the template is then the form of the answer, on one canvas."
    )
    max_tokens: Tokens | None = Field(None, description="For each hole that states no size; 64 if left out.")
    candidates: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    strategy: Literal["auto", "fim", "canvas"] | None = None


Span = Annotated[list[Annotated[int, Field(ge=0), WHOLE]], Field(min_length=2, max_length=2)]


class EditRequest(Common):
    text: Annotated[str, Field(min_length=1, max_length=1 << 20)]
    strength: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="Share of the tokens that become noise.")
    keep: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0), WHOLE]], Field(min_length=2, max_length=2)]],
        Field(max_length=4096),
    ] = Field(default=[], description="Spans of characters, [start, end], that stay as they are.")
    instruction: Annotated[str, Field(min_length=1, max_length=1 << 20)] | None = None
