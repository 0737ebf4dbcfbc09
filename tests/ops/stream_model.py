"""How the parts of a program that streams experts wait for each other (`ops/stream_gluon.py`, `ops/experts_gluon.py`,
`ops/pairs_gluon.py`, `ops/wide_gluon.py`), as generators that a test runs in any order. Triton's interpreter knows no
Gluon: the kernels themselves need a card.

Every `yield` is a place where another part may run. What is not here: copies that arrive after they were asked for,
the launch before, and the order in which memory is seen: a flag and what it stands for are seen as they were written.
`rows`: of each block, whether it has any; blocks from E on are those beyond the first.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

Part = Generator[None, None, None]
Message = tuple[int, bool, int]  # number of a tile or -1, whether its block has rows, its first place in the ring
END: Message = (-1, False, 0)


class Barrier:
    """As an mbarrier: whoever waits for a phase passes when it is over, and knows only whether it is odd."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than a phase has"
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def passed(self, phase: int) -> bool:
        return self.phase != phase


def wait(barrier: Barrier, phase: int) -> Part:
    while not barrier.passed(phase):
        yield


@dataclass
class Ring:
    """A place that goes round, and whether the turn is an odd one"""

    size: int
    phase: int
    at: int = 0

    def step(self) -> None:
        self.at += 1
        if self.at == self.size:
            self.at, self.phase = 0, self.phase ^ 1


def in_any_order(parts: list[Part], seed: int, patience: int = 100_000) -> None:
    """Until all have ended; fails if for long none does. They may begin others: in this list."""
    choose, still = random.Random(seed), 0
    while parts:
        part = choose.choice(parts)
        try:
            for _ in range(choose.choice((1, 1, 3, 20))):
                next(part)
            still += 1
        except StopIteration:
            parts.remove(part)
            still = 0
        assert still < patience, "everybody waits"


class Mailbox:
    def __init__(self, slots: int, readers: int) -> None:
        self.messages: list[Message] = [END] * slots
        self.told, self.heard = [Barrier(1) for _ in range(slots)], [Barrier(readers) for _ in range(slots)]

    def tell(self, ring: Ring, message: Message) -> Part:
        yield from wait(self.heard[ring.at], ring.phase)
        self.messages[ring.at] = message
        self.told[ring.at].arrive()
        ring.step()

    def hear(self, ring: Ring) -> Generator[None, None, Message]:
        yield from wait(self.told[ring.at], ring.phase)
        message = self.messages[ring.at]
        yield
        self.heard[ring.at].arrive()
        ring.step()
        return message


@dataclass
class Work:
    """What all programs share"""

    experts: int
    rows: list[bool]
    up: int  # tiles of a block in the first product
    down: int
    up_steps: int  # stages of a tile
    down_steps: int
    stages: int
    most: int
    rounds: int
    quant: bool
    lag: int | None = None  # of 4-bit weights: rows are told of so many stages later
    groups: int = 1  # that make a tile: 2 in `wide_gluon.py`, where each makes one of two
    sides: bool = False  # tiles are laid out by side
    taken: list[int] = field(default_factory=lambda: [0] * 4)
    flags: list[int] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    rounded: dict[int, int] = field(default_factory=dict)  # by tiles of the first product: their part of the rows

    def __post_init__(self) -> None:
        self.flags = [0] * len(self.rows)
        self.ups, self.total = len(self.rows) * self.up, len(self.rows) * (self.up + self.down)

    def count(self, which: int = 0) -> int:
        self.taken[which] += 1
        return self.taken[which] - 1

    def block(self, at: int) -> int:
        return at // self.up if at < self.ups else (at - self.ups) // self.down

    def all_in(self, done: dict[int, int], block: int) -> bool:
        """Are all tiles of a block's first product among them?"""
        times = self.groups if done is self.made else 1
        return all(done.get(at) == times for at in range(block * self.up, (block + 1) * self.up))

    def steps(self, at: int) -> int:
        return self.up_steps if at < self.ups else self.down_steps


@dataclass
class Taking:
    """How a program of a side takes tiles (`sides_gluon.next_of`)"""

    work: Work
    side: int
    alone_at: int
    queue: int = 0
    taken: int = 1
    alone: bool = False

    def first(self) -> int:
        return 2 * self.work.count(self.side) + self.side

    def next(self) -> Generator[None, None, int]:
        work, side = self.work, self.side
        if self.taken == self.alone_at:
            self.alone = work.taken[1 - side] == 0
        self.taken += 1
        yield
        if self.alone and self.queue < 2:
            self.queue, side = 0, 0 if work.taken[0] <= work.taken[1] else 1
            yield
        while self.queue < 4:
            whose = side ^ self.queue & 1
            found = 2 * work.count((self.queue & 2) + whose) + whose
            if found < (work.ups if self.queue < 2 else work.total - work.ups):
                return found if self.queue < 2 else work.ups + found
            self.queue += 1
            yield
        return -1


class Program:
    alone_at = 4  # tiles

    def __init__(self, work: Work, side: int = 0) -> None:
        self.work, self.taking = work, Taking(work, side, self.alone_at)
        self.ready, self.free = ([Barrier(n) for _ in range(work.stages)] for n in (2, 1))
        self.go = [Barrier(1), Barrier(1)]
        self.box, self.guess = Mailbox(work.most, 4), Mailbox(1, 1)
        self.later = Mailbox(work.rounds, 1)
        self.weights: list[tuple[int, int] | None] = [None] * work.stages
        self.x: list[tuple[int, int] | None] = [None] * work.stages

    def parts(self) -> list[Part]:
        found = [self._plan(), self._weights(), self._rows(), self._sums(0), self._sums(1)]
        return [*found, self._round()] if self.work.quant else found

    def _plan(self) -> Part:
        work, box, later, place = self.work, Ring(self.work.most, 1), Ring(self.work.rounds, 1), 0
        at = self.taking.first() if work.sides else work.count()
        yield from self.guess.tell(Ring(1, 1), (at, False, 0))
        asked = at < work.experts * work.up
        if work.sides and at >= work.ups:
            at = yield from self.taking.next()
        while 0 <= at < work.total:
            there = work.rows[work.block(at)]
            if there or asked:
                yield from self.box.tell(box, (at, there, place))
                if work.quant and at < work.ups:
                    yield from self.later.tell(later, (at, there, place))
                place += work.steps(at)
            asked = False
            yield
            if work.sides:
                at = yield from self.taking.next()
            else:
                at = work.count()
        yield from self.box.tell(box, END)
        if work.quant:
            yield from self.later.tell(later, END)

    def _fetch(self, at: int, ring: Ring, into: list[tuple[int, int] | None]) -> Part:
        for k in range(self.work.steps(at)):
            yield from wait(self.free[ring.at], ring.phase)
            into[ring.at] = (at, k)
            self.ready[ring.at].arrive()
            ring.step()
            yield

    def _weights(self) -> Part:
        ring, turn = Ring(self.work.stages, 1), Ring(self.work.most, 0)
        at, _, _ = yield from self.guess.hear(Ring(1, 0))
        asked = at < self.work.experts * self.work.up
        if asked:
            yield from self._fetch(at, ring, self.weights)
        at, _, _ = yield from self.box.hear(turn)
        while at >= 0:
            if not asked:
                yield from self._fetch(at, ring, self.weights)
            asked = False
            at, _, _ = yield from self.box.hear(turn)

    def _rows(self) -> Part:
        work, ring, turn = self.work, Ring(self.work.stages, 1), Ring(self.work.most, 0)
        at, _, _ = yield from self.box.hear(turn)
        while at >= 0:
            if at >= work.ups:
                while work.flags[work.block(at)] < work.up * (work.groups + work.quant):
                    yield
                assert work.all_in(work.rounded if work.quant else work.made, work.block(at)), "rows not there yet"
            yield from self._fetch(at, ring, self.x)
            at, _, _ = yield from self.box.hear(turn)

    def _round(self) -> Part:
        work, turn = self.work, Ring(self.work.rounds, 0)
        at, there, _ = yield from self.later.hear(turn)
        while at >= 0:
            if there:
                while work.flags[work.block(at)] < work.up * work.groups:
                    yield
                assert work.all_in(work.made, work.block(at)), "rounded before it was made"
                yield
                work.rounded[at] = work.rounded.get(at, 0) + 1
                yield
                work.flags[work.block(at)] += 1
            at, there, _ = yield from self.later.hear(turn)

    def _sums(self, mine: int) -> Part:
        work, turn, whose, may = self.work, Ring(self.work.most, 0), 0, 1 - mine
        at, _, place = yield from self.box.hear(turn)
        while at >= 0:
            if whose == mine:
                yield from wait(self.go[mine], may)
                ring = Ring(work.stages, place // work.stages & 1, place % work.stages)
                last = ring.at
                for k in range(work.steps(at)):
                    yield from wait(self.ready[ring.at], ring.phase)
                    assert self.weights[ring.at] == self.x[ring.at] == (at, k), "a stage holds something else"
                    if k > 0:
                        self.free[last].arrive()
                    last = ring.at
                    ring.step()
                    yield
                self.free[last].arrive()
                self.go[1 - mine].arrive()
                yield
                work.made[at] = work.made.get(at, 0) + 1
                yield
                if at < work.ups:
                    work.flags[work.block(at)] += 1
                may ^= 1
            whose ^= 1
            at, _, place = yield from self.box.hear(turn)


class Pairs(Program):
    """Of 4-bit weights: one group that multiplies, and is through with a stage before it gives it back"""

    def __init__(self, work: Work, side: int = 0) -> None:
        super().__init__(work, side)
        self.box = Mailbox(work.most, 3)

    def parts(self) -> list[Part]:
        found = [self._plan(), self._weights(), self._rows(), self._sums(0)]
        return [*found, self._round()] if self.work.quant else found

    def _rows(self) -> Part:
        work, ring, turn = self.work, Ring(self.work.stages, 1), Ring(self.work.most, 0)
        assert work.lag is not None
        at, _, place = yield from self.box.hear(turn)
        while at >= 0:
            if at < work.ups:
                done = place % work.stages
                for k in range(work.up_steps + work.lag):
                    if k < work.up_steps:
                        yield from wait(self.free[ring.at], ring.phase)
                        self.x[ring.at] = (at, k)
                        ring.step()
                        yield
                    if k >= work.lag:
                        self.ready[done].arrive()
                        done = (done + 1) % work.stages
            else:
                while work.flags[work.block(at)] < work.up * (1 + work.quant):
                    yield
                assert work.all_in(work.rounded if work.quant else work.made, work.block(at)), "rows not there yet"
                yield from self._fetch(at, ring, self.x)
            at, _, place = yield from self.box.hear(turn)

    def _sums(self, mine: int) -> Part:
        work, turn = self.work, Ring(self.work.most, 0)
        at, _, place = yield from self.box.hear(turn)
        while at >= 0:
            ring = Ring(work.stages, place // work.stages & 1, place % work.stages)
            for k in range(work.steps(at)):
                yield from wait(self.ready[ring.at], ring.phase)
                assert self.weights[ring.at] == self.x[ring.at] == (at, k), "a stage holds something else"
                yield
                assert self.weights[ring.at] == self.x[ring.at] == (at, k), "a stage was overwritten"
                self.free[ring.at].arrive()
                ring.step()
            work.made[at] = work.made.get(at, 0) + 1
            yield
            if at < work.ups:
                work.flags[work.block(at)] += 1
            at, _, place = yield from self.box.hear(turn)


class Wide(Program):
    """Of many rows: both groups multiply at once, with factors that come with the second stage"""

    def __init__(self, work: Work, side: int = 0) -> None:
        super().__init__(work, side)
        self.free = [Barrier(2) for _ in range(work.stages)]
        self.factors = [-1, -1]
        self.units = 0

    def _fetch(self, at: int, ring: Ring, into: list[tuple[int, int] | None]) -> Part:
        for k in range(self.work.steps(at)):
            yield from wait(self.free[ring.at], ring.phase)
            into[ring.at] = (at, k)
            yield
            if into is self.x and k == 1:
                self.factors[self.units % 2] = at
                self.units += 1
                yield
            self.ready[ring.at].arrive()
            ring.step()
            yield

    def _sums(self, mine: int) -> Part:
        work, turn, which = self.work, Ring(self.work.most, 0), 0
        at, _, place = yield from self.box.hear(turn)
        while at >= 0:
            ring = Ring(work.stages, place // work.stages & 1, place % work.stages)
            last = ring.at
            for k in range(work.steps(at)):
                yield from wait(self.ready[ring.at], ring.phase)
                assert self.weights[ring.at] == self.x[ring.at] == (at, k), "a stage holds something else"
                yield
                if k > 0:
                    assert self.weights[last] == self.x[last] == (at, k - 1), "a stage was overwritten"
                    self.free[last].arrive()
                last = ring.at
                ring.step()
            self.free[last].arrive()
            for _ in range(4):
                yield
                assert self.factors[which] == at, "factors of another tile"
            work.made[at] = work.made.get(at, 0) + 1
            yield
            if at < work.ups:
                work.flags[work.block(at)] += 1
            which ^= 1
            at, _, place = yield from self.box.hear(turn)


def run(
    work: Work, programs: int, at_once: int, seed: int, patience: int = 20_000, sides: Sequence[int] = (0, 1)
) -> None:
    """All programs, `at_once` of them on the card, in some order; fails if nothing moves any more. `sides`: theirs, by
    turns"""
    kind = Wide if work.groups == 2 else Program if work.lag is None else Pairs
    choose, waiting, running, still = random.Random(seed), programs, list[list[Part]](), 0
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(kind(work, sides[waiting % len(sides)]).parts())
            waiting -= 1
        parts = choose.choice(running)
        part = choose.choice(parts)
        before = sum(work.taken), len(work.made), sum(work.flags)
        try:
            for _ in range(choose.choice((1, 1, 3, 20))):
                next(part)
        except StopIteration:
            parts.remove(part)
            running = [each for each in running if each]
            still = 0
            continue
        still = 0 if before != (sum(work.taken), len(work.made), sum(work.flags)) else still + 1
        assert still < patience * (1 + len(running)), "everybody waits"
