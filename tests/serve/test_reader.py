"""A chat reply taken apart piece by piece is what it is taken apart at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.engine import Commit, TokenLogprob
from diffusiongemma.engine.output import OutputText
from diffusiongemma.serve.reader import ENDS, Delta, ReplyReader
from diffusiongemma.text import parse_ids
from diffusiongemma.text.bytes import byte_tokenizer

TOKENIZER = byte_tokenizer()
MARKERS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")
CALL = '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, allow_special=True)


def read(ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> tuple[list[Delta], Delta]:
    """The engine's commits for these tokens, cut into blocks -> every delta, and their sum"""
    reader, output = ReplyReader(TOKENIZER), OutputText(TOKENIZER, stops, skip_special=True)
    deltas, edges = [], [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for i, (a, b) in enumerate(pairwise(edges)):
        text = output.push(ids[a:b])
        if i == len(edges) - 2:
            text += output.finish()
        deltas.append(reader.push(Commit(i, ids[a:b], text, [TokenLogprob(t, -1.0) for t in ids[a:b]])))
        if output.stopped:
            break
    deltas.append(reader.finish())
    total = Delta()
    for delta in deltas:
        total.content += delta.content
        total.reasoning += delta.reasoning
        total.calls += delta.calls
        total.logprobs += delta.logprobs
    return deltas, total


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
known = st.sampled_from([*MARKERS, *ENDS, CALL, "thought\n", "call:f{a:", "}", "\n"])


@given(st.lists(st.one_of(known, words)), st.lists(st.integers(0, 40), max_size=4))
def test_any_cuts_give_what_the_whole_gives(pieces: list[str], cuts: list[int]) -> None:
    special = (*MARKERS, *ENDS, CALL)
    ids = [i for piece in pieces for i in (tokens(piece) if piece in special else TOKENIZER.encode(piece))]
    _, total = read(ids, cuts)
    whole = parse_ids(TOKENIZER, ids)
    assert (total.content, total.reasoning, tuple(total.calls)) == (whole.text, whole.thinking, whole.tool_calls)


def test_thinking_calls_and_answer() -> None:
    ids = tokens(f"<|channel>thought\nhm\nyes\n<channel|>Let me see.{CALL}Done.")
    deltas, total = read(ids, [12, 13, 14, 30, 60])
    assert total.reasoning == "hm\nyes"
    assert total.content == "Let me see.Done."
    assert [(call.name, call.arguments) for call in total.calls] == [("get_weather", {"city": "Köln", "days": 2})]
    assert len([delta for delta in deltas if delta.calls]) == 1  # a call comes whole
    assert b"".join(TOKENIZER.token_bytes(one.token) or b"" for one in total.logprobs).decode() == total.content


def test_a_call_that_was_cut_off_is_read_as_far_as_it_goes() -> None:
    _, total = read(tokens('ok<|tool_call>call:f{a:1,b:<|"|>x'), [5])
    assert total.content == "ok"
    assert total.calls[0].name == "f"
    assert total.calls[0].arguments == {"a": 1, "b": "x"}
    assert not total.calls[0].complete


@pytest.mark.parametrize("cuts", [[], [2], [3], [4], [5], [3, 4, 5]])
def test_a_stop_text_is_never_shown_nor_what_comes_behind(cuts: list[int]) -> None:
    deltas, total = read(tokens("abcENDdef"), cuts, stops=("END",))
    assert total.content == "abc"
    assert all("E" not in delta.content for delta in deltas)


@pytest.mark.parametrize("cut", range(1, 6))
def test_half_a_character_waits(cut: int) -> None:
    deltas, total = read(tokens("a€b🙂"), [cut])
    assert total.content == "a€b🙂"
    assert all("\ufffd" not in delta.content for delta in deltas)
