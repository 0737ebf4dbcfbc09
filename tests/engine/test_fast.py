"""The fast runner against the plain one, without a card: torch twins for kernels, functions for graphs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.engine import End, Engine, Limits, Request, SamplingParams
from diffusiongemma.engine import fast as fast_module
from diffusiongemma.engine import runner as runner_module
from diffusiongemma.engine import slate as slate_module
from diffusiongemma.engine.fast import FastRunner, choose_runner
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.runner import Runner, default_chunk
from diffusiongemma.engine.shelf import Work
from diffusiongemma.engine.slate import Parcel
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import CacheRow
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.model.pool import CachePool
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import (
    CONFIG,
    SMALL,
    BoardDraws,
    alike,
    all_at_once,
    fast_engine,
    make_model,
    plain_engine,
    told,
    watched,
)

Passes = list[list[int]]
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 40), "seed": st.integers(0, 2**40), "steps": st.integers(1, 7)},
    optional={
        "t_max": st.floats(0.5, 2.0),
        "entropy_bound": st.floats(0.01, 8.0),
        "confidence": st.floats(0.001, 5.0),
        "stability": st.integers(0, 2),
        "early_stop": st.booleans(),
        "canvas": st.sampled_from([None, "adaptive", 1, 5, 16]),
        "redo": st.integers(0, 2),
        "forget": st.integers(0, 3),
        "stop_tokens": st.lists(st.integers(107, 383), max_size=2),
    },
)
pins = st.dictionaries(st.integers(0, 20), st.integers(3, 383), max_size=4)
forbidden = st.lists(st.integers(0, 383), max_size=4).map(tuple)
prompts = st.lists(st.integers(3, 383), min_size=1, max_size=40).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    params = SamplingParams.build(**draw(options))
    held = {at: token for at, token in draw(pins).items() if at < params.max_new_tokens}
    banned = tuple(t for t in draw(forbidden) if t not in held.values())
    return Request(draw(prompts), params, held, forbidden=banned)


@given(st.lists(requests(), min_size=1, max_size=4), st.booleans())
@settings(max_examples=10)
def test_it_says_what_the_plain_runner_says(asked: list[Request], ahead: bool) -> None:
    with fast_engine(Limits(chunk=16, max_bytes=SMALL), ahead=ahead) as engine:
        handles = [engine.submit(request) for request in asked]
        got = [told(handle) for handle in handles]
    with plain_engine() as engine:
        for request, events in zip(asked, got, strict=True):
            assert request.params.seed is not None
            with watched() as close:
                alone = told(engine.submit(request, draws=BoardDraws(request.params.seed)))
            assert alike(events, alone, close)


def test_what_differs_where_no_decision_was_close_is_told() -> None:
    one: list[tuple[object, ...]] = [("draft", 0, 1), ("draft", 0, 2), ("commit", 0), ("end", "length")]
    other = [*one[:2], ("commit", 1), one[3]]
    assert alike(one, one, [False, False])
    assert not alike(one, other, [False, False])
    assert not alike(one, one[:3], [False, False])
    assert alike(one, other, [False, True])
    assert not alike([("draft", 1, 1), *one[1:]], one, [False, True]), "it was close only later"


@given(st.lists(requests(), min_size=2, max_size=5))
@settings(max_examples=5)
def test_alone_and_in_a_batch(asked: list[Request]) -> None:
    limits = Limits(chunk=16, max_rows=3, max_bytes=SMALL)
    with fast_engine(limits) as engine:
        handles = [engine.submit(request) for request in asked]
        together = [told(handle) for handle in handles]
    with fast_engine(limits) as engine:
        for request, events in zip(asked, together, strict=True):
            assert told(engine.submit(request)) == events


def test_mixed_with_what_goes_the_plain_way() -> None:
    """Log-probabilities, scores, own chance and the causal twin run beside recorded steps, over the same pool."""
    base = {"max_new_tokens": 30, "steps": 4, "seed": 5}
    with fast_engine(Limits(chunk=8, max_bytes=SMALL)) as engine, plain_engine() as plain:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        asked = [
            Request((5, 6, 7), SamplingParams.build(**base)),
            Request((5, 6, 7, 8), SamplingParams.build(**base, logprobs=2)),
            Request((9, 6, 7), SamplingParams.build(**base), score=True),
            Request((9, 9), SamplingParams.build(mode="ar", max_new_tokens=20, seed=3, top_p=0.9)),
        ]
        handles = [engine.submit(request) for request in asked]
        got = [told(handle) for handle in handles]
        assert got[1] == told(plain.submit(asked[1]))
        assert got[3] == told(plain.submit(asked[3]))
        assert got[0] == told(plain.submit(asked[0], draws=BoardDraws(5)))
        assert got[2] == told(plain.submit(asked[2], draws=BoardDraws(5)))


def count_launches(engine: Engine) -> list[int]:
    runner = engine.scheduler.runner
    assert isinstance(runner, FastRunner)
    lane = runner.lane(16)
    launched: list[int] = []
    launch = lane.launch
    lane.launch = lambda *given: (launched.append(len(lane.passengers)), launch(*given))[1]  # type: ignore[method-assign]
    return launched


@pytest.mark.parametrize("ahead", [True, False])
def test_no_step_is_launched_in_vain_when_all_are_taken(ahead: bool) -> None:
    with fast_engine(ahead=ahead) as engine:
        launched = count_launches(engine)
        result = engine.generate([5, 6], raw=True, max_new_tokens=40, steps=6, seed=1, early_stop=False)
        assert len(launched) == result.metrics.steps
        assert result.metrics.steps % 6 == 0


def test_a_step_that_turns_out_to_be_too_many_is_thrown_away() -> None:
    """With early stopping at any entropy, the step launched ahead is one too many, and nobody hears of it."""
    options = {"max_new_tokens": 40, "steps": 30, "seed": 1, "stability": 0, "confidence": 50.0}
    with fast_engine() as engine:
        launched = count_launches(engine)
        events = [told(engine.submit(engine.request([5, 6], raw=True, **options))) for _ in range(2)]
    assert events[0][:-1] == events[1][:-1]
    steps = sum(event[0] == "draft" for found in events for event in found)
    assert steps < len(launched) <= 2 * steps


def test_cancelling_with_steps_under_way() -> None:
    with fast_engine() as engine:
        options = {"steps": 1000, "early_stop": False, "seed": 1, "max_new_tokens": 16}
        slow = engine.submit(engine.request([5], raw=True, **options))
        events = iter(slow)
        for _ in range(3):
            next(events)
        other = engine.submit(engine.request([6], raw=True, max_new_tokens=16, steps=3, seed=2))
        assert told(other)[-1][0] == "end"
        slow.cancel()
        assert next(e for e in events if isinstance(e, End)).finish_reason == "cancelled"
        again = told(engine.submit(engine.request([6], raw=True, max_new_tokens=16, steps=3, seed=2)))
        assert again[-1][0] == "end"


def test_rows_fit_however_long_it_runs() -> None:
    """A small pool is used up again and again: rows that ended make room, those that run move."""
    limits = Limits(max_bytes=3 * CacheRow.bytes_for(CONFIG, 60, torch.float32), max_rows=4, chunk=16)
    with fast_engine(limits) as engine, plain_engine() as plain:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        asked = [
            Request(tuple(range(3 + i, 12 + i + i % 7)), SamplingParams.build(max_new_tokens=20 + i, steps=2, seed=i))
            for i in range(20)
        ]
        got = all_at_once(engine, asked)
        assert runner.pool.moves > 3
        for i, request in enumerate(asked):
            alone = told(plain.submit(request, draws=BoardDraws(i)))
            assert got[i][:-1] == alone[:-1]


def test_cold_canvases_step_apart_from_warm_ones() -> None:
    """The vocabulary end reads them in another way, which must not depend on who else is here."""
    base = {"max_new_tokens": 30, "steps": 4, "t_max": 0.8}
    asked = [
        Request((5, 6, 7), SamplingParams.build(**base, seed=i, t_min=t)) for i, t in enumerate((0.4, 0.1, 0.5, 0.2))
    ]
    with fast_engine() as engine, plain_engine() as plain:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        handles = [engine.submit(request) for request in asked]
        assert [told(handle) for handle in handles] == [
            told(plain.submit(request, draws=BoardDraws(i))) for i, request in enumerate(asked)
        ]
        lanes = {place: lane.warm for place, lane in runner._lanes.items()}
        assert lanes == {(16, True, False): True, (16, False, False): False}


def test_a_card_with_memory_to_spare_encodes_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free: dict[str, int | None] = {"now": None}
    monkeypatch.setattr(runner_module, "bytes_left", lambda device: free["now"])
    device = torch.device("cpu")
    assert default_chunk(device) == 512  # no card
    free["now"] = 7 << 30
    assert default_chunk(device) == 2048
    assert default_chunk(device, taken=2 << 30) == 512
    model = make_model()
    usual, small = Limits(max_bytes=SMALL), Limits(max_bytes=SMALL, chunk=48)
    for left, limits, chunk, room in ((7, usual, 2048, 2048), (14, usual, 2048, 4096), (14, small, 48, 48)):
        free["now"] = left << 30
        runner = FastRunner(model, torch_ops(), limits)
        with Engine(model, byte_tokenizer(), limits=limits, runner=runner) as engine:
            assert engine.scheduler.chunk == runner.chunk == chunk
            assert engine.scheduler.room == runner.room == room
            assert runner.slate.most_tokens == max(room, chunk + 16)
            ops = runner.network.ops
            assert (ops.placing, ops.reading) == ((2048, 2048) if room == 4096 else (512, 1024))
    free["now"] = 1 << 30
    assert Runner(model).chunk == Runner(model).room == 512


def passes_of(runner: Runner) -> Passes:
    """The new tokens of every row, of all passes from now on."""
    assert isinstance(runner, FastRunner)
    counts, run = Passes(), runner.slate._pass

    def spy(parcel: Parcel, hidden: bool) -> None:
        counts.append(list(parcel.counts))
        run(parcel, hidden)

    runner.slate._pass = spy  # type: ignore[method-assign]
    return counts


def two_blocks(first: int, last: int) -> list[Request]:
    """Prompts of 20 tokens; two blocks of 16 each."""
    params = {"max_new_tokens": 32, "steps": 2, "early_stop": False}
    return [Request(tuple(range(i, i + 20)), SamplingParams.build(**params, seed=i)) for i in range(first, last)]


def test_prompts_and_commits_of_all_users_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts of 20 tokens, then eight blocks of 16: one pass each, where the chunk has room for them, or a pass
    while no canvas is under way."""
    monkeypatch.setattr(fast_module, "TURN", 0)  # else so few tokens go with the next step
    texts, passes = list[list[list[tuple[object, ...]]]](), list[Passes]()
    for chunk, room in ((160, 160), (32, 160), (32, 32)):
        with fast_engine(Limits(max_rows=8, max_bytes=SMALL)) as engine:
            runner = engine.scheduler.runner
            runner.chunk, runner.room = chunk, room
            passes.append(passes_of(runner))
            texts.append(all_at_once(engine, two_blocks(3, 11)))
    assert passes[0] == passes[1] == [[20] * 8, [16] * 8]
    assert len(passes[2]) > 8
    assert texts[0] == texts[1] == texts[2]


def test_who_is_under_way_waits_for_no_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "TURN", 0)
    with fast_engine(Limits(max_rows=8, max_bytes=SMALL)) as engine:
        scheduler, runner = engine.scheduler, engine.scheduler.runner
        runner.chunk, runner.room = 24, 160
        passes = passes_of(runner)
        asked = two_blocks(3, 11)
        prepared = [engine._prepare(request, None)[0] for request in asked]
        scheduler.add(prepared[0])
        while not prepared[0].metrics.steps:
            scheduler.tick()
        for sequence in prepared[1:]:
            scheduler.add(sequence)
        before = len(passes)
        while scheduler.busy:
            stepping = any(s.phase == "denoise" and s.metrics.steps for s in scheduler.running)
            scheduler.tick()
            if stepping and len(passes) > before:
                assert sum(passes[-1]) <= 24
            before = len(passes)
        assert sum(map(sum, passes)) == 8 * (20 + 16)


def test_a_prompt_is_cut_by_the_chunk_however_much_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "TURN", 0)
    with fast_engine(Limits(max_rows=8, max_bytes=SMALL)) as engine:
        runner = engine.scheduler.runner
        runner.chunk, runner.room = 8, 160
        passes = passes_of(runner)
        all_at_once(engine, two_blocks(3, 5))
        assert passes[:3] == [[8, 8], [8, 8], [4, 4]]


def test_a_pass_is_recorded_for_what_a_row_has_at_most() -> None:
    """Canvases of several rows, short prompts, or one long prompt among them; a lone row may have all tokens."""
    with fast_engine(Limits(max_rows=8, max_bytes=SMALL, chunk=2048)) as engine:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)

        def kind(counts: list[int], length: int, hidden: bool = True) -> slate_module.Kind:
            rows = [CacheRow(CONFIG, length + count, torch.float32) for count in counts]
            for row in rows:
                row.length = length
            return runner.slate.kind(Parcel(torch.zeros(sum(counts)), rows, counts), hidden)

        assert kind([256] * 8, 512) == (8, 2048, 256, 2048, True)
        assert kind([512] * 4, 0) == (8, 2048, 1024, 2048, True)
        assert kind([1500, 20, 256], 0, hidden=False) == (8, 2048, 2048, 2048, False)
        assert kind([20, 16], 0) == (8, 64, 64, 2048, True)
        assert kind([256], 512) == (1, 256, 256, 2048, True)
        assert kind([600], 2000) == (1, 1024, 1024, 8192, True)
        what = "2048 tokens, a row 256 at most, up to 2048"
        assert str(kind([256] * 8, 512)) == f"encoding {what}"
        assert str(kind([256] * 8, 512, hidden=False)) == f"remembering {what}"


def test_few_reaches_are_recorded_and_none_is_far_too_long() -> None:
    pool = CachePool(CONFIG, SMALL, torch.float32)
    asked = (1, 2048, 2049, 8192, 8193, 8704, 16385, 70_000)
    assert [pool.reach_for(n) for n in asked] == [2048, 2048, 8192, 8192, 16384, 16384, 32768, 131_072]


def test_which_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # else kernels run here too
    model = make_model()
    assert type(choose_runner(model, Limits())) is Runner
    assert type(choose_runner(model, Limits(), kernels=False)) is Runner
    with pytest.raises(DeviceError, match="kernels=True"):
        choose_runner(model, Limits(), kernels=True)


@pytest.mark.parametrize(("width", "recorded"), [(16, [True, False]), (5, [False])])
def test_a_step_is_recorded_at_once(width: int, recorded: list[bool]) -> None:
    """Also of a width that may never come again, but not with a prompt before it, which comes only once."""
    names: list[str] = []

    class Counting(Recorder):
        def record(self, name: str, work: Work, changed: Iterable[Tensor] = ()) -> Work:
            names.append(name)
            return work

    model, limits = make_model(), Limits(max_bytes=SMALL)
    runner = FastRunner(model, torch_ops(), limits)
    runner.slate.recorder = Counting(model.device)
    with Engine(model, byte_tokenizer(), limits=limits, runner=runner) as engine:
        params = SamplingParams.build(max_new_tokens=width, canvas=width, steps=4, early_stop=False, seed=1)
        assert len(list(engine.submit(Request((5, 6, 7), params)))) >= 4
    assert ["remembering" in name for name in names if name.startswith("a step")] == recorded


def test_a_lane_is_kept_while_its_canvases_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a canvas has come to lies on its lane's board alone: another width must not cost it that."""
    monkeypatch.setattr(fast_module, "MOST_LANES", 1)
    asked = [
        Request((5, 6, 7), SamplingParams.build(max_new_tokens=width, canvas=width, steps=6, early_stop=False, seed=i))
        for i, width in enumerate((5, 7, 9))
    ]
    with fast_engine(ahead=False) as engine, plain_engine() as plain:
        handles = [engine.submit(request) for request in asked]
        assert [told(handle) for handle in handles] == [
            told(plain.submit(request, draws=BoardDraws(i))) for i, request in enumerate(asked)
        ]
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        assert len(runner._lanes) == 1  # and no longer than that
