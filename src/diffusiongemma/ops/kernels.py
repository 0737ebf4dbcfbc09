"""Whether Triton kernels can run here, how they are launched, and how many are compiled at once.

This module imports without Triton and without a GPU, as does everything above `ops`: the `*_triton` modules are
imported only after `unavailable` has found nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

log = logging.getLogger(__name__)

TRIED = ((3, 6), (3, 9))  # versions of Triton that compile the kernels in Gluon, a language that still changes

_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


def unavailable(device: torch.device | str, capability: tuple[int, int] = (9, 0)) -> str | None:
    """Why no Triton kernel can run on this device, or None. `capability`: what the kernel is laid out for."""
    device = torch.device(device)
    if find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD cards"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        least = f"{capability[0]}.{capability[1]}"
        return f"the kernels are laid out for compute capability {least} and above, this card has {found[0]}.{found[1]}"
    return None


def gluon_unavailable(device: torch.device) -> str | None:
    """Why no kernel in Gluon can run on this device, or None"""
    if interpreted() or device.type != "cuda":
        return "Gluon has no interpreter"
    found = torch.cuda.get_device_capability(device)
    if found[0] != 9:
        return f"they are laid out for Hopper (9.0), this card has {found[0]}.{found[1]}"
    import triton

    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if not TRIED[0] <= version <= TRIED[1]:
        first, last = (".".join(map(str, each)) for each in TRIED)
        return f"they were tried with Triton {first} to {last}, not with {triton.__version__}"
    return None


@cache
def gluon(device: torch.device) -> bool:
    """Do kernels in Gluon run on this device? If not, the log says why, once."""
    reason = gluon_unavailable(device)
    if reason is not None and device.type == "cuda":
        log.info("no kernels in Gluon, those in Triton do their work: %s", reason)
    return reason is None


def interpreted() -> bool:
    """Triton runs kernels in Python, on tensors of the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    if _compile_only.get():
        kernel.warmup(*args, grid=(programs,), **options)
    else:
        kernel[(programs,)](*args, **options)


EARLY = True


def early() -> dict[str, bool]:
    """Options of a launch that may begin before the one before it has ended. Its kernel must call `gdc_wait` before it
    reads what that one writes, and before it writes anything that others know."""
    return {"launch_pdl": True} if EARLY and not interpreted() else {}


@contextmanager
def compiling(threads: int | None = None) -> Iterator[None]:
    """Inside, `launch` compiles and does not run: many kernels at once, all ready at the end. Results mean nothing.
    A kernel that does not compile says so when it is launched."""
    import triton

    token = _compile_only.set(True)
    try:
        with (
            ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            yield
    finally:
        _compile_only.reset(token)
