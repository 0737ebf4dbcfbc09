"""What a request tells while it runs: drafts, committed texts, the end. The outbox says when."""

from __future__ import annotations

import time
from collections.abc import Callable

from diffusiongemma.diffusion import Canvas
from diffusiongemma.engine.events import Commit, Draft, End, Event, FinishReason, Metrics, TokenLogprob
from diffusiongemma.engine.output import OutputText

Emit = Callable[[Event], None]


class Teller:
    """Puts events together and hands them to `emit`, with the times that `metrics` keeps."""

    def __init__(self, output: OutputText, emit: Emit, decode: Callable[[list[int]], str], metrics: Metrics) -> None:
        self.emit, self._output, self._decode, self._metrics = emit, output, decode, metrics
        self._made = time.perf_counter()
        self._untold: str | None = None  # why a text could not be put together

    @property
    def age(self) -> float:
        return time.perf_counter() - self._made

    def draft(self, canvas: Canvas) -> Draft:
        """Read at once, for the canvas goes on; told when there is time."""
        assert canvas.argmax is not None
        assert canvas.entropy is not None
        assert canvas.accepted is not None
        values = (canvas.argmax.tolist(), canvas.entropy.tolist(), canvas.accepted.tolist())
        return Draft(self._metrics.blocks, canvas.step, *values, decode=self._decode)

    def commit(
        self, block: int, tokens: list[int], text: str | None, logprobs: list[TokenLogprob] | None, last: bool
    ) -> None:
        """`text`: what became certain with these tokens, if that is known already."""
        if text is None:
            try:
                text = self._output.push(tokens) + (self._output.finish() if last else "")
            except Exception as error:
                self._untold = f"{type(error).__name__}: {error}"
                raise
        if text and self._metrics.first_text_seconds is None:
            self._metrics.first_text_seconds = self.age
        if tokens or text:
            self.emit(Commit(block, tokens, text, logprobs))

    def end(self, reason: FinishReason, error: str | None, refused: bool) -> None:
        if self._untold is not None:  # its end may have waited behind that text
            reason, error = "error", self._untold
        self._metrics.total_seconds = self.age
        self.emit(End(reason, self._metrics, error, refused))
