"""Who runs next. Every tick: admit who fits, encode a bounded chunk, step every canvas.

Requests are admitted strictly in the order they came, so none starves; a canvas that has begun takes one step in every
tick, however long a prompt beside it is (on a card a new one may wait for a few); a fixed memory budget covers running
rows and kept prefixes, and prefixes give way first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine.prefix import PrefixStore, common
from diffusiongemma.engine.runner import Runner
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.errors import ConfigError, InputError
from diffusiongemma.model import CacheRow
from diffusiongemma.ops.threads import alone


@dataclass(frozen=True)
class Limits:
    max_rows: int = 16  # sequences that run at once
    max_bytes: int = 2 << 30  # of K/V cache, running rows and kept prefixes together
    # Tokens that one tick encodes, so that prompts do not stall canvases; None: as the device likes it, `Runner.chunk`,
    # and as much as it has room for, `Runner.room`, where no canvas is under way.
    chunk: int | None = None
    # The experts a second time, as passes of few users on a Hopper card read them best (`model/packed.py`); that rounds
    # a few of the model's numbers. None: where there is memory to spare.
    packed: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes", "chunk"):
            value = getattr(self, name)
            if value is None and name == "chunk":
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.packed is not None and type(self.packed) is not bool:
            raise ConfigError(f"packed must be True, False or None, got {self.packed!r}")


@dataclass
class Scheduler:
    config: ModelConfig
    runner: Runner
    limits: Limits
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    prefixes: PrefixStore = field(default_factory=PrefixStore)
    ticks: int = 0
    _waited: int = 0  # ticks in a row that new canvases have waited
    on_tick: Callable[[], None] | None = None  # a test looks here

    def add(self, sequence: Sequence) -> None:
        needed = self._bytes(sequence)
        if needed > self.limits.max_bytes:
            raise InputError(
                f"this request needs {needed / 2**20:.1f} MiB of K/V cache for {sequence.max_length} tokens, the "
                f"budget is {self.limits.max_bytes / 2**20:.1f} MiB: shorten it, or give the engine a larger max_bytes"
            )
        sequence.outbox = self.runner.outbox
        self.waiting.append(sequence)

    @property
    def chunk(self) -> int:
        """Tokens that one tick encodes at most, those of the autoregressive twin aside."""
        return self.limits.chunk or self.runner.chunk

    @property
    def room(self) -> int:
        """… where no canvas waits meanwhile: prompts that came together, and blocks that are committed together, need
        not take turns then. A prompt is cut by `chunk` all the same."""
        return self.limits.chunk or self.runner.room

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def reserved(self) -> int:
        return sum(self._bytes(sequence) for sequence in self.running)

    def tick(self) -> None:
        """One round: at most one encode pass and one denoise pass."""
        self.ticks += 1
        self._drop_cancelled()
        self._admit()
        if work := self._next_chunks():
            with self._alone(sum(len(tokens) for _, tokens in work)):
                self.runner.encode(work)
        self._join()
        if canvases := self._canvases([sequence for sequence, _ in work]):
            with self._alone(sum(len(sequence.canvas) for sequence in canvases if sequence.canvas is not None)):
                self.runner.denoise(canvases)
        self._retire()
        self._keep_copies()
        if not (canvases and self.busy):  # else the next step comes first, if the runner says so
            self.runner.outbox.deliver()
        if self.on_tick is not None:
            self.on_tick()

    def _alone(self, tokens: int) -> AbstractContextManager[None]:
        """Around a pass of so many tokens: of a CPU's threads, one does what is not worth waking the others for."""
        return alone(self.runner.device, tokens * self.config.hidden_size)

    def abort(self, message: str) -> None:
        """Something broke: end everything, trust no row."""
        with self.runner.outbox.hold():
            for sequence in [*self.running, *self.waiting]:
                sequence.fail(message)
                sequence.row = None  # who still holds the request, as lanes do, must not hold its memory
        self.runner.outbox.deliver(careful=True)
        self.running.clear()
        self.waiting.clear()
        self.prefixes.clear()

    # ---- admission -----------------------------------------------------------------------------------------------

    def _bytes(self, sequence: Sequence) -> int:
        return CacheRow.bytes_for(self.config, sequence.max_length, self.runner.dtype)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_rows:
            sequence = self.waiting[0]
            needed = self._bytes(sequence)
            self.prefixes.find(sequence.request.prompt, len(sequence.request.prompt))  # used now: it goes last
            if not self._make_room(needed):
                return  # it waits, and all behind it: first come, first served
            self.running.append(self.waiting.popleft())  # first: should its row fail, it gets its end like all
            if self._must_wait(sequence):
                sequence.phase = "join"  # it has its memory, and gets its row when the leader's prompt is encoded
            else:
                sequence.admit(*self._first_row(sequence))

    @staticmethod
    def _must_wait(sequence: Sequence) -> bool:
        """Is the beginning of its prompt being encoded by another of its group?"""
        return sequence.leader is not None and not sequence.leader.prompt_encoded

    def _join(self) -> None:
        """Followers whose leader has encoded the prompt (or is no more) go on with a copy of its row."""
        for sequence in self.running:
            if sequence.phase == "join" and not self._must_wait(sequence):
                sequence.admit(*self._first_row(sequence))

    def _first_row(self, sequence: Sequence) -> tuple[CacheRow, int]:
        """A copy of the longest kept beginning (or of the leader's, if there is one), or else an empty row."""
        prompt = sequence.request.prompt
        # The twin draws its first token from the last prompt token's pass, so that pass must happen.
        usable = len(prompt) - (sequence.params.mode == "ar")
        if sequence.leader is not None and (row := sequence.leader.row) is not None:
            shared = min(common(prompt, sequence.leader.tokens), usable, row.length)
            if shared and row.can_truncate(shared):
                return row.fork(sequence.max_length, length=shared), shared
        found = self.prefixes.find(prompt, usable)
        if found is None:
            return self.runner.new_row(sequence.max_length), 0
        row, shared = found
        return row.fork(sequence.max_length, length=shared), shared

    # ---- one tick ------------------------------------------------------------------------------------------------

    def _next_chunks(self) -> list[tuple[Sequence, list[int]]]:
        """Sequences that draw token by token (one each), then prompts and blocks in order of arrival.

        Where a prompt is cut does not depend on who else is here: another cut could round differently.
        """
        work = [(s, s.chunk(1)) for s in self.running if s.phase == "draw"]
        stepping = any(s.phase in ("denoise", "score") and s.metrics.steps for s in self.running)
        budget = self.chunk if work or stepping else self.room
        for sequence in self.running:
            if sequence.phase == "encode" and len(tokens := sequence.chunk(self.chunk)) <= budget:
                work.append((sequence, tokens))
                budget -= len(tokens)
        return work

    def _canvases(self, read: list[Sequence]) -> list[Sequence]:
        """Who takes a step; `read`: whose tokens were encoded just now.

        Requests that come together should step together: on a card a step of one costs a third of a step of eight, and
        who is a step ahead is so to the end. So as long as nobody is on the way, new canvases wait for the prompts that
        are being read (and for one tick more, in which others may arrive), but not for many ticks.
        """
        canvases = [s for s in self.running if s.phase in ("denoise", "score")]
        new = all(s.phase == "denoise" and not s.metrics.steps for s in canvases)
        fresh = [s for s in self.running if not s.metrics.steps and s.params.mode == "diffusion"]
        reading = any(s.phase != "denoise" or s in read for s in fresh)
        if canvases and new and reading and self._waited < self.runner.patience:
            self._waited += 1
            return []
        self._waited = 0
        return canvases

    def _keep_copies(self) -> None:
        """Copies of prompts where a later turn will branch off, if the row itself will have forgotten that point.

        At the end of a tick: a prompt that went with the first step of its canvas is there by then, and nothing behind
        it, for a step writes no row and no block is committed before a step of it has been read. Who has ended needs no
        copy: its row is kept, and still has that point.
        """
        for sequence in self.running:
            row, count = sequence.row, sequence.to_keep
            if row is None or not 0 < count <= row.length:
                continue
            sequence.to_keep = 0
            if self._make_room(CacheRow.bytes_for(self.config, count, self.runner.dtype)):
                self.prefixes.put(sequence.tokens[:count], row.fork(count, length=count))

    def _make_room(self, size: int) -> bool:
        """Forget prefixes until so many bytes are free; none, if that would not help."""
        if self.reserved + size > self.limits.max_bytes:
            return False
        while self.reserved + self.prefixes.nbytes + size > self.limits.max_bytes:
            self.prefixes.evict()
        return True

    def _drop_cancelled(self) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.cancelled:
                sequence.cancel()
        self.waiting = deque(s for s in self.waiting if s.phase != "ended")
        self._retire()

    def _retire(self) -> None:
        """Rows of ended sequences become prefixes: what they encoded may be asked for again."""
        ended = [s for s in self.running if s.phase == "ended"]
        self.running = [s for s in self.running if s.phase != "ended"]
        for sequence in ended:
            row, sequence.row = sequence.row, None
            if row is None or sequence.cancelled:
                continue  # who cancels frees memory at once
            if row.length and self._make_room(row.nbytes):
                self.prefixes.put(sequence.tokens[: row.length], row)
