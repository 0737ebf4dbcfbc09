"""A small network in a fast engine and in a plain one, without a card, and what a caller sees of either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from diffusion.margins import slack, tolerance
from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion import Canvas, Denoiser, Draws, SeededDraws
from diffusiongemma.engine import Commit, Draft, End, Engine, Event, Limits, Request
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.shelf import Work
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.ops import vocab
from diffusiongemma.text.bytes import byte_tokenizer

CONFIG = ModelConfig.preset(
    "tiny", vocab_size=384, hidden_size=32, num_hidden_layers=2, sliding_window=12, canvas_length=16, num_experts=4
).replace(layer_types=("sliding_attention", "full_attention"), eos_token_ids=(1, 150, 200, 250))

SMALL = 4 << 20  # bytes of the pool, which is there from the start


def make_model() -> DiffusionGemma:
    model = DiffusionGemma(CONFIG).init_weights(3, std=0.3).eval().requires_grad_(False)
    # Random conditioning makes a rounding error ten times larger with every step: other tokens after seven of them.
    model.self_conditioning.down_proj.weight.mul_(0.02)
    return model


def fast_engine(limits: Limits = Limits(max_bytes=SMALL), **options: bool) -> Engine:  # noqa: B008
    model = make_model()
    return Engine(model, byte_tokenizer(), limits=limits, runner=FastRunner(model, torch_ops(), limits, **options))


def plain_engine() -> Engine:
    return Engine(make_model(), byte_tokenizer(), kernels=False)


@dataclass
class BoardDraws:
    """The chance of a board, for the plain way: noise to begin with, then uniform numbers and tokens step by step."""

    seed: int
    steps: int = 0
    stepping: bool = False
    _start: SeededDraws = field(init=False)

    def __post_init__(self) -> None:
        self._start = SeededDraws(self.seed)

    def uniforms(self, count: int) -> Tensor:
        self.stepping = True
        return self._drawn(count, 0)[0]

    def tokens(self, count: int, vocab_size: int) -> Tensor:
        if not self.stepping:
            return self._start.tokens(count, vocab_size)
        self.stepping, token = False, self._drawn(count, vocab_size)[1]
        self.steps += 1
        return token

    def _drawn(self, count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        seed, step = torch.full((count,), self.seed), torch.full((count,), self.steps)
        return vocab.draws(seed, step, torch.arange(count), vocab_size)


class RunningRecorder(Recorder):
    """As on a card: recording runs the work, twice, and puts back what it was told of."""

    def record(self, name: str, work: Work, changed: Iterable[Tensor] = ()) -> Work:
        kept = [(tensor, tensor.clone()) for tensor in changed]
        for _ in range(2):
            work()
            for tensor, value in kept:
                tensor.copy_(value)
        self.recorded += 1
        return work


def told(events: Iterable[Event]) -> list[tuple[object, ...]]:
    """What a caller sees, without numbers that may round."""
    found: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, Draft):
            found.append(("draft", event.block, event.step, event.tokens, event.accepted))
        elif isinstance(event, Commit):
            found.append(("commit", event.block, event.tokens, event.text))
        elif isinstance(event, End):
            m = event.metrics
            counts = (m.steps, m.blocks, m.blocks_settled, m.blocks_redone, m.decoder_forwards, m.positions)
            found.append(("end", event.finish_reason, event.error, m.new_tokens, *counts))
    return found


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Of each step of a plain engine inside: might numbers that round otherwise have decided otherwise?"""
    close, step = list[bool](), Denoiser.step

    def watch(denoiser: Denoiser, canvas: Canvas, logits: Tensor, draws: Draws) -> Canvas:
        within = tolerance(logits, denoiser.schedule.at(denoiser.schedule.steps - canvas.step))
        close.append(slack(denoiser, canvas, logits.clone(), draws.uniforms(len(canvas))) < 2 * within)
        return step(denoiser, canvas, logits, draws)

    with mock.patch.object(Denoiser, "step", watch):
        yield close


def alike(told_one: list[tuple[object, ...]], other: list[tuple[object, ...]], close: list[bool]) -> bool:
    """Are both the same, up to the first step that was `close`?"""
    if told_one == other:
        return True
    pairs = enumerate(zip(told_one, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(told_one), len(other)))
    steps = sum(event[0] == "draft" for event in other[:first])
    return any(close[: steps + 1])


def all_at_once(engine: Engine, asked: list[Request]) -> list[list[tuple[object, ...]]]:
    """Without the engine's thread, which may begin before the last has come: who runs beside whom is settled."""
    prepared = [engine._prepare(request, None) for request in asked]
    for sequence, _ in prepared:
        engine.scheduler.add(sequence)
    while engine.scheduler.busy:
        engine.scheduler.tick()
    return [told(handle) for _, handle in prepared]
