"""Replies taken apart: round trips, parts that are cut off, and anything at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.text import Reply, ToolCall, parse_ids, parse_reply
from text.fixtures import KINDS, SPECIAL_IDS, make_tokenizer

Q = '<|"|>'
WORDS = st.text(alphabet='abé東 \n{}[]:,"<|>', max_size=20).filter(lambda t: not any(s in t for s in SPECIAL_IDS))
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)
CALLS = st.builds(ToolCall, KEYS, st.dictionaries(KEYS, VALUES, max_size=4))
REPLIES = st.builds(Reply, WORDS, WORDS, st.lists(CALLS, max_size=3).map(tuple))


def write(value: Any) -> str:
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def compose(reply: Reply, end: str = "<turn|>") -> str:
    thought = f"<|channel>thought\n{reply.thinking}\n<channel|>"
    calls = "".join(f"<|tool_call>call:{c.name}{write(c.arguments)}<tool_call|>" for c in reply.tool_calls)
    return thought + reply.text + calls + end


@given(
    reply=REPLIES, end=st.sampled_from(["", "<turn|>", "<eos><pad><pad>", "<|tool_response>", "<turn|>after the end"])
)
def test_round_trip(reply: Reply, end: str) -> None:
    assert parse_reply(compose(reply, end)) == reply


@pytest.mark.parametrize("kind", KINDS)
@given(reply=REPLIES)
def test_round_trip_over_ids(kind: str, reply: Reply) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(compose(reply, "<turn|><pad>"), allow_special=True)
    assert parse_ids(tokenizer, ids) == reply


@pytest.mark.parametrize("kind", KINDS)
def test_spelled_markers_are_text_over_ids(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    said = "Write <|channel>thought or <turn|> and <|tool_call>."
    assert parse_ids(tokenizer, tokenizer.encode(said)) == Reply(said)


@given(reply=REPLIES, data=st.data())
def test_a_reply_cut_anywhere_is_a_beginning(reply: Reply, data: st.DataObject) -> None:
    whole = compose(reply, "")
    special = sorted(SPECIAL_IDS, key=len, reverse=True)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    # Tokens come whole: a cut never falls inside a marker.
    while any(cut.endswith(s[:n]) for s in special for n in range(1, len(s))):
        cut = cut[:-1]
    part = parse_reply(cut)
    assert reply.thinking.startswith(part.thinking)
    assert reply.text.startswith(part.text)
    complete = [call for call in part.tool_calls if call.complete]
    assert list(reply.tool_calls[: len(complete)]) == complete
    assert len(part.tool_calls) <= len(complete) + 1


@given(
    text=st.lists(st.text(max_size=5) | st.sampled_from([*SPECIAL_IDS, "thought\n", "call:f", "{a:", "[", "}"])).map(
        "".join
    )
)
def test_anything_can_be_parsed(text: str) -> None:
    reply = parse_reply(text)
    assert all(isinstance(call.arguments, dict) for call in reply.tool_calls)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("", Reply()),
        ("Hello", Reply("Hello")),
        ("<|channel>thought\n<channel|>Hi", Reply("Hi")),
        ("<|channel>thought\nhm", Reply("", "hm")),
        ("<|channel>thou", Reply()),
        ("<|channel>plan<channel|>Hi", Reply("Hi", "plan")),
        ("a<|channel>thought\nb<channel|>c<|channel>thought\nd<channel|>e", Reply("ace", "b\nd")),
        ("<channel|>Hi<tool_call|>", Reply("Hi")),
        ("Hi<pad> there<turn|>rest", Reply("Hi there")),
        ("<|tool_call>call:f<tool_call|>", Reply(tool_calls=(ToolCall("f", {}),))),
        ("<|tool_call>call:f{}<tool_call|>", Reply(tool_calls=(ToolCall("f", {}),))),
        ("<|tool_call>call:f{a:1", Reply(tool_calls=(ToolCall("f", {"a": 1}, False),))),
        ("<|tool_call>call:f{a:1}", Reply(tool_calls=(ToolCall("f", {"a": 1}, False),))),
        ("<|tool_call>call:f{a:1<tool_call|>", Reply(tool_calls=(ToolCall("f", {"a": 1}, False),))),
        ("<|tool_call>call:f{a:", Reply(tool_calls=(ToolCall("f", {}, False),))),
        ("<|tool_call>call:f{a:1}}<tool_call|>", Reply(tool_calls=(ToolCall("f", {"a": 1}, False),))),
        (f"<|tool_call>call:f{{a:{Q}x", Reply(tool_calls=(ToolCall("f", {"a": "x"}, False),))),
        ("<|tool_call>nonsense<tool_call|>", Reply("<|tool_call>nonsense")),
        ("<|tool_call>nonsense", Reply("<|tool_call>nonsense")),
        ("<|tool_call>", Reply()),
        ("<|tool_call>call:", Reply()),
        ("<|tool_call>call:<tool_call|>", Reply("<|tool_call>call:")),
    ],
)
def test_cases(text: str, reply: Reply) -> None:
    assert parse_reply(text) == reply


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("{ a : 1 , b : [ true , x y ] }", {"a": 1, "b": [True, "x y"]}),
        ('{"a": "b,\\"c", "d": 1e3}', {"a": 'b,"c', "d": 1000.0}),
        ("{a:1e999,b:-2.5,c:1.}", {"a": "1e999", "b": -2.5, "c": "1."}),
        ("{a:,b:[]}", {"a": "", "b": []}),
        (f"{{{Q}a:b{Q}:null}}", {"a:b": None}),
    ],
)
def test_other_ways_to_write_arguments(body: str, arguments: dict[str, Any]) -> None:
    assert parse_reply(f"<|tool_call>call:f{body}<tool_call|>").tool_calls == (ToolCall("f", arguments),)


def test_deep_and_long_replies_stay_cheap() -> None:
    deep = parse_reply("<|tool_call>call:f{a:" + "[" * 100_000 + "<tool_call|>")
    assert not deep.tool_calls[0].complete
    many = parse_reply("<|tool_call>call:f{a:<|channel>" * 20_000)
    assert len(many.tool_calls) == 20_000
    assert (
        parse_reply(f"<|tool_call>call:f{{a:{'9' * 10_000}}}<tool_call|>").tool_calls[0].arguments["a"] == "9" * 10_000
    )
