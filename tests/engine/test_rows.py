"""Cache rows that move while steps are under way, without a card: every text is that of the plain runner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.engine import Engine, Limits, Request, SamplingParams
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Lane
from diffusiongemma.engine.worker import Handle
from diffusiongemma.errors import CacheError
from diffusiongemma.model import CacheRow
from diffusiongemma.model.pool import CachePool
from engine.runners import CONFIG, BoardDraws, fast_engine, plain_engine, told

Told = list[tuple[object, ...]]


def room_for(tokens: int) -> int:
    """Bytes of a row of so many tokens."""
    return CacheRow.bytes_for(CONFIG, tokens, torch.float32)


def canvases(prompt: range, count: int, seed: int = 0, stable: int = 0, **options: object) -> Request:
    params = SamplingParams.build(max_new_tokens=count, seed=seed, **{"steps": 3, "early_stop": False, **options})
    return Request(tuple(prompt), params, stable=stable)


def drawing(prompt: range, count: int) -> Request:
    params = SamplingParams.build(mode="ar", max_new_tokens=count, temperature=0.0, seed=1)
    return Request(tuple(prompt), params, ends=False)


def drive(engine: Engine, arrivals: Sequence[tuple[int, Sequence[Request]]]) -> list[Told]:
    """Hand groups of requests in, each at its tick, on this thread: what happens between two steps is no chance."""
    scheduler, handles = engine.scheduler, list[Handle]()
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    found = {id(request): at for at, request in enumerate(r for _, group in arrivals for r in group)}
    order = list[int]()
    while left or scheduler.busy:
        while left and (left[0][0] <= scheduler.ticks or not scheduler.busy):
            asked = left.pop(0)[1]
            prepared = [engine._prepare(request, None) for request in asked]
            for request, (sequence, handle) in zip(asked, prepared, strict=True):
                sequence.group = [member for member, _ in prepared]
                handles.append(handle)
                order.append(found[id(request)])
                scheduler.add(sequence)
        scheduler.tick()
    texts = {at: told(handle) for at, handle in zip(order, handles, strict=True)}
    return [texts[at] for at in range(len(texts))]


def expected(arrivals: Sequence[tuple[int, Sequence[Request]]]) -> list[Told]:
    """What each says on its own, the plain way."""
    with plain_engine() as engine:
        found = []
        for request in (request for _, group in arrivals for request in group):
            assert request.params.seed is not None
            draws = BoardDraws(request.params.seed) if request.params.mode == "diffusion" else None
            found.append(told(engine.submit(request, draws=draws)))
        return found


def moves_of(engine: Engine) -> int:
    runner = engine.scheduler.runner
    assert isinstance(runner, FastRunner)
    return runner.pool.moves


# It needs more than what is free behind the others, so those that live move together.
NEWCOMERS = {
    "a prompt of several passes": canvases(range(100, 150), 40),
    "a canvas of another width": canvases(range(100, 103), 88, canvas=5),
    "the causal twin": drawing(range(100, 103), 88),
}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("newcomer", NEWCOMERS.values(), ids=NEWCOMERS)
@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_a_row_moves_between_two_steps_launched_ahead(mode: str, newcomer: Request, ahead: bool) -> None:
    """The first ends, the second goes on, and moves to where the first was: its next step must read it there."""
    short = canvases(range(10, 30), 16)
    long = canvases(range(40, 60), 16, seed=1, steps=12) if mode == "diffusion" else drawing(range(40, 60), 20)
    arrivals = [(0, [short]), (0, [long]), (6, [newcomer])]
    with fast_engine(Limits(max_bytes=room_for(150), max_rows=4, chunk=24), ahead=ahead) as engine:
        got = drive(engine, arrivals)
        assert moves_of(engine) == 1
    assert got == expected(arrivals)


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_a_copy_that_is_kept_moves_the_rows_of_others(mode: str) -> None:
    """Not only who is admitted asks for a row: so does the copy of a prompt's beginning that a later turn may want."""
    short = canvases(range(10, 30), 16)
    long = canvases(range(40, 60), 16, seed=1, steps=12) if mode == "diffusion" else drawing(range(40, 60), 20)
    prompted = canvases(range(100, 150), 10, seed=2, stable=40)
    arrivals = [(0, [short]), (0, [long]), (4, [prompted])]
    room = sum(room_for(n) for n in (35, 39, 59, 20))  # for all three, and not for the copy as well
    with fast_engine(Limits(max_bytes=room, max_rows=4, chunk=8)) as engine:
        got = drive(engine, arrivals)
        assert moves_of(engine) == 1
        assert len(engine.scheduler.prefixes) > 2
    assert got == expected(arrivals)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    first, size, count = draw(st.integers(3, 12)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    prompt = range(10 * first, 10 * first + size)  # some share a beginning
    if draw(st.booleans()):
        return drawing(prompt, count)
    options = {"steps": draw(st.integers(1, 9)), "canvas": draw(st.sampled_from([None, None, 5]))}
    return canvases(prompt, count, draw(st.integers(0, 99)), draw(st.integers(0, size - 1)), **options)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(requests(), min_size=1, max_size=3)), min_size=2, max_size=6))
@settings(max_examples=10)
def test_whoever_comes_and_goes(arrivals: list[tuple[int, list[Request]]]) -> None:
    with fast_engine(Limits(max_bytes=room_for(170), max_rows=4, chunk=8)) as engine:
        got = drive(engine, arrivals)
    assert got == expected(arrivals)


def test_what_failed_holds_no_memory_and_gets_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat in a lane is there until the next is given, and the caller may keep the handle."""
    request = canvases(range(5, 25), 40)
    land, landed = Lane.land, list[Lane]()

    def once(lane: Lane) -> None:
        landed.append(lane)
        if len(landed) == 2:
            raise ValueError("once")
        land(lane)

    monkeypatch.setattr(Lane, "land", once)
    with fast_engine(Limits(max_bytes=room_for(59) * 3 // 2)) as engine:
        handles = list[Handle]()
        for reason in ("error", "length", "length"):
            handles.append(engine.submit(request))
            assert told(handles[-1])[-1][1] == reason


def test_a_request_whose_row_cannot_be_had_gets_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with fast_engine() as engine:
        new_row = engine.scheduler.runner.new_row
        monkeypatch.setattr(engine.scheduler.runner, "new_row", _no_row)
        assert told(engine.submit(canvases(range(5, 25), 40)))[-1][1:3] == ("error", "CacheError: no room")
        monkeypatch.setattr(engine.scheduler.runner, "new_row", new_row)
        assert told(engine.submit(canvases(range(5, 25), 40)))[-1][1] == "length"


def _no_row(max_length: int) -> CacheRow:
    raise CacheError("no room")


def test_recorded_passes_make_no_views_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know a row by a number; two views of each layer took the host longer than all else before a pass."""
    asked, pool = list[int](), CachePool.layer

    def layer(self: CachePool, *where: int) -> tuple[Tensor, Tensor]:
        asked.append(where[0])
        return pool(self, *where)

    monkeypatch.setattr(CachePool, "layer", layer)
    with fast_engine(Limits(max_rows=3, max_bytes=4 * room_for(60))) as engine:
        for turn in range(2):
            prompts = [range(10 * (3 * turn + i), 10 * (3 * turn + i) + 9) for i in range(3)]
            drive(engine, [(0, [canvases(prompt, 32)]) for prompt in prompts])
        assert len(engine.scheduler.prefixes)
    assert not asked
