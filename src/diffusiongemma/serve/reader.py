"""A chat reply as it comes, taken apart: answer, thinking, tool calls.

The engine says how much text is certain (a stop text may have begun, a character may be half written); the tokens say
what each piece of it is. So pieces wait here until the engine has told as many characters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from diffusiongemma.engine import Commit, TokenLogprob
from diffusiongemma.text import Detokenizer, Tokenizer, ToolCall, parse_ids

OPEN_THOUGHT, CLOSE_THOUGHT, OPEN_CALL, CLOSE_CALL = "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"
ENDS = ("<turn|>", "<eos>", "<|tool_response>")  # what comes behind these is no part of the reply
_HEADER = "thought\n"
Kind = Literal["answer", "thought", "call"]


@dataclass
class Delta:
    """What became certain."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


@dataclass
class _Piece:
    kind: Kind
    text: str
    cost: int  # characters of the engine's text that it stands for
    call: ToolCall | None = None
    ends: Literal["closed", "cut"] | None = None  # of a thought


class ReplyReader:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = (OPEN_THOUGHT, CLOSE_THOUGHT, OPEN_CALL, CLOSE_CALL, *ENDS)
        self._markers = {tokenizer.special[name]: name for name in names if name in tokenizer.special}
        self._detokenizer = Detokenizer(tokenizer, skip_special=True)
        self._kind: Kind = "answer"
        self._call: list[int] = []  # tokens of the call that is being written
        self._pieces: deque[_Piece] = deque()
        self._room = 0  # characters that the engine has told and that are not given out yet
        self._thought = _Thought()
        self._over = False
        self.thought_tokens = 0

    def push(self, commit: Commit) -> Delta:
        self._room += len(commit.text)
        delta = Delta()
        scored: Sequence[TokenLogprob | None] = commit.logprobs or [None] * len(commit.tokens)
        for token, logprob in zip(commit.tokens, scored, strict=True):
            self._take(token)
            plain = self._kind == "answer" and not self._over and not self._tokenizer.is_special(token)
            if logprob is not None and plain:
                delta.logprobs.append(logprob)
        self._release(delta)
        return delta

    def finish(self) -> Delta:
        """The reply is over: what is still open is read as far as it goes."""
        delta = Delta()
        if not self._over:
            self._put(self._detokenizer.finish())
        if self._kind == "call":
            self._end_call()
        self._release(delta)
        return delta

    def _take(self, token: int) -> None:
        marker = self._markers.get(token)
        self._over |= marker in ENDS
        if self._over:
            return
        self.thought_tokens += self._kind == "thought" and marker is None
        if marker is None:
            self._put(self._detokenizer.push([token]))
            if self._kind == "call":
                self._call.append(token)
            return
        if self._kind == "call":
            self._call.append(token)
            self._end_call()
        elif self._kind == "thought":
            self._pieces.append(_Piece("thought", "", 0, ends="closed" if marker == CLOSE_THOUGHT else "cut"))
        self._kind = {OPEN_THOUGHT: "thought", OPEN_CALL: "call"}.get(marker, "answer")  # type: ignore[assignment]
        if marker == OPEN_CALL:
            self._call = [token]

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(_Piece(self._kind, text, len(text)))

    def _end_call(self) -> None:
        reply = parse_ids(self._tokenizer, self._call)
        for call in reply.tool_calls:
            self._pieces.append(_Piece("call", "", 0, call))
        if reply.text:  # a call that nobody can read is shown, not lost
            self._pieces.append(_Piece("answer", reply.text, 0))
        self._call, self._kind = [], "answer"

    def _release(self, delta: Delta) -> None:
        while self._pieces:
            piece = self._pieces[0]
            if piece.cost > self._room:
                if not self._room:
                    return
                rest, taken = piece.text[self._room :], self._room
                piece = _Piece(piece.kind, piece.text[:taken], taken)
                self._pieces[0] = _Piece(piece.kind, rest, len(rest))
            else:
                self._pieces.popleft()
            self._room -= piece.cost
            if piece.call is not None:
                delta.calls.append(piece.call)
            elif piece.kind == "answer":
                delta.content += piece.text
            elif piece.kind == "thought":
                delta.reasoning += self._thought.push(piece.text)
                if piece.ends:
                    delta.reasoning += self._thought.end(piece.ends == "closed")


class _Thought:
    """The text of thoughts without their header and their last line break; several are joined by one."""

    def __init__(self) -> None:
        self._told = False
        self._begin()

    def _begin(self) -> None:
        self._head: str | None = ""  # None: the header is behind us
        self._held = ""
        self._join = self._told

    def push(self, text: str) -> str:
        if self._head is not None:
            self._head += text
            if len(self._head) < len(_HEADER) and _HEADER.startswith(self._head):
                return ""  # the header itself is still being written
            text, self._head = self._head.removeprefix(_HEADER), None
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return self._tell(text.removesuffix("\n"))

    def end(self, closed: bool) -> str:
        """A whole thought that looks like the beginning of a header is one; a cut one may be a header."""
        out = self._tell(self._head or "") if closed else ""
        self._begin()
        return out

    def _tell(self, text: str) -> str:
        if not text:
            return ""
        joined = "\n" + text if self._join else text
        self._join, self._told = False, True
        return joined
