"""A block is committed before the host has read it: the same events and figures, and nothing is left of one that should
not have been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import End, Engine, Event, Limits, Request, SamplingParams
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Lane
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import CONFIG, SMALL, BoardDraws, all_at_once, told

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


def asks(seed: int, count: int = 48, ends: bool = True, drafts: bool = True, **options: object) -> Request:
    usual = {"steps": 3, "early_stop": False, "max_new_tokens": count, "seed": seed}
    return Request((5, 6, 7, seed % 90), SamplingParams.build(**usual | options), drafts=drafts, ends=ends)


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
        spy(Lane, "launch", "step")
        spy(runner.pool.new_row(1).__class__, "truncate", "forget")
        yield found


def test_a_block_is_committed_before_it_is_read() -> None:
    with make_engine(ahead=True) as engine, watched(engine) as found:
        all_at_once(engine, [asks(seed, 32, ends=False) for seed in (1, 2, 3)])
    first = ["step", "step", "read", "step", "read"]
    assert found == ["encode", *first, "encode", "read", *first, "read"]


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"stop": ("no such text",)}, 0),
        ({"redo": 1}, 1),  # when it has been done again, and will not be once more
        ({"count": 16}, 0),  # no block follows
        ({"count": 128}, 4),  # from the fifth block on the row would forget its beginning
    ],
)
def test_only_where_tokens_alone_decide(options: dict[str, Any], early: int) -> None:
    with make_engine(ahead=True) as engine, watched(engine) as found:
        all_at_once(engine, [asks(1, ends=False, **{"count": 32} | options)])
    around = [found[i - 1 : i + 2] for i, word in enumerate(found) if word == "encode"]
    assert around.count(["read", "encode", "read"]) == early


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.sampled_from([{}, {"steps": 1}, {"early_stop": True}, {"canvas": "adaptive"}, {"canvas": 8}, {"redo": 1}]),
    st.sampled_from([None, 32]),
)
@settings(max_examples=25, deadline=None)
def test_the_same_is_told(seeds: list[int], ends: bool, options: dict[str, object], chunk: int | None) -> None:
    asked = [asks(seed, ends=ends, **options) for seed in seeds]
    found = []
    for ahead in (True, False):
        with make_engine(ahead, chunk) as engine:
            found.append(all_at_once(engine, asked))
            assert engine.scheduler.reserved == 0
    assert found[0] == found[1]
    with make_engine(None) as plain:
        assert found[0] == [told(plain.submit(r, draws=BoardDraws(s))) for s, r in zip(seeds, asked, strict=True)]


def test_an_end_that_no_draft_had() -> None:
    """The block was committed by then: its row forgets it, and what is kept is found again as it would be otherwise."""
    figures, forgotten = [], 0
    for ahead in (True, False):
        with make_engine(ahead) as engine, watched(engine) as found:
            reused = []
            for seed in range(40):
                sequence, handle = engine._prepare(asks(seed, 32), None)
                engine.scheduler.add(sequence)
                while engine.scheduler.busy:
                    engine.scheduler.tick()
                end = list(handle)[-1]
                assert isinstance(end, End)
                again, _ = engine._prepare(Request((*sequence.tokens, 9), asks(seed).params), None)
                engine.scheduler.add(again)
                engine.scheduler.tick()
                reused.append((end.metrics.encoder_forwards, end.metrics.new_tokens, again.metrics.reused_tokens))
                again.cancelled = True
                engine.scheduler.tick()
            figures.append(reused)
            if ahead:
                forgotten = found.count("forget")
    assert figures[0] == figures[1]
    assert forgotten >= 3


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


def test_a_commit_that_fails_keeps_no_finished_block_back() -> None:
    """The step before it went well: its draft and its block are told before the end."""
    found = []
    for ahead in (True, False):
        with make_engine(ahead) as engine:
            runner, passes = engine.scheduler.runner, list[int]()
            assert isinstance(runner, FastRunner)
            run = runner.slate._pass

            def fail(*args: Any, passes: list[int] = passes, run: Any = run, **rest: Any) -> None:
                passes.append(1)
                if len(passes) == 2:
                    raise RuntimeError("no memory")
                run(*args, **rest)

            runner.slate._pass = fail  # type: ignore[method-assign]
            found.append(told(engine.submit(asks(1, ends=False))))
            assert told(engine.submit(asks(1, ends=False)))[-1][:2] == ("end", "length")
    assert found[0] == found[1]
    assert [event[0] for event in found[0]] == ["draft", "draft", "draft", "commit", "end"]
    assert found[0][-1][1] == "error"
