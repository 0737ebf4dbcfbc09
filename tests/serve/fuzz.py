"""Requests that schemathesis makes up from the OpenAPI document, right ones and wrong ones, and what must hold for all.

`python -m serve.fuzz 10000` from the folder `tests` sends so many and prints what came back.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis import checks as known

from serve.live import Live, serving

CHECKS = [
    known.not_a_server_error,
    known.status_code_conformance,
    known.content_type_conformance,
    known.response_headers_conformance,
    known.response_schema_conformance,
    known.negative_data_rejection,
    known.unsupported_method,
]
STEPS = 2


def tame(body: Any, model: str) -> Any:
    """Ask for the model that is there, for few steps, and for what hangs together: most would be refused otherwise."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 256:
        body["model"] = model
    body.setdefault("diffusion", {"steps": STEPS})
    if isinstance(body["diffusion"], dict):
        steps = body["diffusion"].get("steps", 48)
        if body["diffusion"].get("mode") != "ar" and type(steps) is int and 1 <= steps <= 1000:
            body["diffusion"]["steps"] = min(steps, STEPS)
    if isinstance(body.get("template"), str):
        body["template"] += "[[?3]]"
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (False, None):
        body["stream"] = True
    for message in body["messages"] if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict) and message.get("content", "") is None:
            message["content"] = "text"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = '{"a": 1}'
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and 64 < body[name] <= 1 << 20:
            body[name] = 64
    return body


def fuzz(live: Live, examples: int, number: int = 0) -> Counter[str]:
    """Send `examples` requests to each operation, right and wrong by turns -> how often each path gave each status."""
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    found: Counter[str] = Counter()
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                    continue  # nothing of it can be wrong

                @seed(number)
                @settings(
                    max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                @given(case=operation.as_strategy(generation_mode=mode))
                def one(case: schemathesis.Case) -> None:
                    case.body = tame(case.body, live.model)
                    response = case.call(base_url=live.url, session=session, timeout=60)
                    found[f"{case.method} {case.path} {response.status_code}"] += 1
                    case.validate_response(response, checks=CHECKS)
                    if response.status_code >= 400:
                        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

                one()
    return found


def main() -> None:
    wanted, began = int(sys.argv[1]), time.monotonic()
    found: Counter[str] = Counter()
    with serving(batch=4, queue=64) as live:
        while (sent := sum(found.values())) < wanted:
            found += fuzz(live, min(500, max(10, (wanted - sent) // 9)), number=sent)
            print(f"{sum(found.values())} requests, {time.monotonic() - began:.0f} s", flush=True)
        health = live.server.state.health()
    for name, count in sorted(found.items()):
        print(f"{count:6d}  {name}")
    print(f"engine failures: {health.engine_failures}")


if __name__ == "__main__":
    main()
