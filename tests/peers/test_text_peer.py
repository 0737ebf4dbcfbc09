"""Tokenizer and chat template against Transformers, on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diffusiongemma.text import ChatTemplate, Tokenizer
from text.fixtures import KINDS, SPECIAL_IDS, write_folder

pytestmark = pytest.mark.peer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Größe «x»"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"name": "stop", "description": ""},
]


class Pair:
    """The same folder, read here and by Transformers."""

    def __init__(self, folder: Path, loader: Any = PreTrainedTokenizerFast) -> None:
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self.template = ChatTemplate.from_pretrained(folder)
        self.theirs = loader.from_pretrained(str(folder))

    def check_prompt(self, messages: list[dict[str, Any]], tools: Any, thinking: bool, generate: bool) -> None:
        options = {"add_generation_prompt": generate, "enable_thinking": thinking}
        theirs = self.theirs.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        ids = self.theirs.apply_chat_template(messages, tools=tools, return_dict=False, **options)
        ours = self.template.render(messages, tools, thinking, generate)
        assert ours == theirs
        assert self.tokenizer.encode(ours, allow_special=True) == ids
        written = json.dumps(messages, ensure_ascii=False).replace('\\"', '"')
        if not any(text in written for text in SPECIAL_IDS):  # else ours keeps them as text, theirs does not
            assert self.template.encode(self.tokenizer, messages, tools, thinking, generate) == ids


@pytest.fixture(scope="module", params=["byte_level", "gemma_like", "gemma_class"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in KINDS:
        return Pair(write_folder(folder, request.param))
    # Transformers' own Gemma class builds its tokenizer anew from the vocabulary of the file.
    return Pair(write_folder(folder, "gemma_like", tokenizer_class="GemmaTokenizer"), AutoTokenizer)


CONTENT = st.text(max_size=30) | st.sampled_from(["", " padded \n", "12 + 34", "東京 😀 café", "a\u0301 \u200b▁", "<"])
HOSTILE = st.lists(CONTENT | st.sampled_from([*SPECIAL_IDS, "<unused7>", "<0x41>"]), max_size=4).map("".join)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": CONTENT}), max_size=3)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CONTENT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from("ab"),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": NAMES, "arguments": st.dictionaries(NAMES, VALUES, max_size=3)}),
    }
)
THOUGHT = st.sampled_from(["reasoning_content", "thinking", "reasoning"])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(CONTENT | PARTS)})
    roles = draw(st.lists(st.sampled_from(["user", "assistant", "model", "tool", "system"]), max_size=6))
    for role in ["user", *roles]:
        message: dict[str, Any] = {"role": role, "content": draw(HOSTILE | PARTS)}
        if role in ("assistant", "model"):
            if draw(st.booleans()):
                message["tool_calls"] = draw(st.lists(CALL, min_size=1, max_size=2))
                message["content"] = draw(st.none() | HOSTILE)
            if draw(st.booleans()):
                message[draw(THOUGHT)] = draw(CONTENT)
        elif role == "tool":
            message |= draw(st.sampled_from([{"name": "weather"}, {"tool_call_id": "a"}, {}]))
            if draw(st.booleans()):
                message["content"] = draw(st.dictionaries(NAMES, VALUES, max_size=2))
        messages.append(message)
    return messages


@settings(max_examples=150, deadline=None)
@given(
    messages=conversations(), tools=st.sampled_from([None, [], TOOLS]), thinking=st.booleans(), generate=st.booleans()
)
def test_prompts(pair: Pair, messages: list[dict[str, Any]], tools: Any, thinking: bool, generate: bool) -> None:
    pair.check_prompt(messages, tools, thinking, generate)


@settings(max_examples=200, deadline=None)
@given(text=HOSTILE)
def test_encode(pair: Pair, text: str) -> None:
    assert pair.tokenizer.encode(text, allow_special=True) == pair.theirs.encode(text, add_special_tokens=False)
    assert pair.tokenizer.encode(text, add_bos=True, allow_special=True) == pair.theirs.encode(text)
    split = pair.theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert pair.tokenizer.encode(text) == split


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode(pair: Pair, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, pair.tokenizer.vocab_size - 1)))
    assert pair.tokenizer.decode(ids, skip_special=skip) == pair.theirs.decode(ids, skip_special_tokens=skip)


def test_vocabulary(pair: Pair) -> None:
    assert pair.tokenizer.vocab_size == len(pair.theirs)
    special = {id for id in range(len(pair.theirs)) if pair.tokenizer.is_special(id)}
    flagged = {id for id, token in pair.theirs.added_tokens_decoder.items() if token.special}
    assert special == flagged
    for name in ("pad", "eos", "bos", "unk"):
        assert pair.tokenizer.special[name] == getattr(pair.theirs, f"{name}_token_id")


FEATURES = {
    "loop variables": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }}"
    "{{ loop.nextitem is defined }}{{ loop.previtem is defined }}{{ loop.changed(m.role) }}{{ loop.cycle('a', 'b') }}"
    "{% endfor %}",
    "a filtered loop": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}",
    "a recursive loop": "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "json": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}",
    "time": "{{ strftime_now('%Y-%m') }}",
    "generation": "{% for m in messages %}\n{% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "whitespace": "  {% if true %}\n  x\n  {% endif %}\n\n{# a #}\n  {{ 'y' }}\n",
    "names": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ mask_token }}{{ sep_token }}",
    "options": "{{ enable_thinking }}{{ add_generation_prompt }}{{ documents is none }}{{ odd }}{{ none is defined }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macros": "{% macro f(x, y=2) %}{{ x ~ y ~ varargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4) }}"
    "{% macro g() %}<{{ caller() }}>{% endmacro %}{% call g() %}x{% endcall %}",
    "operators": "{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ '%s-%05.2f' % ('x', 1.5) }}{{ 7 % 4 }}{{ 'a' ~ 1 }}",
    "methods": "{{ 'a-b'.split('-') }}{{ ' x '.strip() }}{{ 'x'.center(5) }}{{ '{:>4}|{}'.format(1, 'y') }}"
    "{{ 'aXa'.replace('a', 'bb') }}{{ ', '.join(['a', 'b']) }}{{ dict(a=1).items() | list }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | rejectattr('role', 'eq', 'x') | list }}"
    "{{ 'a\nb' | indent(3) }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 'x' | upper | center(9) }}{{ 3.7 | int }}"
    "{{ 'long text' | truncate(6) }}{{ nothing | default(10000000) }}{{ ['b', 'a'] | sort | first }}{{ '<a>' | e }}",
}


@pytest.mark.parametrize("source", FEATURES.values(), ids=FEATURES.keys())
def test_templates_of_others(tmp_path: Path, source: str) -> None:
    """What other people's templates use renders the same."""
    folder = write_folder(tmp_path, "byte_level")
    (folder / "chat_template.jinja").write_text(source)
    pair = Pair(folder)
    messages = [{"role": r, "content": c} for r, c in [("user", "Hé <b> 'q'"), ("assistant", "a & b"), ("user", "ok")]]
    ours = pair.template.render(messages, TOOLS, thinking=True, odd=[1, "x"])
    options = {"add_generation_prompt": True, "enable_thinking": True, "odd": [1, "x"]}
    assert ours == pair.theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False, **options)


def test_named_templates(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_folder(tmp_path, "byte_level", chat_template=listed)
    (folder / "chat_template.jinja").unlink()
    pair = Pair(folder)
    for tools in (None, [], TOOLS):
        pair.check_prompt([{"role": "user", "content": "Hi"}], tools, False, True)


def test_older_files(tmp_path: Path) -> None:
    """special_tokens_map.json, extra special tokens in a list, tokens written as objects."""
    named = {"eos_token": {"__type": "AddedToken", "content": "<turn|>"}, "odd_token": "<unused6>"}
    folder = write_folder(tmp_path, "gemma_like", additional_special_tokens=["<unused7>", "<unused8>"], **named)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|think|>"}}))
    pair = Pair(folder)
    assert (pair.tokenizer.special["bos"], pair.tokenizer.special["eos"]) == (98, 106)
    assert (pair.theirs.bos_token_id, pair.theirs.eos_token_id) == (98, 106)
    assert {6, 7, 8, 98, 106} <= set(pair.theirs.all_special_ids)
    assert all(pair.tokenizer.is_special(id) for id in pair.theirs.all_special_ids)
    ids = [6, 9, 300, 98]  # 7 and 8 stay in Transformers' decoded text, although it calls them special
    assert pair.tokenizer.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)
    pair.check_prompt([{"role": "user", "content": "Hi"}], None, False, True)
