"""The engine's thread: its death costs what runs, and nothing else. Requests that are cancelled together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diffusiongemma.engine import Draft, End, Engine, Event, worker
from diffusiongemma.engine.worker import Scope
from diffusiongemma.ops import kernels
from engine.test_engine import make_engine, wait_idle, wait_until


def kill(engine: Engine) -> None:
    """A BaseException in the middle of a step, as an interrupt or a library's exit would be."""

    def die() -> None:
        if engine.scheduler.running:
            engine.scheduler.on_tick = None
            raise SystemExit

    engine.scheduler.on_tick = die


def test_a_dead_thread_ends_its_requests_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with make_engine() as engine:
        expected = engine.generate([3, 4], max_new_tokens=8, steps=2, seed=0).tokens
        kill(engine)
        handles = [engine.submit(engine.request([3, i], max_new_tokens=20, steps=8)) for i in range(20)]
        ends = [list(handle)[-1] for handle in handles]
        assert ends[0].error == "SystemExit"
        assert {end.error for end in ends} <= {"SystemExit", None}  # who was still in the queue was spared
        assert not any(end.refused for end in ends)
        assert engine.worker.failures == 1
        assert engine.worker.last_failure is not None
        assert engine.worker.last_failure[1] == "SystemExit"
        wait_idle(engine)
        assert engine.scheduler.reserved == 0
        assert engine.generate([3, 4], max_new_tokens=8, steps=2, seed=0).tokens == expected
        assert engine.worker.failures == 1
        assert engine.worker.failed_in_a_row == 0
    assert "thread died" in caplog.text


def test_the_thread_has_the_models_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current card: that of `--device cuda:1` is another than a new thread's."""
    inside = list[torch.device]()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.clear()

    monkeypatch.setattr(worker, "current", current)
    with make_engine() as engine:
        seen = list[list[torch.device]]()
        engine.scheduler.on_tick = lambda: seen.append(list(inside))
        engine.generate([3, 4], max_new_tokens=8, steps=2, seed=0)
        assert seen
        assert all(devices == [engine.model.device] for devices in seen)
    assert not inside


def test_a_card_is_current_inside_and_the_one_before_it_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index, self.before = device.index, now[0]

        def __enter__(self) -> None:
            now[0] = self.index

        def __exit__(self, *_: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    with kernels.current(torch.device("cuda", 1)):
        assert now == [1]
        with kernels.current(torch.device("cpu")):
            assert now == [1]
    assert now == [0]


def test_who_asks_again_from_the_end_event_is_served_by_the_new_thread() -> None:
    with make_engine() as engine:
        again: list[Event] = []

        def retry(event: Event) -> None:
            if isinstance(event, End) and event.finish_reason == "error":
                engine.submit(engine.request([5], max_new_tokens=4, steps=1), again.append)

        kill(engine)
        engine.submit(engine.request([3, 4], max_new_tokens=100, steps=48), retry)
        wait_until(lambda: any(isinstance(event, End) for event in again))
        assert again[-1].finish_reason == "length"


def test_a_request_that_asks_for_too_much_is_refused_not_failed() -> None:
    with make_engine() as engine:
        object.__setattr__(engine.scheduler.limits, "max_bytes", 1000)
        (end,) = engine.submit(engine.request([3, 4], max_new_tokens=100))
        assert isinstance(end, End)
        assert end.refused
        assert engine.worker.failures == 0


def test_a_scope_cancels_what_runs_and_what_comes() -> None:
    with make_engine() as engine:
        scope = Scope()
        handles = [engine.submit(engine.request([3], max_new_tokens=500, steps=48, drafts=False)) for _ in range(3)]
        for handle in handles:
            scope.add(handle)
        scope.cancel()
        late = engine.submit(engine.request([3], max_new_tokens=500, steps=48, drafts=False))
        scope.add(late)
        for handle in [*handles, late]:
            assert list(handle)[-1].finish_reason == "cancelled"
        wait_idle(engine)


@pytest.mark.parametrize("ask", ["infill", "fill", "form", "edit"])
def test_a_scope_ends_a_stream_of_several_requests(ask: str) -> None:
    with make_engine(template=True) as engine:
        scope, options = Scope(), {"steps": 1000, "early_stop": False}
        stream = {
            "infill": lambda: engine.infill_stream("a", "b", max_new_tokens=8, scope=scope, **options),
            "fill": lambda: engine.fill_stream("a[[?3]]b[[?3]]c", scope=scope, **options),
            "form": lambda: engine.form_stream("x", "a[[?3]]", scope=scope, candidates=3, **options),
            "edit": lambda: engine.edit_stream("a text of more than one canvas", scope=scope, **options),
        }[ask]()
        assert isinstance(next(stream), Draft)
        scope.cancel()
        rest = list(stream)
        assert isinstance(rest[-1], End)
        assert rest[-1].finish_reason == "cancelled"
        assert len(rest) < 50
        wait_idle(engine)
        # Cancelled before it began: it ends at once.
        early = engine.form_stream("x", "a[[?3]]", scope=scope, **options)
        assert [event.kind for event in early if event.kind != "draft"] == ["end"]
