"""What a running request tells the outside: drafts while a canvas settles, text when a block is final, one end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A committed token, its log-probability under the model's last word on it, and the best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Draft:
    """One denoising step of one block: the best token of every position, and how sure the model is of it."""

    kind: ClassVar[Literal["draft"]] = "draft"
    block: int
    step: int
    tokens: list[int]
    entropy: list[float]
    accepted: list[bool]
    decode: Callable[[list[int]], str] = field(repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        return self.decode(self.tokens)


@dataclass(frozen=True)
class Commit:
    """A finished block: tokens that will not change, and the text that is now certain."""

    kind: ClassVar[Literal["commit"]] = "commit"
    block: int
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class End:
    """The last event of every request, whatever happened."""

    kind: ClassVar[Literal["end"]] = "end"
    finish_reason: FinishReason
    metrics: Metrics
    error: str | None = None
    refused: bool = False  # an error of the request, which asked for too much; the engine is well


Event = Draft | Commit | End


@dataclass
class Metrics:
    """Honest figures of one request. Times are seconds since it was handed in."""

    seed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, found in the prefix cache
    new_tokens: int = 0
    blocks: int = 0
    blocks_settled: int = 0  # of these, ended by the stop rule; the others ran out of steps
    blocks_redone: int = 0
    steps: int = 0  # denoising steps, or tokens drawn one by one
    decoder_forwards: int = 0
    encoder_forwards: int = 0
    positions: int = 0  # canvas positions computed, over all steps
    queue_seconds: float = 0.0
    first_draft_seconds: float | None = None
    first_text_seconds: float | None = None
    prefill_seconds: float = 0.0  # until the prompt was in the cache, or a card had been told to put it there
    total_seconds: float = 0.0

    @property
    def settled(self) -> bool:
        """Did the stop rule end every canvas? The model's own word on it: nothing has looked at what it wrote."""
        return 0 < self.blocks == self.blocks_settled

    @property
    def tokens_per_forward(self) -> float:
        """Committed tokens for each pass that decided on tokens."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        busy = self.total_seconds - self.queue_seconds
        return self.new_tokens / busy if busy > 0 else 0.0

    @property
    def tokens_per_second_without_prefill(self) -> float:
        busy = self.total_seconds - self.prefill_seconds
        return self.new_tokens / busy if busy > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = ("tokens_per_forward", "tokens_per_second", "tokens_per_second_without_prefill")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Result:
    """What `generate` gives: the events of a stream, added up."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: list[TokenLogprob] | None = None
