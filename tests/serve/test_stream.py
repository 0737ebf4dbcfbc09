"""Server-sent events: what a draft says, and what a slow reader gets."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from diffusiongemma.serve.stream import event, text_pieces
from diffusiongemma.text.bytes import byte_tokenizer
from serve.live import HANGS, QUICK, Live, serving, sse, wait_until

ASK = [{"role": "user", "content": "12 + 30 ="}]


def stream(live: Live, path: str = "/v1/chat/completions", **body: Any) -> list[tuple[str | None, Any]]:
    given = {"model": live.model, "messages": ASK, "max_tokens": 12, "seed": 1, "stream": True, "diffusion": QUICK}
    with live.client() as client, client.stream("POST", path, json=given | body) as response:
        assert response.status_code == 200
        return list(sse(response))


def test_drafts_say_what_the_engine_says(live: Live) -> None:
    events = stream(live, stream_options={"include_drafts": True})
    drafts = [data for name, data in events if name == "canvas.draft"]
    request = live.engine.request(ASK, max_new_tokens=12, seed=1, **QUICK)
    expected = [event for event in live.engine.events(request) if event.kind == "draft"]
    assert len(drafts) == len(expected)
    tokenizer = live.engine.tokenizer
    for found, draft in zip(drafts, expected, strict=True):
        assert (found["block"], found["step"], found["steps"]) == (draft.block, draft.step, QUICK["steps"])
        assert found["accepted"] == draft.accepted
        assert found["entropy"] == [round(value, 3) for value in draft.entropy]
        assert len(found["tokens"]) == len(draft.tokens) == 16
        assert found["special"] == [i for i, token in enumerate(draft.tokens) if tokenizer.is_special(token)]
        assert found["skipped"] == 0
        assert found["choices"] == []
    assert drafts[0]["id"] == events[0][1]["id"]


def test_without_asking_there_are_only_chunks(live: Live) -> None:
    events = stream(live)
    assert {name for name, _ in events} == {None, "done"}
    assert {data["object"] for _, data in events[:-1]} == {"chat.completion.chunk"}
    assert all(set(data["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"} for _, data in events[:-1])


def test_a_silent_stream_says_that_it_is_alive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusiongemma.serve.work.BEAT", 0.02)
    slow = {"steps": 4, "early_stop": False, "canvas": 16}
    for path, body in (
        ("chat/completions", {"messages": ASK, "max_tokens": 16}),
        ("completions", {"prompt": "x", "max_tokens": 16}),
        ("canvas/edit", {"text": "abcdefgh"}),
    ):
        diffusion = slow if path != "canvas/edit" else {k: v for k, v in slow.items() if k != "canvas"}
        given = {"model": live.model, "stream": True, "seed": 1, "diffusion": diffusion} | body
        with (
            live.held() as go_on,
            live.client() as client,
            client.stream("POST", f"/v1/{path}", json=given) as response,
        ):
            lines, said = response.iter_lines(), list[str]()
            while said.count(": alive") < 2:
                said.append(next(lines))
            go_on()
            rest = list(lines)
        assert set(said) == {": alive", ""}  # nothing else came before
        assert "data: [DONE]" in rest


def test_pieces_join_to_the_text() -> None:
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("a€b"), tokenizer.special["<eos>"], *tokenizer.encode("🙂")[:2]]
    pieces, special = text_pieces(tokenizer, ids)
    assert pieces == ["a", "", "", "€", "b", "<eos>", "", "\ufffd"]
    assert special == [5]
    assert text_pieces(tokenizer, []) == ([], [])


def test_no_text_ends_a_line() -> None:
    """A draft may hold any character, and httpx takes more for the end of a line than the standard does."""
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029])) + "é\\u2028"
    data, *rest = event({"tokens": [text]}).decode().splitlines()
    assert rest == [""]
    assert json.loads(data.removeprefix("data: ")) == {"tokens": [text]}


def raw_request(live: Live, body: dict[str, Any], receive_buffer: int) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(HANGS)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.fixture
def slow_body(live: Live) -> dict[str, Any]:
    """Half a megabyte of drafts, made much faster than a small window takes them."""
    diffusion = {"steps": 160, "early_stop": False, "canvas": 16}
    return {
        "model": live.model, "prompt": "x", "max_tokens": 16, "n": 4, "seed": 1, "stream": True,
        "stream_options": {"include_drafts": True}, "diffusion": diffusion,
    }  # fmt: skip


def test_a_slow_reader_holds_nothing_and_still_gets_its_text(live: Live, slow_body: dict[str, Any]) -> None:
    expected = live.post("/v1/completions", {k: v for k, v in slow_body.items() if not k.startswith("stream")}).json()
    connection = raw_request(live, slow_body, 4096)
    try:
        connection.recv(100)
        live.wait_idle()  # the engine is done, though next to nothing was read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        data = b""
        while b"[DONE]" not in data:
            part = connection.recv(1 << 16)
            assert part, "closed before the end"
            data += part
    finally:
        connection.close()
    lines = [line.removeprefix("data: ") for line in data.decode().replace("\r\n", "\n").split("\n")]
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    texts = ["", "", "", ""]
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]
    drafts = [one for one in found if one["object"] == "canvas.draft"]
    assert sum(one["skipped"] for one in drafts) > 0  # drafts that it could not take were left out, and counted


def test_a_reader_that_never_reads_is_disconnected(slow_body: dict[str, Any]) -> None:
    with serving(stall_seconds=0.5) as live:
        connection = raw_request(live, slow_body | {"model": live.model}, 2048)
        try:
            wait_until(lambda: b"dgemma_requests_total{" in live.server.state.metrics.text(), "the request has ended")
            wait_until(lambda: not live.server.server_state.connections, "the connection is closed")
        finally:
            connection.close()
        live.wait_idle()
