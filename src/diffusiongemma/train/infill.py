"""Holes in code: whole lines, several lines, or part of a line, in the format of tasks/format.py.

Before the text next to a hole may stand passages from elsewhere in its file that look alike (text/alike.py), each
closed by eos. What is left of a row is the end of another file.

Legend: B rows, P prefix, L canvas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diffusiongemma.engine.params import LEAST_CONTEXT, is_far
from diffusiongemma.errors import ConfigError, DataError
from diffusiongemma.tasks.format import EOS, fill_canvas, infill_prompt
from diffusiongemma.text.alike import LEAST, REACH, alike
from diffusiongemma.train.recipe import TaskConfig
from diffusiongemma.train.rows import Rows, to_rows
from diffusiongemma.train.sources import Documents, Ids

KINDS = ("line", "lines", "inside")
MAX_LINES = 8


class Infill:
    """`kinds`: shares of line, lines, inside. `far`: how many tokens of the prefix are for passages that look alike;
    `suffix`: how much of the others the text after the hole may take."""

    def __init__(
        self,
        config: TaskConfig,
        documents: Documents,
        line_starts: npt.NDArray[np.bool_],
        kinds: tuple[float, ...] = (0.60, 0.25, 0.15),
        suffix: float = 0.4,
        far: int = 0,
    ) -> None:
        if len(kinds) != len(KINDS) or abs(sum(kinds) - 1.0) > 1e-6:
            raise ConfigError(f"task {config.name}: kinds must be shares of {', '.join(KINDS)} that sum to 1")
        if not is_far(far) or far > config.prefix - LEAST_CONTEXT:
            raise ConfigError(
                f"task {config.name}: far must be 0 or an integer of at least {LEAST} tokens, and leave at least "
                f"{LEAST_CONTEXT} of the prefix of {config.prefix}, got {far!r}"
            )
        self.config, self.documents, self.kinds = config, documents, kinds
        self.near, self.far = config.prefix - far, far
        self.max_suffix = int(suffix * self.near)
        self.line_starts = line_starts
        self.lines = documents.lines(line_starts)
        if len(self.lines) <= MAX_LINES:
            raise DataError(f"task {config.name}: there are only {len(self.lines)} lines of text")

    def rows(self, rng: np.random.Generator, count: int) -> Rows:
        c = self.config
        prefix = np.empty((count, c.prefix), np.int64)
        canvas = np.empty((count, c.canvas), np.int64)
        read = np.ones((count, c.prefix), bool)
        for i, (first, end, begin, close) in enumerate(self.holes(rng, count).tolist()):
            prefix[i], passages = self.prompt(rng, first, end, begin, close)
            read[i, passages] = False  # they end anywhere, and eos must not be learned from that
            canvas[i] = fill_canvas(self.documents.tokens[first:end].tolist(), c.canvas)
        return to_rows(c, prefix, canvas, None, read)

    def holes(self, rng: np.random.Generator, count: int) -> Ids:
        """[count, 4]: first and end of each hole, and where its document begins and its eos stands"""
        found: list[Ids] = []
        missing = count
        for _ in range(100):
            some = self._candidates(rng, 2 * missing + 16)[:missing]
            found.append(some)
            missing -= len(some)
            if missing == 0:
                return np.concatenate(found)
        raise DataError(f"task {self.config.name}: hardly any hole of this text fits a canvas of {self.config.canvas}")

    def _candidates(self, rng: np.random.Generator, count: int) -> Ids:
        kind = rng.choice(len(KINDS), count, p=self.kinds)
        line = rng.integers(0, len(self.lines) - MAX_LINES, count)
        several = np.where(kind == 1, rng.integers(2, MAX_LINES + 1, count), 1)
        first, end = self.lines[line], self.lines[line + several]
        # Inside: any stretch after the line break that is not the whole rest of the line.
        size = end - first - 1
        start = first + 1 + (rng.random(count) * size).astype(np.int64)
        stop = start + 1 + (rng.random(count) * (end - start)).astype(np.int64)
        inside = kind == 2
        partial = (start > first + 1) | (stop < end)
        fits = np.where(inside, (size >= 3) & partial & (stop <= end), size >= 1)  # a blank line is no task
        first, end = np.where(inside, start, first), np.where(inside, stop, end)
        fits &= (end - first < self.config.canvas) & (end > first)
        document = np.searchsorted(self.documents.offsets, first, side="right") - 1
        begin, close = self.documents.offsets[document], self.documents.offsets[document + 1] - 1
        fits &= end <= close
        return np.stack([first, end, begin, close], axis=1)[fits]

    def prompt(self, rng: np.random.Generator, first: int, end: int, begin: int, close: int) -> tuple[Ids, slice]:
        """[P]: the prompt of one hole, and where in it passages stand; text before the hole takes the room that the
        text after it leaves"""
        tokens, room = self.documents.tokens, self.near - len(infill_prompt([], []))
        draw, wish = rng.random(), self.max_suffix
        if draw < 0.3:  # mostly as much as there is; sometimes less, sometimes nothing: then the file ends there
            wish = int(rng.integers(0, self.max_suffix + 1)) if draw < 0.25 else 0
            close = min(close, end + wish)
        after = tokens[end : min(close, end + wish)]
        before = tokens[max(begin, first - (room - len(after))) : first]
        prompt = np.array(infill_prompt(before.tolist(), after.tolist()))
        passages = self._passages(first, end, begin, close, (len(before), len(after)))
        spare = self.config.prefix - len(prompt) - len(passages)
        fill = self.documents.tail(rng, spare) if spare else np.empty(0, np.int64)
        padded = np.concatenate([np.zeros(spare - len(fill), np.int64), fill, passages, prompt])
        return padded, slice(spare, spare + len(passages))

    def _passages(self, first: int, end: int, begin: int, close: int, near: tuple[int, int]) -> Ids:
        """Passages that look alike, each closed by eos"""
        if not self.far:
            return np.empty(0, np.int64)
        tokens = self.documents.tokens
        sides = (tokens[max(begin, first - REACH) : first], tokens[end : min(close, end + REACH)])
        before, after = (np.asarray(side, np.int64) for side in sides)
        found = alike(before, after, near, self.line_starts, self.far)
        return np.concatenate([np.empty(0, np.int64), *(part for one in found for part in (one, [EOS]))])
