"""The command as a process: ready in time, signals, mistakes, logs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from diffusiongemma.errors import ConfigError
from diffusiongemma.serve import logs
from diffusiongemma.serve.lifecycle import ServerState
from diffusiongemma.serve.metrics import ServerMetrics
from diffusiongemma.serve.server import bind
from diffusiongemma.serve.settings import Settings
from serve.live import (
    EMBEDDED,
    ENDLESS,
    HANGS,
    QUICK,
    check_error,
    get,
    post,
    process,
    random_model,
    serving,
    sse,
    wait_ready,
    wait_until,
)

FINE = {"prompt": "x", "max_tokens": 4, "seed": 1, "diffusion": QUICK}
LONG = {"prompt": "x", "max_tokens": 32, "seed": 1, "diffusion": ENDLESS | {"steps": 250}}


def name_of(url: str) -> str:
    found: str = get(f"{url}/v1/models").json()["data"][0]["id"]
    return found


def computed(program: str) -> float:
    """Seconds that another Python computes for this."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANGS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_and_stop() -> tuple[float, float]:
    """-> seconds until the embedded model is served, and those of them that the process computed"""
    began = time.monotonic()
    with process(model=EMBEDDED) as (started, url):
        wait_ready(url)
        seconds = time.monotonic() - began
        used = Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert post(f"{url}/v1/completions", {"model": name_of(url)} | FINE).status_code == 200
        started.send_signal(signal.SIGINT)
        assert started.wait(HANGS) == 0
        assert started.stderr is not None
        assert "Traceback" not in started.stderr.read()
    return seconds, sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def test_ready_within_seconds() -> None:
    """The goal is 5 s. On a machine that others use as well, the seconds that it computed are what it can answer for,
    and on a slow one it may take twice what nobody can do without: 1.1 to 1.3 of that were seen. The best of three
    counts."""
    tries = []
    for _ in range(3):
        seconds, own = start_and_stop()
        needed = computed("import fastapi, safetensors, tokenizers, torch, uvicorn")
        tries.append(f"{seconds:.1f} s, {own:.1f} s of computing, {needed:.1f} s of it for libraries")
        if min(seconds, own) < max(5, 2 * needed):
            return
    pytest.fail("; ".join(tries))


def test_sigterm_under_load_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    options = ("--batch", "2", "--queue", "50", "--grace", "600", "--log-json", "--log-file", str(log))
    with process(*options) as (started, url), ThreadPoolExecutor(12) as pool:
        wait_ready(url)
        body = {"model": name_of(url)} | LONG
        expected = post(f"{url}/v1/completions", body).json()["choices"][0]["text"]
        with httpx.Client(base_url=url, timeout=HANGS) as client:  # one for all: making ten takes long
            futures = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(10)]
            wait_until(lambda: client.get("/health").json()["waiting"] == 8)
            started.send_signal(signal.SIGTERM)
            responses = [future.result() for future in futures]
        assert started.wait(HANGS) == 0
        done = [r for r in responses if r.status_code == 200]
        assert len(done) == 2
        assert all(r.json()["choices"][0]["text"] == expected for r in done)
        for response in responses:
            if response.status_code != 200:
                assert check_error(response, 503)["code"] == "shutting_down"
        with pytest.raises(httpx.ConnectError):
            get(f"{url}/health")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["message"] == "ready" for line in lines)
    asked = [line for line in lines if line.get("path") == "/v1/completions"]
    assert sorted(line["status"] for line in asked) == [200] * 3 + [503] * 8
    assert {line["client"] for line in asked} == {"127.0.0.1"}


def test_after_the_time_of_grace_requests_are_cut_with_an_answer() -> None:
    with process("--grace", "0.3") as (started, url), ThreadPoolExecutor(2) as pool:
        wait_ready(url)
        body = {"model": name_of(url)} | LONG | {"max_tokens": 400, "diffusion": ENDLESS}
        whole = pool.submit(post, f"{url}/v1/completions", body)

        def stream() -> list[tuple[str | None, object]]:
            drafts = {"stream": True, "stream_options": {"include_drafts": True}}
            with httpx.stream("POST", f"{url}/v1/completions", json=body | drafts, timeout=HANGS) as response:
                return list(sse(response))

        streamed = pool.submit(stream)
        wait_until(lambda: get(f"{url}/health").json()["running"] == 2)
        began = time.monotonic()
        started.send_signal(signal.SIGTERM)
        check_error(whole.result(), 503)
        assert "shutting_down" in json.dumps(streamed.result())
        assert started.wait(HANGS) == 0
        assert time.monotonic() - began < 25  # and not after the 30 s that it would have of itself


def test_a_server_that_drains_is_not_ready() -> None:
    with serving() as live, live.client() as client:
        assert client.get("/ready").status_code == 200
        live.server.state.draining = True
        assert client.get("/ready").json() == {"ready": False, "status": "draining"}
        check_error(live.post("/v1/completions", FINE), 503)
        live.server.state.draining = False


def test_a_full_disk_does_not_stop_the_server() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with process("--log-file", "/dev/full") as (started, url):
        wait_ready(url)
        for _ in range(5):
            assert post(f"{url}/v1/completions", {"model": name_of(url)} | FINE).status_code == 200
        assert "dgemma_log_lines_lost 0.0" not in get(f"{url}/metrics").text
        started.send_signal(signal.SIGTERM)
        assert started.wait(HANGS) == 0


def test_a_model_that_is_not_there_is_a_message() -> None:
    command = [sys.executable, "-m", "diffusiongemma", "serve", "no-such-model", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 2
    assert "error: no folder no-such-model" in result.stderr
    assert "Traceback" not in result.stderr


def test_packed_experts_that_nobody_reads_are_a_message() -> None:
    command = [sys.executable, "-m", "diffusiongemma", "serve", random_model(), "--port", "0", "--device", "cpu"]
    result = subprocess.run([*command, "--packed"], capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 2
    assert "error: packed=True cannot be honoured" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("packed", [None, False])
def test_experts_that_shall_not_be_packed(packed: bool | None) -> None:
    with ServerState(Settings(model=random_model(), device="cpu", packed=packed)).load() as engine:
        assert engine.scheduler.limits.packed is packed


def test_a_port_that_is_taken_is_a_message() -> None:
    listener = bind(Settings(port=0))
    listener.listen()
    with listener, pytest.raises(ConfigError, match="cannot listen on"):
        bind(Settings(port=listener.getsockname()[1]))


def test_a_log_file_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the log file"):
        logs.set_up(False, tmp_path / "missing" / "log", ServerMetrics())
