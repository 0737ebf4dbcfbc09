"""500 requests of every kind, arriving at random, a fifth of them cancelled: all end, none starves, nothing is left."""

from __future__ import annotations

import random
import time

from diffusiongemma.engine import Commit, End, Limits
from engine.test_engine import make_engine, wait_idle

COUNT = 500
CHECKED = 50
LIMITS = Limits(max_rows=12, max_bytes=1_500_000, chunk=32)


def random_ask(rng: random.Random) -> tuple[list[int], dict]:
    shared = list(range(10, 10 + rng.choice([0, 0, 20, 45])))  # some begin alike
    prompt = [*shared, *(rng.randrange(3, 400) for _ in range(rng.randrange(1, 60)))]
    given: dict = {"max_new_tokens": rng.randrange(1, 60), "seed": rng.randrange(1000)}
    if rng.random() < 0.25:
        given |= {"mode": "ar", "temperature": rng.choice([0, 0.7, 1.2]), "max_new_tokens": rng.randrange(1, 25)}
    else:
        given |= {"steps": rng.randrange(1, 10), "canvas": rng.choice([None, 4, 8, "adaptive"])}
        given |= rng.choice([{}, {"redo": 1}, {"confidence": 4.0}, {"threshold": 0.9}, {"entropy_bound": 2.0}])
    given |= rng.choice([{}, {}, {"stop": ["e", "zz"]}, {"stop_tokens": [300]}, {"logprobs": 2}])
    return prompt, given


def test_soak() -> None:
    rng = random.Random(0)
    asked = [random_ask(rng) for _ in range(COUNT)]
    cancel_after = {i: rng.randrange(0, 12) for i in range(COUNT) if rng.random() < 0.2}
    with make_engine(LIMITS) as engine:
        added: dict[int, int] = {}
        admitted: dict[int, int] = {}
        ended: dict[int, int] = {}
        most_bytes = 0

        def look() -> None:
            nonlocal most_bytes
            scheduler = engine.scheduler
            most_bytes = max(most_bytes, scheduler.reserved + scheduler.prefixes.nbytes)
            for sequence in scheduler.running:
                admitted.setdefault(id(sequence), scheduler.ticks)
            alive = {id(s) for s in (*scheduler.running, *scheduler.waiting)}
            for key in admitted:
                if key not in alive:
                    ended.setdefault(key, scheduler.ticks)

        engine.scheduler.on_tick = look
        handles = []
        for i, (prompt, given) in enumerate(asked):
            handle = engine.submit(engine.request(prompt, drafts=i in cancel_after, **given))
            added[id(handle.sequence)] = i
            handles.append(handle)
            if rng.random() < 0.15:
                time.sleep(rng.random() * 0.03)
            if i in cancel_after and cancel_after[i] == 0:
                handle.cancel()
        outcomes = [outcome(handle, cancel_after.get(i)) for i, handle in enumerate(handles)]
        wait_idle(engine)

        # All end, exactly once, and the engine never failed.
        assert all(isinstance(events[-1], End) for events in outcomes)
        assert all(sum(isinstance(e, End) for e in events) == 1 for events in outcomes)
        assert engine.worker.failures == 0
        reasons = {events[-1].finish_reason for events in outcomes}
        assert reasons == {"stop", "length", "cancelled"}

        # None starves: admitted in the order they came, and done within its own work plus its turns at the encoder.
        order = [added[key] for key in sorted(admitted, key=lambda k: (admitted[k], added[k]))]
        assert order == sorted(order)
        for key, start in admitted.items():
            metrics = outcomes[added[key]][-1].metrics
            own = metrics.steps + metrics.encoder_forwards
            turns = (metrics.blocks + metrics.blocks_redone + 4) * LIMITS.max_rows
            assert ended[key] - start <= own + turns

        # Memory was within the budget, and is back to where it was.
        assert most_bytes <= LIMITS.max_bytes
        assert engine.scheduler.reserved == 0
        while engine.scheduler.prefixes.evict():
            pass
        assert engine.scheduler.prefixes.nbytes == 0

    # Token for token what they are alone.
    whole = [i for i in range(COUNT) if outcomes[i][-1].finish_reason != "cancelled"]
    for i in rng.sample(whole, CHECKED):
        with make_engine(Limits(max_rows=1, chunk=32)) as alone:
            result = alone.generate(asked[i][0], **asked[i][1])
        assert [t for e in outcomes[i] if isinstance(e, Commit) for t in e.tokens] == result.tokens
        assert "".join(e.text for e in outcomes[i] if isinstance(e, Commit)) == result.text


def outcome(handle, cancel_after: int | None) -> list:
    events = []
    for event in handle:
        events.append(event)
        if cancel_after is not None and len(events) >= cancel_after:
            handle.cancel()
    return events
