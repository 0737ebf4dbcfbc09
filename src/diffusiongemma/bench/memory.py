"""Peak memory: while the weights are made or loaded, and while a text with a long context is written.

On a GPU: what torch's allocator held at most, and what CUDA itself holds beside it (context, libraries, graphs). On a
CPU: the process.
"""

from __future__ import annotations

from typing import Any

import torch

from diffusiongemma.bench.drive import make_request, random_tokens, together
from diffusiongemma.bench.floor import weight_bytes
from diffusiongemma.bench.subject import Subject, beside, free, peak, reset_peak
from diffusiongemma.bench.timing import Outcome
from diffusiongemma.engine.runner import CHUNK
from diffusiongemma.model import CacheRow
from diffusiongemma.model.packed import drop_packed

LIMIT_GB = 18.0  # what the 26B in 4 bits should fit in


def measure_memory(subject: Subject, users: int = 1, prefix: int = 8192, canvas: int | None = None) -> Outcome:
    """Two blocks after a context of `prefix` tokens, so that a commit is in it. As on a card that the model just fits
    on: prompts are read in small passes, and experts lie in memory once."""
    model, config = subject.model, subject.model.config
    width = canvas or config.canvas_length
    length = prefix + 2 * width
    told: dict[str, Any] = {"users": users, "prefix": prefix, "canvas": width, "chunk": CHUNK}
    drop_packed(model)  # another part may have had them
    free(subject.device)
    reset_peak(subject.device)
    with subject.engine(users, length, spare=0, chunk=CHUNK, once=True) as engine:
        prompts = [random_tokens(engine, prefix, seed=i) for i in range(users)]
        together(engine, [make_request(p, 2 * width, seed=i, steps=4, canvas=width) for i, p in enumerate(prompts)])
        room = engine.scheduler.limits.max_bytes
        writing, made_of = peak(subject.device), _parts(subject.device)
    weights = weight_bytes(model).total()
    cache = users * CacheRow.bytes_for(config, length, model.dtype)
    floor, highest = weights + cache, max(writing, subject.making_peak)
    title, rows = subject.heading("peak memory", **told)
    rows += [
        ("floor", f"{floor / 1e9:.2f} GB: weights {weights / 1e9:.2f}, keys and values {cache / 1e9:.3f}"),
        ("room", f"the engine keeps at most {room / 1e9:.3f} GB of keys and values"),
        ("figure", f"{highest / 1e9:.2f} GB: making {subject.making_peak / 1e9:.2f}, writing {writing / 1e9:.2f}"),
        *([("writing", ", ".join(f"{name} {value:.2f}" for name, value in made_of.items()))] if made_of else []),
        ("ratio", f"{highest / floor:.2f}; {highest / 1e9 / LIMIT_GB:.2f} of {LIMIT_GB} GB"),
    ]  # fmt: skip
    result = subject.facts("memory", **told) | {
        "floor_gb": floor / 1e9, "peak_gb": highest / 1e9, "making_peak_gb": subject.making_peak / 1e9,
        "writing_peak_gb": writing / 1e9, "ratio": highest / floor, "limit_gb": LIMIT_GB, "room_gb": room / 1e9,
        "making_seconds": subject.making_seconds, "writing_gb": made_of,
    }  # fmt: skip
    return Outcome(title, rows, result)


def _parts(device: torch.device) -> dict[str, float]:
    """GB of a GPU since `reset_peak`: what tensors took, what torch reserved for them and graphs, what is beside it."""
    if device.type != "cuda":
        return {}
    parts = {
        "tensors at the end": torch.cuda.memory_allocated(device),
        "at most": torch.cuda.max_memory_allocated(device),
        "reserved at the end": torch.cuda.memory_reserved(device),
        "reserved at most": torch.cuda.max_memory_reserved(device),
        "beside": beside(device),
    }
    return {name: value / 1e9 for name, value in parts.items()}
