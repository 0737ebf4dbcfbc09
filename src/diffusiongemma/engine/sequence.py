"""A request while it runs: its tokens, its cache row, its canvas, and what it has told so far.

`encode` phases (the prompt, and every block that another follows) alternate with canvases; the autoregressive twin
has tokens instead of canvases. The engine's thread alone touches a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion import Canvas, Denoiser, Draws, SeededDraws
from diffusiongemma.engine.block import block_denoiser, block_width
from diffusiongemma.engine.events import FinishReason, Metrics, TokenLogprob
from diffusiongemma.engine.guard import find_garbage
from diffusiongemma.engine.outbox import Outbox
from diffusiongemma.engine.output import OutputText
from diffusiongemma.engine.params import WIDTHS
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.telling import Emit, Teller
from diffusiongemma.model import CacheRow

log = logging.getLogger(__name__)
Block = tuple[Denoiser, Canvas]  # one that is about to begin
Phase = Literal["waiting", "join", "encode", "denoise", "draw", "score", "ended"]


class Sequence:
    def __init__(
        self,
        request: Request,
        config: ModelConfig,
        output: OutputText,
        emit: Emit,
        decode: Callable[[list[int]], str],
        ends: Seq[int],
        pairs: Seq[tuple[int, int]],
        seed: int,
        draws: Draws | None = None,
    ) -> None:
        self.request, self.params, self.config = request, request.params, config
        self.tokens = list(request.prompt)  # prompt and committed blocks
        self.row: CacheRow | None = None
        self.phase: Phase = "waiting"
        self.cancelled = False
        self.group: Seq[Sequence] = ()  # requests with the same beginning, in order: the first encodes it for all
        self.to_keep = 0  # tokens of the prompt of which a copy is to be kept as soon as they are in the cache
        self.canvas: Canvas | None = None
        self.soft: Tensor | None = None  # [L, D] what the next step is conditioned on
        self.reply: list[int] = []
        self.to_score: list[int] = []  # positions of the finished canvas that count
        self.metrics = Metrics(seed=seed, prompt_tokens=len(request.prompt))
        self.draws: Draws = draws or SeededDraws(seed)
        self.outbox = Outbox()
        self._output, self._teller = output, Teller(output, emit, decode, self.metrics)
        self._ends = frozenset(ends if request.ends else ()) | frozenset(request.params.stop_tokens)
        self._pairs = pairs
        self._scores: list[float] = []
        self._redos = 0
        self._settled_end: int | None = None
        self._done_reason: FinishReason | None = None
        self.denoiser: Denoiser | None = None  # of the present canvas

    # ---- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Cache slots it can need: what comes last is never encoded, so it takes none."""
        return len(self.request.prompt) + self.params.max_new_tokens - 1

    @property
    def leader(self) -> Sequence | None:
        """Who encodes the prompt that its group shares: the first that lives; None if that is itself."""
        first = next((member for member in self.group if member.phase != "ended"), self)
        return None if first is self else first

    @property
    def is_followed(self) -> bool:
        """Does another of its group wait for its prompt?"""
        return any(member.leader is self and member.phase in ("waiting", "join") for member in self.group)

    @property
    def prompt_encoded(self) -> bool:
        return self.row is not None and self.row.length >= len(self.request.prompt)

    @property
    def expects_more(self) -> bool:
        """With the last step of its canvas under way: does another block follow, unless an end of text comes up that
        the step before did not have?"""
        canvas = self.canvas
        if self.cancelled or canvas is None or canvas.argmax is None:
            return False
        if self.params.stop or self.request.score or self._redos < self.params.redo:
            return False  # more than the tokens decides what becomes of them
        follows = len(self.reply) + len(canvas) < self.params.max_new_tokens
        return follows and self._first_end(canvas.argmax.tolist()) is None

    def foresee(self) -> Block:
        """The canvas behind this one, if it `expects_more`: what `encoded` may begin with then"""
        assert self.canvas is not None
        return self._next_block(len(self.reply) + len(self.canvas), redos=0)

    @property
    def to_encode(self) -> int:
        """Tokens that are known but not in the cache."""
        assert self.row is not None
        return len(self.tokens) - self.row.length

    def chunk(self, size: int) -> list[int]:
        """The next tokens to encode, at most `size`; not across the point of which a copy is kept, if the row could not
        go back to it from their end."""
        assert self.row is not None
        start = self.row.length
        stop = min(len(self.tokens), start + size)
        if start < self.to_keep < stop and stop > self.row.ring:
            stop = self.to_keep
        return self.tokens[start:stop]

    def admit(self, row: CacheRow, reused: int) -> None:
        self.row = row
        if reused < self.request.stable and self.max_length > row.ring:
            self.to_keep = self.request.stable  # a later turn branches off there: the row will have forgotten it
        self.metrics.reused_tokens = reused
        self.metrics.queue_seconds = self.age
        self.phase = "encode"
        if not self.to_encode:
            self.encoded()

    @property
    def age(self) -> float:
        return self._teller.age

    # ---- what the runner reports -------------------------------------------------------------------------------------

    def encoded(self, foreseen: Block | None = None) -> None:
        """Everything known is in the cache, or will be with the next canvas's first step (`FastRunner`): on to that
        canvas, or to drawing tokens."""
        if not self.metrics.blocks and not self.metrics.prefill_seconds:
            self.metrics.prefill_seconds = self.age
        if self.params.mode == "ar":
            self.phase = "draw"
            return
        self._begin_block(foreseen)

    def stepped(self, logits: Tensor) -> bool:
        """logits [L, V] of the canvas, overwritten by probabilities -> does another step follow?"""
        assert self.canvas is not None
        assert self.denoiser is not None
        raw = logits.clone() if self.params.logprobs is not None else None
        return self.took(self.denoiser.step(self.canvas, logits, self.draws), raw)

    def took(self, canvas: Canvas, raw: Tensor | None = None) -> bool:
        """The canvas is one step further -> does another follow? `raw` [L, V]: its logits, if somebody wants them."""
        self.canvas = canvas
        self.metrics.steps += 1
        self.metrics.decoder_forwards += 1
        self.metrics.positions += len(self.canvas)
        if self.metrics.first_draft_seconds is None:
            self.metrics.first_draft_seconds = self.age
        if self.request.drafts:
            self.outbox.put(partial(self._teller.emit, self._teller.draft(self.canvas)))
        if self.canvas.done:
            self._finish_block(raw)
            return False
        if self.params.canvas == "adaptive":
            self._drop_behind_the_end()
        return True

    def drawn(self, token: int, logprob: TokenLogprob | None) -> None:
        """The autoregressive twin has its next token."""
        self.metrics.steps += 1
        if self.metrics.first_draft_seconds is None:
            self.metrics.first_draft_seconds = self.age
        self._commit([token], [logprob] if logprob else None, token in self._ends)
        if self.phase != "ended":
            self.tokens.append(token)

    @property
    def score(self) -> float | None:
        """Mean log-probability of the tokens that count."""
        return sum(self._scores) / len(self._scores) if self._scores else None

    def scored(self, logprobs: list[float]) -> None:
        """The log-probability of each token in `to_score`: on to the next block, or to the end."""
        assert self.canvas is not None
        self.metrics.decoder_forwards += 1
        self.metrics.positions += len(self.canvas)
        self._scores += logprobs
        if self._done_reason is None:
            self.phase = "encode"
        else:
            self._end(self._done_reason)

    def cancel(self) -> None:
        self._end("cancelled")

    def fail(self, message: str, refused: bool = False) -> None:
        self._end("error", message, refused)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _begin_block(self, foreseen: Block | None = None) -> None:
        self.denoiser, self.canvas = foreseen or self._next_block(len(self.reply), self._redos)
        self.soft, self._settled_end = None, None
        self.phase = "denoise"

    def _next_block(self, offset: int, redos: int) -> Block:
        """`offset`: tokens of the reply before it"""
        assert self.row is not None
        device = self.row.device
        width = block_width(self.request, self.config, offset)
        denoiser = block_denoiser(self.request, self.config, self._ends, offset, width, redos)
        start = self.request.start if not offset and not redos else None
        if start is None:
            return denoiser, denoiser.start(width, self.draws, device)
        tokens = torch.tensor(start).to(device, non_blocking=True)
        return denoiser, denoiser.resume(tokens, self.request.start_step)

    def _finish_block(self, raw: Tensor | None) -> None:
        canvas = self.canvas
        assert canvas is not None
        assert canvas.argmax is not None
        block = canvas.argmax.tolist()
        room = self.params.max_new_tokens - len(self.reply)
        end = self._first_end(block)
        kept = block[: end if end is not None else len(block)][:room]
        ended = end is not None and end < room
        if self._redos < self.params.redo:
            reply = [*self.reply, *kept]
            why = find_garbage(kept, reply, canvas.settled, canvas.mean_entropy, self._pairs, ended)
            if why is not None:
                log.info("block %d is done again: %s", self.metrics.blocks, why)
                self._redos += 1
                self.metrics.blocks_redone += 1
                self._begin_block()
                return
        self._redos = 0
        self.metrics.blocks += 1
        self.metrics.blocks_settled += canvas.settled
        logprobs = None
        if raw is not None:
            logprobs = [read_logprob(raw[i], token, self.params.logprobs or 0) for i, token in enumerate(kept)]
        self.tokens += block
        wanted, offset = self.request.score_at, len(self.reply)
        counted = range(len(kept) + ended) if self.request.score else range(0)
        self.to_score = [at for at in counted if wanted is None or offset + at in wanted]
        self._commit(kept, logprobs, ended)
        if self.phase != "ended":
            # The score is the text's alone, not that of the way to it: no conditioning on earlier steps.
            self.phase, self.soft = ("score" if self.to_score else "encode"), None

    def _first_end(self, tokens: list[int]) -> int | None:
        """Where the first token lies that ends the reply."""
        if self._ends.isdisjoint(tokens):
            return None
        return next(at for at, token in enumerate(tokens) if token in self._ends)

    def _commit(self, kept: list[int], logprobs: list[TokenLogprob] | None, ended: bool) -> None:
        """Take these tokens as final, have their text told, and end the request if it is over."""
        if ended and self.params.mode == "ar":
            kept, logprobs = [], None
        # Without stop texts nothing depends on the text: it is put together when it is told.
        text = self._output.push(kept) if self.params.stop else None
        if self._output.stopped:
            told = max(0, self._output.tokens_told([*self.reply, *kept]) - len(self.reply))
            kept, logprobs = kept[:told], None if logprobs is None else logprobs[:told]
        self.reply += kept
        self.metrics.new_tokens = len(self.reply)
        over = ended or len(self.reply) >= self.params.max_new_tokens or self._output.stopped
        if over and text is not None:  # what was held back may hold a stop text, too
            text += self._output.finish()
        block = max(0, self.metrics.blocks - 1) if self.params.mode == "diffusion" else len(self.reply) - 1
        self.outbox.put(partial(self._teller.commit, block, kept, text, logprobs, over))
        if over:
            self._done_reason = "stop" if ended or self._output.stopped else "length"
            if not self.to_score:
                self._end(self._done_reason)

    def _drop_behind_the_end(self) -> None:
        """Positions behind an end of text that has settled are not computed again (`canvas="adaptive"`)."""
        canvas = self.canvas
        assert canvas is not None
        assert canvas.argmax is not None
        assert canvas.entropy is not None
        end = self._first_end(canvas.argmax.tolist())
        settled = end is not None and end == self._settled_end and float(canvas.entropy[end]) < self.params.confidence
        self._settled_end = end
        if end is None or not settled:
            return
        width = next((w for w in WIDTHS if end < w), len(canvas))
        if width < len(canvas):
            self.canvas = Denoiser.cut(canvas, width)

    def _end(self, reason: FinishReason, error: str | None = None, refused: bool = False) -> None:
        if self.phase == "ended":
            return
        self.phase = "ended"
        self.canvas = self.soft = None
        self.outbox.put(partial(self._teller.end, reason, error, refused))


def read_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """logits [V] as the model gave them, at temperature 1"""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(top) if top else None
    alternatives = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), alternatives)
