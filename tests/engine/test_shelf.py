"""How many recorded passes are kept, and which go; what goes is recorded again when it is wanted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
from torch import Tensor

from diffusiongemma.engine import Limits, Request, SamplingParams
from diffusiongemma.engine import fast as fast_module
from diffusiongemma.engine import steps as steps_module
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.shelf import Shelf, Shelves, Work
from diffusiongemma.engine.slate import Kind as Encoding
from diffusiongemma.engine.steps import Kind, Steps
from engine.runners import SMALL, RunningRecorder, all_at_once, fast_engine


def nothing() -> None:
    """A recorded pass"""


def refuse() -> Work:
    raise AssertionError("it was recorded again")


def test_what_was_not_used_for_longest_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    shelves = Shelves(most=3)
    letters, numbers = Shelf[str](shelves), Shelf[int](shelves)
    letters.get("a", lambda: nothing)
    numbers.get(1, lambda: nothing)
    letters.get("b", lambda: nothing)
    assert letters.get("a", refuse) is nothing
    numbers.get(2, lambda: nothing)
    assert (list(letters), list(numbers), len(shelves)) == (["b", "a"], [2], 3)
    letters.get("c", lambda: nothing)
    assert (list(letters), list(numbers), shelves.dropped) == (["a", "c"], [2], 2)
    dropped = "dropped a recording that was not used for long: "
    assert [record.message for record in caplog.records] == [f"{dropped}1", f"{dropped}b"]


def test_it_goes_before_another_is_recorded() -> None:
    """A graph that is destroyed in the middle of a recording spoils it."""
    shelf = Shelf[int](Shelves(most=2))

    def graph() -> Work:
        assert sum(old() is not None for old in graphs) <= 1

        def replay() -> None:
            nothing()

        graphs.append(weakref.ref(replay))
        return replay

    graphs = list[weakref.ref[Work]]()
    for kind in range(6):
        shelf.get(kind, graph)
    assert list(shelf) == [4, 5]


def test_a_recording_that_fails_is_not_there() -> None:
    shelf = Shelf[str](Shelves())

    def fail() -> Work:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        shelf.get("a", fail)
    assert "a" not in shelf
    assert shelf.get("a", lambda: nothing) is nothing


class Idle:
    """A lane whose steps do nothing"""

    def __init__(self) -> None:
        self.recorded = list[Kind]()

    def step(self, kind: Kind) -> None:
        pass

    def record(self, kind: Kind) -> Work:
        self.recorded.append(kind)
        return nothing


def test_what_was_given_up_is_to_be_wanted_often_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else combinations that come by turns would be recorded each time."""
    monkeypatch.setattr(steps_module, "OFTEN", 2)
    lane, steps = Idle(), Steps(Shelves(most=1), usual=True)
    odd = Kind(3, 2048, Encoding(1, 256, 256, 2048, False))
    for _ in range(2):
        assert [steps.takes(odd, lane) for _ in range(4)] == [False, False, True, True]
        steps.work(Kind(1, 2048), lane)
    assert lane.recorded == 2 * [odd, Kind(1, 2048)]


def test_what_comes_seldom_is_never_recorded() -> None:
    """However long a server runs; what comes often is, also if it began late."""
    lane, steps = Idle(), Steps(Shelves(), usual=True)
    usual, seldom, often = (
        Kind(2, 2048, before) for before in (None, *(Encoding(1, n, 9, 2048, False) for n in (7, 8)))
    )
    for step in range(50_000):
        if step % 500 == 0:
            assert not steps.takes(seldom, lane)
        elif step > 40_000 and step % 50 == 0 and steps.takes(often, lane):
            steps.work(often, lane)
        steps.work(usual, lane)
    assert lane.recorded == [usual, often]
    for step in range(3 * steps_module.AGE):
        if step % 90 == 0:  # a dozen times until half is forgotten: then 6, 9, 10 … are left, and at last it is due
            steps.takes(seldom, lane)
        if step % 7 == 0:
            steps.takes(Kind(2, 2048, Encoding(1, 100 + step, 9, 2048, False)), lane)
        steps.work(usual, lane)
    assert lane.recorded == [usual, often, seldom]
    assert len(steps._wanted) < 300  # what came once is gone


@pytest.mark.parametrize("most", [2, 3, 5])
def test_texts_are_as_they_would_be_with_all_kept(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "OFTEN", 0)
    asked = [
        Request(
            tuple(range(5, 8 + 9 * i)),
            SamplingParams.build(max_new_tokens=40, steps=3, early_stop=False, seed=i, **extra),
        )
        for i, extra in enumerate([{}, {"canvas": 5}, {}, {"canvas": 7}, {"t_min": 0.1}])
    ]
    asked.append(Request((5, 6, 7), SamplingParams.build(mode="ar", max_new_tokens=9, temperature=0.0, seed=1)))
    found = []
    for bound in (most, 1000):
        with fast_engine(Limits(max_bytes=SMALL)) as engine:
            runner = engine.scheduler.runner
            assert isinstance(runner, FastRunner)
            shelves = runner.recorder.shelves
            shelves.most = bound
            recorder = RunningRecorder(runner.device)
            runner.slate.recorder = runner.drawing.recorder = recorder
            recorder.shelves = shelves  # lanes are made later
            found.append([all_at_once(engine, part) for part in (asked, asked[:2], asked[3:])])
            assert len(shelves) <= bound
            assert (shelves.dropped > 0) == (bound == most)
    assert found[0] == found[1]


class Graphs(Recorder):
    """As on a card: what is recorded holds nothing of who recorded it."""

    def record(self, name: str, work: Work, changed: Iterable[Tensor] = ()) -> Work:
        return lambda: None


def test_a_lane_that_is_dropped_gives_its_memory_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python happens to look for circles: its board and its graphs take memory of the card."""
    monkeypatch.setattr(fast_module, "MOST_LANES", 1)
    with fast_engine() as engine:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        runner.slate.recorder = Graphs(runner.device)
        shelves = runner.slate.recorder.shelves
        gc.collect()
        gc.disable()
        try:
            for width in (5, 7):
                runner.lane(width).recorded(Kind(1, 2048))
            board = weakref.ref(runner.lane(5).board)
            runner.lane(7)
            assert len(shelves) == 2
            runner._drop_lanes()
            assert board() is None
            assert len(shelves) == 1
        finally:
            gc.enable()
