"""The queue: bounded, fair, and it loses nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.serve.errors import ApiError, unavailable
from diffusiongemma.serve.limits import Gate, Turn
from serve.live import run_async


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_async(test(*args, **kwargs))

    return run


async def soon(*tasks: Awaitable[Any]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ask(gate: Gate, client: str, cost: int = 1) -> asyncio.Task[Turn]:
    return asyncio.create_task(gate.enter(client, cost))


@in_a_loop
async def test_who_comes_first_runs_first() -> None:
    gate = Gate(2, 10)
    tasks = [ask(gate, "a") for _ in range(4)]
    await soon()
    assert [task.done() for task in tasks] == [True, True, False, False]
    assert (gate.running, gate.waiting) == (2, 2)
    gate.leave(tasks[1].result())
    await soon()
    assert [task.done() for task in tasks] == [True, True, True, False]
    gate.leave(tasks[1].result())  # leaving twice counts once
    await soon()
    assert gate.running == 2


@in_a_loop
async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    gate = Gate(1, 2)
    tasks = [ask(gate, "a") for _ in range(3)]
    await soon()
    with pytest.raises(ApiError) as caught:
        await gate.enter("a", 1)
    assert caught.value.status_code == 429
    assert int((caught.value.headers or {})["Retry-After"]) >= 1
    with pytest.raises(ApiError):
        gate.check("a")
    for task in tasks:
        gate.leave(await task)
    assert (gate.running, gate.waiting) == (0, 0)


@in_a_loop
async def test_turns_go_round_between_clients() -> None:
    gate = Gate(1, 20)
    greedy = [ask(gate, "greedy") for _ in range(6)]
    await soon()
    others = [ask(gate, name) for name in ("b", "c")]
    order = []
    waiting = dict(zip(greedy + others, ["greedy"] * 6 + ["b", "c"], strict=True))
    while waiting:
        await soon()
        done = [task for task in waiting if task.done()]
        assert len(done) == 1
        order.append(waiting.pop(done[0]))
        gate.leave(done[0].result())
    assert order[:4] == ["greedy", "b", "c", "greedy"] or order[:4] == ["greedy", "greedy", "b", "c"]
    assert order.index("c") <= 3  # not behind all six


@in_a_loop
async def test_the_one_with_fewer_rows_running_comes_first() -> None:
    gate = Gate(4, 20)
    running = [ask(gate, "a") for _ in range(4)]
    await soon()
    more, other = ask(gate, "a"), ask(gate, "b")
    await soon()
    gate.leave(running[0].result())
    await soon()
    assert other.done()
    assert not more.done()
    more.cancel()


@in_a_loop
async def test_nobody_can_fill_the_queue_for_others() -> None:
    gate = Gate(1, 3)
    greedy = [ask(gate, "greedy") for _ in range(4)]
    await soon()
    polite = ask(gate, "polite")
    await soon()
    assert isinstance(greedy[3].exception(), ApiError)  # its newest gave way
    assert gate.waiting == 3
    again = ask(gate, "polite")  # two each would not be more even
    await soon()
    assert isinstance(again.exception(), ApiError)
    gate.leave(greedy[0].result())
    await soon()
    assert polite.done() or greedy[1].done()
    for task in (polite, *greedy[1:3]):
        task.cancel()


@in_a_loop
async def test_a_large_request_gets_its_rows_some_day() -> None:
    gate = Gate(4, 20)
    small = [ask(gate, "a") for _ in range(4)]
    await soon()
    large, late = ask(gate, "b", 99), ask(gate, "c")
    await soon()
    for task in small[:3]:
        gate.leave(task.result())
    await soon()
    assert not large.done()
    assert not late.done()
    gate.leave(small[3].result())
    await soon()
    assert large.done()
    assert large.result().cost == 4  # all there are
    assert not late.done()
    gate.leave(large.result())
    await late


@in_a_loop
async def test_who_goes_away_leaves_no_hole() -> None:
    gate = Gate(1, 5)
    first, second, third = (ask(gate, "a") for _ in range(3))
    await soon()
    second.cancel()
    await soon()
    assert gate.waiting == 1
    # Admitted and cancelled in the same breath: its row is given back.
    gate.leave(first.result())
    third.cancel()
    await soon()
    assert (gate.running, gate.waiting) == (0, 0)


@in_a_loop
async def test_closing_refuses_what_waits_and_what_comes() -> None:
    gate = Gate(1, 5)
    first, second = ask(gate, "a"), ask(gate, "a")
    await soon()
    gate.close(unavailable("over", "over"))
    await soon()
    assert first.done()
    assert isinstance(second.exception(), ApiError)
    with pytest.raises(ApiError) as caught:
        await gate.enter("b", 1)
    assert caught.value.status_code == 503
    gate.leave(first.result())
    assert gate.running == 0


@given(
    st.integers(1, 4), st.integers(1, 6), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=30)
)
def test_all_are_served_or_refused_within_the_bounds(rows: int, queue: int, asked: list[tuple[str, int]]) -> None:
    async def run() -> None:
        gate = Gate(rows, queue)

        async def one(client: str, cost: int) -> bool:
            try:
                turn = await gate.enter(client, cost)
            except ApiError:
                return False
            assert 0 < gate.running <= rows
            await asyncio.sleep(0)
            gate.leave(turn)
            return True

        results = await asyncio.gather(*(one(client, cost) for client, cost in asked))
        assert (gate.running, gate.waiting) == (0, 0)
        assert sum(results) >= min(len(asked), queue)

    run_async(run())
