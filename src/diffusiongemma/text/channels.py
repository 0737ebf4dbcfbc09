r"""What a model wrote, taken apart: its thinking, its tool calls and its answer.

    <|channel>thought\n…\n<channel|>answer<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|><turn|>

Parts that are cut off are read as far as they go. `parse_reply` works on text in which special tokens were kept;
`parse_ids` on token ids, where a marker that the model merely spelled out is ordinary text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diffusiongemma.text.tokenizer import Tokenizer

QUOTE = '<|"|>'
_HEADER = "thought\n"
_ENDS = ("<turn|>", "<eos>", "<|tool_response>")  # generation stops at each of these
_SILENT = ("<pad>", "<bos>")
_MARKERS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", *_ENDS, *_SILENT)
_SPLIT = re.compile("(" + "|".join(map(re.escape, _MARKERS)) + ")")
_CALL = re.compile(r"\s*call:\s*([^\s{}]+)\s*")
_CALL_START = re.compile(r"\s*(c|ca|cal|call|call:\s*)?")  # no name yet, so there is nothing to show
_BARE = re.compile(r"[^,\]}]*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    complete: bool = True  # False when the call was cut off or its arguments could not be read to the end


@dataclass(frozen=True)
class Reply:
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(text: str) -> Reply:
    """Take apart a reply in which special tokens were kept."""
    return _assemble(_SPLIT.split(text))


def parse_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Reply:
    """Take apart a reply in token ids."""
    markers = {id: marker for marker in _MARKERS if (id := tokenizer.special.get(marker)) is not None}
    markers |= {tokenizer.special[name]: f"<{name}>" for name in ("pad", "eos", "bos") if name in tokenizer.special}
    parts: list[str] = []
    run: list[int] = []
    for id in ids:
        if (marker := markers.get(id)) is None:
            run.append(id)
        else:
            parts += [tokenizer.decode(run, skip_special=False), marker]
            run = []
    return _assemble([*parts, tokenizer.decode(run, skip_special=False)])


def _assemble(parts: list[str]) -> Reply:
    """`parts` alternate: text, marker, text, …, text."""
    answer: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    inside, held = "", [parts[0]]

    def close(by: str) -> None:
        body = "".join(held)
        held.clear()
        if inside == "<|channel>":
            thoughts.append(_thought(body, closed=by == "<channel|>"))
        elif inside == "<|tool_call>" and (call := _tool_call(body, closed=by == "<tool_call|>")):
            calls.append(call)
        elif not inside or by or not _CALL_START.fullmatch(body):
            answer.append(inside + body)  # a call that nobody can read is shown, not lost

    for marker, text in zip(parts[1::2], parts[2::2], strict=True):
        if marker in _ENDS:
            break
        if marker not in _SILENT:
            close(marker)
            inside = marker if marker in ("<|channel>", "<|tool_call>") else ""
        held.append(text)
    close("")
    return Reply("".join(answer), "\n".join(t for t in thoughts if t), tuple(calls))


def _thought(body: str, closed: bool) -> str:
    if body.startswith(_HEADER):
        body = body[len(_HEADER) :]
    elif not closed and _HEADER.startswith(body):
        return ""  # the header itself is still being written
    return body.removesuffix("\n")


def _tool_call(body: str, closed: bool) -> ToolCall | None:
    if not (match := _CALL.match(body)):
        return None
    values = _Values(body, match.end())
    arguments = values.object() if body[match.end() :] else {}
    return ToolCall(match[1], arguments, closed and values.sound and not body[values.at :].strip())


class _Values:
    """Reads `{key:value,…}` from the left; what is wrong or missing clears `sound` and ends the reading."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at, self.sound = text, at, True

    def object(self, depth: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not self._take("{"):
            return found
        while self.sound and not self._try("}"):
            key = self._key()
            if self._take(":") and self._more():
                found[key] = self._value(depth + 1)
                if not self._try(",") and not self._peek("}"):
                    self.sound = False
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self._take("[")
        while self.sound and not self._try("]"):
            if self._more():
                found.append(self._value(depth + 1))
            if not self._try(",") and not self._peek("]"):
                self.sound = False
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            self.sound = False
            return None
        if self._peek("{"):
            return self.object(depth)
        if self._peek("["):
            return self._list(depth)
        if (quoted := self._quoted()) is not None:
            return quoted
        return self._bare()

    def _key(self) -> str:
        if (quoted := self._quoted()) is not None:
            return quoted
        self._space()
        end = self.text.find(":", self.at)
        start, self.at = self.at, len(self.text) if end < 0 else end
        return self.text[start : self.at].rstrip()

    def _quoted(self) -> str | None:
        """A string in the model's quotes, or in JSON's, which models write too."""
        self._space()
        if self.text.startswith(QUOTE, self.at):
            start = self.at + len(QUOTE)
            end = self.text.find(QUOTE, start)
            self.sound &= end >= 0
            self.at = len(self.text) if end < 0 else end + len(QUOTE)
            return self.text[start : None if end < 0 else end]
        if self.text.startswith('"', self.at):
            try:
                value, self.at = _JSON.raw_decode(self.text, self.at)
            except ValueError:
                return None
            return str(value)
        return None

    def _bare(self) -> Any:
        """A number, true, false or null; any other word is taken as a string."""
        match = _BARE.match(self.text, self.at)
        assert match is not None  # it may match nothing, but it matches
        self.at = match.end()
        word = match[0].strip()
        if word in _WORDS:
            return _WORDS[word]
        if _NUMBER.fullmatch(word) and len(word) < 400:
            number = float(word) if set(word) & set(".eE") else int(word)
            return number if abs(number) != math.inf else word
        return word

    def _space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _more(self) -> bool:
        """Whether anything follows; a value must."""
        self._space()
        self.sound &= self.at < len(self.text)
        return self.sound

    def _peek(self, symbol: str) -> bool:
        self._space()
        return self.text.startswith(symbol, self.at)

    def _try(self, symbol: str) -> bool:
        if self._peek(symbol):
            self.at += len(symbol)
            return True
        return False

    def _take(self, symbol: str) -> bool:
        self.sound &= self._try(symbol)
        return self.sound
