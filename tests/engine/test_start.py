"""Before the first request: what it will need is compiled and recorded, and nothing of it is left."""

from __future__ import annotations

import pytest

from diffusiongemma.engine import Engine, Limits, Request, SamplingParams, collect, prepare
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.text.bytes import byte_tokenizer
from engine.runners import CONFIG, SMALL, fast_engine, plain_engine


def test_a_text_of_two_blocks_finds_everything_recorded() -> None:
    with fast_engine() as engine:
        recorder = engine.scheduler.runner.recorder if isinstance(engine.scheduler.runner, FastRunner) else None
        assert recorder is not None
        names = prepare(engine)
        step = "a step of 1 over 2048 tokens"
        prompt, block = ("64 tokens, a row 64", f"{CONFIG.canvas_length} tokens, a row {CONFIG.canvas_length}")
        with_both = [f"{step}, and remembering {what} at most, up to 2048" for what in (prompt, block)]
        # 512 tokens and a canvas are more than this engine has room for in one pass.
        alone = [f"remembering {n} tokens, a row {n} at most, up to 2048" for n in (512, 64)]
        assert names == [with_both[0], step, with_both[1], *alone]
        assert recorder.listener is None
        assert prepare(engine) == []
        assert not len(engine.scheduler.prefixes)
        params = SamplingParams.build(max_new_tokens=2 * CONFIG.canvas_length, steps=4, early_stop=False, seed=1)
        recorder.listener = names.append
        again = collect(engine.submit(Request((5, 6, 7), params, ends=False)))
        assert len(names) == 5
        engine.generate([5] * 40, max_new_tokens=8 * CONFIG.canvas_length, steps=1)  # its row forgets its beginning
        assert len(names) == 5
    with fast_engine() as fresh:  # the text is the one that it would have been
        assert collect(fresh.submit(Request((5, 6, 7), params, ends=False))).tokens == again.tokens


def test_where_there_is_nothing_to_record() -> None:
    with plain_engine() as engine:
        assert prepare(engine) == []
    with fast_engine(Limits(max_bytes=1 << 14)) as engine:
        assert prepare(engine) == []


def test_a_model_of_few_positions_starts_all_the_same() -> None:
    config, limits = CONFIG.replace(max_position_embeddings=64), Limits(max_bytes=SMALL)
    model = DiffusionGemma(config).init_weights(3).eval().requires_grad_(False)
    with Engine(model, byte_tokenizer(), limits=limits, runner=FastRunner(model, torch_ops(), limits)) as engine:
        assert prepare(engine) == []
        assert engine.generate([5, 6, 7], max_new_tokens=20, steps=2).tokens


def test_what_is_done_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with fast_engine() as engine:
        prepare(engine, progress=True)
    assert "5 passes compiled and recorded" in " ".join(capfd.readouterr().err.split())
    with fast_engine() as engine:
        prepare(engine)
    assert capfd.readouterr().err == ""
