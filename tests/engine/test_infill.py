"""Holes: the text around them stays byte for byte, the best candidate wins, and a batch changes nothing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import (
    Candidate,
    Commit,
    Draft,
    End,
    Engine,
    Metrics,
    Request,
    SamplingParams,
    collect,
)
from diffusiongemma.engine.candidates import Try, judge
from diffusiongemma.engine.infill import NEAR, ladder, plan_infill, spread, widths_to_try
from diffusiongemma.errors import ConfigError, DiffusionGemmaError, InputError
from diffusiongemma.model import CacheRow
from diffusiongemma.tasks import format as task_format
from diffusiongemma.text.exact import encode_exact, exact_text
from diffusiongemma.text.fim import FimTokens, share
from engine.holes import FIM, PLAIN, engine, model, new_engine, tokenizer
from engine.test_engine import wait_idle

TEXTS = st.text(max_size=12)
WIDE = 32  # the model's canvas


def plan(
    kind: str, prefix: str = "def f(x):", suffix: str = " + 1\n", candidates: int | None = None, **options
) -> list[Try]:
    steps = {} if options.get("mode") == "ar" else {"steps": 3}
    params = SamplingParams.build(**{"seed": 5, "max_new_tokens": 20} | steps | options)
    return plan_infill(engine(kind), prefix, suffix, params, candidates)


def run_alone(own: Engine, request: Request) -> tuple[list[int], float | None]:
    handle = own.submit(request)
    tokens = collect(handle).tokens
    assert handle.sequence is not None
    return tokens, handle.sequence.score


# ---- the text around a hole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PLAIN, *FIM])
@settings(max_examples=12)
@given(prefix=TEXTS, suffix=TEXTS, most=st.integers(1, 40), seed=st.integers(0, 2**40))
@example(prefix="a\u2581b \ufffd", suffix="\u2581\x00é", most=3, seed=0)
@example(prefix="", suffix="", most=1, seed=0)
@example(prefix="if x:\r\n\t ", suffix="<|fim_middle|><eos>", most=9, seed=0)
def test_prefix_middle_suffix_is_what_the_tokens_say(kind: str, prefix: str, suffix: str, most: int, seed: int) -> None:
    result = engine(kind).infill(prefix, suffix, max_new_tokens=most, seed=seed, steps=1, candidates=2)
    before, after = (encode_exact(tokenizer(kind), text) for text in (prefix, suffix))
    decode = tokenizer(kind).decode
    assert (decode(before), decode(after)) == (prefix, suffix)
    assert decode([*before, *result.tokens, *after]) == prefix + result.text + suffix
    assert exact_text(tokenizer(kind), result.tokens) == result.text
    assert len(result.tokens) <= most
    assert not any(tokenizer(kind).is_special(token) for token in result.tokens)


@pytest.mark.parametrize("kind", [*PLAIN, *FIM])
def test_tokens_on_both_sides_are_the_ones_given(kind: str) -> None:
    """The canvas or the prompt holds exactly what the two texts tokenise to."""
    prefix, suffix = "Größe = ", " * 東京"
    before, after = (encode_exact(tokenizer(kind), text) for text in (prefix, suffix))
    for one in plan(kind, prefix, suffix):
        if kind in PLAIN:
            (hole,) = one.holes
            assert list(one.request.prompt) == [2, *before]
            assert one.request.pins == dict(enumerate(after[: WIDE - hole.stop], hole.stop))
            assert one.request.params.max_new_tokens == hole.stop + len(one.request.pins)
        else:
            assert one.request.prompt == FimTokens.of(tokenizer(kind)).prompt(before, after, 100)


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=10)
@given(suffix=st.text(min_size=1, max_size=12), seed=st.integers(0, 99))
def test_pins_hold_in_every_draft_and_in_the_answer(kind: str, suffix: str, seed: int) -> None:
    one = plan(kind, suffix=suffix, candidates=2, seed=seed)[0]
    for event in engine(kind).events(one.request):
        if isinstance(event, Draft | Commit):
            assert all(event.tokens[at] == token for at, token in one.request.pins.items())


def test_a_hole_in_code_may_begin_with_an_open_line() -> None:
    kind = "fim_suffix_first"
    for one in plan(kind, "def f():\n    ", "\n"):
        lead = encode_exact(tokenizer(kind), "\n    ")
        assert one.request.pins == dict(enumerate(lead))
        assert tokenizer(kind).decode(one.request.prompt) == "\n" + "def f():"  # suffix first
        assert one.holes == (slice(len(lead), None),)
    assert tokenizer("fim").decode(plan("fim", "def f():\n    ", "\n")[0].request.prompt) == "def f():\n    \n"


def test_a_line_break_without_an_indent_is_left_to_the_model() -> None:
    """The break and the indent behind it are one token, so a pinned break would forbid every indent."""
    kind = "fim_suffix_first"
    for mode in ("diffusion", "ar"):
        for one in plan(kind, "def f():\n", "\n    return x", mode=mode):
            assert (one.lead, one.request.pins, one.holes) == ("\n", {}, (slice(0, None),))
            assert tokenizer(kind).decode(one.request.prompt) == "\n    return x" + "def f():"
    (one,) = plan(kind, "def f():\n    ", "\n", mode="ar")  # here the causal twin gets it in its prompt
    assert (one.lead, tokenizer(kind).decode(one.request.prompt)) == ("", "\ndef f():\n    ")
    assert one.request.params.max_new_tokens == 20
    for suffix in ("x", " + 1\n"):  # inside a line: the prefix ends as it was given
        (one,) = plan(kind, "def f():\n    ", suffix, candidates=1)
        assert (one.lead, one.request.pins) == ("", {})
        assert tokenizer(kind).decode(one.request.prompt) == suffix + "def f():\n    "


def test_the_line_break_is_cut_off_and_who_lacks_it_loses() -> None:
    kind = "fim_suffix_first"
    own = engine(kind)
    (one,) = plan(kind, "def f():\n", "\n", candidates=1)
    encode = tokenizer(kind).encode

    def candidate(text: str, score: float) -> Candidate:
        return judge(own, one, encode(text), End("stop", Metrics(seed=1)), score)

    good, late = candidate("\n    y = 1", -3.0), candidate("y = 1", -0.1)
    assert (good.texts, good.fillings, good.opens) == (("    y = 1",), (tuple(encode("    y = 1")),), True)
    assert (late.texts, late.opens) == (("y = 1",), False)
    assert max(late, good, key=lambda c: c.rank) is good


@pytest.mark.parametrize(
    ("most", "widest", "expected"),
    [(20, 256, [64]), (63, 256, [64]), (64, 256, [64, 128]), (200, 256, [64, 128, 256]), (300, 256, [64, 128, 256])]
    + [(20, 32, [32]), (40, 32, [32]), (100, 64, [64])],
)  # fmt: skip
def test_canvases_that_are_tried(most: int, widest: int, expected: list[int]) -> None:
    assert widths_to_try(most, SamplingParams(), widest) == expected
    assert widths_to_try(most, SamplingParams(canvas=16), widest) == [16]


def test_the_prompt_is_the_one_that_training_uses() -> None:
    fim = FimTokens(task_format.FIM_PREFIX, task_format.FIM_SUFFIX, None, task_format.BOS)
    assert list(fim.prompt([10, 11], [20, 21, 22], 99)) == task_format.infill_prompt([10, 11], [20, 21, 22])
    for text in ("x = 1", "x\n  ", "x\r\n", "\n", ""):
        assert fim.split(text) == task_format.open_hole(text)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 80))
def test_what_is_far_from_the_hole_is_left_out(before: int, after: int, budget: int) -> None:
    prefix, suffix = list(range(before)), list(range(100, 100 + after))
    kept = share(prefix, suffix, budget)
    assert len(kept[0]) + len(kept[1]) == min(budget, before + after)
    assert kept[0] == prefix[before - len(kept[0]) :]
    assert kept[1] == suffix[: len(kept[1])]
    assert len(kept[1]) >= min(after, budget // 4)


def test_a_prefix_longer_than_the_model_loses_its_beginning() -> None:
    for kind in ("bytes", "fim"):
        result = engine(kind).infill("é" * 5000, "x" * 5000, max_new_tokens=4, steps=1, candidates=1)
        assert len(result.tokens) <= 4
        (one,) = plan(kind, "ab" * 3000, "cd" * 3000, candidates=1)
        assert len(one.request.prompt) > 4000
        told = tokenizer(kind).decode(one.request.prompt)
        before = sum(map(told.count, "ab"))
        assert told == ("ab" * 3000)[-before:] + ("cd" * 3000)[: len(told) - before]
        assert (before < len(told)) == (kind == "fim")


# ---- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "fim", "fim_suffix_first"])
def test_a_candidate_in_the_batch_is_the_candidate_alone(kind: str) -> None:
    tries = plan(kind, "a = [\n", "]\n")
    handles = engine(kind).submit_group([one.request for one in tries])
    for one, handle in zip(tries, handles, strict=True):
        tokens, score = run_alone(new_engine(kind), one.request)
        assert collect(handle).tokens == tokens
        assert handle.sequence is not None
        assert handle.sequence.score == pytest.approx(score, abs=1e-5)


def test_the_best_finished_text_wins() -> None:
    result = engine("byte_level").infill("a", "b", max_new_tokens=20, steps=3)
    texts = [c for c in result.candidates if c.texts is not None]
    assert len({len(c.fillings[0]) for c in result.candidates}) == len(ladder(1, 20))
    assert result.score == max(c.score for c in texts if c.score is not None)
    assert (result.text, result.finish_reason) == ((texts[0].texts or ())[0], "stop")

    def candidate(texts: tuple[str, ...] | None, score: float, reason: str) -> Candidate:
        return Candidate(0, ((1,),), texts, score, reason)

    broken, cut = candidate(None, -0.1, "stop"), candidate(("a",), -0.2, "length")
    poor, good = candidate(("b",), -3.0, "stop"), candidate(("c",), -2.0, "stop")
    assert sorted([poor, broken, good, cut], key=lambda c: c.rank, reverse=True) == [good, poor, cut, broken]


def test_if_all_break_a_character_they_are_run_again_without_parts_of_characters() -> None:
    result = engine("bytes").infill("é", "é", max_new_tokens=24, steps=1, candidates=1)
    broken = [c for c in result.candidates if c.texts is None]
    assert len(result.candidates) == 2
    assert len(broken) == 1
    assert result.text.isascii()
    assert len(result.text) == 24


def test_the_score_is_the_mean_log_probability_of_the_hole_and_what_is_near() -> None:
    one = plan("bytes", suffix="x" * 40, max_new_tokens=6)[-1]
    hole = one.holes[0]
    tokens, score = run_alone(engine("bytes"), one.request)
    cache = model().new_cache(1, 64)
    with torch.inference_mode():
        model().encode(torch.tensor([one.request.prompt]), cache)
        logits = model().denoise(torch.tensor([tokens]), cache)[0].log_softmax(-1)
    each = logits[range(len(tokens)), tokens]
    assert len(tokens) == WIDE > hole.stop + NEAR
    assert score == pytest.approx(float(each[: hole.stop + NEAR].mean()), abs=1e-4)


def test_a_score_over_several_blocks_counts_the_text_and_its_end() -> None:
    params = SamplingParams(max_new_tokens=WIDE + 5, steps=2, seed=1)
    request = Request((2, 120, 130), params, pins={WIDE + 2: 1}, forbidden=(1,), score=True)
    handle = engine("bytes").submit(request)
    result = collect(handle)
    assert (len(result.tokens), result.finish_reason) == (WIDE + 2, "stop")
    assert result.metrics.decoder_forwards == result.metrics.steps + 2
    cache, each = model().new_cache(1, 128), []
    with torch.inference_mode():
        for known, block in (((2, 120, 130), result.tokens[:WIDE]), (result.tokens[:WIDE], [*result.tokens[WIDE:], 1])):
            model().encode(torch.tensor([known]), cache)
            if len(block) < WIDE:  # what stood behind the end is seen, but not counted
                canvas = [*block, *(handle.sequence.tokens[3 + WIDE + len(block) :])]
            else:
                canvas = block
            logits = model().denoise(torch.tensor([canvas]), cache)[0].log_softmax(-1)
            each += logits[range(len(block)), block].tolist()
    assert handle.sequence.score == pytest.approx(sum(each) / len(each), abs=1e-4)


def test_lengths_to_try() -> None:
    assert ladder(1, 20) == [1, 2, 4, 8, 16, 20]
    assert ladder(3, 3) == [3]
    assert ladder(5, 2) == [2]  # less room than wanted
    assert spread([1, 2, 4, 8, 16, 20], 3) == [1, 4, 20]
    assert spread([1, 2], 1) == [2]
    assert [one.holes[0].stop for one in plan("bytes", suffix="x" * 50, max_new_tokens=64)] == [1, 2, 4, 8, 16]
    assert len(plan("bytes", candidates=2)) == 2


def test_the_model_ends_the_middle_itself() -> None:
    """End of text and padding may be written, and are not part of the middle."""
    ids = tokenizer("fim").special
    for one in plan("fim"):
        assert not {ids["eos"], ids["pad"]} & set(one.request.forbidden)
        assert {ids["bos"], ids["<|fim_middle|>"], 363, 767} <= set(one.request.forbidden)
        pinned = replace(one.request, pins={2: ids["pad"]})
        assert len(run_alone(engine("fim"), pinned)[0]) <= 2
    assert {one.request.params.seed for one in plan("fim", candidates=5)} == {5, 6, 7, 8, 9}


def test_the_causal_twin_fills_in_too() -> None:
    result = engine("fim").infill("a = ", " + 1", max_new_tokens=6, mode="ar", temperature=0.7)
    assert result.metrics.encoder_forwards >= len(result.tokens)
    assert result.score is None
    assert exact_text(tokenizer("fim"), result.tokens) == result.text
    assert not any(tokenizer("fim").is_special(token) for token in result.tokens)


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_the_prompt_is_encoded_once() -> None:
    own = new_engine("byte_level", chunk=8)
    prefix = "The quick brown fox jumps over the lazy dog, 12 times; " * 2
    metrics = own.infill(prefix, " end", max_new_tokens=20, steps=2, seed=3).metrics
    prompt = len(encode_exact(own.tokenizer, prefix)) + 1
    assert metrics.prompt_tokens - metrics.reused_tokens == prompt
    assert metrics.encoder_forwards == math.ceil(prompt / 8)


def rows_of(own: Engine, requests: list[Request], group: bool) -> list[list[torch.Tensor]]:
    """Keys and values of each request's prompt, as they are when its canvas begins."""
    rows: dict[int, list[torch.Tensor]] = {}

    def look() -> None:
        for sequence in own.scheduler.running:
            if sequence.phase == "denoise" and sequence.canvas.step == 1:
                rows[sequence.request.params.seed] = contents(sequence.row)

    own.scheduler.on_tick = look
    if group:
        for handle in own.submit_group(requests):
            collect(handle)
    else:
        for request in requests:
            own.scheduler.prefixes.clear()
            collect(own.submit(request))
    return [rows[request.params.seed] for request in requests]


def contents(row: CacheRow) -> list[torch.Tensor]:
    parts = [
        row.last(layer, row.length) for layer in range(row.config.num_hidden_layers) if not row.config.is_sliding(layer)
    ]
    parts += [
        row.last(layer, row.ring) for layer in range(row.config.num_hidden_layers) if row.config.is_sliding(layer)
    ]
    return [torch.cat(part, dim=1).clone() for pair in parts for part in pair]


def test_a_forked_row_is_bit_for_bit_the_row_of_its_own_encoding() -> None:
    prompt = tuple(range(107, 107 + 70))  # longer than the sliding window and than a chunk
    requests = [
        Request((*prompt, *[200] * i), SamplingParams(max_new_tokens=5 * i + 1, steps=2, seed=i, canvas=i + 1))
        for i in range(4)
    ]
    same = [replace(request, prompt=prompt) for request in requests]
    together = rows_of(new_engine(chunk=16), same, group=True)
    apart = rows_of(new_engine(chunk=16), same, group=False)
    for a, b in zip(together, apart, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # Prompts that go on differently share what they can.
    own = new_engine(chunk=128)
    results = [collect(handle) for handle in own.submit_group(requests)]
    assert [result.metrics.reused_tokens for result in results] == [0, 70, 70, 70]
    assert [r.tokens for r in results] == [collect(new_engine().submit(request)).tokens for request in requests]


@pytest.mark.parametrize("max_rows", [1, 2, 16])
def test_followers_that_come_late_get_the_same_text(max_rows: int) -> None:
    """… also when the leader has grown or gone meanwhile."""
    prompt = tuple(range(107, 107 + 40))
    sizes = (40, 10, 70, 3)  # the first needs two blocks
    requests = [Request(prompt, SamplingParams(max_new_tokens=n, steps=2, seed=n)) for n in sizes]
    own = new_engine(max_rows=max_rows, chunk=16)
    found = [collect(handle).tokens for handle in own.submit_group(requests)]
    assert found == [collect(new_engine().submit(request)).tokens for request in requests]
    assert own.scheduler.reserved == 0


def test_when_the_leader_goes_the_next_one_leads() -> None:
    prompt = tuple(range(107, 107 + 60))
    requests = [Request(prompt, SamplingParams(max_new_tokens=4, steps=2, seed=n)) for n in range(3)]
    own = new_engine(chunk=8)
    handles = []

    def cancel_the_leader() -> None:
        if own.scheduler.ticks == 2:
            handles[0].cancel()

    own.scheduler.on_tick = cancel_the_leader
    handles += own.submit_group(requests)
    results = [collect(handle) for handle in handles]
    assert [result.finish_reason for result in results] == ["cancelled", "length", "length"]
    assert [result.metrics.reused_tokens for result in results[1:]] == [0, 60]
    assert results[2].tokens == collect(new_engine().submit(requests[2])).tokens
    # One that can never fit is refused, and leads nobody.
    small = CacheRow.bytes_for(model().config, 70, torch.float32)
    own = new_engine(max_bytes=small)
    large = replace(requests[0], params=replace(requests[0].params, max_new_tokens=500))
    refused, fine = own.submit_group([large, requests[1]])
    with pytest.raises(DiffusionGemmaError, match="K/V cache"):
        collect(refused)
    assert collect(fine).tokens == results[1].tokens


# ---- the stream ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "fim"])
def test_the_stream_shows_drafts_of_the_middle_one_commit_and_the_end(kind: str) -> None:
    events = list(engine(kind).infill_stream("a = ", " + 1", max_new_tokens=12, steps=3))
    kinds = [event.kind for event in events]
    assert kinds == ["draft"] * (len(events) - 2) + ["commit", "end"]
    assert len(events) >= 5
    assert all(len(e.tokens) == len(e.entropy) == len(e.accepted) <= WIDE for e in events[:-2])
    assert collect(events).text == engine(kind).infill("a = ", " + 1", max_new_tokens=12, steps=3).text
    if kind == "byte_level":
        # The longest hole, once it has begun: on a busy machine a shorter one may be seen before.
        assert max(len(e.tokens) for e in events[:-2]) == 12


def test_who_leaves_the_stream_frees_everything() -> None:
    own = new_engine("bytes")
    stream = own.infill_stream("a" * 40, "b", max_new_tokens=16, steps=1000)
    assert isinstance(next(iter(stream)), Draft)
    stream.close()
    wait_idle(own)
    assert own.scheduler.reserved == 0
    assert own.scheduler.prefixes.nbytes == 0


def test_a_failure_is_told_once() -> None:
    own = new_engine("bytes", max_bytes=1)
    events = list(own.infill_stream("a", "b", steps=1))
    assert [event.kind for event in events] == ["end"]
    assert isinstance(events[0], End)
    assert "K/V cache" in str(events[0].error)
    with pytest.raises(DiffusionGemmaError, match="K/V cache"):
        own.infill("a", "b", steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fim"}, "no fill-in-the-middle tokens"),
        ({"strategy": "guess"}, "strategy must be"),
        ({"candidates": 0}, "candidates must be"),
        ({"candidates": 17}, "candidates must be"),
        ({"mode": "ar"}, "left to right"),
        ({"canvas": 16}, "canvas has no effect"),
        ({"stop": "x"}, "stop has no effect"),
        ({"logprobs": 1}, "logprobs has no effect"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"colour": 1}, "no such option"),
        ({"context": 64}, "context has no effect with strategy 'canvas'"),
        ({"context": 3}, "context must be"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        engine("bytes").infill_stream("a", "b", **options)


def test_only_texts_can_be_filled_between() -> None:
    with pytest.raises(InputError, match="a text is needed, not int"):
        engine("bytes").infill(1, "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fim", "min_tokens": 2}, "min_tokens 2 has no effect"),
        ({"strategy": "canvas", "min_tokens": 1000}, "does not fit"),
        ({"strategy": "canvas", "context": 64}, "context has no effect"),
        ({"strategy": "canvas", "far": 0}, "far has no effect with strategy 'canvas'"),
        ({"strategy": "fim", "far": 64}, "far has no effect without context"),
        ({"strategy": "fim", "far": -1}, "far must be 0 or an integer of at least 24 tokens, got -1"),
        ({"strategy": "fim", "context": 64, "far": 23}, "far must be 0 or an integer of at least 24 tokens, got 23"),
        (
            {"strategy": "fim", "context": 64, "far": True},
            "far must be 0 or an integer of at least 24 tokens, got True",
        ),
        ({"strategy": "fim", "mode": "ar", "candidates": 3}, "candidates 3 has no effect"),
    ],
)
def test_choices_without_effect_are_refused(options, words) -> None:
    own = engine(FIM[0] if options["strategy"] == "fim" else PLAIN[0])
    params = SamplingParams.build(max_new_tokens=8, **({"mode": "ar"} if options.pop("mode", None) else {}))
    with pytest.raises(InputError, match=words):
        plan_infill(own, "a", "b", params, **options)
