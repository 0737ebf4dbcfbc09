"""Server-sent events: OpenAI's chunks, drafts for those who ask, errors that clients raise."""

from __future__ import annotations

import codecs
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diffusiongemma.engine import Draft
from diffusiongemma.serve.errors import CLIENT_GONE, ApiError
from diffusiongemma.text import Tokenizer

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"  # a comment, which clients skip
# Beside \r and \n, which JSON escapes anyway, these end a line for Python's splitlines, and so for whoever reads with
# httpx: a token of a draft would cut its event in two.
BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    def chunk(self, **fields: Any) -> bytes:
        return event({"id": self.id, "object": self.object, "created": self.created, "model": self.model, **fields})


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def event(data: Any, name: str | None = None) -> bytes:
    text = to_json(data)
    for raw, escaped in BREAKS.items():
        text = text.replace(raw, escaped)
    line = b"data: " + text + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line


def draft_event(head: Head, tokenizer: Tokenizer, index: int, draft: Draft, steps: int, skipped: int) -> bytes:
    pieces, special = text_pieces(tokenizer, draft.tokens)
    data = {
        "id": head.id,
        "object": "canvas.draft",
        "created": head.created,
        "model": head.model,
        "choices": [],  # so that a client which looks for text finds none
        "index": index,
        "block": draft.block,
        "step": draft.step,
        "steps": steps,
        "tokens": pieces,
        "entropy": [round(value, 3) for value in draft.entropy],
        "accepted": draft.accepted,
        "special": special,
        "skipped": skipped,
    }
    return event(data, "canvas.draft")


def text_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[list[str], list[int]]:
    """What each token adds to the text, and which are control tokens. Half a character comes with its last token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces, special = list[str](), list[int]()
    for at, token in enumerate(tokens):
        if tokenizer.is_special(token):
            pieces.append(decoder.decode(b"", final=True) + tokenizer.piece(token))
            decoder.reset()
            special.append(at)
        else:
            pieces.append(decoder.decode(tokenizer.token_bytes(token) or b""))
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces, special


class EventStream(Response):
    """`events` may raise: before its first event that is an ordinary error, later it is an event of its own."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(status_code=200, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._close = first, rest, close

    @classmethod
    async def open(cls, events: AsyncIterator[bytes], close: Callable[[], None]) -> EventStream:
        """Wait for the first event, so that what fails before it has a status of its own."""
        try:
            return cls(await anext(events), events, close)
        except BaseException:
            close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, self._first)
            try:
                async for data in self._rest:
                    await self._send(send, data)
            except ApiError as error:
                if error.status_code == CLIENT_GONE:
                    scope["ended_as"] = CLIENT_GONE
                    return
                scope["ended_as"] = error.status_code
                await self._send(send, event(error.body))
            except Exception:
                log.exception("a stream broke off")
                scope["ended_as"] = 500
                await self._send(send, event(ApiError(500, "the server made a mistake", code="internal").body))
            await self._send(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()

    @staticmethod
    async def _send(send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
