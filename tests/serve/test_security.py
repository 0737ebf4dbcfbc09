"""Keys, hosts, origins, sizes, headers, and what must never be told."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffusiongemma.cli import app
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.errors import ConfigError
from diffusiongemma.serve import logs
from diffusiongemma.serve.metrics import ServerMetrics
from diffusiongemma.serve.security import Keys
from diffusiongemma.serve.settings import KEYS_VARIABLE, Settings, is_loopback, read_keys
from engine.runners import fast_engine
from serve.live import HANGS, QUICK, Live, check_error, get, post, send, serving, wait_until

KEYS = ("first-key-0123456789", "second-key-0123456789")
SECRET = "the-text-of-a-client"
BODY = {"prompt": SECRET, "max_tokens": 2, "diffusion": QUICK, "user": "someone"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with serving(keys=KEYS, cors_origins=("https://friend.example",)) as live:
        yield live


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", "Bearer \xff"])
def test_no_key_no_answer(locked: Live, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
        response = get(locked.url + path, headers=headers)
        assert check_error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    check_error(post(f"{locked.url}/v1/completions", {"model": locked.model} | BODY, headers=headers), 401)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_works(locked: Live, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert get(f"{locked.url}/v1/models", headers=headers).status_code == 200


def test_health_needs_no_key(locked: Live) -> None:
    assert get(f"{locked.url}/health").json()["status"] == "ok"
    assert get(f"{locked.url}/ready").status_code == 200


def test_keys_are_told_apart_by_number() -> None:
    keys = Keys(KEYS)
    assert [keys.find(key) for key in (*KEYS, "other")] == ["key-1", "key-2", None]
    assert not Keys([])
    assert KEYS[0] not in repr(vars(keys))


def test_another_address_demands_keys() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(ConfigError, match="API keys are needed"):
            Settings(host=host)
        assert Settings(host=host, keys=KEYS).host == host
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        Settings(host=host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": ("short",)}, "at least 16"),
        ({"keys": ("a key with spaces in it",)}, "visible ASCII"),
        ({"cors_origins": ("*",)}, "CORS origin"),
        ({"cors_origins": ("https://x.org/path",)}, "CORS origin"),
        ({"queue": 0}, "queue must be"),
        ({"port": 70000}, "port must be"),
        ({"batch": 0}, "batch must be"),
        ({"cache": 0}, "--cache-mib"),
        ({"max_body": float("inf")}, "--max-body-mib"),  # with a traceback
        ({"grace": float("inf")}, "grace must be a number"),
        ({"request_seconds": float("nan")}, "request_seconds must be a number"),
        ({"name": ""}, "name must have"),  # no request could ask for it
    ],
)
def test_settings_check_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**options)


def test_a_limit_may_be_any_whole_number() -> None:
    assert Settings(max_tokens=10**330).max_tokens == 10**330  # it ended in an OverflowError


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEYS[0]}\n\n  {KEYS[1]}  \n")
    monkeypatch.setenv(KEYS_VARIABLE, f"third-key-0123456789, {KEYS[0]}")
    assert read_keys(file) == ("third-key-0123456789", *KEYS)
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_keys(None) == ()
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_keys(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "missing")


def test_the_command_refuses_an_open_server() -> None:
    result = CliRunner().invoke(app, ["serve", "random:tiny", "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigError)
    assert "API keys are needed" in str(result.exception)


# ---- browsers --------------------------------------------------------------------------------------------------------


def test_a_foreign_name_is_not_answered(live: Live) -> None:
    """A page whose name was made to point here would otherwise be of the same origin."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""):
        error = check_error(get(f"{live.url}/health", headers={"Host": host}), 403)
        assert error["code"] == "foreign_host"
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:8000"):
        assert get(f"{live.url}/health", headers={"Host": host}).status_code == 200


def test_a_foreign_origin_is_not_answered(live: Live) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example"):
        response = post(f"{live.url}/v1/completions", {"model": live.model} | BODY, headers={"Origin": origin})
        assert check_error(response, 403)["code"] == "foreign_origin"
        assert "access-control-allow-origin" not in response.headers
    assert get(f"{live.url}/v1/models", headers={"Origin": live.url}).status_code == 200


def test_a_named_origin_may_ask(locked: Live) -> None:
    ask = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = send("OPTIONS", f"{locked.url}/v1/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://friend.example"
    answer = locked.post("/v1/completions", BODY, headers={"Origin": "https://friend.example"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    other = send("OPTIONS", f"{locked.url}/v1/completions", headers=ask | {"Origin": "https://other.example"})
    check_error(other, 403)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_only_json_is_read(live: Live, kind: str) -> None:
    """What a browser sends to any server without asking first does nothing here."""
    content = json.dumps({"model": live.model} | BODY).encode()
    response = send("POST", f"{live.url}/v1/completions", content=content, headers={"Content-Type": kind})
    check_error(response, 415)


def test_every_answer_is_guarded(live: Live) -> None:
    for path in ("/health", "/docs", "/v1/models", "/nowhere", "/metrics", "/docs.css"):
        headers = get(live.url + path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-request-id"].startswith("req_")
        assert "server" not in headers


def test_the_docs_page_needs_nothing_from_elsewhere(live: Live) -> None:
    page = get(f"{live.url}/docs").text
    assert "<script" not in page
    assert "style=" not in page
    assert "http://" not in page.replace(live.url, "")
    assert "https://" not in page
    for path in ("/v1/chat/completions", "/v1/canvas/infill", "/health"):
        assert path in page
    assert "Not honoured" in page


# ---- logs and metrics ------------------------------------------------------------------------------------------------


def test_nothing_of_a_client_is_in_logs_or_metrics(locked: Live) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("diffusiongemma")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        answers = [
            locked.post("/v1/completions", BODY),
            locked.post("/v1/completions", BODY | {SECRET: 1}),
            locked.post("/v1/completions", BODY | {"diffusion": {"mode": SECRET}}),
            get(f"{locked.url}/v1/models", headers={"Authorization": f"Bearer {SECRET}"}),
        ]
        names = [answer.headers["x-request-id"] for answer in answers]
        # A line is written behind its answer.
        wait_until(lambda: all(name in written.getvalue() for name in names), "a line for every request")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    found = {line["request_id"]: line for line in lines if line["message"] == "request"}
    requests = [found[name] for name in names]
    assert [line["status"] for line in requests] == [answer.status_code for answer in answers] == [200, 400, 400, 401]
    assert requests[0]["client"] == "key-1"
    assert requests[0]["user"] == "someone"
    assert requests[0]["request_id"].startswith("req_")
    with locked.client() as client:
        metrics = client.get("/metrics").text
    for secret in (SECRET, *KEYS):
        assert secret not in written.getvalue()
        assert secret not in metrics
    assert 'dgemma_requests_total{path="/v1/completions",status="200"}' in metrics
    assert "dgemma_new_tokens_total" in metrics
    get(f"{locked.url}/{SECRET}", headers={"Authorization": f"Bearer {KEYS[0]}"})
    with locked.client() as client:
        assert SECRET not in client.get("/metrics").text  # nor a path that somebody made up


def test_a_line_cannot_be_forged() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "request", (), None)
    record.fields = {"path": "/a\nERROR fake", "user": "b c"}  # type: ignore[attr-defined]
    for formatter in (logs.Lines(), logs.JsonLines()):
        assert "\n" not in formatter.format(record)


def test_recorded_passes_are_counted() -> None:
    metrics = ServerMetrics()
    with fast_engine() as engine:
        metrics.watch(engine)
        runner = engine.scheduler.runner
        assert isinstance(runner, FastRunner)
        runner.recorder.recorded, runner.recorder.shelves.dropped = 7, 2
        assert b"dgemma_passes_recorded 7.0" in metrics.text()
        assert b"dgemma_passes_dropped 2.0" in metrics.text()


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    metrics = ServerMetrics()
    before = {name: list(logging.getLogger(name).handlers) for name in ("diffusiongemma", "uvicorn")}
    handler = logs.set_up(True, Path("/dev/full"), metrics)
    try:
        for _ in range(3):
            logging.getLogger("diffusiongemma.serve").info("hello")
        assert handler.lost == 3
        assert b"dgemma_log_lines_lost 3.0" in metrics.text()
    finally:
        with contextlib.suppress(OSError):
            handler.close()
        for name, handlers in before.items():
            logging.getLogger(name).handlers = handlers
            logging.getLogger(name).propagate = True


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods_have_the_body(live: Live) -> None:
    check_error(get(f"{live.url}/v1/nowhere"), 404)
    response = send("DELETE", f"{live.url}/v1/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(get(f"{live.url}/v1/models/../../etc/passwd"), 404)
    check_error(get(f"{live.url}/studio/..%2f..%2fapp.py"), 404)


def test_header_names_that_are_no_http(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANGS)
    connection.putrequest("GET", "/health", skip_host=True)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"]["code"] == "bad_http"
    connection.close()
