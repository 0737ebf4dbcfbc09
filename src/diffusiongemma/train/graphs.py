"""A task's micro-batch, forward and backward, as one CUDA graph.

A micro-batch is some ten thousand small kernels, and starting them one by one takes the host longer than the GPU needs
to run them. All micro-batches of a task have the same shapes, so their work is recorded once and replayed. Random
numbers stay fresh: a replay reads the generator's seed and offset, as `torch.manual_seed` left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from diffusiongemma.train.objective import Result
from diffusiongemma.train.optim import clear_gradients
from diffusiongemma.train.rows import Rows

Work = Callable[[Rows], Result]  # adds to the gradients that lie on the parameters


class Recorded:
    def __init__(self, work: Work, rows: Rows, pool: Any) -> None:
        """`rows` are on the device; their memory is what replays read."""
        self.rows = rows
        side = torch.cuda.Stream()  # the default stream cannot be recorded
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work(rows)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            result = work(rows)
            self.result = Result(result.loss.detach(), result.load, result.metrics)

    def __call__(self, rows: Rows) -> Result:
        """Gradients as `work` would add them; the result is a copy, because the next replay writes over its own."""
        for mine, new in zip(self.rows.tensors(), rows.to(self.rows.prefix.device).tensors(), strict=True):
            mine.copy_(new)
        self.graph.replay()
        out = self.result
        return Result(out.loss.clone(), out.load.clone(), {key: value.clone() for key, value in out.metrics.items()})


def record_all(work: Work, examples: Iterable[Rows], model: nn.Module) -> dict[str, Recorded]:
    """One graph a task, in one pool of memory: they run one after another. `examples` lie on the device."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # stays where it is, or a replay would add to freed memory
    pool = torch.cuda.graph_pool_handle()
    recorded = {rows.task: Recorded(work, rows, pool) for rows in examples}
    clear_gradients(model, keep=True)
    return recorded
