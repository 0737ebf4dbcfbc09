"""Whether Triton kernels can run here, what the card can do, how they are launched, and how many are compiled at once.

What kernels need of a card: 8.9 for products of fp8 numbers, 9.0 for launches that begin early and for prefetches in
bulk, and Hopper itself (9.0, no other) for those in Gluon and in CUDA C++. How much shared memory a program may have
differs, too, and with it their tiles. All but Hopper are cards that the kernels were compiled for and never run on
(`engine/trial.py`).

This module imports without Triton and without a GPU, as does everything above `ops`: the `*_triton` modules are
imported only after `unavailable` has found nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)

TRIED = ((3, 6), (3, 9))  # versions of Triton that compile the kernels in Gluon, a language that still changes

OLDEST = (8, 9)  # compute capability: tensor cores that multiply fp8 numbers
HOPPER = (9, 0)
NVRTC = (12, 3)  # knows all that Hopper's kernels in CUDA C++ say

_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


class Card(NamedTuple):
    """What kernels ask of a device."""

    capability: tuple[int, int]
    shared: int  # bytes of shared memory that one program may have
    processors: int  # multiprocessors

    @property
    def early(self) -> bool:
        """May a launch begin before the one before it has ended, and a program prefetch in bulk?"""
        return self.capability >= HOPPER

    @property
    def small(self) -> bool:
        """Is there too little shared memory for tiles laid out for Hopper's 227 KB?"""
        return self.shared < ROOMY


ROOMY = 200 << 10
NO_CARD = Card(HOPPER, 227 << 10, 3)  # the interpreter: as on Hopper, with few programs of those that share work


@cache
def card(device: torch.device) -> Card:
    if device.type != "cuda":
        return NO_CARD
    found: Any = torch.cuda.get_device_properties(device)
    return Card((found.major, found.minor), int(found.shared_memory_per_block_optin), int(found.multi_processor_count))


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Inside, kernels are launched on this card: Triton launches on the thread's current one, whatever it is given."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def unavailable(device: torch.device | str) -> str | None:
    """Why no Triton kernel can run on this device, or None."""
    device = torch.device(device)
    if find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD cards"
    found = card(device).capability
    if found < OLDEST:
        return f"the kernels need compute capability {dotted(OLDEST)} or more, this card has {dotted(found)}"
    return None


def untried(device: torch.device) -> bool:
    """Was no card like this ever seen to run the kernels?"""
    return card(device).capability != HOPPER


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def gluon_unavailable(device: torch.device) -> str | None:
    """Why no kernel in Gluon can run on this device, or None"""
    if interpreted() or device.type == "cpu":
        return "Gluon has no interpreter"
    found = card(device).capability
    if found != HOPPER:
        return f"they are laid out for Hopper ({dotted(HOPPER)}), this card has {dotted(found)}"
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


def cpp_unavailable(device: torch.device) -> str | None:
    """Why no kernel in CUDA C++ can run on this device, or None"""
    if interpreted() or device.type == "cpu":
        return "CUDA C++ has no interpreter"
    found = card(device).capability
    if found != HOPPER:
        return f"they are laid out for Hopper ({dotted(HOPPER)}), this card has {dotted(found)}"
    try:
        from cuda.bindings import nvrtc

        error, *version = nvrtc.nvrtcVersion()
    except Exception as missing:  # the package, or the library behind it, which says so in its own way
        return f"cuda-bindings and NVRTC compile them, and are not to be had: {missing}"
    if error:
        return f"NVRTC answers {error!r}"
    if tuple(version) < NVRTC:
        return f"they need NVRTC {dotted(NVRTC)} or newer, here is {'.'.join(map(str, version))}"
    return None if device.type != "cuda" else _refused(device)


def _refused(device: torch.device) -> str | None:
    """Why the driver does not take what NVRTC makes, or None"""
    from diffusiongemma.ops import nvrtc

    try:
        with current(device):
            nvrtc.probe(device)
    except Exception as error:
        return f"the driver does not take what NVRTC makes: {error}"
    return None


@cache
def cpp(device: torch.device) -> bool:
    """Do kernels in CUDA C++ run on this device? If not, the log says why, once."""
    reason = cpp_unavailable(device)
    if reason is not None and device.type == "cuda":
        log.info("no kernels in CUDA C++, others do their work: %s", reason)
    return reason is None


def interpreted() -> bool:
    """Triton runs kernels in Python, on tensors of the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def compile_only() -> bool:
    """Are kernels compiled here, and not run? See `compiling`."""
    return _compile_only.get()


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    if compile_only():
        kernel.warmup(*args, grid=(programs,), **options)
    else:
        kernel[(programs,)](*args, **options)


EARLY = True


def begins_early() -> bool:
    """Do launches on the current card begin before the one before them has ended?"""
    if interpreted():
        return False
    from triton.runtime.driver import driver

    return card(torch.device("cuda", driver.active.get_current_device())).early


def early() -> dict[str, bool]:
    """Options of a launch that may begin before the one before it has ended. Its kernel must call `gdc_wait` before it
    reads what that one writes, and before it writes anything that others know."""
    return {"launch_pdl": True} if EARLY and begins_early() else {}


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
