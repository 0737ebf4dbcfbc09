# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Kernels that are launched while the one before still runs: their first programs are in place when it ends.

A layer is a chain of small kernels, and between two of them the card idles for a microsecond or two. `run` lets the
next be launched early; `ready`, in its kernel, waits until all that came before is done and visible. Before that line
a kernel may only read constants.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from diffusiongemma.ops.kernels import early, interpreted, launch

SEPARATE = {"enable_fp_fusion": False}  # of a launch: no product is fused with a sum, so that others round alike


@triton.jit
def ready(HOPPER: tl.constexpr):
    if HOPPER:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def run(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Launch a kernel whose programs all call `ready(HOPPER)` before they read what others write, or write."""
    launch(kernel, programs, *args, HOPPER=not interpreted(), **options, **early())


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a kernel that goes through its work by itself are launched."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
