"""The engine's small parts, each alone."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine.guard import find_garbage
from diffusiongemma.engine.output import OutputText
from diffusiongemma.engine.params import HoleSettings, SamplingParams, released_params, without_stop_rule
from diffusiongemma.engine.prefix import PrefixStore, common
from diffusiongemma.engine.prompt import build_prompt
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.runner import draw_token
from diffusiongemma.errors import ConfigError, InputError
from diffusiongemma.model import CacheRow
from diffusiongemma.text import ChatTemplate, default_chat_template
from diffusiongemma.text.bytes import CONTROL_IDS, byte_tokenizer

TOKENIZER = byte_tokenizer()

# ---- the byte tokenizer ------------------------------------------------------------------------------------------


@given(st.text())
def test_byte_tokenizer_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert {name: TOKENIZER.token_to_id(name) for name in CONTROL_IDS} == CONTROL_IDS


# ---- options -----------------------------------------------------------------------------------------------------


def test_defaults_are_the_released_ones() -> None:
    p = SamplingParams()
    assert (p.steps, p.t_min, p.t_max, p.entropy_bound, p.stability, p.confidence) == (48, 0.4, 0.8, 0.1, 1, 0.005)
    assert p.canvas is None
    assert p.redo == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stepz": 3}, "stepz: there is no such option"),
        ({"temperature": 0.5}, "temperature has no effect in mode 'diffusion'"),
        ({"mode": "ar", "steps": 5}, "steps has no effect in mode 'ar'"),
        ({"mode": "ar", "canvas": 64}, "canvas has no effect"),
        ({"mode": "beam"}, "mode must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 2.5}, "steps must be"),
        ({"steps": True}, "steps must be"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"t_min": 0.9}, "t_max 0.8 is below t_min 0.9"),
        ({"t_min": float("nan")}, "t_min"),
        ({"entropy_bound": -1.0}, "entropy_bound"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": 0.9, "entropy_bound": 0.2}, "give one of the two"),
        ({"mode": "ar", "top_p": 0}, "top_p"),
        ({"mode": "ar", "temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop must be"),
        ({"stop": [3]}, "stop must be"),
        ({"stop_tokens": ["a"]}, "stop_tokens"),
        ({"canvas": "wide"}, "canvas"),
        ({"canvas": 0}, "canvas"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 101}, "logprobs"),
        ({"redo": -1}, "redo"),
        ({"early_stop": 1}, "early_stop"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingParams.build(**options)


def test_options_of_a_stop_rule_that_is_off() -> None:
    both = {"stability": 2, "confidence": 0.1}
    assert without_stop_rule(both) == without_stop_rule(both | {"early_stop": True}) == []
    assert without_stop_rule(both | {"early_stop": False}) == ["stability", "confidence"]
    assert without_stop_rule(both | {"early_stop": False, "canvas": "adaptive"}) == ["stability"]  # it asks the other


def test_stop_takes_one_or_several() -> None:
    assert SamplingParams.build(stop="a").stop == ("a",)
    assert SamplingParams.build(stop=["a", "b"], stop_tokens=[4]).stop_tokens == (4,)
    assert SamplingParams.build(stop=None).stop == ()


def test_the_checkpoints_own_settings(tmp_path) -> None:
    assert released_params(tmp_path) == (SamplingParams(), (), "diffusion", HoleSettings())
    data = {"max_denoising_steps": 20, "t_max": 0.9, "sampler_config": {"entropy_bound": 0.3}, "eos_token_id": [1, 106]}
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    params, ends, svg_mode, hole = released_params(tmp_path)
    assert (svg_mode, hole) == ("diffusion", HoleSettings())
    assert (params.steps, params.t_max, params.entropy_bound, params.t_min) == (20, 0.9, 0.3, 0.4)
    assert ends == (1, 106)
    (tmp_path / "dgemma.json").write_text('{"svg_mode": "ar"}')
    assert released_params(tmp_path) == (params, ends, "ar", HoleSettings())
    fine = ({"context": 640}, {"context": 64, "run_in": "x = 1"}, {"context": 64, "far": 32, "run_in": "x"})
    for said in (*fine, {"entropy_bound": 0.01}):
        (tmp_path / "dgemma.json").write_text(json.dumps({"hole": said}))
        assert released_params(tmp_path) == (params, ends, "diffusion", HoleSettings(**said))
    for few in (7, 64.0, True, "64"):
        (tmp_path / "dgemma.json").write_text(json.dumps({"hole": {"context": few}}))
        with pytest.raises(ConfigError, match="hole: context must be an integer of at least 8 tokens"):
            released_params(tmp_path)
    for wrong, message in (
        ({"run_in": "x"}, "run_in has no effect without context"),
        ({"context": 64, "run_in": 3}, "run_in must be a text"),
        ({"far": 256}, "far has no effect without context"),
        ({"context": 64, "far": -1}, "far must be 0 or an integer of at least 24 tokens, got -1"),
        ({"context": 64, "far": "256"}, "far must be 0 or an integer of at least 24 tokens, got '256'"),
        ({"entropy_bound": 0}, "entropy_bound must be a number above 0, got 0"),
        ({"entropy_bound": "0.1"}, "entropy_bound must be a number above 0"),
        ({"length": 3}, "hole must be an object with some of context, far, run_in, entropy_bound"),
        ([64], "hole must be an object"),
        (None, "hole must be an object"),
    ):
        (tmp_path / "dgemma.json").write_text(json.dumps({"hole": wrong}))
        with pytest.raises(ConfigError, match=message):
            released_params(tmp_path)
    for wrong in ("causal", None, ["ar"]):
        (tmp_path / "dgemma.json").write_text(json.dumps({"svg_mode": wrong}))
        with pytest.raises(ConfigError, match="svg_mode must be 'diffusion' or 'ar'"):
            released_params(tmp_path)
    (tmp_path / "dgemma.json").write_text('{"svg": "ar"}')
    with pytest.raises(ConfigError, match="svg: there is no such setting"):
        released_params(tmp_path)
    (tmp_path / "dgemma.json").unlink()
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="generation_config"):
        released_params(tmp_path)


def test_requests_check_themselves() -> None:
    params = SamplingParams.build(max_new_tokens=4)
    with pytest.raises(InputError, match="empty"):
        Request((), params)
    with pytest.raises(InputError, match="position 4"):
        Request((1,), params, pins={4: 1})
    with pytest.raises(InputError, match="mode 'diffusion'"):
        Request((1,), SamplingParams.build(mode="ar"), pins={0: 1})
    with pytest.raises(InputError, match="0 to 9"):
        Request((10,), params).check(10, 8, 100)
    with pytest.raises(InputError, match="wider"):
        Request((1,), SamplingParams.build(canvas=9)).check(10, 8, 1000)
    with pytest.raises(InputError, match="positions"):
        Request((1,) * 98, params).check(10, 8, 100)


# ---- prompts -----------------------------------------------------------------------------------------------------


def test_prompts() -> None:
    template = ChatTemplate(default_chat_template(), {"bos_token": "<bos>"})
    chat = build_prompt([{"role": "user", "content": "hi"}], TOKENIZER, template)
    assert build_prompt("hi", TOKENIZER, template) == chat
    assert chat.tokens[0] == CONTROL_IDS["<bos>"]
    assert 0 < chat.stable < len(chat.tokens)  # a later turn repeats all but the invitation to answer
    longer = [*[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]]
    again = build_prompt([*longer, {"role": "user", "content": "hu"}], TOKENIZER, template)
    assert again.tokens[: chat.stable] == chat.tokens[: chat.stable]
    raw = build_prompt("hi", TOKENIZER, template, raw=True)
    assert raw.tokens == (2, *TOKENIZER.encode("hi"))
    assert build_prompt([5, 6], TOKENIZER, None).tokens == (5, 6)
    for bad, words in [([5, {"role": "user"}], "mixture"), ([1.5], "integers"), (7, "int")]:
        with pytest.raises(InputError, match=words):
            build_prompt(bad, TOKENIZER, template)
    with pytest.raises(InputError, match="no chat template"):
        build_prompt([{"role": "user", "content": "hi"}], TOKENIZER, None)
    with pytest.raises(InputError, match="no effect"):
        build_prompt("hi", TOKENIZER, None, thinking=True)


# ---- output ------------------------------------------------------------------------------------------------------


@given(st.text("ab♥", max_size=40), st.lists(st.text("ab♥", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_texts_never_leak(text: str, stops: list[str], data) -> None:
    output = OutputText(TOKENIZER, stops, skip_special=True)
    ids, told = TOKENIZER.encode(text), ""
    while ids and not output.stopped:
        size = data.draw(st.integers(1, 5))
        told += output.push(ids[:size])
        assert not any(stop in told for stop in stops)
        ids = ids[size:]
    told += output.finish()
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert told == text
        assert not output.stopped
    else:
        # What was told is the text before a stop text, and no stop text is in it.
        assert output.stopped
        assert text.startswith(told)
        assert not any(stop in told for stop in stops)
        assert any(text[len(told) :].startswith(stop) for stop in stops)


# ---- garbage -----------------------------------------------------------------------------------------------------


def test_guard() -> None:
    fine = list(range(100))
    pairs = [(500, 501)]

    def why(block, converged=True, entropy=0.0, reply=None, ended=True):
        return find_garbage(block, reply or block, converged, entropy, pairs, ended)

    assert why(fine) is None
    assert why(fine, converged=False, entropy=0.1) is None
    assert why(fine, converged=False, entropy=2.0) == "not converged"
    assert why(fine, entropy=2.0) is None
    assert why([7] * 40) == "repetition"
    assert why(fine[:20] + [1, 2, 3] * 20) == "repetition"
    assert why(fine + [1, 2, 3] * 5) is None
    assert why([7] * 5) is None
    assert why([500, 1, 501]) is None
    assert why([500, 1]) == "unbalanced control tokens"
    assert why([500, 1], ended=False) is None
    assert why([501, 1], reply=[500, 4, 501, 1]) is None
    assert why([501, 1]) == "unbalanced control tokens"
    assert why([500, 500, 501, 501]) == "unbalanced control tokens"


# ---- prefixes ----------------------------------------------------------------------------------------------------

CONFIG = ModelConfig.preset("tiny", sliding_window=6)


def row_of(count: int) -> CacheRow:
    row = CacheRow(CONFIG, max(count, 1))
    for layer in range(CONFIG.num_hidden_layers):
        heads, size = CONFIG.layer_heads(layer)
        row.write(layer, torch.zeros(heads, count, size), torch.zeros(heads, count, size))
    row.advance(count)
    return row


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_beginning(a: list[int], b: list[int]) -> None:
    plain = 0
    while plain < min(len(a), len(b)) and a[plain] == b[plain]:
        plain += 1
    assert common(a, b) == common(tuple(a), b) == plain


def test_prefix_store() -> None:
    store = PrefixStore()
    assert store.find([1, 2, 3], 3) is None
    store.put([1, 2, 3], row_of(3))
    store.put([1, 9], row_of(2))
    assert store.find([1, 2, 4], 3)[1] == 2
    assert store.find([1, 9, 9], 3)[1] == 2
    assert store.find([1, 2, 3, 4], 2)[1] == 2  # no more than asked for
    assert store.find([7], 1) is None
    store.put([1, 2, 3, 4], row_of(4))  # does what [1, 2, 3] did
    assert len(store) == 2
    # Rows whose rings have slid can only be used whole.
    store.put(list(range(20)), row_of(20))
    assert store.find(range(15), 15) is None
    assert store.find(list(range(25)), 25)[1] == 20
    # Least recently used goes first.
    store.find([1, 9], 2)
    assert store.evict()
    assert store.find([1, 2, 3], 3)[1] == 1  # [1, 2, 3, 4] is gone; [1, 9] shares one token
    assert store.nbytes == sum(row.nbytes for _, row in store._rows) > 0
    while store.evict():
        pass
    assert store.nbytes == 0


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=20))
def test_prefix_store_goes_by_use(asked: list[tuple[bool, list[int]]]) -> None:
    """Against the same with a dict: what is found, what is kept, and who goes first."""
    store, kept = PrefixStore(), dict[tuple[int, ...], CacheRow]()
    for put, tokens in asked:
        key = tuple(tokens)
        if put:
            row = row_of(len(key))
            store.put(tokens, row)
            for known in [k for k in kept if len(k) < len(key) and key[: len(k)] == k and row.can_truncate(len(k))]:
                del kept[known]
            kept.pop(key, None)
            kept[key] = row
            continue
        usable = [(common(k, key), k) for k, row in kept.items() if row.can_truncate(common(k, key))]
        shared, best = max(usable, key=lambda pair: pair[0], default=(0, ()))
        found = store.find(tokens, len(tokens))
        if not shared:
            assert found is None
            continue
        kept[best] = kept.pop(best)
        assert found is not None
        assert found[0] is kept[best]
        assert found[1] == shared
    assert store._rows == list(kept.items())


# ---- the twin's draw ---------------------------------------------------------------------------------------------


def test_draw_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    params = SamplingParams.build(mode="ar", temperature=0)
    assert draw_token(logits, params, torch.tensor([0.7]))[0] == 1
    params = SamplingParams.build(mode="ar", top_p=0.6)  # p(1) = 0.64
    assert {draw_token(logits, params, torch.tensor([u / 50]))[0] for u in range(50)} == {1}
    params = SamplingParams.build(mode="ar", top_p=0.7)
    assert {draw_token(logits, params, torch.tensor([u / 50]))[0] for u in range(50)} == {1, 3}
    params = SamplingParams.build(mode="ar", logprobs=2)
    count = [0] * 4
    for u in torch.rand(4000, generator=torch.Generator().manual_seed(0)):
        token, logprob = draw_token(logits, params, u[None])
        count[token] += 1
    assert torch.allclose(torch.tensor(count) / 4000, logits.softmax(0), atol=0.03)
    assert [t for t, _ in logprob.top] == [1, 3]
