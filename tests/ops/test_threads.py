"""What threads share and what one does alone: how many there are where, and that no text depends on it."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from diffusiongemma.engine import scheduler
from diffusiongemma.ops import attention, experts, int8_cpu, linear, threads
from diffusiongemma.ops.threads import LEAST, MOST, alone, shared
from engine.test_engine import make_engine

CPU = torch.device("cpu")
MANY = 3


@pytest.fixture(autouse=True)
def _many() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def counted(work: int) -> int:
    with shared(work):
        return torch.get_num_threads()


def test_one_thread_but_for_what_is_worth_more() -> None:
    assert counted(LEAST) == MANY
    with alone(CPU, MOST):
        assert torch.get_num_threads() == 1
        assert (counted(LEAST - 1), counted(LEAST)) == (1, MANY)
        with shared(LEAST):
            assert counted(LEAST) == MANY, "what is inside is shared already …"
            assert torch.get_num_threads() == MANY, "… and does not end it"
        with alone(CPU, MOST):
            assert counted(LEAST) == MANY
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == MANY


def test_a_failure_leaves_as_many_as_before() -> None:
    with alone(CPU, MOST):
        with pytest.raises(RuntimeError), shared(LEAST):
            raise RuntimeError
        assert torch.get_num_threads() == 1
        assert counted(LEAST) == MANY
    with pytest.raises(RuntimeError), alone(CPU, MOST):
        raise RuntimeError
    assert torch.get_num_threads() == MANY


def test_large_passes_a_gpu_and_a_single_thread_are_as_torch_has_them() -> None:
    with alone(CPU, MOST + 1):
        assert torch.get_num_threads() == MANY
    with alone(torch.device("cuda"), 1):
        assert torch.get_num_threads() == MANY
    torch.set_num_threads(1)
    with alone(CPU, MOST):
        assert counted(LEAST) == 1


def test_other_threads_have_theirs() -> None:
    found, inside, go_on = list[int](), threading.Event(), threading.Event()

    def other() -> None:
        found.append(torch.get_num_threads())
        inside.set()
        go_on.wait()
        found.append(counted(LEAST))

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with alone(CPU, MOST):
        go_on.set()
        thread.join()
    assert found == [MANY, MANY]


@pytest.mark.parametrize("size", [8, 512])
def test_products_and_attention_of_some_size_are_shared(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def watched(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **options: object) -> object:
            seen.append(torch.get_num_threads())
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in ((F, "linear"), (F, "scaled_dot_product_attention"), (torch, "bmm"), (torch, "_int_mm")):
        watched(module, name)
    monkeypatch.setattr(int8_cpu, "fast_int8", lambda: True)
    x = torch.randn(64, size)
    q, kv = torch.randn(64, 4, 32), torch.randn(2, size * 2, 32)
    with alone(CPU, MOST):
        linear.linear(x, torch.randn(8 * size, size))
        int8_cpu.sums(x.to(torch.int8), torch.ones(8 * size, size, dtype=torch.int8))
        attention.attend_canvas(q, kv, kv)
        index = torch.arange(4).repeat(32).view(64, 2)
        weights = torch.randn(4, 2 * size, size), torch.randn(4, size, size)
        experts.experts_grouped(x, index, torch.ones(64, 2), *weights)
    assert seen == [MANY if size == 512 else 1] * 5


@pytest.mark.parametrize("least", [1, LEAST])
def test_the_engine_works_so_and_its_texts_are_the_same(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAST", least)
    seen, texts = list[int](), []
    for way in (alone, lambda *_: nullcontext()):
        monkeypatch.setattr(scheduler, "alone", way)
        with make_engine() as engine:
            network = engine.model.logits
            monkeypatch.setattr(
                engine.model, "logits", lambda x, f=network: seen.append(torch.get_num_threads()) or f(x)
            )
            for mode in ("diffusion", "ar"):
                result = engine.generate([3, 4, 5, 6], max_new_tokens=24, mode=mode, seed=7, logprobs=1)
                texts.append((result.tokens, result.logprobs))
    assert texts[:2] == texts[2:]
    assert set(seen[: len(seen) // 2]) == {1}
    assert set(seen[len(seen) // 2 :]) == {MANY}
    assert torch.get_num_threads() == MANY


def test_an_engine_that_starts_while_another_works_alone_has_its_threads() -> None:
    inside, go_on, seen = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        with alone(CPU, 1):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with make_engine() as engine:
        engine.scheduler.on_tick = lambda: seen.append(torch.get_num_threads())
        engine.generate([3, 4, 5, 6], max_new_tokens=4, steps=1, seed=7)
    go_on.set()
    thread.join()
    assert set(seen) == {MANY}
