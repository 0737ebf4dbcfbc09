"""Matrix products whose rows do not depend on their neighbours.

A request must give the same text alone or in any batch, so a row of `x @ w.T` may not change its bits when other
rows join. MKL keeps that promise for multiples of 8 rows, whatever the number of threads; a rest of 1 to 3 rows goes
through other kernels with another order of summation. So rows are padded to a multiple of 8, which costs next to
nothing. `tests/ops/test_linear.py` holds the promise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in], weight [out, in] -> [N, out]; on a CPU, bit for bit the same for a row whatever N is."""
    rows = x.shape[0]
    missing = -rows % ROWS
    if missing == 0 or x.is_cuda:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight)[:rows]


class Linear(nn.Module):
    """A weight matrix without bias. Quantised variants replace this module and keep its call."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        return linear(x, self.weight)
