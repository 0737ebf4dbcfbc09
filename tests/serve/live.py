"""A live server on loopback, for tests: in a thread of this process, or as the command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
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
HANGS = 120.0  # seconds after which something hangs; a machine that others use as well may be slow


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
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANGS, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json={"model": self.model} | body, **options)

    def wait_idle(self) -> None:
        def idle() -> bool:
            health = self.server.state.health()
            return health.running == health.waiting == 0 and not self.engine.scheduler.busy

        wait_until(idle, "the engine is idle")

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """The engine stands still behind its next step -> what lets it go on. Who runs and who waits is settled then,
        however fast requests come and steps go."""
        released = False

        def stand() -> None:
            while not released:
                time.sleep(0.001)  # not an Event: a thread that is to die must notice it

        def release() -> None:
            nonlocal released
            released = True

        self.engine.scheduler.on_tick = stand
        try:
            yield release
        finally:
            self.engine.scheduler.on_tick = None
            release()


@contextmanager
def serving(**options: Any) -> Iterator[Live]:
    """A server in a thread."""
    settings = Settings(**{"model": random_model(), "port": 0} | options)
    server, listener = Server(settings), bind(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    live = Live(server, f"http://127.0.0.1:{listener.getsockname()[1]}", settings.keys[0] if settings.keys else None)
    try:
        wait_until(lambda: server.state.status != "loading" or server.state.load_error is not None, "loaded")
        assert server.state.load_error is None, server.state.load_error
        yield live
    finally:
        server.stop()
        thread.join(HANGS)
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
        started.wait(HANGS)
        for pipe in (started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()


def wait_until(true: Callable[[], bool], what: str = "what was waited for") -> None:
    until = time.monotonic() + HANGS
    while not true():
        assert time.monotonic() < until, f"{what}: not after {HANGS:.0f} s"
        time.sleep(0.005)


def send(method: str, url: str, **options: Any) -> httpx.Response:
    """Of itself httpx waits five seconds for an answer, which is little on a busy machine."""
    return httpx.request(method, url, **{"timeout": HANGS} | options)


def get(url: str, **options: Any) -> httpx.Response:
    return send("GET", url, **options)


def post(url: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return send("POST", url, json=body, **options)


def wait_ready(url: str) -> None:
    def ready() -> bool:
        try:
            return get(url + "/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, "the server is ready")


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
