"""Requests that schemathesis makes up from the OpenAPI document, right ones and wrong ones, and what must hold for all.

`python -m serve.fuzz 10000` from the folder `tests` sends so many and prints what came back.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis import checks as promised

from serve.live import HANGS, Live, serving

CHECKS = [
    promised.not_a_server_error,
    promised.status_code_conformance,
    promised.content_type_conformance,
    promised.response_headers_conformance,
    promised.response_schema_conformance,
    promised.negative_data_rejection,
    promised.unsupported_method,
]
STEPS, TOKENS = 2, 8  # of an answer: what is tested is the server, not the model's patience


def cheap(body: Any, model: str) -> Any:
    """Ask for the model that is there, for few steps and few tokens."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 256:
        body["model"] = model
    if body.get("diffusion") is None:
        body["diffusion"] = {"steps": STEPS}
    if isinstance(body["diffusion"], dict):
        steps = body["diffusion"].get("steps", 48)
        if body["diffusion"].get("mode") != "ar" and whole(steps) and 1 <= steps <= 1000:
            body["diffusion"]["steps"] = min(steps, STEPS)
    form = "template" in body and body.get("messages") is not None
    names = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    for name in names or ([] if form or "text" in body else ["max_tokens"]):
        if body.get(name) is None or (whole(body[name]) and TOKENS < body[name] <= 1 << 20):
            body[name] = TOKENS
    return body


def coherent(body: Any) -> Any:
    """What the schema cannot say: fields that exclude or need each other, and numbers that depend on the model."""
    if not isinstance(body, dict):
        return body
    sampler = body["diffusion"] if isinstance(body.get("diffusion"), dict) else {}
    if sampler.keys() & {"t_min", "t_max"}:
        body.pop("temperature", None)
    if sampler.get("mode") != "ar":
        body.pop("top_p", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if isinstance(body.get("template"), str):
        body["template"] += "[[?3]]"
    elif isinstance(body.get("template"), list):
        body["template"] = [part for part in body["template"] if isinstance(part, str)] + [{"max_tokens": 3}]
    if body.get("messages") is not None and "template" in body:
        body = {name: value for name, value in body.items() if name not in ("strategy", "max_tokens")}
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (False, None):
        body["stream"] = True
    if isinstance(body.get("text"), str) and isinstance(body.get("keep"), list):
        body["keep"] = [[0, len(body["text"])]] if len(body["text"]) > 1 else []
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [known(part) for part in body["prompt"]]
    if body.get("suffix") is not None and isinstance(body.get("prompt"), str):
        body = {name: value for name, value in body.items() if name not in ("stop", "logprobs", "n")}
    for message in body["messages"] if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "text"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = '{"a": 1}'
    return body


def whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def known(part: Any) -> Any:
    """Token ids that the model has."""
    if isinstance(part, list):
        return [known(one) for one in part]
    return int(part) % 256 if whole(part) and part >= 0 else part


@dataclass
class Fuzz:
    """Requests to a live server, and how often each path gave each status."""

    live: Live
    found: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)  # paths that answered with one
    refused: Counter[str] = field(default_factory=Counter)  # fields for which a request that obeys the schema was a 400

    def __post_init__(self) -> None:
        schema = schemathesis.openapi.from_url(f"{self.live.url}/openapi.json")
        schema.config.max_stream_events = 1 << 20  # streams are read to their end
        schema.config.checks.negative_data_rejection.expected_statuses = ["400", "404", "413", "415"]
        operations = [result.ok() for result in schema.get_all_operations()]
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        # Nothing of a GET can be wrong.
        self.parts = [(o, m) for o in operations for m in modes if m is modes[0] or o.method.upper() != "GET"]

    @property
    def sent(self) -> int:
        return sum(self.found.values())

    def send(self, operation: Any, mode: GenerationMode, examples: int, number: int) -> None:
        """`examples` requests to one operation, right or wrong ones; raises for an answer that was not promised."""

        @seed(number)
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode), st.integers(0, 3))
        def one(case: schemathesis.Case, luck: int) -> None:
            case.body = cheap(case.body, self.live.model)
            if luck:  # else the server must find out what does not hang together
                case.body = coherent(case.body)
            response = case.call(base_url=self.live.url, session=session, timeout=HANGS)
            self.found[f"{case.method} {case.path} {response.status_code}"] += 1
            case.validate_response(response, checks=CHECKS)
            if response.headers["content-type"][0].startswith("text/event-stream"):
                self.streams[case.path] += 1
                assert response.content.endswith(b"data: [DONE]\n\n")
                assert b'"server_error"' not in response.content  # an error after the first event has no status
            if response.status_code >= 400:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                if mode is GenerationMode.POSITIVE:
                    self.refused[f"{case.path} {error['param']}"] += 1

        with requests.Session() as session:
            one()


def main() -> int:
    wanted, began, failed = int(sys.argv[1]), time.monotonic(), 0
    with serving(batch=4, queue=64) as live:
        fuzz = Fuzz(live)
        while (before := fuzz.sent) < wanted:
            for operation, mode in fuzz.parts:
                try:
                    fuzz.send(operation, mode, min(500, max(10, (wanted - before) // 9)), number=before)
                except (Exception, BaseExceptionGroup):  # the others have their turn
                    failed += 1
                    traceback.print_exc()
                print(f"{fuzz.sent} requests, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
        health = live.server.state.health()
    for title, count in (("answers", fuzz.found), ("streams", fuzz.streams), ("refused for", fuzz.refused)):
        print(title)
        for name, number in sorted(count.items()):
            print(f"{number:6d}  {name}")
    print(f"operations with an answer that was not promised: {failed}; engine failures: {health.engine_failures}")
    return 1 if failed or health.engine_failures else 0


if __name__ == "__main__":
    sys.exit(main())
