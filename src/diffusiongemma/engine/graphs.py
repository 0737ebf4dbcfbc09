"""Work on fixed tensors, recorded once and replayed: hundreds of kernels for the price of one launch.

On a CUDA device a recorded function is a CUDA graph; elsewhere it is the function itself, so that all around it is
tested without a card. Graphs share one pool of memory: they run one after another and keep nothing between replays.
How many are kept says `shelf.py`.

What a recording needs beside the graph is kept small, because a card may have little left: all runs before it take
their memory from that same pool, on the one stream that is recorded, so the graph finds it there. (Memory that torch
keeps for one stream serves no other, and every stream gets a workspace of its own for the vendor's products.)
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.engine.shelf import Shelves, Work
from diffusiongemma.ops import kernels

log = logging.getLogger(__name__)
_RECORDING = threading.Lock()  # engines share a stream for it: one after another


class Recorder:
    def __init__(self, device: torch.device, graphs: bool = True, before: Work = lambda: None) -> None:
        """`graphs`: off, nothing is recorded and every replay is the function itself. `before`: called before each
        recording, which may take seconds: what should not wait for it."""
        self.device, self.before = device, before
        self.graphs = graphs and device.type == "cuda"
        self.recorded, self.shelves = 0, Shelves()
        self.listener: Callable[[str], None] | None = None  # is told what will be recorded next
        self._pool = _memory(device) if self.graphs else None
        self._spoilt: list[torch.cuda.MemPool] = []
        self._stream = _stream(device) if self.graphs else None

    def record(self, name: str, work: Work, changed: Iterable[Tensor] = ()) -> Work:
        """`work` reads and writes fixed tensors; recording runs it, and leaves those in `changed` as they were."""
        self.before()
        if self.listener is not None:
            self.listener(name)
        if not self.graphs:
            return work
        with _RECORDING:
            return self._record(name, work, list(changed))

    def _record(self, name: str, work: Work, changed: list[Tensor]) -> Work:
        began = time.perf_counter()
        with uncollected():
            graph = self._captured(work, changed)
        self.recorded += 1
        log.info("recorded %s in %.2f s", name, time.perf_counter() - began)
        return graph.replay

    def _captured(self, work: Work, changed: list[Tensor]) -> torch.cuda.CUDAGraph:
        torch.cuda.empty_cache()  # what was left by others would lie beside the pool
        graph = torch.cuda.CUDAGraph()
        with _kept(changed), self._rehearsing(), kernels.compiling():
            work()  # compiles all kernels at once; what it computes is rubbish
        with _kept(changed):
            with self._rehearsing():
                work()  # libraries set themselves up before anything is recorded
            with self._recording(graph):
                work()
        return graph

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        assert self._pool is not None
        pool: Any = self._pool.id
        current = torch.cuda.current_stream(self.device)
        try:
            # Other threads of the program may use the card meanwhile.
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(current)  # else all that follows would run on the other
            if _end_left_open(current.device_index, pool):
                self._spoilt.append(self._pool)  # graphs that were recorded before have their memory there
                self._pool = _memory(self.device)
            raise

    @contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """Inside, work runs where it will be recorded: on that stream, in that memory."""
        assert self._pool is not None
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self.device):
                yield
        finally:
            current.wait_stream(self._stream)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python looks for no garbage: a graph of an engine that is gone, destroyed in the middle of a recording,
    would spoil it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _memory(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def _end_left_open(device: int, pool: Any) -> bool:
    """Where a recording cannot be ended, torch goes on allocating to its pool, and will record no other there. -> was
    it so?"""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # nobody allocates to it
        return False
    return True


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one that is recorded, of all engines: the default stream cannot be."""
    return torch.cuda.Stream(device)


@contextmanager
def _kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in before:
            tensor.copy_(value)


class Mailbox:
    """Memory of the host into which the device's results are copied while both go on; two letters may be under way."""

    def __init__(self, like: Tensor) -> None:
        pinned = like.device.type == "cuda"
        self._letters = [torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned) for _ in range(2)]
        self._next = 0

    def send(self, values: Tensor) -> Callable[[], Tensor]:
        """values [n, ...], at most as many as the mailbox is long -> waits for them to arrive, and gives them"""
        letter = self._letters[self._next][: values.shape[0]]
        self._next = 1 - self._next
        letter.copy_(values, non_blocking=True)
        if values.device.type != "cuda":
            return lambda: letter
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))

        def wait() -> Tensor:
            arrived.synchronize()
            return letter

        return wait
