"""The autoregressive twin in recorded passes, without a card: against the plain runner, and against a loop by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.diffusion import SeededDraws
from diffusiongemma.engine import Commit, End, Engine, Limits, Request, SamplingParams
from diffusiongemma.engine.draw import DrawLane, drawable
from diffusiongemma.engine.engine import Handle
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.runner import draw_token
from diffusiongemma.model import CacheRow
from diffusiongemma.ops import vocab
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import (
    CONFIG,
    SMALL,
    BoardDraws,
    RunningRecorder,
    all_at_once,
    fast_engine,
    make_model,
    plain_engine,
    told,
)

prompts = st.lists(st.integers(3, 383), min_size=1, max_size=40).map(tuple)
forbidden = st.lists(st.integers(0, 383), max_size=4).map(tuple)


def twin(**options: object) -> SamplingParams:
    return SamplingParams.build(mode="ar", **options)


@st.composite
def requests(draw: st.DrawFn, temperatures: tuple[float, ...] = (0.0,)) -> Request:
    params = twin(
        max_new_tokens=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**40)),
        temperature=draw(st.sampled_from(temperatures)),
        stop_tokens=tuple(draw(st.lists(st.integers(3, 383), max_size=20))),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )
    return Request(draw(prompts), params, forbidden=draw(forbidden))


def lane_of(engine: Engine) -> DrawLane:
    runner = engine.scheduler.runner
    assert isinstance(runner, FastRunner)
    return runner.drawing


def count_launches(engine: Engine) -> list[int]:
    lane = lane_of(engine)
    launched: list[int] = []
    launch = lane.launch
    lane.launch = lambda: (launched.append(len(lane.passengers)), launch())[1]  # type: ignore[method-assign]
    return launched


def logprobs_of(handle: Handle) -> list[float]:
    return [entry.logprob for event in handle if isinstance(event, Commit) for entry in event.logprobs or ()]


def run(engine: Engine, asked: list[Request]) -> list[list[tuple[object, ...]]]:
    handles = [engine.submit(request) for request in asked]
    return [told(handle) for handle in handles]


@given(st.lists(requests(), min_size=1, max_size=4), st.booleans())
@settings(max_examples=15)
def test_the_best_tokens_are_those_of_the_plain_runner(asked: list[Request], ahead: bool) -> None:
    with fast_engine(Limits(chunk=16, max_bytes=SMALL), ahead=ahead) as engine:
        got = run(engine, asked)
    with plain_engine() as engine:
        assert got == [told(engine.submit(request)) for request in asked]


@given(st.lists(requests((0.0, 0.3, 1.0, 2.5)), min_size=2, max_size=5))
@settings(max_examples=8)
def test_alone_and_in_a_batch(asked: list[Request]) -> None:
    limits = Limits(chunk=16, max_rows=3, max_bytes=SMALL)
    with fast_engine(limits) as engine:
        together = run(engine, asked)
    with fast_engine(limits) as engine:
        assert together == [told(engine.submit(request)) for request in asked]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_samples_are_those_of_a_loop_by_hand(temperature: float) -> None:
    model, seed, prompt, banned = make_model(), 77, [5, 6, 7, 8], (9, 10, 11)
    params = twin(max_new_tokens=30, seed=seed, temperature=temperature, logprobs=0 if temperature == 1 else None)
    with fast_engine() as engine:
        launched = count_launches(engine)
        handle = engine.submit(Request(tuple(prompt), params, forbidden=banned, ends=False))
        commits = [event for event in handle if isinstance(event, Commit)]
        assert len(launched) == 29
    row, tokens, logprobs = CacheRow(CONFIG, 60), list[int](), list[float]()
    new = prompt
    with torch.inference_mode():
        for step in range(30):
            logits = model.logits(model.encode_packed(torch.tensor(new), [row], [len(new)])[-1:])
            logits[:, list(banned)] = -torch.inf
            if step == 0:  # the prompt's pass is not the lane's
                token, _ = draw_token(logits[0].clone(), params, SeededDraws(seed).uniforms(1))
            else:
                uniform, _ = vocab.draws(torch.tensor([seed]), torch.tensor([step]), torch.tensor([0]), 384)
                below = (logits[0] / temperature).softmax(dim=-1).cumsum(dim=0)
                token = int(torch.searchsorted(below, uniform * below[-1], right=True))
            tokens.append(token)
            logprobs.append(float(logits[0].log_softmax(dim=-1)[token]))
            new = [token]
    assert [token for commit in commits for token in commit.tokens] == tokens
    assert not set(tokens) & set(banned)
    if params.logprobs is not None:
        told_of = [entry.logprob for commit in commits for entry in commit.logprobs or ()]
        assert told_of == pytest.approx(logprobs, abs=1e-4)


def test_log_probabilities_of_the_best_tokens() -> None:
    request = Request((5, 6, 7), twin(max_new_tokens=20, temperature=0.0, logprobs=0, seed=1), ends=False)
    with fast_engine() as engine, plain_engine() as plain:
        launched = count_launches(engine)
        found = [logprobs_of(e.submit(request)) for e in (engine, plain)]
        assert launched == [1] * 19
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert len(found[0]) == 20


def test_a_seed_reproduces_and_another_differs() -> None:
    with fast_engine() as engine:
        asked = [Request((5, 6, 7), twin(max_new_tokens=25, seed=seed), ends=False) for seed in (4, 4, 5)]
        first, again, other = run(engine, asked)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, True), ({"temperature": 0.0}, True), ({"temperature": 0.0, "top_p": 0.5}, True), ({"logprobs": 0}, True),
        ({"top_p": 0.9}, False), ({"logprobs": 2}, False), ({"logprobs": 0, "temperature": 0.7}, False),
        ({"temperature": 1e-30}, False),
    ],
)  # fmt: skip
def test_what_goes_the_plain_way(options: dict[str, float], recorded: bool) -> None:
    request = Request((5, 6, 7), twin(max_new_tokens=12, seed=2, **options), ends=False)
    with fast_engine() as engine, plain_engine() as plain:
        launched = count_launches(engine)
        events = told(engine.submit(request))
        assert len(launched) == (11 if recorded else 0)
        if not recorded:
            assert events == told(plain.submit(request))


def test_own_chance_goes_the_plain_way() -> None:
    request = Request((5, 6, 7), twin(max_new_tokens=12, seed=2), ends=False)
    with fast_engine() as engine, plain_engine() as plain:
        launched = count_launches(engine)
        events = told(engine.submit(request, draws=BoardDraws(2)))
        assert not launched
        assert events == told(plain.submit(request, draws=BoardDraws(2)))


@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_is_launched_beyond_the_last_token(ahead: bool) -> None:
    """The last token has no slot in the cache row."""
    with fast_engine(ahead=ahead) as engine:
        launched = count_launches(engine)
        for count in (1, 2, 3, 20):
            launched.clear()
            told(engine.submit(Request((5, 6), twin(max_new_tokens=count, seed=1), ends=False)))
            assert len(launched) == count - 1


def test_an_end_throws_away_what_was_launched_ahead_and_the_row_stays_true() -> None:
    """The row of a reply that ended serves the next turn, beyond the window of the sliding layers."""
    with fast_engine() as engine, plain_engine() as plain:
        free = told(engine.submit(Request((5, 6, 7), twin(max_new_tokens=40, seed=1), ends=False)))
        text = [token for event in free if event[0] == "commit" for token in event[2]]  # type: ignore[attr-defined]
        at = next(i for i in range(20, 40) if text[i] not in text[:i])
        launched = count_launches(engine)
        params = twin(max_new_tokens=40, seed=1, stop_tokens=(text[at],))
        events = told(engine.submit(Request((5, 6, 7), params, ends=False)))
        assert [event[2] for event in events[:-1] if event[2]] == [[token] for token in text[:at]]
        assert events[-1][1] == "stop"
        assert len(launched) == at + 1  # the one too many encoded the stop token
        following = (5, 6, 7, *text[: at + 1], 30, 31)
        turn = Request(following, twin(max_new_tokens=10, temperature=0.0, logprobs=0, seed=1), ends=False)
        ours, theirs = list(engine.submit(turn)), list(plain.submit(turn))
        assert isinstance(ours[-1], End)
        assert ours[-1].metrics.reused_tokens == 3 + at + 1
        got, expected = (
            [entry for event in found if isinstance(event, Commit) for entry in event.logprobs or ()]
            for found in (ours, theirs)
        )
        assert [entry.token for entry in got] == [entry.token for entry in expected]
        assert [entry.logprob for entry in got] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


def test_stop_texts() -> None:
    letters = set(byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz"))
    others = tuple(sorted(set(range(CONFIG.vocab_size)) - letters))

    def text_of(events: list[tuple[object, ...]]) -> str:
        return "".join(str(event[3]) for event in events if event[0] == "commit")

    with fast_engine() as engine:
        free = text_of(told(engine.submit(Request((5, 6), twin(max_new_tokens=40, seed=1), forbidden=others))))
        assert len(free) == 40
        stop = free[19:22]
        request = Request((5, 6), twin(max_new_tokens=40, seed=1, stop=stop), forbidden=others)
        events = told(engine.submit(request))
    assert text_of(events) == free[: free.index(stop)]
    assert events[-1][1] == "stop"


def test_cancelling_with_passes_under_way() -> None:
    with fast_engine() as engine:
        slow = engine.submit(Request((5,), twin(max_new_tokens=2000, seed=1), ends=False))
        events: Iterator[object] = iter(slow)
        for _ in range(5):
            next(events)
        other = Request((6, 7), twin(max_new_tokens=20, temperature=0.0, seed=2))
        beside = told(engine.submit(other))
        slow.cancel()
        assert next(e for e in events if isinstance(e, End)).finish_reason == "cancelled"
        assert told(engine.submit(other)) == beside
    with plain_engine() as plain:
        assert told(plain.submit(other)) == beside


def test_beside_canvases_and_the_plain_way() -> None:
    base = {"max_new_tokens": 30, "steps": 4, "seed": 5}
    asked = [
        Request((5, 6, 7), SamplingParams.build(**base)),
        Request((9, 9), twin(max_new_tokens=30, temperature=0.0, seed=3)),
        Request(tuple(range(3, 60)), twin(max_new_tokens=20, temperature=0.0, seed=3), forbidden=(40, 50)),
        Request((9, 8), twin(max_new_tokens=20, top_p=0.8, seed=3)),
        Request((5, 6, 7, 8), SamplingParams.build(**base, logprobs=2)),
    ]
    with fast_engine(Limits(chunk=8, max_bytes=SMALL)) as engine, plain_engine() as plain:
        got = run(engine, asked)
        draws = [BoardDraws(5), None, None, None, None]
        assert got == [told(plain.submit(r, draws=d)) for r, d in zip(asked, draws, strict=True)]


def test_rows_that_move() -> None:
    limits = Limits(max_bytes=3 * CacheRow.bytes_for(CONFIG, 60, torch.float32), max_rows=4, chunk=16)
    asked = [
        Request(tuple(range(3 + i, 12 + i + i % 7)), twin(max_new_tokens=15 + i, temperature=0.0, seed=i))
        for i in range(16)
    ]
    with fast_engine(limits) as engine, plain_engine() as plain:
        got = all_at_once(engine, asked)
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        assert runner.pool.moves > 2
        assert [e[:-1] for e in got] == [told(plain.submit(request))[:-1] for request in asked]


def test_recording_leaves_no_trace() -> None:
    """Not in cache rows either, which are rings and longer than the window here."""
    options = {"temperature": 0.0, "logprobs": 0}
    asked = [
        Request(tuple(range(3 + i, 40 + i)), twin(max_new_tokens=8 + 4 * i, seed=i, **options), ends=False)
        for i in range(3)
    ]
    with fast_engine() as engine, plain_engine() as plain:
        lane = lane_of(engine)
        lane.recorder = RunningRecorder(torch.device("cpu"))
        handles = [engine.submit(request) for request in asked]
        got = [logprobs_of(handle) for handle in handles]
        assert lane.recorder.recorded >= 2
        for request, found in zip(asked, got, strict=True):
            assert found == pytest.approx(logprobs_of(plain.submit(request)), abs=1e-4)


def test_only_those_that_draw() -> None:
    with fast_engine() as engine:
        seen: list[bool] = []
        lane = lane_of(engine)
        land = lane.land
        lane.land = lambda: (seen.extend(drawable(s) for s in lane.passengers), land())[1]  # type: ignore[method-assign]
        told(engine.submit(Request((5, 6), twin(max_new_tokens=6, seed=1), ends=False)))
        assert seen
        assert all(seen)
