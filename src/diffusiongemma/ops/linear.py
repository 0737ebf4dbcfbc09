"""Matrix products whose rows do not depend on their neighbours.

A request must give the same text alone or in any batch, so a row of `x @ w.T` may not change its bits when other
rows join. On AMD's processors MKL keeps that promise for multiples of 8 rows, whatever the number of threads; a rest of
1 to 3 rows goes through other kernels with another order of summation. So rows are padded to a multiple of 8, which
costs next to nothing. On Intel's it takes other kernels for 8 rows than for 16, and where there is no AVX-512 for more
rows again, unless it is asked for strict reproducibility, which costs nothing measurable. It reads that wish when it is
first used, so this module tells it when it is imported; who multiplied before is warned when a model is loaded.
`tests/ops/test_linear.py` holds the promise.
"""

from __future__ import annotations

import logging
import os
import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusiongemma.ops.threads import shared

ROWS = 8
MKL_VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"

log = logging.getLogger(__name__)


def ask_for_steady_rows() -> None:
    """On an Intel processor; what a user has set stays."""
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        about = platform.processor()  # not Linux
    if "GenuineIntel" in about:
        os.environ.setdefault(MKL_VARIABLE, STRICT)


ask_for_steady_rows()


@cache
def rows_are_steady() -> bool:
    """Whether 8 rows have the same bits among 16 here; if not, a warning says what to do."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2 * ROWS, 224, generator=generator), torch.randn(512, 224, generator=generator)
    steady = torch.equal(F.linear(x[:ROWS], weight), F.linear(x, weight)[:ROWS])
    if not steady:
        log.warning(
            "on this CPU a text may depend, in the last bit, on what runs beside it: start with %s=%s in the "
            "environment, or import diffusiongemma.ops.linear before torch multiplies anything",
            MKL_VARIABLE,
            STRICT,
        )
    return steady


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in], weight [out, in] -> [N, out]; on a CPU, bit for bit the same for a row whatever N is."""
    rows = x.shape[0]
    missing = -rows % ROWS
    with shared(rows * weight.numel()):
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
