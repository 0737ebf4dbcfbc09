"""The runner for a GPU with kernels: whole steps as CUDA graphs, over rows that lie in one pool.

What a recorded step cannot do (log-probabilities of a canvas, alternatives, top-p, scores, chance from elsewhere) goes
the plain way, over the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from diffusiongemma.diffusion import SeededDraws
from diffusiongemma.diffusion.batch import unfit
from diffusiongemma.engine import trial
from diffusiongemma.engine.draw import DrawLane, drawable
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.lane import Lane, is_ruled, is_warm
from diffusiongemma.engine.params import WIDTHS
from diffusiongemma.engine.runner import FULL, PLENTY, Runner, bytes_left, default_chunk, default_room, packed
from diffusiongemma.engine.scheduler import Limits
from diffusiongemma.engine.sequence import Block, Sequence
from diffusiongemma.engine.slate import Parcel, Slate
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.model.fused import FusedNetwork, Overlap
from diffusiongemma.model.packed import pack_experts, packed_bytes, packings, unpackable
from diffusiongemma.model.pool import CachePool
from diffusiongemma.model.support import prepare, unsupported
from diffusiongemma.ops.kernels import current, untried
from diffusiongemma.ops.memory import is_out_of_memory

log = logging.getLogger(__name__)
# Encoded tokens and those of a step: of so many at most, one pass is quicker than two, which read the same experts.
TURN = 4096
MOST_LANES = 8  # of widths that may never come again: whose boards are kept
Work = tuple[Sequence, list[int]]  # tokens that are to be encoded
Place = tuple[int, bool, bool]  # a lane: the width of its canvases, whether they are warm, and ruled (`Lane`)


class Ahead(NamedTuple):
    """A block that was committed before it was read."""

    sequence: Sequence
    before: int  # tokens that its row had
    following: Block | None  # the canvas behind it, if that is known


class FastRunner(Runner):
    def __init__(
        self,
        model: DiffusionGemma,
        ops: Ops,
        limits: Limits | None = None,
        *,
        graphs: bool = True,
        ahead: bool = True,
        overlap: Seq[Overlap] = ("draw", "encode", "denoise"),
    ) -> None:
        """`ahead`: launch a step before the one before it has been read. `overlap`: see `FusedNetwork`."""
        super().__init__(model)
        for left in prepare(model, ops):
            log.warning("without a kernel: %s", left)
        limits = limits or Limits()
        self.max_rows, self.ahead = limits.max_rows, ahead
        self.chunk = limits.chunk or default_chunk(self.device, limits.max_bytes)
        self.pool = CachePool(model.config, limits.max_bytes, self.dtype, self.device)
        self.room = limits.chunk or default_room(self.device, limits.max_bytes)
        roomy = limits.chunk is None and self.room == FULL
        less = _packs(model, ops, limits, roomy)
        self.network = FusedNetwork(model, self.pool, ops.roomy() if roomy else ops, overlap, less)
        self.recorder = Recorder(self.device, graphs, before=self.outbox.deliver)
        most = max(self.room, self.chunk + limits.max_rows)
        self.slate = Slate(self.network, self.recorder, limits.max_rows, most)
        self.drawing = DrawLane(self.network, self.recorder, limits.max_rows)
        self._usual = {*WIDTHS, model.config.canvas_length}
        self._lanes: dict[Place, Lane] = {}  # the last used comes last
        self._waiting = list[Work]()  # for the next step: they are encoded in the same pass

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, nothing is launched before it must be, and nothing goes with anything else. No request may run when
        it begins or ends."""
        before, self.ahead = self.ahead, False
        try:
            yield
        finally:
            self.ahead = before

    def new_row(self, max_length: int) -> CacheRow:
        return self.pool.new_row(max_length)

    def lane(self, width: int, warm: bool = True, ruled: bool = False) -> Lane:
        place = (width, warm, ruled)
        if place not in self._lanes:
            self._lanes[place] = Lane(self.slate, self.max_rows, *place, width in self._usual)
        self._lanes[place] = self._lanes.pop(place)
        return self._lanes[place]

    def _drop_lanes(self) -> None:
        strange = [place for place, lane in self._lanes.items() if not lane.usual]
        for old in strange[: max(0, len(strange) - MOST_LANES)]:
            if not self._lanes[old].busy:
                del self._lanes[old]

    def _encode(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> Tensor:
        return self.slate.encode(tokens, rows, counts)

    def _remember(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> None:
        self.slate.remember(tokens, rows, counts)

    @torch.inference_mode()
    def encode(self, work: Seq[tuple[Sequence, list[int]]]) -> None:
        drawing = [sequence for sequence, _ in work if drawable(sequence)]
        rest = [(sequence, tokens) for sequence, tokens in work if not drawable(sequence)]
        if self._launch(self.drawing, drawing):
            self._land([self.drawing])
        later = [(sequence, tokens) for sequence, tokens in rest if self.ahead and _can_wait(sequence, len(tokens))]
        all_waiting = [*self._waiting, *later]
        stepping = len(all_waiting) * self.model.config.canvas_length
        if stepping + sum(len(tokens) for _, tokens in all_waiting) > self._most:
            later = []
        waits = {id(sequence) for sequence, _ in later}
        if now := [(sequence, tokens) for sequence, tokens in rest if id(sequence) not in waits]:
            super().encode(now)
        self._waiting += later
        for sequence, _ in later:
            sequence.metrics.encoder_forwards += 1
            sequence.encoded()

    @property
    def _most(self) -> int:
        """Tokens of a pass that encodes and steps: of no more it is quicker than two, and there is memory for it."""
        return min(TURN, self.room)

    @torch.inference_mode()
    def denoise(self, sequences: Seq[Sequence]) -> None:
        plain, seated = list[Sequence](), dict[Place, list[Sequence]]()
        for sequence in sequences:
            if (place := self._place(sequence)) is None:
                plain.append(sequence)
            else:
                seated.setdefault(place, []).append(sequence)
        lanes = list[Lane]()
        for place in {**dict.fromkeys(self._flying()), **seated}:
            if self._launch(lane := self.lane(*place), seated.get(place, [])):
                lanes.append(lane)
        try:
            ahead = self._commit_ahead(lanes, len(sequences)) if self.ahead else []
        finally:  # should it fail, a finished block is told all the same
            self._land(lanes)
        self._settle(ahead)
        self._drop_lanes()
        if plain:
            if parcel := self._parcel(self._still_waiting()):
                self.slate.remember(*parcel)
            super().denoise(plain)

    def _still_waiting(self) -> list[Work]:
        """What `encode` left for a step, and is wanted still; it waits no longer"""
        waiting, self._waiting = self._waiting, []
        return [(sequence, tokens) for sequence, tokens in waiting if sequence.phase == "denoise"]

    @staticmethod
    def _parcel(work: Seq[Work]) -> Parcel | None:
        rows = [sequence.row for sequence, _ in work if sequence.row is not None]
        return Parcel(packed(work), rows, [len(tokens) for _, tokens in work]) if rows else None

    def _depart(self, lane: Lane) -> None:
        """A step of all who are seated, in one pass with what waits to be encoded, if that pays"""
        parcel = self._parcel(self._still_waiting())
        if parcel and not lane.takes(parcel, self._most):
            self.slate.remember(*parcel)
            parcel = None
        lane.launch(parcel)

    def _flying(self) -> list[Place]:
        return [place for place, lane in self._lanes.items() if lane.flights]

    def _launch(self, lane: Lane | DrawLane, sequences: list[Sequence]) -> bool:
        """A step of these is under way then, and maybe the next; False: nobody waits for one.

        Who comes while a step is under way waits for it: the step after it takes all.
        """
        if lane.flights and not lane.expected():
            lane.discard()
        if not lane.flights:
            if not sequences:
                return False
            lane.seat(sequences)
            if isinstance(lane, Lane):
                self._depart(lane)
            else:
                lane.launch()
        unchanged = {id(s) for s in lane.passengers} == {id(s) for s in sequences}
        if self.ahead and unchanged and lane.certain_to_go_on():
            lane.launch()
        return True

    def _land(self, lanes: Seq[Lane | DrawLane]) -> None:
        """Read a step of each. What comes of it is told when the device has its next work: a step that is under way
        already, or what the next tick launches (a committed block and the canvas after it, often)."""
        self.outbox.deliver()
        with self.outbox.hold():
            for lane in lanes:
                lane.land()
        if any(lane.flights for lane in lanes):
            self.outbox.deliver()

    def _commit_ahead(self, lanes: Seq[Lane], waiting: int) -> list[Ahead]:
        """Launch the commit of blocks whose last step is under way, if no other canvas waits: the device has their
        tokens before the host has. Of few it goes with the first step of what follows."""
        ending = lanes[0].ending() if len(lanes) == 1 else []
        rows = [sequence.row for sequence in ending if sequence.row is not None]
        if not rows or len(rows) != waiting or len(rows) * lanes[0].width > self.room:
            return []
        lane, few = lanes[0], 2 * len(rows) * lanes[0].width <= self._most
        outgrown = [row for row in rows if row.length + lane.width > row.ring]
        if outgrown and not few:
            return []  # a row must be able to forget its block again, and it is much that would have to be put aside
        if not _put_aside(outgrown, lane.width):
            return []
        before = [row.length for row in rows]
        following = [sequence.foresee() for sequence in ending] if few else []
        parcel = Parcel(lane.board.previous[: len(rows)].flatten(), rows, [lane.width] * len(rows))
        if few and all(map(lane.fits, following)):
            blocks = parcel._replace(tokens=lane.succeed(following).flatten())
            if lane.takes(blocks, self._most):
                lane.launch(blocks)
            else:
                self.slate.remember(*blocks)
                lane.launch()
        else:
            self.slate.remember(*parcel)
        return list(map(Ahead, ending, before, following if few else [None] * len(rows)))

    def _settle(self, blocks: Seq[Ahead]) -> None:
        """These blocks were committed before they were read. Who turned out to be at its end, or was cancelled, forgets
        what came after it; the others go on."""
        for sequence, before, following in blocks:
            assert sequence.row is not None
            if sequence.phase == "encode":
                sequence.metrics.encoder_forwards += 1
                sequence.encoded(following)
            else:
                sequence.row.truncate(before)
            sequence.row.drop_aside()

    def _place(self, sequence: Sequence) -> Place | None:
        """The lane that this canvas goes in; None: the plain way."""
        denoiser, canvas = sequence.denoiser, sequence.canvas
        if sequence.phase != "denoise" or sequence.params.logprobs is not None or denoiser is None or canvas is None:
            return None
        if not isinstance(sequence.draws, SeededDraws) or unfit(denoiser) is not None:
            return None
        return len(canvas), is_warm(denoiser), is_ruled(denoiser)


def _can_wait(sequence: Sequence, tokens: int) -> bool:
    """Can so many tokens be encoded together with the first step of the canvas behind them? Unless others of its group
    wait for its prompt: they would be a step behind it to the end"""
    if sequence.params.mode != "diffusion" or sequence.to_encode != tokens:
        return False
    return bool(sequence.reply) or not sequence.is_followed


def _put_aside(rows: Seq[CacheRow], count: int) -> bool:
    """What the next tokens overwrite; False: there is no memory for it"""
    try:
        for row in rows:
            row.put_aside(count)
    except Exception as error:
        for row in rows:
            row.drop_aside()
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _packs(model: DiffusionGemma, ops: Ops, limits: Limits, roomy: bool) -> bool:
    """Shall packed experts be read? They are packed then."""
    if limits.packed is False:
        return False
    if not limits.packed and not packings(model):
        left = bytes_left(model.device)
        if not roomy or left is None or left < limits.max_bytes + packed_bytes(model) + PLENTY:
            return False
    reason = unpackable(model, ops)
    if reason is None and not pack_experts(model):
        reason = "that would change them too much, or there is no memory for it"
    if reason and limits.packed:
        raise DeviceError(f"packed=True cannot be honoured: {reason}")
    if reason is None:
        log.info("experts lie in memory a second time, for passes of few users: %s", ", ".join(packings(model)))
    return reason is None


def choose_runner(model: DiffusionGemma, limits: Limits, kernels: bool | None = None) -> Runner:
    """The fast runner where it can run, else the plain one. `kernels`: insist on it, or do without it. On a card that
    nobody has tried, the kernels are tried first (`engine/trial.py`), unless somebody insists."""
    if kernels is False or (kernels is None and model.device.type != "cuda"):
        return _plain(model, limits)
    if reason := unsupported(model):
        if kernels:
            raise DeviceError(f"kernels=True cannot be honoured: {reason}")
        log.warning("the plain torch path is used: %s", reason)
        return _plain(model, limits)
    ops = triton_ops()
    with current(model.device):
        if kernels is None and untried(model.device) and (reason := trial.failed(model, ops)):
            log.warning(
                "the plain torch path is used, which is slow: the kernels were not found right on this card: %s "
                "(Engine(kernels=True) takes them all the same)",
                reason,
            )
            return _plain(model, limits)
        return FastRunner(model, ops, limits)


def _plain(model: DiffusionGemma, limits: Limits) -> Runner:
    if limits.packed:
        raise DeviceError("packed=True cannot be honoured: packed experts are for the kernels of a Hopper card")
    return Runner(model)
