"""What is made once is made before the first request: kernels are compiled and passes recorded, and a line says so."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from diffusiongemma.checkpoint.progress import shown
from diffusiongemma.engine.engine import Engine
from diffusiongemma.engine.events import End, Event
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.worker import Handle
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.model import CacheRow

SHORT, LONG = 64, 512  # tokens of a prompt
STEPS = 3


def prepare(engine: Engine, progress: bool | None = None) -> list[str]:
    """Begin a few texts -> what was recorded for them: a step, and one with a prompt, a long one, or a block before it;
    and prompts in passes of their own, as those are that come while others write. The kernels of these are compiled
    then (Triton keeps them for the next start); what only others need is recorded when they come. Without a card there
    is little to do. `progress`: a line on stderr; None: on terminals only."""
    runner, found = engine.scheduler.runner, list[str]()
    if not isinstance(runner, FastRunner):
        engine.generate([1], max_new_tokens=1, steps=1, seed=0, canvas=1)
        return found
    with _line(progress) as tell:

        def hear(name: str) -> None:
            found.append(name)
            tell(name)

        before, runner.recorder.listener = runner.recorder.listener, hear
        try:
            _begin(engine, runner, SHORT, blocks=2)
            _begin(engine, runner, LONG)
            with runner.in_turn():
                for prompt in (SHORT, LONG):
                    _begin(engine, runner, prompt)
        finally:
            runner.recorder.listener = before
    return found


def _begin(engine: Engine, runner: FastRunner, prompt: int, blocks: int = 1) -> None:
    """A text of so many blocks, up to the first draft, or the first block; none, if there is no room for it: what
    shorter ones need is recorded when they come"""
    config, width = engine.model.config, engine.model.config.canvas_length
    given = {"canvas": width, "steps": STEPS, "early_stop": False, "redo": 0, "seed": 0, "stop": (), "logprobs": None}
    limit = blocks * width
    params = SamplingParams.build(engine.params, mode="diffusion", max_new_tokens=limit, stop_tokens=(), **given)
    length = prompt + limit
    taken = CacheRow.bytes_for(config, length, runner.dtype)
    if length > config.max_position_embeddings or taken > engine.scheduler.limits.max_bytes:
        return
    handle, events = Future[Handle](), queue.SimpleQueue[Event]()

    def hear(event: Event) -> None:
        """On the engine's thread: the pass behind what is told is recorded by now, and nobody wants the text"""
        if not isinstance(event, End):
            handle.result().cancel()  # waits for `submit` to have returned it
        events.put(event)

    request = Request((1,) * prompt, params, ends=False, drafts=blocks == 1)
    handle.set_result(engine.submit(request, forward=hear))
    while not isinstance(event := events.get(), End):
        pass
    if event.error:
        raise DiffusionGemmaError(f"the engine cannot write: {event.error}")


@contextmanager
def _line(progress: bool | None) -> Iterator[Callable[[str], None]]:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    told = list[str]()
    with shown(progress, *columns) as bar:
        task = bar.add_task("compiling kernels", total=6)

        def tell(name: str) -> None:
            bar.update(task, description=f"compiling and recording: {name}", completed=len(told))
            told.append(name)

        yield tell
        bar.update(task, description=f"{len(told)} passes compiled and recorded", completed=6)
