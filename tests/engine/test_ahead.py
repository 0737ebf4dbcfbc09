"""What is encoded goes with a step (a turn), or has a pass of its own: prompts, and blocks, which are committed before
the host has read them. The same events and figures, and nothing is left of what should not have been."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import End, Engine, Event, Limits, Request, SamplingParams, fast
from diffusiongemma.engine import steps as steps_module
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.graphs import uncollected
from diffusiongemma.engine.lane import Lane
from diffusiongemma.engine.slate import Parcel
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import CONFIG, SMALL, BoardDraws, RunningRecorder, all_at_once, told

# Rows that still remember their beginning with a few blocks of 16 behind it; one token in 27 is an end.
WIDE = CONFIG.replace(sliding_window=80, eos_token_ids=(1, *range(100, 380, 20)))


def make_engine(ahead: bool | None, chunk: int | None = None) -> Engine:
    """`ahead` None: the plain way."""
    model = DiffusionGemma(WIDE).init_weights(3, std=0.3).eval().requires_grad_(False)
    model.self_conditioning.down_proj.weight.mul_(0.02)
    limits = Limits(max_bytes=SMALL, chunk=chunk)
    if ahead is None:
        return Engine(model, byte_tokenizer(), limits=limits, kernels=False)
    return Engine(model, byte_tokenizer(), limits=limits, runner=FastRunner(model, torch_ops(), limits, ahead=ahead))


def asks(
    seed: int,
    count: int = 48,
    ends: bool = True,
    drafts: bool = True,
    prompt: int = 4,
    stable: int = 0,
    **options: object,
) -> Request:
    usual = {"max_new_tokens": count, "seed": seed}
    if options.get("mode") != "ar":
        usual |= {"steps": 3, "early_stop": False}
    tokens = (*range(5, prompt + 4), seed % 90)
    return Request(tokens, SamplingParams.build(**usual | options), drafts=drafts, ends=ends, stable=stable)


@contextmanager
def turning(turns: bool) -> Iterator[None]:
    """Not `turns`: as if there were many canvases"""
    with pytest.MonkeyPatch.context() as patch:
        if not turns:
            patch.setattr(fast, "TURN", 0)
        yield


@contextmanager
def watched(engine: Engine) -> Iterator[list[str]]:
    """What happens, in order: passes that are launched, steps that are read, blocks that are forgotten again."""
    runner, found = engine.scheduler.runner, list[str]()
    assert isinstance(runner, FastRunner)
    with pytest.MonkeyPatch.context() as patch:

        def spy(owner: object, name: str, word: str) -> None:
            work = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **rest: (found.append(word), work(*args, **rest))[1])

        spy(runner.slate, "_pass", "encode")
        spy(Lane, "land", "read")
        launch = Lane.launch

        def launched(lane: Lane, parcel: Parcel | None = None) -> None:
            found.append("step" if parcel is None else "turn")
            launch(lane, parcel)

        patch.setattr(Lane, "launch", launched)
        spy(runner.pool.new_row(1).__class__, "truncate", "forget")
        yield found


def test_a_block_is_committed_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "OFTEN", 0)
    orders = []
    for turns in (True, False):
        with turning(turns), make_engine(ahead=True) as engine, watched(engine) as found:
            all_at_once(engine, [asks(seed, 32, ends=False) for seed in (1, 2, 3)])
        orders.append(found)
    first = ["step", "step", "read", "step", "read"]
    assert orders[0] == ["turn", *first[1:], "turn", "read", *first[1:], "read"]
    assert orders[1] == ["encode", *first, "encode", "read", *first, "read"]


@pytest.mark.parametrize(
    ("options", "turns", "commits"),
    [
        ({"stop": ("no such text",)}, 2, 0),  # the text has been read when its turn comes
        ({"redo": 1}, 2, 1),  # when it has been done again, and will not be once more
        ({"count": 16}, 1, 0),  # no block follows, but there is a prompt
        ({"count": 128}, 8, 4),  # from the fifth block on the row forgets its beginning, which must be put aside
    ],
)
def test_ahead_only_where_tokens_alone_decide(options: dict[str, Any], turns: int, commits: int) -> None:
    asked = asks(1, ends=False, **{"count": 32} | options)
    with make_engine(ahead=True) as engine, watched(engine) as found:
        all_at_once(engine, [asked])
    assert found.count("turn") == turns
    with turning(False), make_engine(ahead=True) as engine, watched(engine) as found:
        all_at_once(engine, [asked])
    around = [found[i - 1 : i + 2] for i, word in enumerate(found) if word == "encode"]
    assert around.count(["read", "encode", "read"]) == commits


def test_a_canvas_of_another_lane_takes_its_first_step_by_itself() -> None:
    """The second block has a pin, which other kernels read: the block before it is committed ahead all the same."""
    asked = replace(asks(1, ends=False), pins={20: 30})
    with make_engine(ahead=True) as engine, watched(engine) as found:
        told_ahead = all_at_once(engine, [asked])
    first = ["step", "step", "read", "step", "read"]
    assert found == ["turn", *first[1:], "encode", "read", *first, "encode", "read", *first, "read"]
    with make_engine(ahead=False) as engine:
        assert all_at_once(engine, [asked]) == told_ahead


def lengths_kept(engine: Engine) -> list[int]:
    """Tokens of every row that is kept from now on, in order"""
    prefixes, found = engine.scheduler.prefixes, list[int]()
    put = prefixes.put
    prefixes.put = lambda tokens, row: (found.append(len(tokens)), put(tokens, row))[1]  # type: ignore[method-assign]
    return found


def test_a_block_that_waits_for_its_turn_is_no_reason_to_keep_the_prompt_again() -> None:
    asked = asks(1, prompt=75, stable=75, ends=False, stop=("no such text",))
    with make_engine(ahead=True) as engine, watched(engine) as found:
        kept = lengths_kept(engine)
        all_at_once(engine, [asked])
    assert found.count("turn") == 3
    assert kept == [75, 75 + 32]


def test_who_goes_the_plain_way_commits_by_itself() -> None:
    """Log-probabilities are not for a board: beside one that is seated, and alone."""
    plain = asks(1, ends=False, logprobs=0, stop=("no such text",))
    for asked in ([plain], [plain, asks(2, ends=False, stop=("no such text",))]):
        found = []
        for ahead in (True, False):
            with make_engine(ahead) as engine:
                found.append(all_at_once(engine, asked))
        assert found[0] == found[1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory")])
def test_without_memory_to_put_anything_aside_the_host_is_waited_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [asks(1, 80, ends=False, prompt=75)]
    with make_engine(ahead=False) as other:
        want = all_at_once(other, asked)

    def fail(row: CacheRow, count: int) -> None:
        raise error

    monkeypatch.setattr(CacheRow, "put_aside", fail)
    with make_engine(ahead=True) as engine, watched(engine) as found:
        assert all_at_once(engine, asked) == want
    assert found.count("turn") == 5, "with the first step all the same"
    first = ["turn", "step", "read", "step", "read", "read", "turn"]
    assert found[: len(first)] == first


def test_what_fails_otherwise_while_something_is_put_aside_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(row: CacheRow, count: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(CacheRow, "put_aside", fail)
    with make_engine(ahead=True) as engine:
        reason, error = told(engine.submit(asks(1, 80, ends=False, prompt=75)))[-1][1:3]
    assert (reason, error) == ("error", "RuntimeError: CUDA error: an illegal memory access was encountered")


def test_recording_a_turn_leaves_no_trace() -> None:
    """Not in cache rows either: what it would commit then is rubbish, and rings hold what is needed."""
    asked = [asks(1, 80, ends=False, prompt=75)]
    with make_engine(ahead=True) as engine, make_engine(ahead=False) as other:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        runner.slate.recorder = RunningRecorder(runner.device)
        assert all_at_once(engine, asked) == all_at_once(other, asked)
        assert runner.slate.recorder.recorded == 3  # a step, one with the prompt, and one with a commit


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    lost = list[int]()

    class Knot:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            lost.append(1)

    gc.collect()
    with uncollected():
        for _ in range(10 * gc.get_threshold()[0]):
            Knot()
        assert not lost
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert lost


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.sampled_from([{}, {"steps": 1}, {"early_stop": True}, {"canvas": "adaptive"}, {"canvas": 8}, {"redo": 1}]),
    st.sampled_from([None, 32]),
    st.sampled_from([4, 70]),  # tokens of the prompt: with the second, blocks overwrite what a row still needs
)
@settings(max_examples=25, deadline=None)
def test_the_same_is_told(
    seeds: list[int], ends: bool, options: dict[str, object], chunk: int | None, prompt: int
) -> None:
    asked = [asks(seed, ends=ends, prompt=prompt, **options) for seed in seeds]
    found = []
    for ahead, turns in ((True, True), (False, False), (True, False)):
        with turning(turns), make_engine(ahead, chunk) as engine:
            found.append(all_at_once(engine, asked))
            assert engine.scheduler.reserved == 0
    assert found[0] == found[1] == found[2]
    with make_engine(None) as plain:
        assert found[0] == [told(plain.submit(r, draws=BoardDraws(s))) for s, r in zip(seeds, asked, strict=True)]


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("prompt", [4, 75])
def test_an_end_that_no_draft_had(prompt: int, turns: bool) -> None:
    """The block was committed by then: its row forgets it, and what is kept is found again as it would be otherwise."""
    figures, forgotten = [], 0
    for ahead in (True, False):
        with turning(turns), make_engine(ahead) as engine, watched(engine) as found:
            reused = []
            for seed in range(40):
                sequence, handle = engine._prepare(asks(seed, 32, prompt=prompt), None)
                engine.scheduler.add(sequence)
                while engine.scheduler.busy:
                    engine.scheduler.tick()
                end = list(handle)[-1]
                assert isinstance(end, End)
                again, heard = engine._prepare(Request((*sequence.tokens, 9), asks(seed, 16).params), None)
                engine.scheduler.add(again)
                while engine.scheduler.busy:
                    engine.scheduler.tick()
                figure = (end.metrics.encoder_forwards, end.metrics.new_tokens, again.metrics.reused_tokens)
                reused.append((*figure, told(heard)))  # what is written behind it, too
            figures.append(reused)
            if ahead:
                forgotten = found.count("forget")
    assert figures[0] == figures[1]
    assert forgotten >= (3 if turns or prompt == 4 else 0)  # the other one waits until it has read the block


@pytest.mark.parametrize("at", range(1, 8))
def test_who_is_cancelled_leaves_nothing(at: int) -> None:
    with make_engine(ahead=True) as engine:
        events = list[Event]()

        def hear(event: Event) -> None:
            events.append(event)
            if len(events) == at:
                handle.cancel()

        sequence, handle = engine._prepare(asks(4, ends=False), hear)
        handle.sequence = sequence
        engine.scheduler.add(sequence)
        while engine.scheduler.busy:
            engine.scheduler.tick()
        assert isinstance(events[-1], End)
        assert events[-1].finish_reason == "cancelled"
        assert sequence.row is None
        assert not len(engine.scheduler.prefixes)


@pytest.mark.parametrize("turns", [True, False])
def test_a_commit_that_fails_keeps_no_finished_block_back(turns: bool) -> None:
    """The step before it went well: its draft and its block are told before the end."""
    found = []
    for ahead in (True, False):
        with turning(turns), make_engine(ahead) as engine:
            runner, passes = engine.scheduler.runner, list[int]()
            assert isinstance(runner, FastRunner)
            network = runner.network

            def fail(*args: Any, passes: list[int] = passes, run: Any, **rest: Any) -> Any:
                passes.append(1)
                if len(passes) == 2:
                    raise RuntimeError("no memory")
                return run(*args, **rest)

            network.remember = partial(fail, run=network.remember)  # type: ignore[method-assign]
            network.turn = partial(fail, run=network.turn)  # type: ignore[method-assign]
            found.append(told(engine.submit(asks(1, ends=False))))
            assert told(engine.submit(asks(1, ends=False)))[-1][:2] == ("end", "length")
    assert found[0] == found[1]
    assert [event[0] for event in found[0]] == ["draft", "draft", "draft", "commit", "end"]
    assert found[0][-1][1] == "error"


def recording(runner: FastRunner, fails: Callable[[str], bool], error: Exception) -> None:
    record = runner.slate.recorder.record

    def careful(name: str, *rest: Any) -> Any:
        if fails(name):
            raise error
        return record(name, *rest)

    runner.slate.recorder.record = careful  # type: ignore[method-assign]


def test_a_recording_that_fails_leaves_other_turns_as_they_were() -> None:
    """A turn of one user is recorded, that of two cannot be: the next user's blocks are committed all the same."""
    one, two = asks(1, ends=False), [asks(seed, ends=False) for seed in (2, 3)]
    with make_engine(ahead=True) as engine, make_engine(ahead=False) as other:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        recording(runner, lambda name: "a step of 2" in name and "remembering" in name, RuntimeError("broken"))
        all_at_once(engine, [asks(4, ends=False)])
        with pytest.raises(RuntimeError, match="broken"):
            all_at_once(engine, two)
        engine.scheduler.abort("broken")  # as the engine's thread does
        assert all_at_once(engine, [one]) == all_at_once(other, [one])


@pytest.mark.parametrize(
    ("users", "error"),
    [
        (1, torch.OutOfMemoryError()),
        (2, torch.OutOfMemoryError()),
        (1, torch.AcceleratorError("CUDA error: out of memory")),
        (1, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ],
)
def test_without_memory_to_record_a_turn_there_are_two_passes(
    users: int, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "OFTEN", 0)
    asked = [asks(seed, ends=False) for seed in range(users)]
    with make_engine(ahead=True) as engine, make_engine(ahead=False) as other, watched(engine) as found:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        fails = list[str]()
        recording(runner, lambda name: "and remembering" in name and not fails.append(name), error)
        assert all_at_once(engine, asked) == all_at_once(other, asked)
    assert found.count("turn") == 0
    assert len(fails) == 2, "once for prompts, once for blocks: it is not tried again"
    assert [record.message for record in caplog.records if "no memory to record" in record.message] == [
        f"two passes instead of one: no memory to record {name}" for name in fails
    ]


def one_by_one(engine: Engine, asked: list[Request], every: int) -> list[list[tuple[object, ...]]]:
    """A new one every few ticks: their blocks end at different times."""
    prepared = [engine._prepare(request, None) for request in asked]
    coming = [sequence for sequence, _ in prepared]
    while coming or engine.scheduler.busy:
        if coming and engine.scheduler.ticks % every == 0:
            engine.scheduler.add(coming.pop(0))
        engine.scheduler.tick()
    return [told(handle) for _, handle in prepared]


def test_who_steps_takes_along_what_others_have_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and blocks of users who come one after another: as soon as such a pass has been wanted often enough."""
    asked = [asks(seed, 64, ends=False, steps=5) for seed in range(6)]
    counted = []
    for often in (0, 1, 1000):
        monkeypatch.setattr(steps_module, "OFTEN", often)
        with make_engine(ahead=True) as engine, make_engine(ahead=False) as other, watched(engine) as found:
            assert one_by_one(engine, asked, 3) == one_by_one(other, asked, 3)
        counted.append((found.count("turn"), found.count("encode")))
    (always, apart), (sometimes, _), (seldom, _) = counted
    assert apart == 0
    assert always > sometimes > seldom > 0  # the first prompt finds nobody, the last block nobody else
    assert all(turns + passes <= 6 * 4 for turns, passes in counted), "prompts and three blocks of each"


@given(
    st.lists(st.integers(0, 999), min_size=2, max_size=5, unique=True),
    st.integers(1, 6),
    st.sampled_from([0, 2]),
    st.sampled_from([None, 64]),
    st.lists(
        st.sampled_from(
            [{}, {"steps": 1}, {"early_stop": True}, {"canvas": "adaptive"}, {"canvas": 8}, {"redo": 1},
             {"logprobs": 0}, {"stop": ("no such text",)}, {"prompt": 70}, {"prompt": 75, "count": 80},
             {"prompt": 75, "stable": 75}, {"prompt": 70, "stable": 66, "count": 30}, {"prompt": 90, "stable": 85},
             {"prompt": 90, "stable": 90, "steps": 1}, {"stable": 4, "count": 96}]
        ),
        min_size=5, max_size=5,
    ),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_same_is_told_to_who_comes_at_any_time(
    seeds: list[int], every: int, often: int, chunk: int | None, options: list[dict[str, Any]]
) -> None:
    """And the same is kept of their prompts and texts. (Who comes later may find a beginning kept or not yet.)"""
    asked = [asks(seed, **given) for seed, given in zip(seeds, options, strict=False)]
    found, kept = [], []
    for ahead in (True, False):
        with pytest.MonkeyPatch.context() as patch, make_engine(ahead, chunk) as engine:
            patch.setattr(steps_module, "OFTEN", often)
            engine.scheduler.runner.patience = 2  # as on a card
            found.append(one_by_one(engine, asked, every))
            assert engine.scheduler.reserved == 0
            kept.append(all_kept(engine))
    assert found[0] == found[1]
    assert kept[0].keys() == kept[1].keys()
    for tokens, layers in kept[0].items():
        torch.testing.assert_close(layers, kept[1][tokens], rtol=0, atol=1e-4)


def all_kept(engine: Engine) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """By its tokens, what every kept row would give to a text that goes on behind them."""
    found = dict[tuple[int, ...], list[torch.Tensor]]()
    for tokens, row in engine.scheduler.prefixes._rows:
        layers = range(WIDE.num_hidden_layers)
        windows = [WIDE.sliding_window - 1 if WIDE.is_sliding(layer) else row.length for layer in layers]
        parts = [part for layer in layers for part in row.last(layer, windows[layer])]
        found[tokens] = [torch.cat(part, dim=1).clone() for part in parts]
    return found


@pytest.mark.parametrize(
    ("asked", "first", "kept"),
    [
        (asks(1, 96, stable=4), ["turn", "step"], [4, 4 + 80]),  # a text
        (asks(1, 96, stable=2), ["turn", "step"], [2, 4 + 80]),  # a chat: behind that point the reply's head follows
        (asks(1, 48, prompt=75, stable=70), ["turn", "step"], [70, 75 + 32]),
        (asks(1, 48, prompt=90, stable=90), ["turn", "step"], [90, 90 + 32]),
        # From its end the row could not go back to that point.
        (asks(1, 48, prompt=90, stable=85), ["encode", "turn"], [85, 90 + 32]),
        (asks(1, 48, stable=4), ["turn", "step"], [4 + 32]),  # it remembers its beginning by itself
        (asks(1, 16, prompt=75, stable=70), ["turn", "step"], [70, 75]),
        (asks(1, 16, prompt=75, stable=70, steps=1), ["turn", "read"], [75]),  # it is over: its row is kept
        (asks(1, 16, prompt=75, stable=70, mode="ar", temperature=0), ["encode"], [70, 75 + 15]),  # the twin
    ],
)
def test_a_copy_of_a_prompt_is_kept_when_it_went_with_a_step(asked: Request, first: list[str], kept: list[int]) -> None:
    """Once, and a later turn finds it; with a pass of its own it is the same."""
    asked, told_later = replace(asked, ends=False), []
    later = Request((*asked.prompt[: asked.stable], 9, 8), asks(2, 16).params, ends=False)
    for ahead in (True, False):
        with make_engine(ahead) as engine, watched(engine) as found:
            lengths = lengths_kept(engine)
            all_at_once(engine, [asked])
            assert not ahead or found[: len(first)] == first
            assert lengths == kept
            sequence, handle = engine._prepare(later, None)
            engine.scheduler.add(sequence)
            while engine.scheduler.busy:
                engine.scheduler.tick()
            assert sequence.metrics.reused_tokens == asked.stable
            told_later.append(told(handle))
    with make_engine(ahead=True) as fresh:
        assert all_at_once(fresh, [later]) == [told_later[0]] == [told_later[1]]


def test_a_prompt_that_others_wait_for_does_not_wait_for_a_step() -> None:
    """Followers of a group want its row: else they would be a step behind."""
    group = [asks(seed, ends=False) for seed in (1, 2)]
    group = [replace(request, prompt=group[0].prompt) for request in group]
    with make_engine(ahead=True) as engine, watched(engine) as found:
        handles = engine.submit_group(group)
        for handle in handles:
            list(handle)
    assert found[0] == "encode"


@pytest.mark.parametrize("ahead", [True, False])
def test_who_is_cancelled_before_the_first_step_has_no_copy_kept(ahead: bool) -> None:
    with make_engine(ahead) as engine:
        engine.scheduler.runner.patience = 2
        (one, _), (two, _) = (engine._prepare(asks(seed, 96, ends=False, stable=4), None) for seed in (1, 2))
        engine.scheduler.add(one)
        engine.scheduler.tick()  # its prompt is read, or waits for a step, which waits for others
        assert one.phase == "denoise"
        assert not one.metrics.steps
        one.cancelled = True
        engine.scheduler.add(two)
        while engine.scheduler.busy:
            engine.scheduler.tick()
        kept = [len(tokens) for tokens, _ in engine.scheduler.prefixes._rows]
        assert kept == ([4, 84] if ahead else [4, 4, 84])


def test_a_turn_has_no_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fill up what is encoded included."""
    monkeypatch.setattr(steps_module, "OFTEN", 0)
    with make_engine(ahead=True) as engine:
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        sizes, turn = list[int](), runner.network.turn
        runner.network.turn = lambda *given: (sizes.append(len(given[0]) + len(given[2])), turn(*given))[1]  # type: ignore[method-assign]
        all_at_once(engine, [asks(seed, ends=False, prompt=258 if not seed else 4) for seed in range(10)])
        assert sizes
        assert max(sizes) <= runner.room
