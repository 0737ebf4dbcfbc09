"""A short share of what `serve.fuzz` does: no 500, no answer that the OpenAPI document does not promise."""

from __future__ import annotations

from collections import Counter

from serve.fuzz import Fuzz
from serve.live import Live


def test_made_up_requests(live: Live) -> None:
    before = live.server.state.health().engine_failures
    fuzz = Fuzz(live)
    for operation, mode in fuzz.parts:
        fuzz.send(operation, mode, examples=12, number=0)
    statuses: Counter[str] = Counter()
    for name, count in fuzz.found.items():
        statuses[name.split()[-1]] += count
    assert fuzz.sent >= 100
    assert statuses["200"] > 0
    assert statuses["400"] > 0
    assert sum(fuzz.streams.values()) > 0
    assert set(statuses) <= {"200", "400", "404", "413", "415"}
    assert live.server.state.health().engine_failures == before
    live.wait_idle()
