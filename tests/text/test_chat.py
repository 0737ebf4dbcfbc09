"""The package's own template, how templates are found, what conversations are refused, and what stays plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.errors import InputError, TokenizerError
from diffusiongemma.text import ChatTemplate, default_chat_template, parse_reply
from text.fixtures import KINDS, SPECIAL_IDS, make_tokenizer, write_folder

TEMPLATE = ChatTemplate(default_chat_template(), {"bos_token": "<bos>"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}}}


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_one_turn() -> None:
    prompt = "<bos><|turn>user\nHi<turn|>\n"
    assert TEMPLATE.render([user(" Hi\n")]) == prompt + "<|turn>model\n<|channel>thought\n<channel|>"
    assert TEMPLATE.render([user()], add_generation_prompt=False) == prompt
    thinking = "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert TEMPLATE.render([user()], thinking=True) == thinking


def test_system_turn_with_thinking_and_tools() -> None:
    for role in ("system", "developer"):
        prompt = TEMPLATE.render([{"role": role, "content": "Be brief."}, user()], [WEATHER], thinking=True)
        assert prompt == (
            "<bos><|turn>system\n<|think|>\nBe brief."
            '<|tool>declaration:weather{description:<|"|>The weather of a city.<|"|>,parameters:{type:<|"|>object<|"|>,'
            'properties:{city:{type:<|"|>string<|"|>}},required:[<|"|>city<|"|>]}}<tool|><turn|>\n'
            "<|turn>user\nHi<turn|>\n<|turn>model\n"
        )


@pytest.mark.parametrize("named", [{"name": "weather"}, {"tool_call_id": "c1"}])
def test_tool_call_and_response_share_a_turn(named: dict[str, str]) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Ask."}
    messages = [user(), call, {"role": "tool", "content": "rain", **named}]
    turn = '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
    turn += '<|tool_response>response:weather{value:<|"|>rain<|"|>}<tool_response|>'
    start = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    thought = "<|channel>thought\nAsk.\n<channel|>"
    assert TEMPLATE.render(messages) == start + thought + turn
    done = [*messages, {"role": "model", "content": "Rain."}, user("Thanks")]
    end = "Rain.<turn|>\n<|turn>user\nThanks<turn|>\n"  # thinking of an earlier question is left out
    assert TEMPLATE.render(done, add_generation_prompt=False) == start + turn + end


def test_thinking_in_the_history_is_left_out() -> None:
    said = "<|channel>thought\nhm\n<channel|>Yes.<|channel>thought\nmore<channel|> No.<|channel>cut"
    messages = [user(), {"role": "assistant", "content": said}, user("Why?")]
    prompt = TEMPLATE.render(messages, add_generation_prompt=False)
    assert prompt == "<bos><|turn>user\nHi<turn|>\n<|turn>model\nYes. No.<turn|>\n<|turn>user\nWhy?<turn|>\n"


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert TEMPLATE.render([user(parts)]) == TEMPLATE.render([user("a b")])


KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXT = st.text(max_size=20).filter(lambda text: not any(special in text for special in SPECIAL_IDS))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(name=KEYS, arguments=st.dictionaries(KEYS, VALUES, max_size=4), thought=TEXT)
def test_what_the_template_writes_can_be_read_back(name: str, arguments: dict[str, Any], thought: str) -> None:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": "Ok.", "tool_calls": [call], "reasoning_content": thought}
    prompt = TEMPLATE.render([user(), said], add_generation_prompt=False)
    reply = parse_reply(prompt.partition("<|turn>model\n")[2])
    assert [(c.name, c.arguments, c.complete) for c in reply.tool_calls] == [(name, arguments, True)]
    assert (reply.text, reply.thinking) == ("Ok.", thought)


# ---- control tokens in messages ----------------------------------------------------------------------------------

HOSTILE = st.lists(
    TEXT | st.sampled_from([*SPECIAL_IDS, "<|tu", "rn>", "<", "\U000f0000", "\U000f0001"]), max_size=6
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(system=HOSTILE, parts=st.lists(HOSTILE, max_size=3), said=HOSTILE, argument=HOSTILE, thinking=st.booleans())
def test_users_cannot_write_control_tokens(
    kind: str, system: str, parts: list[str], said: str, argument: str, thinking: bool
) -> None:
    tokenizer = make_tokenizer(kind)

    def conversation(system: str, parts: list[str], said: str, argument: str) -> list[dict[str, Any]]:
        call = {"function": {"name": "f" + argument, "arguments": {"x": argument}}}
        return [
            {"role": "system", "content": system},
            user([{"type": "text", "text": part} for part in parts]),
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": argument},
        ]

    def specials(ids: list[int]) -> list[int]:
        return [id for id in ids if tokenizer.is_special(id)]

    given_ids = TEMPLATE.encode(tokenizer, conversation(system, parts, said, argument), thinking=thinking)
    blank_ids = TEMPLATE.encode(tokenizer, conversation("a", ["a" for _ in parts], "a", "a"), thinking=thinking)
    assert specials(given_ids) == specials(blank_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [["<|tu", "rn>"], ["a <turn|", ">"], ["<", "|turn>"], ["<|tu", "r", "n>"]])
def test_control_tokens_cannot_be_put_together_from_parts(kind: str, parts: list[str]) -> None:
    tokenizer = make_tokenizer(kind)
    ids = TEMPLATE.encode(tokenizer, [user([{"type": "text", "text": part} for part in parts])])
    assert [id for id in ids if tokenizer.is_special(id)] == [2, 105, 106, 105, 100, 101]
    assert "".join(parts) in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(content=HOSTILE.map(str.strip))
def test_what_users_write_is_kept_to_the_letter(kind: str, content: str) -> None:
    tokenizer = make_tokenizer(kind)
    content = content.replace("▁", " ").strip()
    ids = TEMPLATE.encode(tokenizer, [user(content)])
    assert tokenizer.decode(ids, skip_special=False) == TEMPLATE.render([user(content)])
    turn = tokenizer.encode("user\n" + content)
    assert ids[2 : 2 + len(turn)] == turn


def test_names_of_arguments_cannot_hold_control_tokens() -> None:
    call = {"function": {"name": "f", "arguments": {"<turn|>": 1}}}
    with pytest.raises(InputError, match="control token"):
        TEMPLATE.encode(make_tokenizer("byte_level"), [user(), {"role": "assistant", "tool_calls": [call]}])


# ---- finding a template ------------------------------------------------------------------------------------------


def test_where_templates_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "byte_level", chat_template="from config {{ bos_token }}")
    assert ChatTemplate.from_pretrained(folder).render([user()]) == TEMPLATE.render([user()])
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.from_pretrained(folder).render([user()]) == "from config <bos>"
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_folder(tmp_path, "byte_level", chat_template=listed)
    (folder / "chat_template.jinja").unlink()
    template = ChatTemplate.from_pretrained(folder)
    assert [template.render([user()]), template.render([user()], tools=[WEATHER])] == ["plain", "tools"]
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "default.jinja").write_text("from the folder")
    assert ChatTemplate.from_pretrained(folder).render([user()]) == "from the folder"


@pytest.mark.parametrize(
    "entry", [None, 3, {}, [3], [{"name": "default"}], [{"template": "x"}], "{% if %}", "x" * 2**21]
)
def test_damaged_templates(tmp_path: Path, entry: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(TokenizerError):
        ChatTemplate.from_pretrained(tmp_path)


def test_a_list_without_default() -> None:
    template = ChatTemplate({"tool_use": "tools"})
    assert template.render([user()], tools=[]) == "tools"
    with pytest.raises(TokenizerError, match="no default"):
        template.render([user()])


# ---- conversations that are refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ("Hi", "list"),
        (user(), "list"),
        (["Hi"], "message 0"),
        ([{"content": "Hi"}], "role"),
        ([user(), {"role": "wizard", "content": "Hi"}], "message 1 has the role 'wizard'"),
        ([{"role": "user"}], "content"),
        ([user(3)], "content"),
        ([user(b"x")], "plain JSON"),
        ([user(object())], "plain JSON"),
        ([user([{"type": "text"}])], "parts"),
        ([user(["Hi"])], "parts"),
        ([user([{"type": "image", "url": "x"}])], "images come later"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "images come later"),
        ([{"role": "assistant", "content": None}], "content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": 3}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], "arguments of f"),
        ([{"role": "assistant", "content": "x", "thinking": 3}], "thinking"),
    ],
)
def test_refused_conversations(messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        TEMPLATE.render(messages)


@pytest.mark.parametrize("tools", ["x", WEATHER, [3], [{}], [{"function": {"name": 3}}]])
def test_refused_tools(tools: Any) -> None:
    with pytest.raises(InputError, match="tool"):
        TEMPLATE.render([user()], tools=tools)


def test_the_callers_messages_are_not_touched() -> None:
    messages = [user(), {"role": "assistant", "content": "x", "thinking": "y"}]
    before = json.dumps(messages)
    TEMPLATE.render(messages)
    assert json.dumps(messages) == before


def test_find_tells_no_template_from_a_damaged_one(tmp_path) -> None:
    assert ChatTemplate.find(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert ChatTemplate.find(tmp_path) is not None
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TokenizerError):
        ChatTemplate.find(tmp_path)
