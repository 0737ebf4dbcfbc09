"""Many cases through the engine, graded and counted.

A task turns a case into work: a generator that yields the requests it wants run, gets their outcomes, and returns what
they are worth. Work may ask again (another seed for a board that breaks the rules), so cases advance in rounds: all
requests of a round are handed in together, and the engine batches them. A case is graded as soon as its requests have
ended, while others still run; what it asks again waits for the next round, so that batches do not depend on how fast a
grader is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from diffusiongemma.engine import Commit, Draft, End, Engine, Event, Metrics, Request, SamplingParams
from diffusiongemma.engine.events import FinishReason
from diffusiongemma.engine.worker import Handle
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.tasks.statistics import Figure, figure, mean

SEEDS_A_CASE = 1_000  # case i has the seeds from seed + 1000 i on: the next seed is another attempt
MEANINGS = {  # of scores whose names mean several things elsewhere, as text/similar.py has them
    "similarity": "1 - edit distance / length of the longer",
    "ratio": "2 * longest common subsequence / sum of the lengths",
}
Progress = Callable[[int, int], None]  # cases of this round that are done, and how many it has


@dataclass(frozen=True)
class Variant:
    """One way to run the cases; what two variants differ in is what is compared."""

    mode: str = "diffusion"
    steps: int | None = None  # None: what the model's own settings say
    early_stop: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # further sampling options of this mode

    @property
    def label(self) -> str:
        steps = "" if self.steps is None else f" {self.steps}"
        return f"{self.mode}{steps}{'' if self.early_stop else ', all steps'}"

    def params(self, base: SamplingParams, **options: Any) -> SamplingParams:
        """Sampling for one request: `options` are the task's own."""
        own: dict[str, Any] = {"mode": self.mode}
        if self.mode == "ar":
            own["temperature"] = 0.0  # its best guess, unless the options say otherwise
        else:
            own["early_stop"] = self.early_stop
            if self.steps is not None:
                own["steps"] = self.steps
        return SamplingParams.build(base, **own | self.options | options)


@dataclass(frozen=True)
class Outcome:
    """How one request came out."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    score: float | None = None


@dataclass(frozen=True)
class Graded:
    """What became of a case. Scores are truth values (counted as shares) or numbers (as means)."""

    case: str
    kind: str
    seed: int
    text: str
    scores: dict[str, bool | float]
    steps: int  # of the first attempt, all its candidates or looks together
    decided: int  # tokens that those steps decided on: what was pinned is no work of the model
    tried: list[dict[str, Any]] = field(default_factory=list)  # all attempts or candidates, where there are several

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


Work = Generator[list[Request], list[Outcome], Graded]
C = TypeVar("C", contravariant=True)


class Task(Protocol[C]):
    @property
    def name(self) -> str: ...

    @property
    def headline(self) -> str:
        """The score that comes first, a truth value."""

    def work(self, engine: Engine, case: C, variant: Variant, seed: int) -> Work: ...


@dataclass(frozen=True)
class Report:
    """One variant over one set of cases."""

    variant: Variant
    graded: list[Graded]
    seconds: float | None  # None: it ran elsewhere

    def figures(self, kind: str | None = None) -> dict[str, Figure]:
        """Every score, over all cases that have it (of one kind)."""
        values: dict[str, list[bool | float]] = defaultdict(list)
        for one in self.graded:
            if kind in (None, one.kind):
                for name, value in one.scores.items():
                    values[name].append(value)
        return {name: figure(found) for name, found in values.items()}

    @property
    def kinds(self) -> list[str]:
        return sorted({one.kind for one in self.graded})

    @property
    def mean_steps(self) -> Figure:
        return mean([one.steps for one in self.graded])

    @property
    def tokens_per_forward(self) -> float:
        steps = sum(one.steps for one in self.graded)
        return sum(one.decided for one in self.graded) / steps if steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        v = self.variant
        figures = self.figures()
        kinds = {k: {n: f.to_dict() for n, f in self.figures(k).items()} for k in self.kinds}
        return {
            "variant": v.label,
            "mode": v.mode,
            "steps_limit": v.steps,
            "early_stop": v.early_stop if v.mode == "diffusion" else None,
            "options": v.options,
            "cases": len(self.graded),
            "figures": {name: f.to_dict() for name, f in figures.items()},
            "meanings": {name: told for name, told in MEANINGS.items() if name in figures},
            "kinds": kinds if len(kinds) > 1 else {},
            "steps": self.mean_steps.to_dict(),
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "seconds_per_case": self.seconds / len(self.graded) if self.graded and self.seconds is not None else None,
        }


def evaluate(
    engine: Engine,
    task: Task[C],
    cases: Sequence[C],
    variant: Variant,
    seed: int = 0,
    progress: Progress | None = None,
    places: Sequence[int] | None = None,
) -> Report:
    """All cases, in as few rounds as their work needs. The same seed gives the same report, seconds aside.

    `places`: where each case stands in its whole set, if these are a part of it: a case then has the seed that it has
    among all.
    """
    began = time.perf_counter()
    numbered = zip(range(len(cases)) if places is None else places, cases, strict=True)
    works = [task.work(engine, case, variant, seed + SEEDS_A_CASE * place) for place, case in numbered]
    graded: dict[int, Graded] = {}
    waiting: dict[int, list[Request]] = {}
    for i, work in enumerate(works):
        _advance(i, work, None, waiting, graded)
    while waiting:
        asked, waiting = waiting, {}
        with closing(_run_round(engine, asked, progress)) as ended:
            for i, outcomes in ended:
                _advance(i, works[i], outcomes, waiting, graded)
        waiting = dict(sorted(waiting.items()))
    return Report(variant, [graded[i] for i in range(len(cases))], time.perf_counter() - began)


def _advance(
    i: int, work: Work, outcomes: list[Outcome] | None, waiting: dict[int, list[Request]], graded: dict[int, Graded]
) -> None:
    try:
        waiting[i] = next(work) if outcomes is None else work.send(outcomes)
    except StopIteration as end:
        graded[i] = end.value


@dataclass
class _Group:
    """Requests of one case, which share their prompt, while they run."""

    handles: list[Handle]
    tokens: list[list[int]]
    texts: list[str]
    ends: dict[int, End] = field(default_factory=dict)

    def take(self, member: int, event: Event) -> bool:
        """-> have all ended?"""
        if isinstance(event, Commit):
            self.tokens[member] += event.tokens
            self.texts[member] += event.text
        elif isinstance(event, End):
            if event.finish_reason == "error":
                raise DiffusionGemmaError(f"a case failed: {event.error}")
            self.ends[member] = event
        return len(self.ends) == len(self.handles)

    def outcomes(self) -> list[Outcome]:
        found = []
        for member, handle in enumerate(self.handles):
            end, sequence = self.ends[member], handle.sequence
            score = sequence.score if sequence is not None else None
            tokens, text = tuple(self.tokens[member]), self.texts[member]
            found.append(Outcome(tokens, text, end.finish_reason, end.metrics, score))
        return found


def _run_round(
    engine: Engine, asked: dict[int, list[Request]], progress: Progress | None
) -> Generator[tuple[int, list[Outcome]], None, None]:
    """Cases in the order in which they end."""
    inbox: queue.SimpleQueue[tuple[int, int, Event]] = queue.SimpleQueue()

    def forward_to(case: int) -> Callable[[int, Event], None]:
        return lambda member, event: inbox.put((case, member, event))

    running: dict[int, _Group] = {}
    try:
        with held(engine):
            for i, requests in asked.items():
                handles = engine.submit_group(requests, forward_to(i))
                running[i] = _Group(handles, [[] for _ in requests], [""] * len(requests))
        while running:
            i, member, event = inbox.get()
            if running[i].take(member, event):
                outcomes = running.pop(i).outcomes()
                if progress is not None:
                    progress(len(asked) - len(running), len(asked))
                yield i, outcomes
    finally:
        for group in running.values():
            for handle in group.handles:
                handle.cancel()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keep the engine's thread waiting while requests are handed in.

    Which requests share a batch then no longer depends on how fast they came. On a CPU that changes no bit; on a GPU
    sums are formed in an order that depends on the batch, so that without this no figure could be had twice.
    """
    arrived, go_on = threading.Event(), threading.Event()

    def stop_at_the_first_draft(event: Event) -> None:
        arrived.set()
        if isinstance(event, Draft):
            go_on.wait()

    params = SamplingParams(max_new_tokens=1, steps=1, canvas=1, seed=0)
    handle = engine.submit(Request((0,), params), stop_at_the_first_draft)
    try:
        arrived.wait()
        yield
    finally:
        handle.cancel()
        go_on.set()
