"""What breaks, and what comes that is no request at all: a clean answer or a clean close, and the server goes on."""

from __future__ import annotations

import ctypes
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from diffusiongemma.engine import Request
from serve.live import ENDLESS, HANGS, QUICK, Live, check_error, get, post, serving, sse, wait_until

FINE = {"prompt": "x", "max_tokens": 4, "seed": 1, "diffusion": QUICK}
DRAFTS = {"stream": True, "stream_options": {"include_drafts": True}}
SLOW = {"prompt": "x", "max_tokens": 200, "seed": 1, "diffusion": ENDLESS}


@pytest.fixture(scope="module")
def own() -> Iterator[Live]:
    """A server to be treated badly."""
    with serving(batch=4, queue=16, max_body=1 << 20, max_head=16 << 10) as live:
        yield live


@pytest.fixture(autouse=True)
def serves_on(own: Live) -> Iterator[None]:
    yield
    own.wait_idle()
    assert own.post("/v1/completions", FINE).status_code == 200


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANGS)


def raw(live: Live, data: bytes, chunk: int | None = None) -> bytes:
    """Send bytes, read until the server closes or answers."""
    with connect(live) as connection:
        try:
            for at in range(0, len(data), chunk or max(1, len(data))):
                connection.sendall(data[at : at + (chunk or len(data))])
        except (BrokenPipeError, ConnectionResetError):
            pass
        found = b""
        try:
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


def head(live: Live, *lines: str) -> bytes:
    address = live.url.removeprefix("http://")
    first = ["POST /v1/completions HTTP/1.1", f"Host: {address}", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def answer(data: bytes) -> tuple[int, dict[str, Any]]:
    top, _, body = data.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)["error"]


# ---- the engine ------------------------------------------------------------------------------------------------------


def kill_worker(live: Live) -> None:
    """The worst that can happen to a thread: it is ended from outside, whatever it is doing."""
    thread = live.engine.worker._thread
    assert thread is not None
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    thread.join(HANGS)
    assert not thread.is_alive()


def test_a_dead_worker_is_told_and_replaced(own: Live) -> None:
    before = own.server.state.health().engine_failures
    with ThreadPoolExecutor(4) as pool:
        hole = {"template": "a[[?4]]b", "candidates": 1, "diffusion": {"steps": 1000, "early_stop": False}}
        with own.held():
            futures = [pool.submit(own.post, "/v1/completions", SLOW), pool.submit(own.post, "/v1/canvas/infill", hole)]
            wait_until(lambda: own.server.state.health().running == 2)
        wait_until(lambda: len(own.engine.scheduler.running) == 2)
        kill_worker(own)
        for future in futures:
            response = future.result()
            error = check_error(response, 503)
            assert error["code"] == "engine_failed"
            assert int(response.headers["retry-after"]) >= 1
    health = get(f"{own.url}/health")
    assert health.status_code == 200
    assert health.json()["engine_failures"] == before + 1
    assert health.json()["last_failure"]["error"] == "SystemExit"


def test_a_stream_under_a_dead_worker_ends_with_an_error(own: Live) -> None:
    with (
        own.client() as client,
        client.stream("POST", "/v1/completions", json={"model": own.model, **DRAFTS} | SLOW) as response,
    ):
        assert response.status_code == 200
        threading.Timer(0.1, kill_worker, [own]).start()
        events = list(sse(response))
    assert events[-2][1]["error"]["code"] == "engine_failed"
    assert events[-1] == ("done", None)


def test_a_failing_step_is_told_and_the_next_request_is_served(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a secret of somebody's prompt"

    def broken(*_: Any) -> None:
        raise RuntimeError(secret)

    with monkeypatch.context() as patch:
        patch.setattr(own.engine.scheduler.runner, "denoise", broken)
        for _ in range(3):
            response = own.post("/v1/completions", FINE)
            check_error(response, 503)
            assert secret not in response.text
        health = get(f"{own.url}/health")
        assert health.status_code == 503  # three in a row: whoever looks after it should start it anew
        assert health.json()["status"] == "failing"
        assert secret not in health.text
        assert get(f"{own.url}/ready").status_code == 503
    assert own.post("/v1/completions", FINE).status_code == 200
    assert get(f"{own.url}/health").json()["status"] == "ok"


def test_a_mistake_of_the_server_has_the_body_too(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusiongemma.serve.completions.plan", lambda *_: 1 / 0)
    error = check_error(own.post("/v1/completions", FINE), 500)
    assert error["type"] == "server_error"
    assert "division" not in error["message"]


def test_a_request_too_large_for_the_memory_is_refused_not_failed(own: Live) -> None:
    limits = own.engine.scheduler.limits
    before = limits.max_bytes
    object.__setattr__(limits, "max_bytes", 1000)
    try:
        for path, body in (
            ("completions", FINE),
            ("canvas/infill", {"template": "a[[?2]]", "diffusion": {"steps": 1}}),
        ):
            error = check_error(own.post(f"/v1/{path}", body), 400)
            assert "K/V cache" in error["message"]
    finally:
        object.__setattr__(limits, "max_bytes", before)


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_a_429(own: Live) -> None:
    with ThreadPoolExecutor(40) as pool:
        body = SLOW | {"max_tokens": 16, "diffusion": ENDLESS | {"steps": 30}}
        with own.held():
            futures = [pool.submit(own.post, "/v1/completions", body) for _ in range(40)]
            wait_until(lambda: sum(future.done() for future in futures) == 20, "those without a place are answered")
        responses = [future.result() for future in futures]
    found = [response.status_code for response in responses]
    assert sorted(found) == [200] * 20 + [429] * 20  # four rows and a queue of sixteen
    texts = {r.json()["choices"][0]["text"] for r in responses if r.status_code == 200}
    assert len(texts) == 1  # the same seed, whoever was beside it
    for response in responses:
        if response.status_code == 429:
            assert check_error(response, 429)["code"] == "queue_full"
            assert 1 <= int(response.headers["retry-after"]) <= 60


def test_a_greedy_client_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("greedy-key-0123456789", "polite-key-0123456789")
    with serving(batch=1, queue=8, keys=keys) as live, ThreadPoolExecutor(12) as pool:
        body = {"model": live.model} | SLOW | {"max_tokens": 16, "diffusion": ENDLESS | {"steps": 40}}
        order: list[int | None] = []  # the seeds of those that the engine was given
        submit = live.engine.submit_group

        def note(requests: Sequence[Request], *rest: Any) -> Any:
            order.extend(request.params.seed for request in requests)
            return submit(requests, *rest)

        monkeypatch.setattr(live.engine, "submit_group", note)

        def ask(who: int) -> int:
            headers = {"Authorization": f"Bearer {keys[who]}"}
            return post(f"{live.url}/v1/completions", body | {"seed": who}, headers=headers).status_code

        with live.held():
            greedy = [pool.submit(ask, 0) for _ in range(9)]
            wait_until(lambda: live.server.state.health().waiting == 8)
            polite = pool.submit(ask, 1)  # the queue is full of the other's
            wait_until(lambda: any(future.done() for future in greedy), "one gives way")
        assert polite.result() == 200
        assert sorted(future.result() for future in greedy) == [200] * 8 + [429]
        assert order.index(1) <= 2  # behind the one that ran, and one more at most


def test_leaving_the_queue_leaves_no_trace(own: Live) -> None:
    body = json.dumps({"model": own.model} | FINE).encode()
    with ThreadPoolExecutor(1) as pool, own.held():
        running = pool.submit(
            own.post, "/v1/completions", SLOW | {"n": 4, "max_tokens": 4, "diffusion": ENDLESS | {"steps": 30}}
        )
        wait_until(lambda: own.server.state.health().running == 4)
        impatient = [connect(own) for _ in range(3)]
        for connection in impatient:
            connection.sendall(head(own, f"Content-Length: {len(body)}") + body)
        wait_until(lambda: own.server.state.health().waiting == 3)
        for connection in impatient:
            connection.close()
        wait_until(lambda: own.server.state.health().waiting == 0)
    assert running.result().status_code == 200


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{}",
        b'{"model": "\xc3\x28"}',
        b'{"model": "\\ud800"}',
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"NaN",
        b'{"model": "x", "temperature": NaN}',
        b'{"model": "x", "temperature": 1e999}',
        b'{"model": "x", "seed": ' + b"9" * 5000 + b"}",
        b"",
        b"\x00" * 1000,
    ],
)
def test_bodies_that_are_no_request(own: Live, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{own.url}/v1/completions", content=body, headers=headers, timeout=HANGS)
    check_error(response, 400)


def test_a_deep_value_in_a_free_field(own: Live) -> None:
    deep: Any = {}
    for _ in range(150):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 2, "diffusion": QUICK}
    assert own.post("/v1/chat/completions", body).status_code in (200, 400)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb(own: Live, declared: bool) -> None:
    size, part = 100 << 20, b"x" * (1 << 20)

    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield part

    headers = {"Content-Type": "application/json"} | ({"Content-Length": str(size)} if declared else {})
    response = httpx.post(f"{own.url}/v1/completions", content=parts(), headers=headers, timeout=HANGS)
    check_error(response, 413)


def test_a_body_that_says_it_is_endless(own: Live) -> None:
    for length, expected in (("1000000000000", (413, "too_large")), ("9" * 30, (400, "bad_http"))):
        status, error = answer(raw(own, head(own, f"Content-Length: {length}")))
        assert (status, error["code"]) == expected


def test_headers_by_the_thousand(own: Live) -> None:
    flood = [f"X-Flood-{i}: {'y' * 50}" for i in range(10_000)]
    data = raw(own, head(own, *flood), chunk=4096)
    if data:  # the answer may be lost on a connection that the client still writes to
        status, error = answer(data)
        assert status == 400
        assert error["code"] == "bad_http"


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET /\r\n", b"\r\n" * 50 + b"nonsense\r\n\r\n", b"\x00" * 500],
)
def test_what_is_no_http(own: Live, data: bytes) -> None:
    status, error = answer(raw(own, data + b"\r\n\r\n"))
    assert status == 400
    assert error["code"] == "bad_http"


def test_a_request_that_never_ends_is_closed() -> None:
    with serving(receive_seconds=0.5) as live:
        for data, told in (
            (b"POST /v1/completions HTTP/1.1\r\nHost: ", (408, "too_slow")),
            (head(live, "Content-Length: 100") + b"{", None),  # nor is one waited for whose body does not come
            (b"", None),  # nor one that does not even begin
        ):
            began = time.monotonic()
            found = raw(live, data)
            assert time.monotonic() - began < 25  # and not after the 30 s that it would have of itself
            if told is None:
                assert found == b""
            else:
                status, error = answer(found)
                assert (status, error["code"]) == told


def test_connections_are_bounded() -> None:
    with serving(connections=5) as live:
        open_now = live.server.server_state.connections
        wait_until(lambda: not open_now)
        held = [connect(live) for _ in range(5)]
        wait_until(lambda: len(open_now) == 5)
        status, error = answer(raw(live, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert (status, error["code"]) == (503, "too_many_connections")
        for connection in held:
            connection.close()
        wait_until(lambda: not open_now)
        assert get(f"{live.url}/health").status_code == 200
