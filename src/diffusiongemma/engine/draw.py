"""The autoregressive twin on the device: rows that get a token a pass, a recorded pass for every number of them.

A pass encodes the last token of each row, reads the head and draws the next token, which the pass after it finds where
it lies. So that one may be launched before the tokens of the one before have been read. Should a reply turn out to have
ended, its further token is thrown away; but its pass has written into the cache row, so the row counts it at once, and
the token that it encoded is kept with the row's (`DrawLane.land`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from diffusiongemma.diffusion import SeededDraws
from diffusiongemma.engine.events import TokenLogprob
from diffusiongemma.engine.graphs import Mailbox, Recorder
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.engine.shelf import Shelf, Work
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops.attention_cached import New
from diffusiongemma.ops.vocab import Rules, ban

COLDEST = 1e-3  # a temperature below it (but 0) goes the plain way: logits divided by it could overflow


@dataclass(frozen=True)
class Kind:
    """What a pass is recorded for."""

    rows: int
    reach: int  # `CachePool.reach_for` the longest cache row

    def __str__(self) -> str:
        return f"a token for each of {self.rows}, up to {self.reach} tokens"


@dataclass(frozen=True)
class Flight:
    """A pass under way."""

    passengers: list[Sequence]
    arrive: Callable[[], Tensor]  # waits; [B, 2] int32: the token, and the bits of its log-probability


def drawable(sequence: Sequence) -> bool:
    """Can its next token come from a recorded pass?"""
    params = sequence.params
    if sequence.phase != "draw" or not _tells(params):
        return False
    if params.temperature == 0:
        return True
    return params.top_p == 1 and params.temperature >= COLDEST and isinstance(sequence.draws, SeededDraws)


def _tells(params: SamplingParams) -> bool:
    """Are the log-probabilities that it wants known? They are told at temperature 1, of the drawn token alone."""
    return params.logprobs is None or (params.logprobs == 0 and params.temperature in (0, 1))


class DrawLane:
    def __init__(self, network: FusedNetwork, recorder: Recorder, rows: int) -> None:
        config, device = network.config, network.device
        self.network, self.recorder = network, recorder

        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self.tokens = zeros(rows, kind=torch.int64)  # the last of each row, not encoded yet
        self.length, self.drawn = zeros(rows), zeros(rows)  # tokens cached and drawn: both grow with a pass
        self.seed = zeros(rows, kind=torch.int64)
        self.temperature = zeros(rows, kind=torch.float32) + 1
        self.greedy = zeros(rows, kind=torch.bool)
        self.banned = zeros(rows, -(-config.vocab_size // 32))
        self.banned_set = zeros(rows) - 1
        self.offsets = zeros(config.num_hidden_layers, rows)
        self.begin = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.out = zeros(rows, 2)
        self._position = zeros(rows)
        self._mailbox = Mailbox(self.out)
        self._passes = Shelf[Kind](recorder.shelves)
        self._bans: list[tuple[int, ...]] = [()] * rows  # what each row of `banned` was made of
        self._moves = -1  # `CachePool.moves` when `offsets` was told; -1: of others
        self.passengers: list[Sequence] = []
        self.flights: list[Flight] = []

    # ---- seats -------------------------------------------------------------------------------------------------------

    def seat(self, sequences: list[Sequence]) -> None:
        """Give these the first rows; no pass may be under way, so that the host knows all of them."""
        assert not self.flights
        count = len(sequences)
        if count == len(self.passengers) and all(a is b for a, b in zip(self.passengers, sequences, strict=True)):
            return  # the device has them as it left them
        self.passengers, self._moves = list(sequences), -1
        rows = [_row(sequence) for sequence in sequences]
        assert all(row.length == len(s.tokens) - 1 for row, s in zip(rows, sequences, strict=True))
        values: tuple[tuple[Tensor, Seq[float]], ...] = (
            (self.tokens, [s.tokens[-1] for s in sequences]),
            (self.length, [row.length for row in rows]),
            (self.drawn, [s.metrics.steps for s in sequences]),
            (self.seed, [s.metrics.seed for s in sequences]),
            # The best token needs no temperature; at 1 its log-probability is the one that is told.
            (self.temperature, [s.params.temperature or 1.0 for s in sequences]),
            (self.greedy, [s.params.temperature == 0 for s in sequences]),
            (self.banned_set, [row if s.request.forbidden else -1 for row, s in enumerate(sequences)]),
        )
        for target, column in values:
            target[:count].copy_(torch.tensor(column, dtype=target.dtype), non_blocking=True)
        for row, sequence in enumerate(sequences):
            forbidden = sequence.request.forbidden
            if forbidden and forbidden != self._bans[row]:
                self.banned[row].copy_(_bits(forbidden, self.network.config.vocab_size), non_blocking=True)
                self._bans[row] = forbidden

    # ---- passes ------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """A token for each that is seated."""
        rows = [_row(sequence) for sequence in self.passengers]
        for row in rows:
            row.check_room(1)
        self._tell_rows(rows)
        kind = Kind(len(rows), self.network.pool.reach_for(1 + max(row.length for row in rows)))
        self.recorded(kind)()
        for row in rows:
            row.advance(1)
        self.flights.append(Flight(list(self.passengers), self._mailbox.send(self.out[: kind.rows])))

    def _tell_rows(self, rows: list[PoolRow]) -> None:
        """Where they lie, if the device does not know it: they may have moved since the last pass, which may still be
        under way (`Lane._tell_rows`)."""
        pool = self.network.pool
        if self._moves != pool.moves:
            self._moves = pool.moves
            self.offsets[:, : len(rows)].copy_(pool.offsets(rows), non_blocking=True)

    def recorded(self, kind: Kind) -> Work:
        """The pass of this kind, ready to be replayed."""
        return self._passes.get(kind, partial(self._record, kind))

    def _record(self, kind: Kind) -> Work:
        changed = (self.tokens, self.length, self.drawn, self.out)
        begin = self.begin.clone()
        self.begin.zero_()  # recording runs the pass, which must not write into anybody's row
        try:
            return self.recorder.record(f"{kind}", partial(self.step, kind), changed)
        finally:
            self.begin.copy_(begin)

    @torch.inference_mode()
    def step(self, kind: Kind) -> None:
        """Everything between two tokens: network, head, draw."""
        network, config, rows = self.network, self.network.config, kind.rows
        length = self.length[:rows]
        batch = Batch(self.offsets[:, :rows], length, length, New(self.begin[: rows + 1], 1), kind.reach)
        hidden = network.encode(self.tokens[:rows], batch)
        chance = (self.seed[:rows], self.drawn[:rows], self._position[:rows])
        uniform, _ = network.ops.draws(*chance, config.vocab_size)
        rules = Rules(self.temperature[:rows], uniform, None, self.banned, self.banned_set[:rows])
        # Laid out for few rows however many there are, and for any temperature: neighbours change no bit of it.
        reading = network.ops.vocab_end(hidden, network.table, rules, config.final_logit_softcapping, None, few=True)
        greedy = self.greedy[:rows]
        token = torch.where(greedy, reading.argmax, reading.sample)
        logprob = torch.where(greedy, reading.logprob, reading.sample_logprob)
        torch.stack((token.int(), logprob.view(torch.int32)), dim=1, out=self.out[:rows])
        self.tokens[:rows].copy_(token)
        length.add_(1)
        self.drawn[:rows].add_(1)

    def land(self) -> None:
        """Wait for the oldest pass under way, and tell its passengers."""
        flight = self.flights.pop(0)
        tokens, bits = flight.arrive().unbind(dim=1)
        logprobs = bits.view(torch.float32).tolist()
        further = {id(sequence) for later in self.flights for sequence in later.passengers}
        for sequence, token, logprob in zip(flight.passengers, tokens.tolist(), logprobs, strict=True):
            if _ended(sequence):  # it was cancelled, or the token before was its last
                continue
            sequence.metrics.encoder_forwards += 1
            told = None if sequence.params.logprobs is None else TokenLogprob(token, logprob, ())
            sequence.drawn(token, told)
            if _ended(sequence) and id(sequence) in further:
                sequence.tokens.append(token)  # it is in the cache row, which may be kept

    def discard(self) -> None:
        """Nobody waits for what is under way any more."""
        self.flights.clear()

    def expected(self) -> list[Sequence]:
        """Who waits for the oldest pass under way."""
        passengers = self.flights[0].passengers if self.flights else []
        return [sequence for sequence in passengers if sequence.phase == "draw"]

    def certain_to_go_on(self) -> bool:
        """Does everybody want a token after those under way, unless the text ends? Its row has a slot for it then."""
        under_way = len(self.flights)
        return all(
            not s.cancelled and s.phase == "draw" and len(s.reply) + under_way < s.params.max_new_tokens
            for s in self.passengers
        )


def _ended(sequence: Sequence) -> bool:
    return sequence.phase == "ended"


def _row(sequence: Sequence) -> PoolRow:
    assert isinstance(sequence.row, PoolRow)
    return sequence.row


@lru_cache(maxsize=8)
def _bits(forbidden: tuple[int, ...], vocab: int) -> Tensor:
    """[V/32] int32"""
    return ban([list(forbidden)], vocab)[0]
