"""What a model sees of the text around a hole: what is next to it, passages from elsewhere, something before them."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby, islice
from typing import Any

import numpy as np
import pytest

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Engine, SamplingParams, hole
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.engine.hole import CONTEXT, STEP
from diffusiongemma.engine.infill import plan_infill
from diffusiongemma.engine.params import HoleSettings
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.engine.worker import Handle
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.tasks.format import EOS
from diffusiongemma.tasks.infill import FILE, KINDS
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.alike import REACH
from diffusiongemma.train.infill import Infill
from diffusiongemma.train.recipe import TaskConfig
from diffusiongemma.train.ship import FAR, RUN_IN_FILE
from diffusiongemma.train.sources import Documents, Vocabulary
from engine.holes import engine, model, tokenizer

PARAMS = SamplingParams.build(seed=5, max_new_tokens=40)


def test_the_context_is_what_the_model_was_trained_with() -> None:
    kind, before, after = "fim_suffix_first", "ab" * 3000, "cd" * 3000
    for context in (None, 100, 9):
        params = SamplingParams.build(steps=3, seed=5, max_new_tokens=20)
        (one,) = plan_infill(engine(kind), before, after, params, 1, context=context)
        total = context or CONTEXT
        assert len(one.request.prompt) == total
        told = tokenizer(kind).decode(one.request.prompt)
        assert len(told) == total - 3
        assert sum(map(told.count, "cd")) == int(0.4 * total)
        assert told == after[: int(0.4 * total)] + before[-(total - 3 - int(0.4 * total)) :]
    # A short suffix leaves its room to the prefix, not the other way round.
    (one,) = plan_infill(engine(kind), before, "x", params, 1, context=100)
    assert len(one.request.prompt) == 100
    (one,) = plan_infill(engine(kind), "x", after, params, 1, context=100)
    assert len(one.request.prompt) == 3 + 1 + 40
    (one,) = plan_infill(engine("fim"), before, after, params, 1)
    assert len(one.request.prompt) > 4000  # models of the other order say nothing about theirs


def test_a_short_prompt_runs_in_as_far_as_the_model_was_trained() -> None:
    kind, params = "fim_suffix_first", SamplingParams.build(steps=3, seed=5, max_new_tokens=20)
    other = "0123456789" * 20
    own, plain = Engine(model(), tokenizer(kind), hole=HoleSettings(128, run_in=other)), engine(kind)
    end = tokenizer(kind).special["eos"]

    def prompt(of: Engine, before: str, after: str, context: int | None = None) -> tuple[int, ...]:
        (one,) = plan_infill(of, before, after, params, 1, context=context)
        return one.request.prompt

    before = "x = "
    fills = list[tuple[int, ...]]()
    for context in (None, 20):  # what is seen of the text is less, and the rest is filled all the same
        seen = prompt(plain, before, "z" * 900, context or 128)
        whole = prompt(own, before, "z" * 900, context)
        missing = len(whole) - len(seen)
        assert 128 - STEP < len(whole) <= 128
        assert whole[missing:] == seen
        assert whole[missing - 1] == end
        assert tokenizer(kind).decode(whole[: missing - 1]) == other[-(missing - 1) :]
    assert prompt(own, "ab" * 90, "cd" * 90) == prompt(plain, "ab" * 90, "cd" * 90, 128)  # nothing is missing
    for i in range(1, 50):  # as somebody types: what stands before stays the same for a while
        whole = prompt(own, before + "a" * i, "z" * 900)
        fills.append(whole[: whole.index(end) + 1])
    assert 3 <= len(set(fills)) <= 5
    own.hole = HoleSettings(128, run_in="01")
    assert len(prompt(own, "x", "")) == 3 + len(prompt(plain, "x", ""))  # as much as there is
    own.close()


def test_a_run_in_becomes_tokens_once_for_a_tokenizer_and_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told, encode = list[tuple[Tokenizer, str]](), hole.encode_exact

    def count(tokenizer: Tokenizer, text: str) -> list[int]:
        told.append((tokenizer, text))
        return encode(tokenizer, text)

    monkeypatch.setattr(hole, "encode_exact", count)
    kinds, texts = ("fim_suffix_first", "fim"), ("x = 1\n" * 40, "y = 2\n" * 40)
    params, prompts = SamplingParams.build(max_new_tokens=8, seed=5), list[tuple[int, ...]]()
    for _ in range(2):
        for kind in kinds:
            for text in texts:
                with Engine(model(), tokenizer(kind), hole=HoleSettings(128, run_in=text)) as own:
                    (one,) = plan_infill(own, "a = ", "", params, 1)
                end = own.tokenizer.special["eos"]
                at = one.request.prompt.index(end) + 1
                assert one.request.prompt[:at] == (*encode(own.tokenizer, text), end)[-at:]
                prompts.append(one.request.prompt)
    assert prompts[:4] == prompts[4:]
    assert [told.count((tokenizer(kind), text)) for kind in kinds for text in texts] == [1, 1, 1, 1]


def test_a_run_in_needs_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = DiffusionGemma(replace(model().config, eos_token_ids=())).init_weights(0).eval()
    with Engine(bare, tokenizer("fim_suffix_first"), hole=HoleSettings(64, run_in="x")) as own:
        monkeypatch.setattr(own.tokenizer, "special", {**own.tokenizer.special, "eos": None})
        monkeypatch.delitem(own.tokenizer.special, "eos")
        with pytest.raises(ConfigError, match="no end-of-text token"):
            plan_infill(own, "x", "y", SamplingParams.build(max_new_tokens=8), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": 3},
        {"context": -5, "run_in": "a"},
        {"run_in": "a"},
        {"context": 64, "run_in": None},
        {"far": 256},
        *({"context": 64, "far": far} for far in (-1, 23, 64.0, True, None)),
    ],
)
def test_what_a_model_cannot_want(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HoleSettings(**wrong)


def test_a_model_may_want_holes_sampled_with_more_care() -> None:
    """Its bound counts for holes and templates, and for nothing else; a call's own bound or threshold wins."""
    own = Engine(model(), tokenizer("fim_suffix_first"), hole=HoleSettings(entropy_bound=0.004))
    seen: list[SamplingParams] = []
    with own:
        submit = own.worker.submit

        def watched(sequence: Sequence, handle: Handle) -> None:
            seen.append(sequence.params)
            submit(sequence, handle)

        own.worker.submit = watched  # type: ignore[method-assign]
        for options in ({}, {"entropy_bound": 0.2}, {"threshold": 0.9}):
            own.infill("01", "2", max_new_tokens=4, candidates=1, steps=2, **options)
        own.fill("01[[?4]]2", candidates=1, steps=2)
        own.generate("01", max_new_tokens=4, steps=2)
    told = groupby((params.entropy_bound, params.threshold) for params in seen)  # random weights may be asked again
    assert [bounds for bounds, _ in told] == [(0.004, None), (0.2, None), (0.004, 0.9), (0.004, None), (0.1, None)]


# ---- passages from elsewhere -----------------------------------------------------------------------------------------

RUN_IN = RUN_IN_FILE.read_text(encoding="utf-8")
TRAINED = HoleSettings(CONTEXT, FAR, RUN_IN)


@pytest.fixture(scope="module")
def coder() -> Iterator[Engine]:
    """nano's tokenizer, and a network that nobody asks"""
    tokenizer = Tokenizer.from_pretrained(ASSETS / "nano")
    config = replace(ModelConfig.preset("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=4096)
    with Engine(DiffusionGemma(config).init_weights(0), tokenizer, hole=TRAINED) as own:
        yield own


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(str(ASSETS / "nano"))


@cache
def documents() -> Documents:
    """Held-out files, and one that is longer than what is searched"""
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 32)]
    ids = [np.array([*vocabulary().encode(text), EOS], np.uint16) for text in (*texts[:24], "\n".join(texts[20:]))]
    assert len(ids[-1]) > 2 * REACH + 4096
    return Documents(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))


class Full:
    """Draws that leave the suffix whole"""

    def random(self) -> float:
        return 0.9

    def integers(self, low: int, high: int) -> int:
        return low


def rows(kind: str, count: int) -> Iterator[tuple[list[int], int, str, str, str]]:
    """What training sees of holes, from their passages on, how many tokens those have, and the texts before, in and
    after the hole"""
    config, of = TaskConfig("t", "infill", 1.0, prefix=CONTEXT + FAR, canvas=64), documents()
    shares = tuple(float(kind == one) for one in KINDS)
    task, decode = Infill(config, of, vocabulary().line_starts, shares, far=FAR), vocabulary().library.decode
    for first, end, begin, close in task.holes(np.random.default_rng(0), count).tolist():
        row, where = task.prompt(Full(), first, end, begin, close)  # type: ignore[arg-type]
        pieces = (of.tokens[begin:first], of.tokens[first:end], of.tokens[end:close])
        before, inside, after = (decode(piece.tolist()) for piece in pieces)
        yield row[where.start :].tolist(), where.stop - where.start, before, inside, after


def prompt_of(own: Engine, before: str, after: str, params: SamplingParams = PARAMS, **options: Any) -> tuple[int, ...]:
    (one,) = plan_infill(own, before, after, params, 1, **options)
    return one.request.prompt


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_is_the_row_that_training_made(coder: Engine, kind: str) -> None:
    """Token by token, from the first passage on; before it stands the run-in, as far as rows are long."""
    encode = coder.tokenizer.encode
    run_in, some, long = (*encode(RUN_IN), EOS), 0, 0
    for row, passages, before, inside, after in rows(kind, 24):
        opened = ("",)
        if kind != "inside":  # whoever asks for whole lines is behind the line break, and perhaps behind the indent
            breaks = re.match(r"(\r?\n)[ \t]*", inside)
            assert breaks is not None
            opened = (breaks[1], breaks[0])
        for lead in opened:
            got = prompt_of(coder, before + lead, after)
            fill, size = len(got) - len(row), CONTEXT + (FAR if passages else 0)
            assert list(got[fill:]) == row
            assert got[:fill] == run_in[len(run_in) - fill :]
            assert size - STEP < len(got) <= size
            # The causal path has an open line with its indent at the end of its prompt.
            twin = prompt_of(coder, before + lead, after, SamplingParams.build(PARAMS, mode="ar"))
            assert twin == (*got, *(encode(lead) if lead.strip("\r\n") else ()))
        some += passages > 0
        long += len(encode(before)) > REACH
    assert some > 20
    assert long > 5


def test_without_passages_all_is_as_it_was(coder: Engine) -> None:
    with Engine(coder.model, coder.tokenizer, hole=HoleSettings(CONTEXT, run_in=RUN_IN)) as near:
        for _, passages, before, _, after in rows("line", 12):
            got = prompt_of(coder, before + "\n", after, far=0)
            assert got == prompt_of(near, before + "\n", after)
            assert passages == 0 or got != prompt_of(coder, before + "\n", after)
            asked = prompt_of(near, before + "\n", after, far=FAR)  # of a model that was not trained so
            whole = prompt_of(coder, before + "\n", after)
            assert asked == whole[len(whole) - len(asked) :]
        for before, after in (("x = 1\n", "\ny = 2\n"), ("", ""), ("x = 1\n" * 40, "\ny = 2" * 30)):
            got = prompt_of(coder, before, after)  # what is near is all there is
            assert got == prompt_of(near, before, after)
            assert len(got) <= CONTEXT


def split(own: Engine, prompt: tuple[int, ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The closed passages of a prompt without a run-in, and the rest of it"""
    at, found = prompt.index(own.tokenizer.special["bos"]), list[tuple[int, ...]]()
    while sum(map(len, found)) < at:
        start = sum(map(len, found))
        found.append(prompt[start : prompt.index(EOS, start) + 1])
    return found, prompt[at:]


def test_passages_are_beyond_what_the_prompt_holds(coder: Engine) -> None:
    """Also where it holds less or more than the model was trained with: as was asked for, or as there is room."""
    _, _, before, _, after = next(row for row in rows("line", 40) if row[1] and min(len(row[2]), len(row[4])) > 4000)
    sides = [np.array(coder.tokenizer.encode(text), np.uint16) for text in (before, after)]

    def check(own: Engine, room: int, **options: int) -> tuple[int, int]:
        """How many tokens the passages have, and how many the rest"""
        found, rest = split(own, prompt_of(own, before + "\n", after, **options))
        middle = rest.index(own.tokenizer.special["<|fim_prefix|>"])
        far = (sides[0][: len(sides[0]) - (len(rest) - middle - 1)], sides[1][middle - 2 :])
        for one in found:
            assert any(np.array(one[:-1], np.uint16).tobytes() in side.tobytes() for side in far)
        assert sum(map(len, found)) <= room
        return sum(map(len, found)), len(rest)

    with Engine(coder.model, coder.tokenizer, hole=HoleSettings(CONTEXT, FAR)) as own:
        for context in (24, 100, CONTEXT, 1000):
            size, rest = check(own, FAR, context=context)
            assert size > FAR // 2
            assert rest == context
        assert 0 < check(own, 64, far=64)[0] <= 64
        assert check(own, 1000, far=1000)[0] > FAR
    for positions, room in ((300, 0), (CONTEXT + 50, 0), (CONTEXT + 90, 49), (CONTEXT + 140, 99)):
        config = replace(coder.model.config, max_position_embeddings=positions)
        narrow = DiffusionGemma(config).init_weights(0)
        with Engine(narrow, coder.tokenizer, hole=HoleSettings(CONTEXT, FAR)) as own:
            size, rest = check(own, room)
            assert (size > 0) == (room > 0)
            assert size + rest <= positions - PARAMS.max_new_tokens
        with Engine(narrow, coder.tokenizer, hole=TRAINED) as own:
            assert len(prompt_of(own, before + "\n", after)) <= positions - PARAMS.max_new_tokens


def test_passages_need_an_end(coder: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Engine(coder.model, tokenizer("fim_suffix_first"), hole=HoleSettings(64, 64))
    monkeypatch.setattr(own.tokenizer, "special", {k: v for k, v in own.tokenizer.special.items() if k != "eos"})
    monkeypatch.setattr(own, "ends", ())
    with own, pytest.raises(ConfigError, match="no end-of-text token"):
        prompt_of(own, "x = 1\ny = 2\n" * 40, "\ny = 2")


def test_both_orders_may_have_passages() -> None:
    """A model of the other order sees them if it does not see the whole text anyway."""
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(40))
    for kind in ("fim", "fim_suffix_first"):
        plain = prompt_of(engine(kind), text, "\n", context=64)
        found, rest = split(engine(kind), prompt_of(engine(kind), text, "\n", context=64, far=96))
        assert rest == plain
        assert len(rest) == 64  # with all marks of its order
        assert found
