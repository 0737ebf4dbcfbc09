"""Canvases of one width that step together, on the device: a board, a recorded step for every number of them.

Between two steps the host only learns what came out; tokens, conditioning and counters stay where they are. A step may
be launched before the results of the one before it have been read (`Lane.launch` twice): should a canvas turn out to
have been done, its further step is thrown away, for a step writes nothing but the board. (What is encoded in the same
pass goes into cache rows. Where that is a block that was not read yet, they must be able to forget it again:
`CacheRow.put_aside`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diffusiongemma.diffusion import Canvas, Denoiser
from diffusiongemma.diffusion.batch import Board, Outcome, unfit
from diffusiongemma.engine.graphs import Mailbox
from diffusiongemma.engine.sequence import Block, Sequence
from diffusiongemma.engine.shelf import Work
from diffusiongemma.engine.slate import Parcel, Slate
from diffusiongemma.engine.steps import Kind, Steps
from diffusiongemma.model.fused import Batch
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops.attention_cached import New

WARM = 0.4  # a canvas that gets no colder than that leaves the vocabulary end less to do
HOPE = 4.0  # a canvas whose mean entropy is this many times what would end it is not expected to end with the next step


@dataclass(frozen=True)
class Flight:
    """A step under way."""

    passengers: list[tuple[Sequence, Canvas]]
    arrive: Callable[[], Tensor]  # waits; [B, 3 L + 2]


class Lane:
    def __init__(
        self,
        slate: Slate,
        rows: int,
        width: int,
        warm: bool = True,
        ruled: bool = False,
        usual: bool = True,
    ) -> None:
        """`warm`: for canvases that are `is_warm`. `ruled`: for those with pins or banned tokens. Other kernels read
        those, and round differently, so they have lanes of their own: who else is here must not show in a canvas.
        `usual`: canvases of this width are sure to come again."""
        network, self.slate = slate.network, slate
        config, device = network.config, network.device
        self.network, self.width, self.warm = network, width, warm
        self.ruled, self.usual = ruled, usual
        self.board = Board.empty(rows, width, config.hidden_size, config.vocab_size, network.dtype, device)
        self.offsets = torch.zeros(config.num_hidden_layers, rows, dtype=torch.int32, device=device)
        self.length = torch.zeros(rows, dtype=torch.int32, device=device)
        self._within = torch.arange(width, dtype=torch.int32, device=device)
        self._begin = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device)
        self._mailbox = Mailbox(self.board.out)
        self.steps = Steps(slate.recorder.shelves, usual)
        self._seats: list[tuple[Sequence, Canvas]] = []  # who has which row of the board, and at which canvas
        self._rows: list[tuple[int, int, int]] = []  # where the cache row of each lies, as the device knows it
        self._moves = -1
        self.flights: list[Flight] = []

    # ---- seats -------------------------------------------------------------------------------------------------------

    @property
    def passengers(self) -> list[Sequence]:
        return [sequence for sequence, _ in self._seats]

    @property
    def busy(self) -> bool:
        """Is some canvas not done yet? What it has come to lies on the board alone."""
        return bool(self.flights) or any(s.phase == "denoise" and s.canvas is canvas for s, canvas in self._seats)

    def seat(self, sequences: list[Sequence]) -> None:
        """Give these the first rows of the board, keeping who has one; no step may be under way."""
        assert not self.flights
        wanted = {id(sequence) for sequence in sequences}
        for row in reversed(range(len(self._seats))):
            if id(self._seats[row][0]) not in wanted:
                last = self._seats.pop()
                if row < len(self._seats):
                    self.board.swap_in(len(self._seats), row)
                    self._seats[row] = last
        seated = {id(sequence): row for row, (sequence, _) in enumerate(self._seats)}
        for sequence in sequences:
            canvas, denoiser = sequence.canvas, sequence.denoiser
            assert canvas is not None
            assert denoiser is not None
            row = seated.get(id(sequence), len(self._seats))
            if row == len(self._seats):
                self._seats.append((sequence, canvas))
            elif self._seats[row][1] is canvas:
                continue  # the board has it as it left it
            self._seats[row] = (sequence, canvas)
            soft = None if sequence.soft is None else sequence.soft[: self.width]
            self.board.put(row, denoiser, canvas, soft, sequence.metrics.seed, sequence.metrics.steps)

    def fits(self, block: Block) -> bool:
        """Can this canvas be seated here?"""
        denoiser, canvas = block
        alike = (is_warm(denoiser), is_ruled(denoiser)) == (self.warm, self.ruled)
        return alike and len(canvas) == self.width and unfit(denoiser) is None

    def _tell_rows(self) -> None:
        """Where the cache rows lie and how long they are, if the device does not know it.

        Before every step, not only for a new seat: rows move when somebody asks for one (`CachePool.new_row`). A step
        that is under way is not disturbed, for the device copies rows after it, and reads this after that.
        """
        rows = [sequence.row for sequence, _ in self._seats]
        pooled = [row for row in rows if isinstance(row, PoolRow)]
        assert len(pooled) == len(rows)
        # Not the rows themselves: held here, they would not be free.
        known = [(row.start, row.max_length, row.length) for row in pooled]
        pool = self.network.pool
        if known == self._rows and self._moves == pool.moves:
            return
        self._rows, self._moves = known, pool.moves
        self.offsets[:, : len(rows)].copy_(pool.offsets(pooled), non_blocking=True)
        lengths = torch.tensor([row.length for row in pooled], dtype=torch.int32)
        self.length[: len(rows)].copy_(lengths, non_blocking=True)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def launch(self, parcel: Parcel | None = None) -> None:
        """One step of all that are seated; `parcel`: what is encoded in the same pass, before it. Its rows grow."""
        self._tell_rows()
        kind = self.kind(parcel)
        work = self.steps.work(kind, self)
        if parcel is not None and kind.before is not None:
            self.slate.put(parcel, kind.before)
            self._tell_rows()
        work()
        self.flights.append(Flight(list(self._seats), self._mailbox.send(self.board.out[: kind.rows])))

    def takes(self, parcel: Parcel, most: int) -> bool:
        """Should this go with the next step of those who are seated? `most`: tokens of a pass, those that fill it up
        included"""
        self._tell_rows()
        kind = self.kind(parcel)
        assert kind.before is not None
        return kind.rows * self.width + kind.before.size <= most and self.steps.takes(kind, self)

    def succeed(self, following: list[Block]) -> Tensor:
        """With the last step of all that are seated under way (`ending`): the canvases that follow take their seats ->
        the blocks before them [B, L], which the device will have made"""
        blocks = self.board.previous[: len(self._seats)].clone()
        for row, ((sequence, _), (denoiser, canvas)) in enumerate(zip(self._seats, following, strict=True)):
            drawn = sequence.metrics.steps + 1  # the step under way has not been counted yet
            self.board.put(row, denoiser, canvas, None, sequence.metrics.seed, drawn)
            self._seats[row] = (sequence, canvas)
        return blocks

    def kind(self, parcel: Parcel | None = None) -> Kind:
        """The step that those who are seated need, with these tokens before it."""
        rows, lengths = len(self._seats), [length for _, _, length in self._rows]
        if parcel is None:
            return Kind(rows, self.network.pool.reach_for(max(lengths)))
        more = {id(row): count for row, count in zip(parcel.rows, parcel.counts, strict=True)}
        grown = (n + more.get(id(sequence.row), 0) for n, (sequence, _) in zip(lengths, self._seats, strict=True))
        before = self.slate.kind(parcel)
        if set(parcel.counts) == {self.width}:  # blocks come again and again, and need not be filled up
            before = before._replace(rows=len(parcel.rows), size=sum(parcel.counts), most=self.width)
        reach = max(before.reach, self.network.pool.reach_for(max(grown)))
        return Kind(rows, reach, before._replace(reach=reach))

    def recorded(self, kind: Kind) -> Work:
        """The step of this kind, ready to be replayed."""
        return self.steps.recorded(kind, self)

    def record(self, kind: Kind) -> Work:
        """Also if it has been recorded already"""
        board = self.board
        changed = (board.tokens, board.soft, board.previous, board.counts, board.out)
        name = f"{kind}{'' if self.warm else ', cold'}{' with rules' if self.ruled else ''}"
        self.slate.rest()
        return self.slate.recorder.record(name, partial(self.step, kind), changed)

    @torch.inference_mode()
    def step(self, kind: Kind) -> None:
        """Everything between two states of the board: network, vocabulary end, sampler, stop decision."""
        network, board, config, rows = self.network, self.board, self.network.config, kind.rows
        length, new = self.length[:rows], New(self._begin[: rows + 1], self.width)
        positions = (length[:, None] + self._within).flatten()
        batch = Batch(self.offsets[:, :rows], length, positions, new, kind.reach)
        canvas, soft = board.tokens[:rows].flatten(), board.soft[:rows].flatten(0, 1)
        if kind.before is None:
            hidden = network.denoise(canvas, soft, batch)
        else:
            hidden = network.turn(*self.slate.given(kind.before), canvas, soft, batch)
        temperature, uniform, noise = board.draws(rows, config.vocab_size, network.ops.prepare)
        rules = board.rules(rows, temperature, uniform, self.ruled)
        ends = (config.final_logit_softcapping, network.embed_scale)
        how = {"coldest": WARM if self.warm else None, "at_once": network.ops.reading}
        reading = network.ops.vocab_end(hidden, network.table, rules, *ends, **how)
        board.decide(rows, reading, noise, network.ops.decide)

    def land(self) -> None:
        """Wait for the oldest step under way, and tell its passengers."""
        flight = self.flights.pop(0)
        results = flight.arrive()
        for row, (sequence, before) in enumerate(flight.passengers):
            # It may have been cancelled, or the step before may have been its last.
            if sequence.cancelled or sequence.phase != "denoise" or sequence.canvas is not before:
                continue
            canvas = self._after(sequence, before, Outcome.read(results[row]), row)
            if sequence.took(canvas):
                self._follow(before, canvas)

    def _after(self, sequence: Sequence, before: Canvas, outcome: Outcome, row: int) -> Canvas:
        denoiser = sequence.denoiser
        assert denoiser is not None
        history: tuple[Tensor, ...] = ()
        if denoiser.stop is not None and denoiser.stop.stability:
            history = (*before.history, outcome.argmax)[-denoiser.stop.stability :]
        tokens = outcome.argmax  # those that the next step reads stay on the board
        if sequence.params.canvas == "adaptive" and not outcome.done:  # it may be cut, and go on in another lane
            tokens, sequence.soft = self.board.take(row)
        return Canvas(
            tokens, before.step + 1, outcome.done, outcome.settled, outcome.argmax, outcome.entropy, outcome.accepted,
            None, outcome.mean_entropy, history,
        )  # fmt: skip

    def _follow(self, before: Canvas, canvas: Canvas) -> None:
        """The board holds this canvas now; so will what is under way."""
        for seats in (self._seats, *(flight.passengers for flight in self.flights)):
            for row, (sequence, known) in enumerate(seats):
                if known is before:
                    seats[row] = (sequence, canvas)

    def discard(self) -> None:
        """Nobody waits for what is under way any more."""
        self.flights.clear()

    def expected(self) -> list[Sequence]:
        """Who waits for the oldest step under way."""
        passengers = self.flights[0].passengers if self.flights else []
        return [s for s, canvas in passengers if s.phase == "denoise" and s.canvas is canvas]

    def ending(self) -> list[Sequence]:
        """Whose last step is under way, row by row, if that is all who are seated and more is to follow for each: where
        the board keeps their best tokens, their blocks will be."""
        seated = self.passengers
        last = len(self.flights) == 1 and self.expected() == seated
        return seated if last and all(_ends(s, canvas) and s.expects_more for s, canvas in self._seats) else []

    def certain_to_go_on(self) -> bool:
        """Is no canvas expected to be done with the step that is under way?"""
        return all(_goes_on(sequence, canvas) for sequence, canvas in self._seats)


def is_ruled(denoiser: Denoiser) -> bool:
    return bool(denoiser.constraints)


def is_warm(denoiser: Denoiser) -> bool:
    return denoiser.schedule.t_min >= WARM


def _ends(sequence: Sequence, canvas: Canvas) -> bool:
    """Is the step after this canvas its last?"""
    denoiser = sequence.denoiser
    assert denoiser is not None
    return canvas.step + 1 >= denoiser.schedule.steps


def _goes_on(sequence: Sequence, canvas: Canvas) -> bool:
    denoiser = sequence.denoiser
    assert denoiser is not None
    if sequence.cancelled or sequence.params.canvas == "adaptive" or sequence.canvas is not canvas:
        return False
    if canvas.step + 2 > denoiser.schedule.steps:
        return False
    stop = denoiser.stop
    return stop is None or canvas.mean_entropy > HOPE * stop.confidence
