"""An engine that answers what a test wants: graders need known answers, and no trained model is small enough."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Commit, End, Engine, Metrics, Request
from diffusiongemma.engine.worker import Handle
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.bytes import byte_tokenizer
from engine.holes import tokenizer as hole_tokenizer


@cache
def small_model() -> DiffusionGemma:
    """Random weights, but the canvas and the digits that the tasks need."""
    config = dataclasses.replace(
        ModelConfig.preset("tiny"), num_hidden_layers=2, layer_types=(), canvas_length=128, eos_token_ids=(1, 106)
    )
    return DiffusionGemma(config).init_weights(0, 0.1).eval().requires_grad_(False)


def real_engine(holes: bool = False) -> Engine:
    return Engine(small_model(), hole_tokenizer("fim_suffix_first") if holes else byte_tokenizer())


class Oracle(Engine):
    """`answer` turns a request into the answer's text; everything is told at once. `settles`: by the stop rule?"""

    def __init__(
        self,
        answer: Callable[[Request], str],
        tokenizer: Tokenizer | None = None,
        steps: int = 3,
        settles: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        super().__init__(small_model(), tokenizer or byte_tokenizer())
        self.answer, self.steps, self.settles = answer, steps, settles
        self.asked: list[Request] = []

    def submit(self, request, forward=None, draws=None) -> Handle:
        handle = Handle(forward)
        handle.emit(End("stop", Metrics()))  # the gate that keeps batches in order
        return handle

    def submit_group(self, requests: Sequence[Request], forward=None) -> list[Handle]:
        handles = []
        for i, request in enumerate(requests):
            self.asked.append(request)
            text = self.answer(request)
            tokens = self.tokenizer.encode(text)[: request.params.max_new_tokens]
            forward(i, Commit(0, tokens, text))
            counts = {"steps": self.steps, "new_tokens": len(tokens), "blocks": 1}
            metrics = Metrics(seed=request.params.seed, blocks_settled=int(self.settles(request)), **counts)
            forward(i, End("stop", metrics))
            handles.append(Handle())
        return handles
