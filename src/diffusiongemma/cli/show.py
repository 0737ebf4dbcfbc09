"""Follow one request on the command line: a live canvas, plain text, or a JSON object a line.

The text goes to stdout, the line of figures to stderr. Ctrl-C cancels the request, which then ends as any other does.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from diffusiongemma.cli.canvas import Pieces, describe, render, sanitise
from diffusiongemma.cli.options import Settings
from diffusiongemma.engine import Commit, Draft, End, Engine, Event, Metrics, Request
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.text import parse_ids

FRAME = 1 / 30  # seconds between two pictures at least: drawing must not slow the model down


@dataclass
class Answer:
    """What a stream has told so far. A reply of a chat model has its thinking and control tokens taken apart."""

    engine: Engine
    stops: tuple[str, ...] = ()
    is_reply: bool = True
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    thinking: str = ""
    end: End | None = None  # None: still running, or interrupted

    def take(self, event: Event) -> str:
        """-> the text that became final with this event"""
        before = self.text
        if isinstance(event, Commit):
            self.tokens += event.tokens
            self._read(event.text)
        elif isinstance(event, End):
            self.end = event
            self._read("")
        return self.text[len(before) :]

    def _read(self, text: str) -> None:
        if self.engine.template is None or not self.is_reply:
            self.text += text
            return
        reply = parse_ids(self.engine.tokenizer, self.tokens)
        self.thinking = reply.thinking
        # A character whose other bytes are still to come is held back: what was told stays told.
        new = reply.text if self.end is not None else reply.text.rstrip("\ufffd")
        for stop in self.stops:
            new = new.partition(stop)[0]
        if new.startswith(self.text):
            self.text = new

    @property
    def cancelled(self) -> bool:
        return self.end is None or self.end.finish_reason == "cancelled"


class Plain:
    """Text as it becomes final, and nothing else."""

    def __init__(self) -> None:
        self._last = "\n"

    def take(self, event: Event, new_text: str) -> None:
        if new_text:
            sys.stdout.write(sanitise(new_text))
            sys.stdout.flush()
            self._last = new_text[-1]

    def close(self, answer: Answer) -> None:
        if self._last != "\n":
            print(flush=True)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Json(Plain):
    """Every event as a JSON object on its own line; the last one carries the whole text and the figures."""

    def take(self, event: Event, new_text: str) -> None:
        if not isinstance(event, End):
            print(json.dumps(event_to_dict(event)), flush=True)

    def close(self, answer: Answer) -> None:
        end = {"kind": "end", "finish_reason": "cancelled", "error": None, "refused": False, "metrics": None}
        if answer.end is not None:
            end = event_to_dict(answer.end)
        print(json.dumps(end | {"text": answer.text, "thinking": answer.thinking}), flush=True)


class LiveCanvas:
    """The canvas while it settles; at the end the text takes its place, so that it can be scrolled and copied."""

    def __init__(self, console: Console, pieces: Pieces, steps: int) -> None:
        self._console, self._pieces, self._steps = console, pieces, steps
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._text = ""
        self._written = 0
        self._draft: Draft | None = None
        self._drafted = False  # the autoregressive twin has no drafts
        self._status = "reading the prompt"
        self._drawn = float("-inf")

    def take(self, event: Event, new_text: str) -> None:
        self._text += new_text
        if isinstance(event, Draft):
            self._draft, self._drafted = event, True
            self._status = describe(event, self._steps)
        elif isinstance(event, Commit):
            self._draft = None
            self._written += len(event.tokens)
            if not self._drafted:
                self._status = f"{count(self._written, 'token')} so far"
        if monotonic() - self._drawn >= FRAME:
            self._live.update(self._picture(), refresh=True)
            self._drawn = monotonic()

    def close(self, answer: Answer) -> None:
        if answer.thinking:
            self._console.print(Text(sanitise(answer.thinking).strip() + "\n", style="dim italic"), soft_wrap=True)
        if answer.cancelled and self._draft is not None:
            self._console.print(self._body())  # what there was when Ctrl-C came
        elif answer.text:
            self._console.print(Text(sanitise(answer.text).removesuffix("\n")), soft_wrap=True)

    def _body(self) -> Text:
        return Text(sanitise(self._text)) if self._draft is None else render(self._draft, self._pieces, self._text)

    def _picture(self) -> Group:
        """As much of the end as fits on the screen, and a line below."""
        lines = self._body().wrap(self._console, self._console.width, overflow="fold")
        room = max(1, self._console.height - 2)
        return Group(*lines[-room:], Text(self._status, style="dim", no_wrap=True, overflow="ellipsis"))

    def __enter__(self) -> LiveCanvas:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def follow(engine: Engine, request: Request, settings: Settings) -> Answer:
    """Run a request and show it. The caller decides what a cancelled one means."""
    handle = engine.submit(request)
    try:
        with cancel_on_interrupt(handle.cancel):
            return show(engine, handle, settings, request.params.steps, request.params.stop)
    except BaseException:
        handle.cancel()  # an output that broke must not leave it running
        raise


def show(
    engine: Engine,
    events: Iterable[Event],
    settings: Settings,
    steps: int,
    stops: tuple[str, ...] = (),
    is_reply: bool = True,
    behind: str = "",
) -> Answer:
    """Show these events, then what stands behind the answer, then the line of figures."""
    answer = Answer(engine, stops, is_reply)
    display = make_display(engine, settings, steps)
    with display:
        for event in events:
            display.take(event, answer.take(event))
    display.close(answer)
    if behind:
        print(behind, flush=True)
    end = answer.end
    if end is not None and end.finish_reason == "error":
        raise DiffusionGemmaError(f"the request failed: {end.error}")
    if not settings.as_json:
        tell("cancelled" if end is None else metrics_line(end.metrics, end.finish_reason))
    return answer


def make_display(engine: Engine, settings: Settings, steps: int) -> Plain | LiveCanvas:
    if settings.as_json:
        return Json()
    console = Console(highlight=False)
    # A pipe, a file or a terminal that cannot move its cursor gets the text alone.
    if settings.plain or not sys.stdout.isatty() or console.is_dumb_terminal:
        return Plain()
    return LiveCanvas(console, engine.tokenizer, steps)


def tell(line: str) -> None:
    """A remark beside the output."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def metrics_line(m: Metrics, reason: str) -> str:
    twin = m.steps > 0 and m.decoder_forwards == 0  # a token a step, no canvas: what tells of these is left out
    what = "token" if twin else "draft"
    first = f"no {what}" if m.first_draft_seconds is None else f"first {what} {m.first_draft_seconds:.2f} s"
    parts = (
        reason,
        f"{count(m.new_tokens, 'token')} in {m.total_seconds:.2f} s",
        "one after another" if twin else f"{count(m.steps, 'step')} · {m.tokens_per_forward:.2f} tokens per forward",
        f"{m.tokens_per_second:.1f} tok/s",
        first,
        f"seed {m.seed}",
        *(() if twin else (f"{count(m.blocks_redone, 'block')} redone",)),
        f"{count(m.reused_tokens, 'token')} reused",
    )
    return " · ".join(parts)


def event_to_dict(event: Event) -> dict[str, Any]:
    """What `--json` prints of an event; docs/sampling.md describes it."""
    if isinstance(event, Draft):
        values = {"tokens": event.tokens, "entropy": event.entropy, "accepted": event.accepted, "text": event.text}
        return {"kind": event.kind, "block": event.block, "step": event.step, **values}
    if isinstance(event, Commit):
        return {"kind": event.kind} | asdict(event)
    values = {"finish_reason": event.finish_reason, "error": event.error, "refused": event.refused}
    return {"kind": event.kind, **values, "metrics": event.metrics.to_dict()}


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C cancels and lets the request end; a second one interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
        yield
        return

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        cancel()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
