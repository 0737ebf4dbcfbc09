# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Kernels that are launched while the one before still runs: their first programs are in place when it ends.

A layer is a chain of small kernels, and between two of them the card idles for a microsecond or two. `run` lets the
next be launched early; `ready`, in its kernel, waits until all that came before is done and visible. Before that line
a kernel may only read constants. Cards before Hopper cannot do that: their launches come one after another.

Where a kernel behind a few small ones has much to do before its turn (experts that are streamed fill their ring), these
are launched eagerly: each lets the next be launched before it waits itself. None waits for less: a kernel ends when its
own wait is over, so whoever waits for it waits for all before it. (Elsewhere that gained nothing, `docs/log.md`.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from diffusiongemma.ops import kernels
from diffusiongemma.ops.kernels import begins_early, early, interpreted, launch

SEPARATE = {"enable_fp_fusion": False}  # of a launch: no product is fused with a sum, so that others round alike
EAGER = tl.constexpr(2)  # of HOPPER
LATE = tl.constexpr(3)


@triton.jit
def ready(HOPPER: tl.constexpr):
    """HOPPER: 0 in the interpreter; on a card from Hopper on 1, or EAGER; LATE on one before it"""
    if HOPPER == EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif HOPPER and HOPPER != LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def run(kernel: Any, programs: int, *args: Any, eager: Any = False, **options: Any) -> None:
    """Launch a kernel whose programs all call `ready(HOPPER)` before they read what others write, or write."""
    options |= (pdl := early())
    hopper = (EAGER.value if eager else 1) if pdl or begins_early() else 0 if interpreted() else LATE.value
    launch(kernel, programs, *args, HOPPER=hopper, **options)


def multiprocessors(device: torch.device) -> int:
    """How many programs of a kernel that goes through its work by itself are launched."""
    return kernels.card(device).processors
