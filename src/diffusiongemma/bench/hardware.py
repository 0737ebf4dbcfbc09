"""How fast a machine reads and multiplies: from a table of known cards, else measured at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from diffusiongemma.bench.timing import synchronise
from diffusiongemma.ops.cpu import fast_int8
from diffusiongemma.ops.int8_cpu import sums
from diffusiongemma.ops.quant import FP8


@dataclass(frozen=True)
class Card:
    """Bytes read and operations done in a second, as good code reaches them; data sheets promise more."""

    name: str
    read: float
    wide: float  # operations on bfloat16 (a CPU: float32)
    narrow: float  # on 8-bit numbers
    origin: str

    def rate(self, bits: int) -> float:
        return self.narrow if bits <= 8 else self.wide

    def __str__(self) -> str:
        rates = f"{self.wide / 1e12:.3g} TFLOP/s, {self.narrow / 1e12:.3g} in 8 bits"
        return f"{self.name}: reads {self.read / 1e12:.3g} TB/s, {rates}"

    def to_dict(self) -> dict[str, object]:
        return {"read_tb_s": self.read / 1e12, "tflop_s": self.wide / 1e12, "tflop_s_8bit": self.narrow / 1e12,
                "origin": self.origin}  # fmt: skip


# Reading: measured. Operations: a little above the best products that were timed there (docs/benchmarks.md).
KNOWN = {"NVIDIA H200": (4.33e12, 790e12, 1580e12)}


@cache
def card_of(device: torch.device) -> Card:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if name in KNOWN:
        return Card(name, *KNOWN[name], origin="from a table")
    wide = _multiplying(device)
    return Card(name, _reading(device), wide, _multiplying_narrow(device) or wide, origin="measured now")


def _best(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """The shortest of a few calls: a floor should not know of neighbours."""
    taken = []
    for _ in range(rounds):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _reading(device: torch.device) -> float:
    """Bytes a second: a sum over more than any cache holds, or a copy, which reads and writes; the better of them."""
    source = torch.ones((1 << 30 if device.type == "cuda" else 1 << 27) // 4, device=device)
    target = torch.empty_like(source)
    return max(
        source.nbytes / _best(lambda: source.sum(), device),
        2 * source.nbytes / _best(lambda: target.copy_(source), device),
    )


def _multiplying(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best(lambda: a @ b, device)


def _multiplying_narrow(device: torch.device) -> float | None:
    if device.type == "cpu" and fast_int8():
        size, ones = 512, torch.ones(512, 512, dtype=torch.int8)
        return 2 * size**3 / _best(lambda: sums(ones, ones), device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    size = 8192
    a, b = torch.ones(2, size, size, device=device).to(FP8)
    one = torch.ones((), device=device)
    product = torch._scaled_mm
    return 2 * size**3 / _best(lambda: product(a, b.t(), one, one, out_dtype=torch.bfloat16), device)
