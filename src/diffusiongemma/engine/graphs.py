"""Work on fixed tensors, recorded once and replayed: hundreds of kernels for the price of one launch.

On a CUDA device a recorded function is a CUDA graph; elsewhere it is the function itself, so that all around it is
tested without a card. Graphs share one pool of memory: they run one after another and keep nothing between replays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.ops import kernels

log = logging.getLogger(__name__)
Work = Callable[[], None]


class Recorder:
    def __init__(self, device: torch.device, graphs: bool = True) -> None:
        """`graphs`: off, nothing is recorded and every replay is the function itself."""
        self.device = device
        self.graphs = graphs and device.type == "cuda"
        self.recorded = 0
        self._pool: Any = torch.cuda.graph_pool_handle() if self.graphs else None

    def record(self, name: str, work: Work, changed: Iterable[Tensor] = ()) -> Work:
        """`work` reads and writes fixed tensors; recording runs it, and leaves those in `changed` as they were."""
        if not self.graphs:
            return work
        began, changed = time.perf_counter(), list(changed)
        with _kept(changed), kernels.compiling():
            work()  # compiles all kernels at once; what it computes is rubbish
        with _kept(changed):
            side = torch.cuda.Stream(self.device)  # the default stream cannot be recorded
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                work()  # libraries set themselves up before anything is recorded
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the program may use the card meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        self.recorded += 1
        log.info("recorded %s in %.2f s", name, time.perf_counter() - began)
        return graph.replay


@contextmanager
def _kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.clone()) for tensor in tensors]
    yield
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
        arrived.record()

        def wait() -> Tensor:
            arrived.synchronize()
            return letter

        return wait
