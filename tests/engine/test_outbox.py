"""Work comes before words: the device gets its next work before listeners hear of the last, and they hear the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import Commit, End, Engine, Event, Limits, Request, SamplingParams
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.outbox import Outbox
from diffusiongemma.engine.worker import Handle
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import CONFIG, SMALL, BoardDraws, fast_engine, plain_engine, told

LETTERS = tuple(byte_tokenizer().encode("abcdefgh"))
OTHERS = tuple(sorted(set(range(CONFIG.vocab_size)) - set(LETTERS)))


def asks(count: int, seed: int = 1, drafts: bool = True, **options: object) -> Request:
    """A text of a few letters alone."""
    usual: dict[str, object] = {} if options.get("mode") == "ar" else {"steps": 3, "early_stop": False}
    params = SamplingParams.build(max_new_tokens=count, seed=seed, **{**usual, **options})
    return Request((5, 6, 7), params, forbidden=OTHERS, drafts=drafts)


def alone(engine: Engine, request: Request) -> Handle:
    """The plain way, with the chance of the fast one."""
    seed = request.params.seed
    assert seed is not None
    return engine.submit(request, draws=BoardDraws(seed) if request.params.mode == "diffusion" else None)


def test_letters_are_told_in_order_and_when_nobody_holds_them() -> None:
    outbox, told_of = Outbox(), list[int]()

    def letter(number: int) -> Callable[[], None]:
        return lambda: told_of.append(number)

    outbox.put(letter(1))
    assert told_of == [1]
    with outbox.hold():
        outbox.put(letter(2))
        outbox.put(letter(3))
        assert told_of == [1]
    assert told_of == [1]
    outbox.put(letter(4))
    assert told_of == [1, 2, 3, 4]


def test_a_letter_that_raises_is_told_once_and_the_others_are_told() -> None:
    outbox, told_of = Outbox(), list[int]()

    def broken() -> None:
        told_of.append(0)
        raise ValueError("no text")

    with outbox.hold():
        for letter in (broken, lambda: told_of.append(1), broken, lambda: told_of.append(2)):
            outbox.put(letter)
    with pytest.raises(ValueError, match="no text"):
        outbox.deliver()
    assert told_of == [0]
    outbox.deliver(careful=True)
    assert told_of == [0, 1, 0, 2]


def orders_of(engine: Engine, request: Request) -> list[str]:
    """What happens, in order, while this request runs: passes that are launched, and blocks that are told. In a "turn"
    something is encoded, and a step taken."""
    runner, found = engine.scheduler.runner, list[str]()
    assert isinstance(runner, FastRunner)
    encode = runner.slate._pass
    runner.slate._pass = lambda *a, **k: (found.append("encode"), encode(*a, **k))[1]  # type: ignore[method-assign]
    lanes = [runner.lane(16, ruled=True), runner.drawing]
    launches: list[Callable[..., None]] = [lane.launch for lane in lanes]

    def launched(*parcel: object, launch: Callable[..., None]) -> None:
        found.append("step" if parcel in ((), (None,)) else "turn")
        launch(*parcel)

    for lane, launch in zip(lanes, launches, strict=True):
        lane.launch = partial(launched, launch=launch)  # type: ignore[method-assign]

    def hear(event: Event) -> None:
        found.append(event.kind)

    sequence, _ = engine._prepare(request, hear)
    engine.scheduler.add(sequence)
    while engine.scheduler.busy:
        engine.scheduler.tick()
    runner.slate._pass = encode  # type: ignore[method-assign]
    for lane, launch in zip(lanes, launches, strict=True):
        lane.launch = launch  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_the_next_canvas_is_under_way_before_a_block_is_told(stop: tuple[str, ...], ahead: bool) -> None:
    """With and without texts that could end the reply: if they do not, its block is committed first."""
    request = asks(48, drafts=False, stop=stop)
    with fast_engine(ahead=ahead) as engine:
        orders_of(engine, request)  # records everything, which is told before
        found = orders_of(engine, replace(request, prompt=(5, 6, 8)))
    steps = ["step"] * 3
    further = ["encode", "step", "commit", *steps[1:]]
    if ahead:
        further = ["turn", "step", "commit", "step"] if stop else ["turn", "commit", *steps[1:]]
    first = ["turn", *steps[1:]] if ahead else ["encode", *steps]
    assert found == [*first, *further, *further, "commit", "end"]


def test_drafts_do_not_wait_longer_than_for_the_next_launch() -> None:
    for ahead in (True, False):
        with fast_engine(ahead=ahead) as engine:
            orders_of(engine, asks(16))
            found = orders_of(engine, replace(asks(16, steps=5), prompt=(5, 6, 8)))
        launched = told_of = 0
        for order in found:
            launched += order in ("step", "turn")
            told_of += order == "draft"
            assert launched - told_of <= 2
        assert told_of == launched == 5
        assert found[-2:] == ["commit", "end"]


@given(
    st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from([{}, {"canvas": 5}, {"mode": "ar", "temperature": 0.0}]),
)
@settings(max_examples=12)
def test_stop_texts(stop: list[str], seed: int, ahead: bool, options: dict[str, object]) -> None:
    """They end a reply inside a block, across two blocks, or not at all."""
    asked = [asks(40, seed, stop=stop, **options), asks(40, seed + 1)]
    with fast_engine(Limits(chunk=16, max_bytes=SMALL), ahead=ahead) as engine:
        handles = [engine.submit(request) for request in asked]
        got = [told(handle) for handle in handles]
    with plain_engine() as plain:
        assert got == [told(alone(plain, request)) for request in asked]


def heard(engine: Engine, request: Request, cancel: int, draws: BoardDraws | None = None) -> list[Event]:
    """What a listener hears that cancels its request inside this event (or raises there, if it is negative)."""
    events = list[Event]()

    def hear(event: Event) -> None:
        events.append(event)
        if len(events) == abs(cancel):
            if cancel < 0:
                raise ValueError("the listener failed")
            handle.cancel()

    sequence, handle = engine._prepare(request, hear, draws)
    handle.sequence = sequence
    beside, _ = engine._prepare(asks(20, seed=9), None, None if draws is None else BoardDraws(9))
    for one in (sequence, beside):
        engine.scheduler.add(one)
    while engine.scheduler.busy:
        engine.scheduler.tick()
    return events


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("options", [{}, {"drafts": False}, {"mode": "ar", "temperature": 0.0}])
def test_who_cancels_inside_an_event_hears_no_more_than_before(options: dict[str, object], ahead: bool) -> None:
    request = asks(20, **options)  # type: ignore[arg-type]
    draws = "mode" not in options
    with fast_engine(ahead=ahead) as engine, plain_engine() as plain:
        count = len(heard(engine, request, 0))
        for at in range(1, count + 1):
            assert told(heard(engine, request, at)) == told(heard(plain, request, at, BoardDraws(1) if draws else None))
        for at in range(1, count):
            assert len(heard(engine, request, -at)) == at


def test_a_text_that_cannot_be_told_ends_all_that_runs_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Every request gets its end, and the engine goes on."""
    with fast_engine() as engine:
        handles = list[Handle]()
        for broken in (True, False, True, True):
            sequence, handle = engine._prepare(asks(48, drafts=False), None)
            if broken:
                sequence._output.push = _fail  # type: ignore[method-assign]
            engine.worker.submit(sequence, handle)
            handles.append(handle)
        for handle in handles:
            *commits, end = list(handle)
            assert isinstance(end, End)
            assert (end.finish_reason, end.error) == ("error", "ValueError: no text")
            assert len(commits) <= 1
        assert "a step failed" in caplog.text
        assert told(engine.submit(asks(48)))[-1][1] == "length"


@pytest.mark.parametrize("fast", [True, False])
def test_an_end_behind_a_text_that_cannot_be_told_is_an_error(fast: bool) -> None:
    """Not a reply that seems to be whole."""
    with fast_engine() if fast else plain_engine() as engine:
        sequence, handle = engine._prepare(asks(16, drafts=False), None)
        sequence._output.push = _fail  # type: ignore[method-assign]
        engine.worker.submit(sequence, handle)
        (end,) = list(handle)
        assert isinstance(end, End)
        assert (end.finish_reason, end.error) == ("error", "ValueError: no text")


def test_nothing_is_told_after_the_whole_time() -> None:
    with fast_engine() as engine:
        end = list(engine.submit(asks(16, drafts=False)))[-1]
    assert isinstance(end, End)
    assert end.metrics.first_text_seconds is not None
    assert end.metrics.first_text_seconds <= end.metrics.total_seconds


@pytest.mark.parametrize("fast", [True, False])
def test_a_stop_text_in_what_was_held_back(fast: bool) -> None:
    """Half a character is shown as U+FFFD, but only at the end, for it could become a whole one."""
    half = byte_tokenizer().encode("é")[0]
    others = tuple(token for token in range(CONFIG.vocab_size) if token != half)
    with fast_engine() if fast else plain_engine() as engine:
        request = replace(asks(1, drafts=False, stop=("\ufffd",)), forbidden=others)
        *commits, end = list(engine.submit(request))
    assert isinstance(end, End)
    assert end.finish_reason == "stop"
    assert "".join(event.text for event in commits if isinstance(event, Commit)) == ""


def _fail(tokens: object) -> str:
    raise ValueError("no text")


def test_texts_do_not_wait_for_a_recording() -> None:
    """It may take seconds."""
    with fast_engine(ahead=False) as engine:
        runner, found = engine.scheduler.runner, list[str]()
        assert isinstance(runner, FastRunner)
        record = runner.recorder.record
        runner.recorder.record = lambda *args: (record(*args), found.append("recorded"))[0]  # type: ignore[method-assign]
        sequence, _ = engine._prepare(asks(32, drafts=False), lambda event: found.append(event.kind))
        engine.scheduler.add(sequence)
        while engine.scheduler.busy:
            if sequence.metrics.blocks == 1 and sequence.phase == "encode":
                while len(runner.slate._passes):
                    runner.slate._passes.drop()
            engine.scheduler.tick()
    assert found == ["recorded", "recorded", "commit", "recorded", "commit", "end"]
