"""bfloat16 and int8 on a CPU that promises more than it does.

Some virtual machines advertise Intel AMX but die with an illegal instruction when oneDNN uses it, which torch does for
every bfloat16 and every int8 product. The only safe way to know is to let a forked child try: it has this process's
oneDNN, in the state it is in, and costs milliseconds. If the child dies, oneDNN is held back to AVX-512 by the variable
that it reads on its first use. If that comes too late for this process, int8 is done without, and for bfloat16 the user
must set the variable before starting.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from diffusiongemma.errors import DeviceError

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"


@cache
def ensure_cpu_bf16() -> None:
    """Make bfloat16 usable on this CPU, or raise a DeviceError that says what to do."""
    if not _may_have_amx() or _held_back(_bf16_work):
        return
    if set_by_user := os.environ.get(ISA_VARIABLE):
        raise DeviceError(
            f"bfloat16 does not work on this CPU with {ISA_VARIABLE}={set_by_user}: "
            f"set it to {ISA_WITHOUT_AMX}, or use dtype='float32'"
        )
    raise DeviceError(
        "bfloat16 does not work on this CPU in this process: it advertises instructions that it cannot run. "
        f"Start again with {ISA_VARIABLE}={ISA_WITHOUT_AMX} in the environment, or use dtype='float32'"
    )


@cache
def fast_int8() -> bool:
    """Has this CPU instructions for sums of int8 products (VNNI), and do they work in this process?"""
    return _may_have_amx() and torch.cpu._is_vnni_supported() and _held_back(_int8_work)


def _may_have_amx() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _held_back(work: Callable[[], object]) -> bool:
    """Whether this work can be done, if need be without AMX: where nobody has set the variable, and not too late."""
    if survives(work):
        return True
    if ISA_VARIABLE in os.environ:
        return False
    os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
    if survives(work):
        return True
    del os.environ[ISA_VARIABLE]
    return False


def survives(work: Callable[[], object], timeout: float = 20.0) -> bool:
    """Whether a forked child gets through `work` without a signal, an exception or a hang."""
    child = os.fork()
    if child == 0:
        _run_and_exit(work)
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _run_and_exit(work: Callable[[], object]) -> None:
    code = 1
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its death is expected: no core file, no report
        faulthandler.disable()
        torch.set_num_threads(1)  # the thread pool does not survive a fork
        work()
        code = 0
    finally:
        os._exit(code)


def _bf16_work() -> None:
    a = torch.ones(256, 256, dtype=torch.bfloat16)
    F.linear(a, a)
    torch.bmm(a.expand(2, -1, -1), a.expand(2, -1, -1))
    heads = a.view(1, 4, 64, 256)
    F.scaled_dot_product_attention(heads, heads, heads)


def _int8_work() -> None:
    """Also right: oneDNN without VNNI, to which somebody may have held it back, adds two products in 16 bits."""
    a = torch.full((256, 256), 127, dtype=torch.int8)
    if not bool((torch._int_mm(a, a.t()) == 256 * 127**2).all()):
        raise ArithmeticError("wrong sums")
