"""What is made once is made before the first request: kernels are compiled and passes recorded, and a line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusiongemma.checkpoint.progress import shown
from diffusiongemma.engine.engine import Engine
from diffusiongemma.engine.events import Commit, End
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.request import Request
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.model import CacheRow

PROMPT, STEPS = 64, 3


def prepare(engine: Engine, progress: bool | None = None) -> list[str]:
    """Begin a short text -> what was recorded for it: a step, and one with a prompt or a block before it. The kernels
    of these are compiled then (Triton keeps them for the next start); what only others need is recorded when
    they come. Without a card there is little to do. `progress`: a line on stderr; None: on terminals only."""
    runner, found = engine.scheduler.runner, list[str]()
    if not isinstance(runner, FastRunner):
        engine.generate([1], max_new_tokens=1, steps=1, seed=0, canvas=1)
        return found
    config, width = engine.model.config, engine.model.config.canvas_length
    given = {"max_new_tokens": 2 * width, "canvas": width, "steps": STEPS, "early_stop": False, "redo": 0, "seed": 0}
    params = SamplingParams.build(engine.params, mode="diffusion", stop=(), logprobs=None, **given)
    prompt, length = (1,) * PROMPT, PROMPT + 2 * width
    taken = CacheRow.bytes_for(config, length, runner.dtype)
    if length > config.max_position_embeddings or taken > engine.scheduler.limits.max_bytes:
        return found  # such a text has no room: what shorter ones need is recorded when they come
    with _line(progress) as tell:

        def hear(name: str) -> None:
            found.append(name)
            tell(name)

        before, runner.recorder.listener = runner.recorder.listener, hear
        try:
            handle = engine.submit(Request(prompt, params, ends=False, drafts=False))
            for event in handle:
                if isinstance(event, Commit):  # the pass behind it is recorded by now, and nobody wants the text
                    handle.cancel()
                elif isinstance(event, End) and event.error:
                    raise DiffusionGemmaError(f"the engine cannot write: {event.error}")
        finally:
            runner.recorder.listener = before
    return found


@contextmanager
def _line(progress: bool | None) -> Iterator[Callable[[str], None]]:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with shown(progress, *columns) as bar:
        task = bar.add_task("compiling kernels", total=4)  # three passes, and the text itself
        yield lambda name: bar.update(task, description=f"compiling and recording {name}", advance=1)
