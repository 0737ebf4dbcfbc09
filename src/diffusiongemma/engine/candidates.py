"""Several ways to fill the same holes, run as one batch; the best by the model's own score wins, unless the
caller has another order (choice.py).

A candidate whose filling is not text (half a character) loses, whatever its score. If all lose, they are run again
without the tokens that are only parts of characters; then none can.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from diffusiongemma.engine.events import Commit, Draft, End, Event, FinishReason, Metrics, Result
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.worker import Scope
from diffusiongemma.errors import ConfigError, DiffusionGemmaError
from diffusiongemma.text.exact import encode_exact, exact_text, partial_tokens

if TYPE_CHECKING:
    from diffusiongemma.engine.engine import Engine

R = TypeVar("R", bound=Result)
COUNTS = (
    "prompt_tokens", "reused_tokens", "blocks", "blocks_settled", "blocks_redone", "steps", "decoder_forwards",
    "encoder_forwards", "positions",
)  # fmt: skip


@dataclass(frozen=True)
class Try:
    """One way to fill the holes: a request, and where the fillings lie in its answer."""

    request: Request
    holes: tuple[slice, ...]
    window: slice = field(default_factory=lambda: slice(None))  # what a draft shows of the canvas,
    before: tuple[int, ...] = ()  # … between these fixed tokens
    after: tuple[int, ...] = ()
    block: int = 0
    spare: Request | None = None  # what to run if all tries come out broken; None: the same again
    lead: str = ""  # what the first filling should begin with, and is cut off it

    def show(self, draft: Draft) -> Draft:
        left, right, part = len(self.before), len(self.after), self.window
        return replace(
            draft,
            block=self.block,
            tokens=[*self.before, *draft.tokens[part], *self.after],
            entropy=[*[0.0] * left, *draft.entropy[part], *[0.0] * right],
            accepted=[*[True] * left, *draft.accepted[part], *[True] * right],
        )


@dataclass(frozen=True)
class Candidate:
    """How a try came out."""

    seed: int
    fillings: tuple[tuple[int, ...], ...]  # tokens of each hole
    texts: tuple[str, ...] | None  # None: broken characters, or it failed
    score: float | None  # mean log-probability
    finish_reason: FinishReason
    opens: bool = True  # does it begin as it should?
    sound: bool = True  # does it pass the check that was asked for?

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, float]:
        """Text before broken text, a right beginning before none, sound before not, finished before cut off, likely
        before unlikely."""
        return self.texts is not None, self.opens, self.sound, self.finish_reason == "stop", self.score or 0.0


Order = Callable[[Sequence[Candidate]], list[Candidate]]  # the best first


def likeliest_first(found: Sequence[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda candidate: candidate.rank, reverse=True)  # stable: of equals the first stays first


class Failed(Exception):
    """Every candidate ended with an error. `refused`: because the request asked for too much."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Cancelled(Exception):
    """Whoever asked does not want the result any more."""


class Tally:
    """All requests behind one result. Their counts add up, times are since the call; `scope` cancels them."""

    def __init__(self, seed: int, scope: Scope | None = None) -> None:
        self.scope = scope or Scope()
        self._began = time.perf_counter()
        self._sum = Metrics(seed=seed)
        self._empty = True

    def add(self, parts: Sequence[Metrics], began: float) -> None:
        """`began`: when these requests, which ran together, were handed in."""
        total, late = self._sum, began - self._began
        for name in COUNTS:
            setattr(total, name, getattr(total, name) + sum(getattr(part, name) for part in parts))
        drafts = [part.first_draft_seconds for part in parts if part.first_draft_seconds is not None]
        if self._empty:
            total.queue_seconds = late + min(part.queue_seconds for part in parts)
            total.prefill_seconds = late + min(part.prefill_seconds for part in parts)
            self._empty = False
        if total.first_draft_seconds is None and drafts:
            total.first_draft_seconds = late + min(drafts)

    def commit(self, tokens: int) -> None:
        self._sum.new_tokens += tokens
        if self._sum.first_text_seconds is None:
            self._sum.first_text_seconds = time.perf_counter() - self._began

    def metrics(self) -> Metrics:
        return replace(self._sum, total_seconds=time.perf_counter() - self._began)


def best_of(
    engine: Engine, tries: Sequence[Try], tally: Tally, order: Order = likeliest_first
) -> Generator[Event, None, list[Candidate]]:
    """Run these tries together, telling their drafts -> all candidates, the best first."""
    found = yield from _run_together(engine, tries, tally)
    if all(candidate.texts is None for candidate in found):
        whole = [_without_parts(engine, one) for one in tries]
        found += yield from _run_together(engine, whole, tally)
    found = order(found)
    if found[0].texts is None:
        raise Failed("no candidate came out as text")
    return found


def _without_parts(engine: Engine, one: Try) -> Try:
    request = one.spare or one.request
    forbidden = {*request.forbidden, *partial_tokens(engine.tokenizer)}
    return replace(one, request=replace(request, forbidden=tuple(sorted(forbidden))))


def _run_together(engine: Engine, tries: Sequence[Try], tally: Tally) -> Generator[Event, None, list[Candidate]]:
    began = time.perf_counter()
    inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    handles = engine.submit_group([one.request for one in tries], lambda i, event: inbox.put((i, event)))
    tokens: list[list[int]] = [[] for _ in tries]
    ends: dict[int, End] = {}
    for handle in handles:
        tally.scope.add(handle)
    try:
        while len(ends) < len(tries):
            i, event = inbox.get()
            if isinstance(event, Commit):
                tokens[i] += event.tokens
            elif isinstance(event, End):
                ends[i] = event
            elif i == max((k for k, handle in enumerate(handles) if k not in ends and handle.begun), default=i):
                # One canvas to look at: the last of those that run.
                yield tries[i].show(event)
    finally:
        for i, handle in enumerate(handles):
            if i not in ends:
                handle.cancel()
    tally.add([ends[i].metrics for i in range(len(tries))], began)
    if tally.scope.cancelled:
        raise Cancelled
    if all(end.finish_reason == "error" for end in ends.values()):
        raise Failed(str(ends[0].error), all(end.refused for end in ends.values()))
    scores = [handle.sequence.score if handle.sequence else None for handle in handles]
    return [judge(engine, one, tokens[i], ends[i], scores[i]) for i, one in enumerate(tries)]


def judge(engine: Engine, one: Try, tokens: Sequence[int], end: End, score: float | None) -> Candidate:
    """What a try's answer fills the holes with."""
    fillings = tuple(tuple(tokens[hole]) for hole in one.holes)
    texts = [exact_text(engine.tokenizer, filling) for filling in fillings]
    whole = tuple(text for text in texts if text is not None)
    failed = end.finish_reason in ("error", "cancelled") or len(whole) < len(texts)
    # A canvas whose holes have their lengths is finished when it is full.
    reason: FinishReason = "stop" if end.finish_reason == "length" and not one.request.ends else end.finish_reason
    found = Candidate(end.metrics.seed, fillings, None if failed else whole, score, reason)
    return found if not one.lead or found.texts is None else _cut_lead(engine, found, one.lead)


def _cut_lead(engine: Engine, found: Candidate, lead: str) -> Candidate:
    """A token may hold the lead and what follows it, so the rest is spelled anew."""
    assert found.texts is not None
    first, *others = found.texts
    if not first.startswith(lead):
        return replace(found, opens=False)
    rest = first.removeprefix(lead)
    return replace(
        found, texts=(rest, *others), fillings=(tuple(encode_exact(engine.tokenizer, rest)), *found.fillings[1:])
    )


def with_end(stream: Generator[Event, None, R], tally: Tally) -> Generator[Event, None, R | None]:
    """Add the end event that every stream has, whatever happened."""
    try:
        result = yield from stream
    except Failed as error:
        yield End("error", tally.metrics(), str(error), error.refused)
        return None
    except Cancelled:
        yield End("cancelled", tally.metrics())
        return None
    yield End(result.finish_reason, result.metrics)
    return result


def drain(stream: Generator[Event, None, R | None]) -> R:
    """Run a stream to its end for the result alone."""
    while True:
        try:
            event = next(stream)
        except StopIteration as stop:
            result: R = stop.value
            return result
        if isinstance(event, End) and event.finish_reason == "error":
            raise DiffusionGemmaError(f"the request failed: {event.error}")
        if isinstance(event, End) and event.finish_reason == "cancelled":
            raise DiffusionGemmaError("the request was cancelled")


def sampling(base: SamplingParams, refused: Iterable[str], options: Mapping[str, Any]) -> SamplingParams:
    """The options of a call, less those that holes and edits cannot honour."""
    names = {"stop", "stop_tokens", "logprobs", *refused}
    if wrong := sorted(names & options.keys()):
        problems = [f"{name} has no effect on holes and edits" for name in wrong]
        raise ConfigError("these sampling options cannot be honoured", problems)
    return SamplingParams.build(base, **options)


def forbidden_tokens(engine: Engine, allowed: Iterable[int] = ()) -> tuple[int, ...]:
    """What must not stand in a filling: special tokens, and ids that the tokenizer does not know."""
    tokenizer = engine.tokenizer
    unknown = range(tokenizer.vocab_size, engine.model.config.vocab_size)
    return tuple(sorted({*tokenizer.special.values(), *unknown} - set(allowed)))
