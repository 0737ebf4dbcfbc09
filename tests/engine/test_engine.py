"""What the engine promises, whatever runs beside: order of events, exact lengths, same text alone and in any batch."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Commit, Draft, End, Engine, Limits, Request, SamplingParams, collect
from diffusiongemma.errors import ConfigError, DiffusionGemmaError, InputError
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.text import ChatTemplate, default_chat_template
from diffusiongemma.text.bytes import byte_tokenizer

CONFIG = ModelConfig.preset(
    "tiny", vocab_size=400, hidden_size=32, num_hidden_layers=2, sliding_window=12, canvas_length=16, num_experts=4
).replace(layer_types=("sliding_attention", "full_attention"), eos_token_ids=(1, 150, 200, 250))


def make_engine(limits: Limits | None = None, template: bool = False) -> Engine:
    model = DiffusionGemma(CONFIG).init_weights(3, std=0.3).eval().requires_grad_(False)
    chat = ChatTemplate(default_chat_template(), {"bos_token": "<bos>"}) if template else None
    return Engine(model, byte_tokenizer(), chat, limits=limits)


@pytest.fixture(scope="module")
def engine():
    with make_engine() as made:
        yield made


options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 50), "seed": st.integers(0, 5)},
    optional={
        "steps": st.integers(1, 6),
        "t_max": st.floats(0.5, 2.0),
        "entropy_bound": st.floats(0.01, 5.0),
        "confidence": st.floats(0.001, 5.0),
        "stability": st.integers(0, 2),
        "early_stop": st.booleans(),
        "canvas": st.sampled_from([None, "adaptive", 1, 5, 16]),
        "redo": st.integers(0, 2),
        "stop": st.lists(st.sampled_from(["a", "e", "th", "\n", "é"]), max_size=2),
        "stop_tokens": st.lists(st.integers(107, 399), max_size=2),
        "logprobs": st.integers(0, 3),
    },
)
ar_options = st.fixed_dictionaries(
    {"mode": st.just("ar"), "max_new_tokens": st.integers(1, 25), "seed": st.integers(0, 5)},
    optional={"temperature": st.floats(0, 2), "top_p": st.floats(0.1, 1), "logprobs": st.integers(0, 3)},
)
prompts = st.lists(st.integers(3, 399), min_size=1, max_size=40)
asks = st.tuples(prompts, st.one_of(options, ar_options))


def steps_default(ask):
    prompt, given = ask
    if given.get("mode") != "ar":
        given = {"steps": 4, **given}
    return prompt, given


def run_all(engine: Engine, asked) -> list[list]:
    handles = [engine.submit(engine.request(prompt, **given)) for prompt, given in asked]
    return [list(handle) for handle in handles]


def assert_well_formed(events, given) -> None:
    kinds = [event.kind for event in events]
    assert kinds.count("end") == 1
    assert kinds[-1] == "end"
    tokens = [t for e in events if isinstance(e, Commit) for t in e.tokens]
    assert len(tokens) <= given["max_new_tokens"]
    end = events[-1]
    assert end.metrics.new_tokens == len(tokens)
    if end.finish_reason == "length":
        assert len(tokens) == given["max_new_tokens"]
    if given.get("mode") == "ar":
        assert "draft" not in kinds
        return
    # draft* commit, block after block; within a block steps count from 1 (and again after a redo)
    block = 0
    for event in events:
        if isinstance(event, Draft):
            assert event.block == block
            assert len(event.tokens) == len(event.entropy) == len(event.accepted)
        elif isinstance(event, Commit):
            assert event.block == block
            block += 1
            if given.get("logprobs") is not None:
                assert [lp.token for lp in event.logprobs] == event.tokens
                assert all(len(lp.top) == given["logprobs"] and lp.logprob <= 0 for lp in event.logprobs)
    steps = [e for e in events if isinstance(e, Draft)]
    assert end.metrics.steps == len(steps) == end.metrics.decoder_forwards


@given(st.lists(asks.map(steps_default), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_request_does_not_depend_on_its_neighbours(asked) -> None:
    with make_engine(Limits(chunk=16)) as engine:
        together = run_all(engine, asked)
    for (prompt, asked_for), events in zip(asked, together, strict=True):
        assert_well_formed(events, asked_for)
        with make_engine(Limits(max_rows=1, chunk=16)) as engine:
            alone = run_all(engine, [(prompt, asked_for)])[0]
        # Equal to the last bit, entropies included.
        assert [e for e in events if e.kind != "end"] == [e for e in alone if e.kind != "end"]
        assert events[-1].finish_reason == alone[-1].finish_reason


def test_nor_does_it_in_int8() -> None:
    """Weights and activations as a CPU has them of an int8 checkpoint: sums of integers, the same in any order."""
    prompts = ["a", "Another one, which is longer", "xyz" * 9]
    options = {"max_new_tokens": 40, "steps": 4, "seed": 3, "logprobs": 0}
    with Engine.load("random:tiny", quantize="int8") as engine:
        together = engine.generate_batch(prompts, **options)
        for prompt, result in zip(prompts, together, strict=True):
            alone = engine.generate(prompt, **{**options, "seed": result.metrics.seed})
            assert (alone.tokens, alone.logprobs) == (result.tokens, result.logprobs)


@given(st.dictionaries(st.integers(0, 39), st.integers(107, 360), max_size=30), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_pins_hold_in_every_draft_and_in_the_result(pins: dict[int, int], seed: int) -> None:
    pins = {at: token for at, token in pins.items() if token not in CONFIG.eos_token_ids}
    with make_engine() as engine:
        params = SamplingParams.build(max_new_tokens=40, steps=3, seed=seed)
        events = list(engine.submit(Request((5, 6), params, pins=pins, ends=False)))
    tokens = [t for e in events if isinstance(e, Commit) for t in e.tokens]
    assert len(tokens) == 40
    assert all(tokens[at] == token for at, token in pins.items())
    for event in events:
        if isinstance(event, Draft):
            base = 16 * event.block
            for at, token in pins.items():
                if base <= at < base + 16:
                    assert event.tokens[at - base] == token
                    assert event.accepted[at - base]


@given(st.integers(0, 30), st.integers(1, 60), st.sampled_from(["diffusion", "ar"]))
@settings(max_examples=40, deadline=None)
def test_cancelling_at_any_step_frees_its_memory(after: int, length: int, mode: str) -> None:
    with make_engine() as engine:
        given = {"mode": mode, "max_new_tokens": length, "seed": 1} | ({"steps": 5} if mode == "diffusion" else {})
        handle = engine.submit(engine.request([4, 5, 6], **given))
        events = []
        for event in handle:
            events.append(event)
            if len(events) == after + 1:
                handle.cancel()
        assert [e.kind for e in events].count("end") == 1
        assert events[-1].finish_reason in ("cancelled", "length", "stop")
        wait_idle(engine)
        assert engine.scheduler.reserved == 0
        if events[-1].finish_reason == "cancelled":  # at most a copy of the prompt's own rows is kept, and gives way
            assert engine.scheduler.prefixes.nbytes <= CacheRow.bytes_for(CONFIG, 3, torch.float32)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.005)


def wait_idle(engine: Engine) -> None:
    wait_until(lambda: not engine.scheduler.busy)


def test_closing_the_stream_cancels(engine) -> None:
    stream = engine.stream([4, 5], max_new_tokens=2000, steps=48, seed=0)
    assert next(stream).kind == "draft"
    stream.close()
    wait_idle(engine)


def test_generate_is_the_stream_added_up(engine) -> None:
    given = {"max_new_tokens": 40, "steps": 4, "seed": 9, "stop_tokens": [390]}
    events = list(engine.stream([9, 8, 7], **given))
    result = engine.generate([9, 8, 7], **given)
    assert result.text == "".join(e.text for e in events if isinstance(e, Commit))
    assert result.tokens == [t for e in events if isinstance(e, Commit) for t in e.tokens]
    assert result.finish_reason == events[-1].finish_reason
    assert result.metrics.seed == 9


def test_the_same_seed_the_same_text_and_another_another(engine) -> None:
    texts = [engine.generate([3, 4], max_new_tokens=30, steps=3, seed=s).tokens for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    a, b = (engine.generate([3, 4], max_new_tokens=30, steps=3) for _ in range(2))
    assert a.metrics.seed != b.metrics.seed
    assert engine.generate([3, 4], max_new_tokens=30, steps=3, seed=a.metrics.seed).tokens == a.tokens


def test_generate_batch(engine) -> None:
    together = engine.generate_batch([[3], [4, 5], [6]], max_new_tokens=20, steps=3, seed=5)
    for i, prompt in enumerate(([3], [4, 5], [6])):
        assert together[i].tokens == engine.generate(prompt, max_new_tokens=20, steps=3, seed=5 + i).tokens


# ---- no wasted pass, prefix reuse --------------------------------------------------------------------------------


def test_the_last_block_is_not_encoded(monkeypatch) -> None:
    with make_engine() as engine:
        seen = []
        run = engine.model.remember_packed
        monkeypatch.setattr(engine.model, "remember_packed", lambda t, *a: (seen.append(t.shape[0]), run(t, *a))[1])
        monkeypatch.setattr(engine.model, "encode_packed", lambda *a: pytest.fail("nobody reads hidden states"))
        heads = []
        head = engine.model.logits
        monkeypatch.setattr(engine.model, "logits", lambda h: (heads.append(h.shape[0]), head(h))[1])
        params = SamplingParams.build(max_new_tokens=48, steps=2, seed=0)
        result = collect(engine.submit(Request((3, 4, 5), params, ends=False)))
    assert seen == [3, 16, 16]  # the prompt, two of the three blocks
    assert heads == [16] * 6  # one for each denoising step, none for a commit
    assert result.metrics.encoder_forwards == 3
    assert result.metrics.decoder_forwards == 6


def test_hidden_states_are_made_where_a_token_is_drawn(monkeypatch) -> None:
    """Of a prompt that takes three passes, only by the last."""
    with make_engine(limits=Limits(chunk=16)) as engine:
        seen = []
        for name in ("remember_packed", "encode_packed"):
            run = getattr(engine.model, name)
            monkeypatch.setattr(
                engine.model, name, lambda t, *a, run=run, name=name: (seen.append((name, len(t))), run(t, *a))[1]
            )
        params = SamplingParams.build(mode="ar", max_new_tokens=3, temperature=0.0)
        collect(engine.submit(Request(tuple(range(3, 43)), params, ends=False)))
    assert seen == [("remember_packed", 16), ("remember_packed", 16), ("encode_packed", 8), *[("encode_packed", 1)] * 2]


def test_a_second_turn_encodes_only_what_is_new() -> None:
    with make_engine(template=True) as engine:
        chat = [{"role": "user", "content": "a first question, long enough to be worth keeping"}]
        first = engine.generate(chat, max_new_tokens=40, steps=2, seed=0)
        assert first.metrics.reused_tokens == 0
        chat += [{"role": "assistant", "content": first.text or "x"}, {"role": "user", "content": "and a second"}]
        again = engine.generate(chat, max_new_tokens=8, steps=2, seed=0)
        repeated = engine.request(chat[:1]).stable
        assert repeated > CONFIG.sliding_window  # its rings have slid by then
        assert again.metrics.reused_tokens >= repeated
    with make_engine(template=True) as fresh:
        alone = fresh.generate(chat, max_new_tokens=8, steps=2, seed=0)
    assert alone.metrics.reused_tokens == 0
    assert again.tokens == alone.tokens


def test_continuing_a_reply_reuses_its_committed_blocks() -> None:
    with make_engine() as engine:
        params = SamplingParams.build(max_new_tokens=48, steps=2, seed=0)
        first = collect(engine.submit(Request((3, 4, 5), params, ends=False)))
        prompt = (3, 4, 5, *first.tokens, 9)
        second = collect(engine.submit(Request(prompt, params, ends=False, stable=len(prompt))))
        assert second.metrics.reused_tokens == 3 + 32  # all but the last block, which is encoded now
        third = collect(engine.submit(Request(prompt, params, ends=False)))
        assert third.metrics.reused_tokens == len(prompt)
        assert third.tokens == second.tokens


def test_the_prefix_cache_stays_within_the_budget() -> None:
    limits = Limits(max_bytes=200_000)
    with make_engine(limits) as engine:
        highest = 0

        def look() -> None:
            nonlocal highest
            highest = max(highest, engine.scheduler.reserved + engine.scheduler.prefixes.nbytes)

        engine.scheduler.on_tick = look
        for i in range(30):
            engine.generate([3 + i, *range(4, 40)], max_new_tokens=20, steps=1, seed=i)
        assert len(engine.scheduler.prefixes) >= 2
    assert 0 < highest <= limits.max_bytes


def test_a_request_that_can_never_fit_is_refused_and_one_that_does_not_fit_waits() -> None:
    with make_engine(Limits(max_bytes=60_000)) as engine:
        with pytest.raises(DiffusionGemmaError, match="budget"):
            engine.generate([3] * 300, max_new_tokens=100, steps=1)
        together = [0]

        def look() -> None:
            together[0] = max(together[0], len(engine.scheduler.running))

        engine.scheduler.on_tick = look
        results = engine.generate_batch([[3] * 20] * 12, max_new_tokens=33, steps=2, seed=0)
        assert len(results) == 12
        assert 1 <= together[0] < 12


# ---- short answers, garbage --------------------------------------------------------------------------------------


def wide_engine() -> Engine:
    config = CONFIG.replace(canvas_length=256, vocab_size=400, eos_token_ids=(1,))
    return Engine(DiffusionGemma(config).init_weights(3, std=0.3).eval().requires_grad_(False), byte_tokenizer())


def test_adaptive_canvas_starts_from_what_was_asked() -> None:
    with wide_engine() as engine:
        for asked, width in ((10, 32), (32, 32), (33, 64), (128, 128), (200, 256)):
            events = list(engine.stream([3, 4], max_new_tokens=asked, steps=1, seed=0, canvas="adaptive"))
            assert len(events[0].tokens) == width
        assert len(next(iter(engine.stream([3, 4], max_new_tokens=10, steps=1, seed=0))).tokens) == 256


def test_positions_behind_a_settled_end_are_dropped() -> None:
    with wide_engine() as engine:
        params = SamplingParams.build(max_new_tokens=256, steps=6, seed=0, canvas="adaptive", early_stop=False)
        pins = {i: 120 + i for i in range(10)} | {10: 1}  # an answer of ten tokens and its end
        events = list(engine.submit(Request((3, 4), params, pins=pins)))
    widths = [len(e.tokens) for e in events if isinstance(e, Draft)]
    assert widths == [256, 256, 32, 32, 32, 32]
    result = [t for e in events if isinstance(e, Commit) for t in e.tokens]
    assert result == [120 + i for i in range(10)]
    assert events[-1].finish_reason == "stop"
    assert events[-1].metrics.positions == 2 * 256 + 4 * 32


def test_blocks_that_settled_are_told_from_those_that_ran_out_of_steps(engine) -> None:
    given = {"max_new_tokens": 48, "steps": 3, "seed": 4}

    def ended(**options) -> tuple[int, int, bool]:
        metrics = engine.generate([3, 4], **given, **options).metrics
        assert metrics.to_dict()["blocks_settled"] == metrics.blocks_settled
        return metrics.blocks, metrics.blocks_settled, metrics.settled

    assert ended(confidence=1e-6) == (3, 0, False)  # random weights are never that sure
    assert ended(confidence=100.0, stability=0) == (3, 3, True)
    assert ended(early_stop=False) == (3, 0, False)
    assert engine.generate([3, 4], max_new_tokens=2, mode="ar", seed=0).metrics.settled is False
    # Sure enough now and then: some of its blocks settle, which is not all.
    mixed = [ended(confidence=bound, stability=0) for bound in torch.linspace(0.05, 3.0, 60).tolist()]
    assert any(0 < settled < blocks and not all_of_them for blocks, settled, all_of_them in mixed)


def test_garbage_is_redone_from_fresh_noise_at_most_n_times(engine) -> None:
    given = {"max_new_tokens": 16, "steps": 2, "seed": 1, "confidence": 1e-6}
    plain = engine.generate([3, 4], **given)
    assert plain.metrics.blocks_redone == 0
    careful = engine.generate([3, 4], redo=3, **given)  # random weights never converge
    assert careful.metrics.blocks_redone == 3
    assert careful.metrics.steps == 8
    assert careful.metrics.blocks == 1


# ---- when things go wrong ----------------------------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(monkeypatch, caplog) -> None:
    with make_engine() as engine:
        broken = True
        run = engine.model.denoise_packed

        def flaky(*args):
            if broken:
                raise RuntimeError("boom")
            return run(*args)

        monkeypatch.setattr(engine.model, "denoise_packed", flaky)
        events = list(engine.submit(engine.request([3, 4], max_new_tokens=8, steps=2)))
        assert [e.kind for e in events] == ["end"]
        assert events[0].finish_reason == "error"
        assert "boom" in events[0].error
        assert engine.worker.failures == 1
        assert engine.scheduler.reserved == 0
        broken = False
        assert engine.generate([3, 4], max_new_tokens=8, steps=2, seed=0).tokens
    assert "a step failed" in caplog.text


def test_closing_the_engine_ends_what_runs_and_refuses_what_is_new() -> None:
    engine = make_engine()
    handle = engine.submit(engine.request([3, 4], max_new_tokens=4000, steps=48, seed=0, drafts=False))
    engine.close()
    assert isinstance(list(handle)[-1], End)
    with pytest.raises(DiffusionGemmaError, match="closed"):
        engine.generate([3, 4])
    engine.close()


def steps_of(patience: int, lengths: tuple[int, ...], chunk: int) -> tuple[list[int], list[str]]:
    """How many canvases each step had, and the texts, of requests that arrive together; prompts of these lengths"""
    with make_engine(Limits(max_rows=8, chunk=chunk)) as engine:
        runner, taken, gate = engine.scheduler.runner, list[int](), threading.Event()
        runner.patience = patience
        denoise, encode = runner.denoise, runner.encode

        def watched(sequences) -> None:
            taken.append(len(sequences))
            denoise(sequences)

        def held(work) -> None:
            assert gate.wait(60)  # until all have been handed in
            encode(work)

        runner.denoise, runner.encode = watched, held
        params = [
            SamplingParams.build(seed=i, steps=3, early_stop=False, max_new_tokens=16) for i in range(len(lengths))
        ]
        prompts = [tuple(260 + (i + 3 * j) % 100 for j in range(n)) for i, n in enumerate(lengths)]
        requests = [Request(prompt, p, ends=False) for prompt, p in zip(prompts, params, strict=True)]
        handles = [engine.submit(request) for request in requests]
        gate.set()
        return taken, [collect(handle).text for handle in handles]


def test_requests_that_come_together_step_together_where_that_pays() -> None:
    alone, texts = steps_of(0, (12, 12, 12, 12), 12)
    assert alone == [1, 2, 3, 3, 2, 1]  # one prompt a tick, three steps each
    together, same = steps_of(8, (12, 12, 12, 12), 12)
    assert together == [4, 4, 4]
    assert same == texts


def test_new_canvases_do_not_wait_long_for_a_prompt() -> None:
    taken, texts = steps_of(4, (12, 400), 12)  # 34 ticks of reading
    assert taken == [1, 1, 1, 1, 1, 1]
    assert steps_of(0, (12, 400), 12)[1] == texts


def test_bad_requests_are_refused_before_they_run(engine) -> None:
    with pytest.raises(ConfigError, match="no such option"):
        engine.generate([3], colour="red")
    with pytest.raises(InputError, match="0 to 399"):
        engine.generate([400])
    with pytest.raises(InputError, match="positions"):
        engine.generate([3], max_new_tokens=5000)
    with pytest.raises(InputError, match="empty"):
        engine.generate([])


def test_async_front(engine) -> None:
    async def one(seed: int):
        return [event async for event in engine.astream([3, 4], max_new_tokens=20, steps=3, seed=seed)]

    async def several():
        return await asyncio.gather(*(one(seed) for seed in range(4)))

    for seed, events in enumerate(asyncio.run(several())):
        assert events == list(engine.stream([3, 4], max_new_tokens=20, steps=3, seed=seed))[:-1] + [events[-1]]
        assert isinstance(events[-1], End)


def test_leaving_an_async_stream_cancels(engine) -> None:
    async def leave():
        stream = engine.astream([3, 4], max_new_tokens=3000, steps=48, seed=0)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    wait_idle(engine)


def test_many_threads_may_ask_at_once(engine) -> None:
    results: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        results[seed] = engine.generate([3, 4], max_new_tokens=20, steps=3, seed=seed).tokens

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        assert results[seed] == engine.generate([3, 4], max_new_tokens=20, steps=3, seed=seed).tokens


def test_logprobs_are_the_models_own(engine) -> None:
    result = engine.generate([3, 4], max_new_tokens=5, mode="ar", temperature=0, logprobs=3)
    model = engine.model
    cache = model.new_cache(1, 16)
    hidden = model.encode(torch.tensor([[3, 4, *result.tokens]]), cache)
    expected = model.logits(hidden)[0].log_softmax(-1)
    for i, entry in enumerate(result.logprobs):
        assert entry.logprob == pytest.approx(float(expected[1 + i, entry.token]), abs=1e-4)
        assert entry.top[0][0] == entry.token  # greedy


# ---- found in review ---------------------------------------------------------------------------------------------


def test_a_kept_prefix_does_not_change_the_text() -> None:
    """Long enough for several chunks, reused in the middle of one."""
    config = CONFIG.replace(hidden_size=128, sliding_window=100, canvas_length=64)
    model = DiffusionGemma(config).init_weights(3, std=0.1).eval().requires_grad_(False)
    prompt = torch.randint(3, 400, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    given = {"max_new_tokens": 64, "steps": 12, "entropy_bound": 50.0}
    for seed in range(3):
        with Engine(model, byte_tokenizer()) as cold:
            expected = cold.generate(prompt, seed=seed, **given)
        with Engine(model, byte_tokenizer()) as warm:
            warm.generate(prompt[:300], max_new_tokens=1, steps=1, seed=0)
            result = warm.generate(prompt, seed=seed, **given)
        assert result.metrics.reused_tokens == 300
        assert result.tokens == expected.tokens


def test_a_stop_text_ends_tokens_and_figures_too(engine) -> None:
    params = SamplingParams.build(max_new_tokens=16, steps=2, seed=0, stop="cd", logprobs=0)
    pins = {i: byte_tokenizer().encode(c)[0] for i, c in enumerate("abcdefgh")}
    result = collect(engine.submit(Request((5,), params, pins=pins)))
    assert result.text == "ab"
    assert result.tokens == byte_tokenizer().encode("ab")
    assert len(result.logprobs) == result.metrics.new_tokens == 2
    assert result.finish_reason == "stop"


def test_pins_hold_although_the_model_would_end_before_them() -> None:
    with make_engine() as engine:
        for seed in range(8):  # of 400 tokens 4 end the answer; 200 positions are sure to draw one
            params = SamplingParams.build(max_new_tokens=200, steps=1, seed=seed)
            result = collect(engine.submit(Request((5,), params, pins={199: 120})))
            assert result.tokens[199] == 120


def test_confidence_threshold_makes_progress_beside_pins(engine) -> None:
    params = SamplingParams.build(max_new_tokens=16, steps=5, seed=0, threshold=0.999, early_stop=False)
    drafts = [e for e in engine.submit(Request((5,), params, pins={0: 120}, ends=False)) if isinstance(e, Draft)]
    assert all(sum(draft.accepted) >= 2 for draft in drafts)


def test_a_receiver_that_raises_ends_its_own_request_only() -> None:
    with make_engine() as engine:

        def broken(event) -> None:
            raise RuntimeError("gone")

        good = engine.submit(engine.request([3, 4], max_new_tokens=200, steps=3, seed=1))
        engine.submit(engine.request([3, 5], max_new_tokens=200, steps=3, seed=1), forward=broken)
        assert collect(good).finish_reason in ("length", "stop")
        assert engine.worker.failures == 0
        wait_idle(engine)


def test_closing_ends_requests_that_are_still_in_the_queue(monkeypatch) -> None:
    engine = make_engine()
    running, go_on = threading.Event(), threading.Event()
    tick = engine.scheduler.tick
    monkeypatch.setattr(engine.scheduler, "tick", lambda: (running.set(), go_on.wait(120), tick()))
    first = engine.submit(engine.request([3], max_new_tokens=4, steps=1, seed=0))
    assert running.wait(120)
    late = engine.submit(engine.request([4], max_new_tokens=4, steps=1, seed=0))
    closer = threading.Thread(target=engine.close)
    closer.start()
    wait_until(lambda: engine.worker._closed)
    go_on.set()
    assert isinstance(list(first)[-1], End)
    assert list(late)[-1].finish_reason == "error"
    closer.join(120)
    assert not closer.is_alive()


def test_a_request_that_waits_leaves_the_prefixes_alone() -> None:
    one = CacheRow.bytes_for(CONFIG, 99, torch.float32)
    with make_engine(Limits(max_bytes=int(1.9 * one))) as engine:
        engine.generate([7] * 40, max_new_tokens=1, steps=1, seed=0)
        wait_until(lambda: len(engine.scheduler.prefixes) > 0)
        assert engine.scheduler.prefixes.nbytes < 0.9 * one
        params = SamplingParams.build(max_new_tokens=40, steps=200, seed=0, early_stop=False)
        runs = engine.submit(Request((3,) * 60, params))  # keeps no snapshot, and once cancelled no row either
        waits = engine.submit(engine.request([7] * 60, max_new_tokens=40, steps=1, seed=0))
        for count, _ in enumerate(runs):
            if count == 5:
                runs.cancel()
        assert collect(waits).metrics.reused_tokens == 40


def test_a_batch_with_a_bad_request_starts_nothing() -> None:
    with make_engine() as engine:
        with pytest.raises(InputError):
            engine.generate_batch([[3], [4000]], max_new_tokens=4)
        assert engine.scheduler.ticks == 0
        results = engine.generate_batch([[3], [3]], params=SamplingParams.build(max_new_tokens=8, steps=2, seed=5))
        assert [r.metrics.seed for r in results] == [5, 6]


def test_an_engine_that_is_dropped_frees_its_model() -> None:
    engine = make_engine()
    engine.generate([3], max_new_tokens=4, steps=1)
    model = weakref.ref(engine.model)
    del engine
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("limits", [{"max_rows": 0}, {"chunk": 0}, {"max_bytes": 1.5}])
def test_limits_check_themselves(limits) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)
