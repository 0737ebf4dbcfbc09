"""A live server on loopback, for tests: in a thread of this process, or as the command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import httpx

from diffusiongemma import ModelConfig
from diffusiongemma.checkpoint import save_model
from diffusiongemma.engine.engine import ASSETS, Engine
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.serve.server import Server, bind
from diffusiongemma.serve.settings import Settings
from diffusiongemma.text import default_chat_template
from diffusiongemma.text.bytes import byte_tokenizer

T = TypeVar("T")
# The one place that says which model stands for what is shipped: the clients' suite and the document's examples run on
# it. Everything else is about the server, and runs on a small random model.
EMBEDDED = "nano" if (ASSETS / "nano" / "config.json").is_file() else ""

QUICK: dict[str, Any] = {"steps": 3, "canvas": 16}  # a canvas of a few milliseconds
ENDLESS: dict[str, Any] = {"steps": 1000, "early_stop": False, "canvas": 16}  # … and one that takes its time


@cache
def random_model() -> str:
    """A random network that speaks DiffusionGemma's chat format."""
    folder = Path(mkdtemp(prefix="dgemma-serve-")) / "tiny-chat"
    config = ModelConfig.preset("tiny", num_hidden_layers=2)
    save_model(DiffusionGemma(config).init_weights(1, std=0.1), folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(default_chat_template(), encoding="utf-8")
    return str(folder)


@dataclass
class Live:
    server: Server
    url: str
    key: str | None = None

    @property
    def model(self) -> str:
        return self.server.state.model_name

    @property
    def engine(self) -> Engine:
        return self.server.state.engine

    def client(self, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json={"model": self.model} | body, **options)

    def wait_idle(self, seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            health = self.server.state.health()
            if health.running == health.waiting == 0 and not self.engine.scheduler.busy:
                return
            time.sleep(0.005)
        raise AssertionError(f"still busy: {health}")


@contextmanager
def serving(**options: Any) -> Iterator[Live]:
    """A server in a thread."""
    settings = Settings(**{"model": random_model(), "port": 0} | options)
    server, listener = Server(settings), bind(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    live = Live(server, f"http://127.0.0.1:{listener.getsockname()[1]}", settings.keys[0] if settings.keys else None)
    try:
        until = time.monotonic() + 60
        while server.state.status == "loading":
            assert time.monotonic() < until, "the model was not loaded in time"
            assert server.state.load_error is None, server.state.load_error
            time.sleep(0.01)
        yield live
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def process(*args: str, model: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`dgemma serve` as a command -> the process and the address that it says it serves on"""
    command = [sys.executable, "-m", "diffusiongemma", "serve", model or random_model(), "--port", "0", *args]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        yield started, line.split()[-1] if line else ""
    finally:
        if started.poll() is None:
            started.kill()
        started.wait(30)
        for pipe in (started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()


def wait_ready(url: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if httpx.get(url + "/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError("the server was not ready in time")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """On a thread of its own: where the studio's tests came first, this one has Playwright's loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def sse(response: httpx.Response) -> Iterator[tuple[str | None, Any]]:
    """Events of a stream as (name, JSON); the last is ("done", None)."""
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield ("done", None) if data == "[DONE]" else (name, json.loads(data))
            name = None


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Every error has OpenAI's body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error
