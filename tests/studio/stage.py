"""A real server and a real Chromium, for tests of the studio and for its screenshots."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Route

from diffusiongemma.engine.engine import ASSETS

HERE = "nano" if (ASSETS / "nano" / "config.json").is_file() else "random:tiny"
MODEL = os.environ.get("DGEMMA_TEST_MODEL", HERE)
SHIPPED = MODEL == "nano"
SHAPE = '<path fill="none" stroke="currentColor" d="M12 3l3 6h6l-5 5 2 7-6-4-6 4z"/>'
STAR = f'<svg viewBox="0 0 24 24">{SHAPE}</svg>'
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run", "--disable-dev-shm-usage"]  # the last: a container may have little of it
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
HANGS = 240.0  # seconds after which something hangs; on a busy machine an icon alone takes more than 40


def find_chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def launch(playwright: Playwright, path: str) -> Browser:
    return playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * HANGS)


@dataclass
class Served:
    """`dgemma serve` in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    key: str | None = None

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=HANGS).json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        model = self.get("/v1/models")["data"][0]["id"]
        return httpx.post(self.url + path, json={"model": model, **body}, timeout=HANGS).raise_for_status().json()

    def left(self) -> float:
        """How many requests have ended before their answer did, since nobody read it any more."""
        lines = httpx.get(self.url + "/metrics", timeout=HANGS).text.splitlines()
        gone = [line for line in lines if line.startswith("dgemma_requests_total{") and 'status="499"' in line]
        return sum(float(line.split()[-1]) for line in gone)

    def wait_left(self, count: float) -> None:
        """Until so many have, and nothing runs or waits any more."""
        until = time.monotonic() + HANGS
        while self.left() < count or any(self.get("/health")[name] for name in ("running", "waiting")):
            assert time.monotonic() < until, f"not stopped, or still busy: {self.get('/health')}"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANGS)


def free_port() -> int:
    """One that can be taken again later: of itself the system hands out none below 32768, so it stays free."""
    while True:
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port := SystemRandom().randrange(20_000, 30_000)))
                return port
            except OSError:
                continue


@contextmanager
def serve(model: str = MODEL, port: int = 0, key: str | None = None) -> Iterator[Served]:
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env |= {"DGEMMA_API_KEYS": key} if key else {}
    command = [sys.executable, "-m", "diffusiongemma", "serve", model, "--port", str(port), "--grace", "1"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise AssertionError(f"the server did not start: {log.read()[-2000:]}")
            served = Served(line.split()[-1], process, key)
            _wait_ready(served)
            yield served
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(HANGS)
            if process.stdout is not None:
                process.stdout.close()


def _wait_ready(served: Served) -> None:
    until = time.monotonic() + HANGS
    while time.monotonic() < until:
        try:
            if httpx.get(served.url + "/ready", timeout=HANGS).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server was not ready in time")


# ---- the page --------------------------------------------------------------------------------------------------------

WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => {
  (window.violations ??= []).push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}`);
});
"""


@dataclass
class Seen:
    """What a person would find in the developer tools."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def check(self) -> None:
        violations = self.page.evaluate("window.violations ?? []")
        assert violations == [], "the Content-Security-Policy was violated"
        assert self.complaints == [], "the console has complaints"


def watch(page: Page) -> Seen:
    seen = Seen(page)
    page.add_init_script(WATCH_POLICY)
    page.on("console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.complaints.append(f"{error.name}: {error.message}"))
    return seen


def open_studio(context: BrowserContext, url: str, tab: str = "chat") -> Seen:
    page = context.new_page()
    page.set_default_timeout(1000 * HANGS)
    seen = watch(page)
    page.goto(f"{url}/#{tab}")
    page.wait_for_selector("html[data-started]", state="attached")
    return seen


def wait_done(page: Page, tab: str, seconds: float = HANGS) -> None:
    """Until what the tab's button started has come to its end."""
    page.wait_for_selector(f"#panel-{tab}:not([data-busy])", timeout=1000 * seconds)


def notice(page: Page, selector: str) -> None:
    """From now on, remember whether something like this was ever on the page: a draft may be gone within a frame.

    Streams are handed to the page event by event, a frame each: where it is slow, all drafts and the answer come at
    once, and it rightly draws the answer alone.
    """
    page.evaluate(
        """(selector) => {
            window.noticed = false;
            const look = () => { window.noticed ||= document.querySelector(selector) !== null; };
            new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
            const fetch = window.fetch, frame = () => new Promise(requestAnimationFrame);
            window.fetch = async (...given) => {
                const response = await fetch(...given);
                if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) return response;
                let rest = "";
                const apart = new TransformStream({
                    async transform(text, out) {
                        const events = (rest + text).split("\\n\\n");
                        rest = events.pop();
                        for (const event of events) {
                            out.enqueue(`${event}\\n\\n`);
                            await frame();
                            await frame();
                        }
                    },
                    flush(out) { out.enqueue(rest); },
                });
                const paced = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(apart);
                return new Response(paced.pipeThrough(new TextEncoderStream()), response);
            };
        }""",
        selector,
    )


def noticed(page: Page) -> bool:
    return bool(page.evaluate("window.noticed"))


def listen(page: Page) -> None:
    """From now on, keep what is streamed to the page; the browser itself does not."""
    page.evaluate(
        """() => {
            const fetch = window.fetch;
            window.fetch = async (...given) => {
                const response = await fetch(...given);
                if (given[1]?.method === "POST") window.heard = [given[1].body, response.clone().text()];
                return response;
            };
        }"""
    )


def heard(page: Page) -> tuple[Any, list[Any]]:
    """The last request of the page, and the events that answered it."""
    asked, stream = page.evaluate("Promise.all(window.heard)")
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return json.loads(asked), [json.loads(line) for line in lines[:-1]]


def set_option(page: Page, tab: str, **values: float) -> None:
    details = page.locator(f"#panel-{tab} details.options")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    for name, value in values.items():
        details.locator(f"input[name={name}]").fill(str(value))


def drawn(page: Page) -> str:
    """The document that the picture shows."""
    page.wait_for_function("() => document.querySelector('#svg-picture').naturalWidth > 0")
    source = page.locator("#svg-picture").get_attribute("src") or ""
    assert source.startswith("data:image/svg+xml,")
    return urllib.parse.unquote(source.split(",", 1)[1])


def choose_mode(page: Page, mode: str) -> None:
    """How icons are drawn: `diffusion` or `ar`."""
    page.locator(f"#svg-mode label:has([value={mode}])").click()


# ---- canned answers, for what a model does only sometimes ------------------------------------------------------------


def draft(step: int, tokens: list[str], entropy: list[float], accepted: list[bool], **more: Any) -> dict[str, Any]:
    same: dict[str, Any] = {"object": "canvas.draft", "choices": [], "index": 0, "block": 0, "steps": 48, "skipped": 0}
    return same | {"step": step, "tokens": tokens, "entropy": entropy, "accepted": accepted, "special": []} | more


def usage(steps: int, tokens: int, **more: Any) -> dict[str, Any]:
    diffusion: dict[str, Any] = {
        "seed": 7, "blocks": 1, "blocks_settled": 1, "blocks_redone": 0, "steps": steps, "decoder_forwards": steps,
        "encoder_forwards": 1, "positions": 96 * steps, "queue_seconds": 0.0, "prefill_seconds": 0.01,
        "first_draft_seconds": 0.02, "first_text_seconds": 0.1, "total_seconds": 0.1,
        "tokens_per_forward": tokens / max(1, steps), "tokens_per_second": 10.0 * tokens,
    }  # fmt: skip
    return {
        "prompt_tokens": 9,
        "completion_tokens": tokens,
        "total_tokens": 9 + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "diffusion": diffusion | more,
    }


def answer_with(page: Page, path: str, events: list[dict[str, Any]]) -> None:
    """The next requests to `path` get these events."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def fulfil(route: Route) -> None:
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body=body)

    page.route(f"**{path}", fulfil)


def keep_busy(page: Page, path: str) -> None:
    """Requests to `path` take all of their steps: on a busy machine a canvas would settle before it can be stopped."""

    def unstopped(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json
        body["diffusion"] = {**body.get("diffusion", {}), "early_stop": False}
        route.continue_(post_data=json.dumps(body))

    page.route(f"**{path}", unstopped)


def answer_chat(page: Page, text: str, drafts: list[dict[str, Any]] | None = None, finish: str = "stop") -> None:
    tokens = list(text)
    settled = draft(1, tokens, [0.0] * len(tokens), [True] * len(tokens))
    head = {"object": "chat.completion.chunk"}
    chunk = {**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    end = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    last = {**head, "choices": [], "usage": usage(len(drafts or [settled]), len(tokens))}
    for path in ("/v1/chat/completions", "/v1/completions"):  # the second: a model without a chat template
        answer_with(page, path, [*(drafts or [settled]), chunk, end, last])
