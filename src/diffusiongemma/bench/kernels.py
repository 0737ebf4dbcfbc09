"""Where the time of a step on a GPU goes: the kernels of recorded steps, told apart by name and by order.

A kernel of ours belongs to the file in `ops/` that it stands in. Products are the exception: attention, MLP and experts
use the same kernels, ours or the vendor's, so a product belongs to what was announced last on its stream: rotary
tables and the end of a layer announce attention, the end of attention announces the dense MLP, the router
announces the experts. A stream that nothing announced anything on is the dense MLP's own. Experts that are streamed
have a kernel of their own, and the dense MLP then runs in their time: hardly anything is left to charge it for.

Kernels overlap: one may begin early and wait for the one before it, and streams run beside each other. A kernel is
charged for the time after all that began before it had ended, so the parts and the idle time add up to the whole.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import diffusiongemma.ops
from diffusiongemma.bench.floor import ATTENTION, CONDITIONING, DENSE, EXPERTS, REST, VOCABULARY

PRODUCT = "product"
_FILES = {
    "attention": ATTENTION, "heads": ATTENTION, "experts": EXPERTS, "packed": EXPERTS, "pairs": EXPERTS,
    "wide": EXPERTS, "routing": EXPERTS, "product": PRODUCT, "int4": PRODUCT, "few": PRODUCT, "vocab": VOCABULARY,
    "weigh": VOCABULARY, "soft": VOCABULARY,
}  # fmt: skip
_VENDOR = re.compile(r"gemm|nvjet|cutlass|xmma|gemv|splitk|cublas", re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """One kernel that ran; microseconds."""

    name: str
    stream: int
    start: float
    length: float


@dataclass
class Profile:
    """What one step spends on the card."""

    parts: dict[str, float]  # milliseconds
    idle_ms: float  # nothing runs, within steps and between them
    kernels: list[dict[str, Any]]  # the longest, with their part


@cache
def families() -> dict[str, str]:
    """Kernel -> part, for every kernel in `ops/`; norms and the router are the rest."""
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction  # what a kernel is where TRITON_INTERPRET is set

    found = {}
    folder = Path(diffusiongemma.ops.__path__[0])
    for file in sorted((*folder.glob("*_triton.py"), *folder.glob("*_gluon.py"))):
        try:
            module = import_module(f"diffusiongemma.ops.{file.stem}")
        except (ImportError, AttributeError):
            if file.stem.endswith("_gluon"):  # a version of Triton that does not know it, and does not run it either
                continue
            raise
        for name, value in vars(module).items():
            ours = isinstance(value, JITFunction | InterpretedFunction) and value.fn.__module__.endswith(file.stem)
            if name.endswith("kernel") and ours:
                found[name] = _FILES.get(file.stem.partition("_")[0], REST)
    for file in sorted(folder.glob("*.cu")):
        for name in re.findall(r"(\w+_cuda_kernel)\(", file.read_text(encoding="utf-8")):
            found[name] = _FILES.get(file.stem.partition("_")[0], REST)
    return found


def profiled(call: Callable[[], object]) -> list[Launch]:
    """The kernels that run on the card during a call, whatever thread starts them, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        record.export_chrome_trace(str(file))
        return from_trace(json.loads(file.read_text(encoding="utf-8")))


def from_trace(trace: dict[str, Any]) -> list[Launch]:
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    launches = [Launch(e["name"], e["args"]["stream"], float(e["ts"]), float(e["dur"])) for e in events]
    return sorted(launches, key=lambda launch: launch.start)


def summarise(launches: list[Launch], layers: int, steps: int, top: int = 25) -> Profile:
    """The kernels of so many whole steps -> what one of them spends."""
    assert launches, "the profiler saw no kernel"
    parts = assign(launches, layers)
    time: defaultdict[str, float] = defaultdict(float)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    idle, busy_until = 0.0, launches[0].start
    for launch, part in zip(launches, parts, strict=True):
        idle += max(0.0, launch.start - busy_until)
        end = launch.start + launch.length
        charged = max(0.0, end - max(launch.start, busy_until))
        busy_until = max(busy_until, end)
        time[part] += charged
        by_name[launch.name, part].append(charged)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return Profile(
        {part: round(us / steps / 1e3, 4) for part, us in time.items()},
        round(idle / steps / 1e3, 4),
        [
            {"kernel": name[:80], "part": part, "calls": len(taken) / steps, "us": round(sum(taken) / steps, 2)}
            for (name, part), taken in longest
        ],
    )


def assign(launches: list[Launch], layers: int) -> list[str]:
    """The part that each belongs to."""
    kinds = [_kind(launch.name) for launch in launches]
    zones: dict[int, str] = {}
    parts: list[str] = []
    ended = 0  # layers
    mixed = False  # attention has ended; what is multiplied next is its own, whatever branch of a graph it is in
    for launch, kind in zip(launches, kinds, strict=True):
        name, stream = launch.name, launch.stream
        zone = ATTENTION if mixed else zones.get(stream, DENSE)
        parts.append(zone if kind == PRODUCT else kind)
        mixed = _known(name, "_join_kernel") or (mixed and kind != PRODUCT)
        if _known(name, "_rope_kernel"):
            zones[stream] = ATTENTION
            _condition(kinds, parts)
        elif _known(name, "_after_attention_kernel"):
            zones[stream] = DENSE
        elif any(_known(name, kernel) for kernel in ("_scores_kernel", "route_kernel", "route_one_kernel")):
            zones[stream] = EXPERTS
        elif _known(name, "_after_feed_forward_kernel"):
            ended += 1
            zones[stream] = VOCABULARY if ended % layers == 0 else ATTENTION
    return parts


def _condition(kinds: list[str], parts: list[str]) -> None:
    """A step begins with the two products of self-conditioning; the rotary tables come right after them."""
    products = [i for i in range(len(parts)) if kinds[i] == PRODUCT]
    for i in products[-2:]:
        parts[i] = CONDITIONING


def _kind(name: str) -> str:
    part = next((part for kernel, part in families().items() if _known(name, kernel)), None)
    return part or (PRODUCT if _VENDOR.search(name) else REST)


def _known(name: str, kernel: str) -> bool:
    """Triton may add to a kernel's name, after it."""
    return name == kernel or (name.startswith(kernel) and not name[len(kernel)].isalpha())
