"""Many streaming clients at once, some of which vanish or read slowly: every answer must be its seed's known text.

    python scripts/load_test.py                          # 64 clients for five minutes on the embedded model
    python scripts/load_test.py --seconds 10 --clients 8 --model FOLDER

The known texts come from the bare engine. So does the throughput that the server's is compared with: both do the same
requests in the same order, the engine alone and the server for as many streaming clients as its queue takes. The last
line is JSON; the exit code is 1 if an answer was wrong, lost or not what the API promises, or if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from diffusiongemma.engine import Commit, Engine, Limits, Request, collect
from diffusiongemma.serve.reader import ReplyReader

QUICK = {"steps": 16, "canvas": 32}
ROUNDS = 3  # of measuring the throughput
SLOW = 0.25  # seconds for which a slow reader looks at an event before it takes the next
TIMEOUT = httpx.Timeout(300, connect=30)
GROWTH = 0.05  # of memory, from the second third of the run to the last, that is called flat


@dataclass
class Case:
    """One thing to ask, and the text that must come back."""

    path: str
    body: dict[str, Any]
    request: Request | None  # for the bare engine; None: a hole, which is several requests
    text: str = ""


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    first_draft: list[float] = field(default_factory=list)  # seconds, from asking on
    first_draft_running: list[float] = field(default_factory=list)  # … less the time in the queue
    asked: int = 0
    tokens: int = 0  # of right answers

    def wrong(self, what: str) -> None:
        self.outcomes["wrong"] += 1
        if len(self.problems) < 20:
            self.problems.append(what)


def make_cases(engine: Engine, count: int) -> list[Case]:
    """Chats, completions and holes, each with a seed of its own."""
    cases = []
    for i in range(count):
        seed, body = 1000 + i, {"seed": 1000 + i, "max_tokens": 32, "diffusion": QUICK}
        options: dict[str, Any] = {"seed": seed, "max_new_tokens": 32, **QUICK}
        if i % 8 == 7:
            prefix, suffix = f"def f{i}(x):\n    return ", "\n\nprint(f(1))\n"
            given = body | {"prompt": prefix, "suffix": suffix, "max_tokens": 8, "diffusion": {"steps": 8}}
            text = engine.infill(prefix, suffix, max_new_tokens=8, seed=seed, steps=8).text
            cases.append(Case("/v1/completions", given, None, text))
        elif i % 2 and engine.template is not None:
            messages = [{"role": "user", "content": f"{i} + {3 * i}"}]
            request = engine.request(messages, drafts=False, **options)
            text = chat_text(engine, request)
            cases.append(Case("/v1/chat/completions", body | {"messages": messages}, request, text))
        else:
            prompt = f"import os\n\nname{i} = "
            request = engine.request(prompt, raw=True, drafts=False, **options)
            text = collect(engine.events(request)).text
            cases.append(Case("/v1/completions", body | {"prompt": prompt}, request, text))
    return cases


def chat_text(engine: Engine, request: Request) -> str:
    reader = ReplyReader(engine.tokenizer)
    told = [reader.push(event).content for event in engine.events(request) if isinstance(event, Commit)]
    return "".join(told) + reader.finish().content


def bare_seconds(engine: Engine, cases: list[Case]) -> float:
    """For all of them, with twice as many at hand as the engine has rows."""
    requests = [case.request for case in cases if case.request is not None]
    began, ahead = time.perf_counter(), 2 * engine.scheduler.limits.max_rows
    running = [engine.submit(request) for request in requests[:ahead]]
    for request in requests[ahead:]:
        collect(running.pop(0))
        running.append(engine.submit(request))
    for handle in running:
        collect(handle)
    return time.perf_counter() - began


async def served_seconds(url: str, model: str, cases: list[Case], clients: int, tally: Tally) -> float:
    """The same through the server: each client takes the next case as soon as it is answered."""
    began, rest, rng = time.perf_counter(), iter(cases), random.Random(0)

    async def one(number: int) -> None:
        async with a_client(url) as client:
            for case in rest:
                await ask(client, case, model, "drafts" if number % 2 else "plain", rng, tally)

    await asyncio.gather(*(one(number) for number in range(clients)))
    return time.perf_counter() - began


async def events(response: httpx.Response, pause: float) -> AsyncIterator[tuple[str | None, str]]:
    name = None
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, line[6:]
            name = None
            if pause:
                await asyncio.sleep(pause)


def a_client(url: str, small_window: bool = False) -> httpx.AsyncClient:
    """With a small window, what is not read stays at the server."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)] if small_window else []
    # There is no TLS here, and its certificates, read anew by each client, would cost more than all else of it.
    transport = httpx.AsyncHTTPTransport(verify=False, socket_options=options)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, transport=transport, trust_env=False)


async def ask(client: httpx.AsyncClient, case: Case, model: str, how: str, rng: random.Random, tally: Tally) -> None:
    drafts = how != "plain"
    options = {"include_usage": True} | ({"include_drafts": True} if drafts else {})
    body = case.body | {"model": model, "stream": True, "stream_options": options}
    leave_after = rng.randrange(1, 6) if how == "vanishing" else None
    began, first, text, ended, usage = time.perf_counter(), None, "", False, None
    tally.asked += 1
    async with client.stream("POST", case.path, json=body) as response:
        if response.status_code == 429:
            tally.outcomes["refused"] += 1
            await response.aread()
            await asyncio.sleep(min(3.0, float(response.headers["retry-after"])) * rng.uniform(0.3, 1.0))
            return
        if response.status_code != 200:
            tally.wrong(f"{case.path} answered {response.status_code}: {(await response.aread())[:200]!r}")
            return
        seen = 0
        async for name, data in events(response, SLOW if how == "slow" else 0.0):
            if data == "[DONE]":
                ended = True
                continue
            if first is None:
                first = time.perf_counter() - began
            message = json.loads(data)
            if "error" in message:
                tally.wrong(f"{case.path} broke off: {message['error']}")
                return
            seen += 1
            if leave_after is not None and seen >= leave_after:
                tally.outcomes["vanished"] += 1
                return
            if name == "canvas.draft":
                continue
            usage = message.get("usage") or usage
            for choice in message["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    if not ended or usage is None:
        tally.wrong(f"{case.path} ended without its end")
    elif text != case.text:
        tally.wrong(f"{case.path} seed {case.body['seed']}: {text!r} is not {case.text!r}")
    else:
        tally.outcomes[f"right, {how}"] += 1
        tally.tokens += usage["completion_tokens"]
        if drafts and first is not None and how != "slow":
            tally.first_draft.append(first)
            queued = usage["diffusion"]["queue_seconds"]
            tally.first_draft_running.append(usage["diffusion"]["first_draft_seconds"] - queued)


async def load(url: str, model: str, cases: list[Case], clients: int, seconds: float) -> Tally:
    """Every client asks again as soon as it is answered. A tenth vanishes, a tenth reads slowly, half wants drafts."""
    until, tally = time.monotonic() + seconds, Tally()

    async def one(number: int) -> None:
        rng = random.Random(number)
        how = {3: "vanishing", 7: "slow"}.get(number % 10, "drafts" if number % 2 else "plain")
        async with a_client(url, small_window=how == "slow") as client:
            while time.monotonic() < until:
                try:
                    await ask(client, rng.choice(cases), model, how, rng, tally)
                except httpx.HTTPError as error:
                    tally.wrong(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(one(number) for number in range(clients)))
    return tally


def resident(pid: int) -> float:
    """MiB"""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def computed(pid: int) -> float:
    """Seconds of all threads: a busy machine changes the time that work takes, but hardly this."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


async def watch(pid: int, found: list[float]) -> None:
    while True:
        found.append(resident(pid))
        await asyncio.sleep(1.0)


async def whole_run(
    url: str, model: str, pid: int, cases: list[Case], given: argparse.Namespace
) -> tuple[Tally, list[float]]:
    memory: list[float] = []
    watcher = asyncio.create_task(watch(pid, memory))
    tally = await load(url, model, cases, given.clients, given.seconds)
    watcher.cancel()
    return tally, memory


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT, trust_env=False)


def settled(url: str) -> dict[str, Any]:
    """How the server is when the last has left; on a busy machine it takes a while to notice that."""
    until = time.monotonic() + 60
    while True:
        health: dict[str, Any] = get(f"{url}/health").json()
        if not health["running"] + health["waiting"] or time.monotonic() > until:
            return health
        time.sleep(0.1)


def quantiles(values: list[float]) -> list[float] | None:
    """Median and 95%."""
    return [round(statistics.quantiles(values, n=20)[at], 3) for at in (9, 18)] if len(values) > 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--queue", type=int, default=48, help="fewer than clients, so that some are refused")
    parser.add_argument("--compare", type=int, default=105, help="requests of each throughput measurement; 0: none")
    given = parser.parse_args()

    calm, ratios = Tally(), list[float]()
    with Engine.load(given.model, limits=Limits(max_rows=given.batch)) as engine:
        cases = make_cases(engine, given.cases)
        plain = [case for case in cases if case.request is not None]
        work = [plain[i % len(plain)] for i in range(given.compare)]
        command = [sys.executable, "-m", "diffusiongemma", "serve", given.model, "--port", "0"]
        command += ["--batch", str(given.batch), "--queue", str(given.queue), "--log-file", os.devnull]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            while get(f"{url}/ready").status_code != 200:
                time.sleep(0.1)
            model = get(f"{url}/v1/models").json()["data"][0]["id"]
            crowd = min(given.clients, given.batch + given.queue)
            for _ in range(ROUNDS if work else 0):  # by turns, since a machine is not equally fast all the time
                before = computed(os.getpid()), computed(server.pid)
                bare = bare_seconds(engine, work)
                own = computed(os.getpid()) - before[0]
                served = asyncio.run(served_seconds(url, model, work, crowd, calm))
                theirs = computed(server.pid) - before[1]
                ratios.append(bare / served)
                print(f"{len(work)} requests: the engine alone {bare:.1f} s, the server {served:.1f} s", end="")
                print(f"; of computing {own:.1f} s and {theirs:.1f} s", flush=True)
            tally, memory = asyncio.run(whole_run(url, model, server.pid, cases, given))
            health = settled(url)
        finally:
            server.terminate()
            code = server.wait(60)
    return report(given, calm, tally, memory, health, code, ratios)


def report(
    given: argparse.Namespace,
    calm: Tally,
    tally: Tally,
    memory: list[float],
    health: dict[str, Any],
    code: int,
    ratios: list[float],
) -> int:
    third = max(1, len(memory) // 3)
    early, late = statistics.median(memory[third : 2 * third]), statistics.median(memory[-third:])
    lost = sum(one.asked - sum(one.outcomes.values()) for one in (calm, tally))
    refused = calm.outcomes["refused"]  # the queue had room for all of these
    faults = calm.outcomes["wrong"] + tally.outcomes["wrong"] + refused + lost + abs(code)
    faults += health["running"] + health["waiting"] + health["engine_failures"]
    for name, count in sorted(tally.outcomes.items()):
        print(f"{count:7d}  {name}")
    for problem in (*calm.problems, *tally.problems):
        print(f"problem: {problem}")
    draft, running = quantiles(tally.first_draft), quantiles(tally.first_draft_running)
    print(f"asked {tally.asked} times, {lost} lost; {tally.tokens / given.seconds:.1f} tokens a second came right")
    print(f"first draft, median and 95%: {draft} s; less the time in the queue: {running} s")
    print(f"memory, MiB, every half minute: {[round(value) for value in memory[::30]]}")
    print(f"… {early:.0f} MiB in the second third, {late:.0f} MiB in the last ({100 * (late / early - 1):+.1f}%)")
    ratio = round(statistics.median(ratios), 3) if ratios else None
    print(f"throughput over that of the bare engine: {ratio} (at least 0.9 wanted; {[round(r, 3) for r in ratios]})")
    result = {
        "load_test": given.model, "clients": given.clients, "seconds": given.seconds, "outcomes": dict(tally.outcomes),
        "asked": tally.asked, "lost": lost, "first_draft_s": draft, "first_draft_running_s": running,
        "memory_mib": [round(early, 1), round(late, 1)], "throughput_ratio": ratio, "faults": faults,
    }  # fmt: skip
    print(json.dumps(result))
    grew = late > (1 + GROWTH) * early and given.seconds >= 60  # a short run is still warming up
    return 1 if faults or grew else 0


if __name__ == "__main__":
    sys.exit(main())
