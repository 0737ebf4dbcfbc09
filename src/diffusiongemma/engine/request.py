"""A request as it is handed in: prompt tokens, options, and what is fixed of the answer beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.errors import InputError, LengthError


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    pins: Mapping[int, int] = field(default_factory=dict)  # position in the answer -> token
    start: tuple[int, ...] | None = None  # the first canvas begins with these tokens instead of noise
    start_step: int = 0  # … as if so many steps had been taken
    forbidden: tuple[int, ...] = ()  # tokens that may not be written
    stable: int = 0  # prompt tokens that a later turn will repeat: worth keeping
    drafts: bool = True  # emit a draft event for every step
    ends: bool = True  # do the model's end-of-text tokens end the answer?
    score: bool = False  # one more pass a block: how likely are the tokens, given each other?
    score_at: frozenset[int] | None = None  # … of these positions of the answer alone; None: the text and its end

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty: give at least one token")
        if self.params.mode == "ar" and (self.pins or self.start is not None or self.score):
            raise InputError(
                "pins, a start canvas and scores need mode 'diffusion': the causal path cannot honour them"
            )
        last = self.params.max_new_tokens - 1
        if bad := sorted(at for at in self.pins if not 0 <= at <= last):
            raise InputError(f"pins must lie within the {last + 1} new tokens, got position {bad[0]}")
        if not 0 <= self.start_step < self.params.steps:
            raise InputError(f"start_step must be from 0 to {self.params.steps - 1}, got {self.start_step}")

    def check(self, vocab_size: int, canvas_length: int, max_positions: int) -> None:
        """What only the model's own sizes can tell."""
        tokens: Sequence[int] = (*self.prompt, *self.pins.values(), *(self.start or ()), *self.forbidden)
        if bad := [t for t in tokens if not 0 <= t < vocab_size]:
            raise InputError(f"token ids must be from 0 to {vocab_size - 1}, got {bad[0]}")
        check_stop_tokens(self.params.stop_tokens, vocab_size)
        width = self.params.canvas
        if isinstance(width, int) and width > canvas_length:
            raise InputError(f"canvas {width} is wider than the model's {canvas_length}")
        total = len(self.prompt) + self.params.max_new_tokens
        if total > max_positions:
            raise LengthError(
                f"{len(self.prompt)} prompt tokens and {self.params.max_new_tokens} new ones are more than the model's "
                f"{max_positions} positions: shorten the prompt or lower max_new_tokens"
            )
        if self.start is not None and len(self.start) > canvas_length:
            raise InputError(f"a start canvas of {len(self.start)} tokens is wider than the model's {canvas_length}")


def check_stop_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if bad := [t for t in tokens if t >= vocab_size]:
        raise InputError(f"stop token {bad[0]} never comes: token ids are from 0 to {vocab_size - 1}")
