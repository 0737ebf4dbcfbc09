"""What is measured: one set of weights, made or loaded once, and engines over it, one for each measurement."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusiongemma.bench.floor import EXPERTS, part_of
from diffusiongemma.bench.hardware import Card, card_of
from diffusiongemma.bench.routing import spread
from diffusiongemma.bench.timing import Rows, machine
from diffusiongemma.checkpoint import load_model, pick_device, pick_dtype, resolve
from diffusiongemma.config import PRESETS, ModelConfig
from diffusiongemma.engine import Engine, Limits
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.packed import packings
from diffusiongemma.model.quantize import EMBEDDINGS, Scheme, formats_in, random_network, use_fast_products
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.bytes import byte_tokenizer

# Logits of such weights are nearly even, so no kernel can skip what carries no probability, as on text it may.
STD = 0.02


@dataclass(frozen=True)
class Target:
    """What a user asked to measure."""

    preset: str = "26b-a4b"  # a preset, or a checkpoint: folder, hub id, 'nano'
    random_weights: bool = False  # of a checkpoint's geometry; a preset has no others
    quant: str | None = None  # None: as the device likes it, or as the checkpoint has it
    group: int | None = None
    device: str = "auto"
    packed: bool | None = None  # as `Limits.packed`


@dataclass
class Subject:
    name: str
    model: DiffusionGemma
    tokenizer: Tokenizer
    random: bool
    making_seconds: float
    making_peak: int  # bytes on the device (a CPU: of the process)
    packed: bool | None = None
    cold_seconds: float | None = None  # from weights in memory to the first block, if an engine has started yet

    @classmethod
    def make(cls, target: Target) -> Subject:
        device = pick_device(target.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # graphs are replayed, and steps taken, on this thread, too
        kind = None if target.quant in (None, "bf16") else target.quant
        if kind is None and target.group is not None:
            raise ConfigError(f"--group {target.group} has no effect without --quant int4: leave it out")
        dtype = pick_dtype("bfloat16" if target.quant == "bf16" else "auto", device, [])
        random = target.random_weights or target.preset in PRESETS
        reset_peak(device)
        start = time.perf_counter()
        if random:
            if target.preset in PRESETS:
                config = ModelConfig.preset(target.preset)
            else:
                config = ModelConfig.from_pretrained(folder_of(target.preset))
            scheme = None if kind is None else Scheme.parse(kind, target.group)
            model, tokenizer = random_network(config, scheme, device, dtype, std=STD), byte_tokenizer()
            use_fast_products(model)
            spread(model)
        else:
            folder = folder_of(target.preset)
            wanted = "bfloat16" if target.quant == "bf16" else "auto"
            model = load_model(folder, str(device), wanted, quantize=kind, group=target.group)
            tokenizer = Tokenizer.from_pretrained(folder)
        seconds = time.perf_counter() - start
        return cls(target.preset, model, tokenizer, random, seconds, peak(device), target.packed)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def card(self) -> Card:
        return card_of(self.device)

    @property
    def weights(self) -> str:
        """In a word, embeddings aside: fp8, int4-64, bfloat16, …; experts first, if the other layers differ."""
        formats = {name: fmt for name, fmt in formats_in(self.model).items() if name != EMBEDDINGS}
        ordered = sorted(formats, key=lambda name: part_of(name) != EXPERTS)
        names = [f"{fmt.kind}-{fmt.group}" if fmt.group else fmt.kind for fmt in map(formats.__getitem__, ordered)]
        return "+".join(dict.fromkeys(names)) or str(self.model.dtype).removeprefix("torch.")

    @contextmanager
    def engine(
        self, users: int, length: int, spare: int = 2, chunk: int | None = None, once: bool = False
    ) -> Iterator[Engine]:
        """An engine for so many rows of so many tokens, and room for kept prompts as large as `spare` more. `once`: its
        experts lie in memory no second time."""
        config = self.model.config
        if length > config.max_position_embeddings:
            raise ConfigError(f"{length} tokens are more than the model's {config.max_position_embeddings} positions")
        room = (users + spare) * CacheRow.bytes_for(config, length, self.model.dtype)
        limits = Limits(max_rows=users, max_bytes=room, chunk=chunk, packed=False if once else self.packed)
        made = Engine(self.model, self.tokenizer, name=self.name, limits=limits)
        try:
            yield made
        finally:
            made.close()
            del made
            free(self.device)

    def facts(self, bench: str, **config: Any) -> dict[str, Any]:
        """How every result begins."""
        return {"bench": bench, "preset": self.name, "weights": self.weights, "packed": packings(self.model),
                "random_weights": self.random, **config, **machine(self.device),
                "machine": self.card.to_dict()}  # fmt: skip

    def heading(self, what: str, **config: Any) -> tuple[str, Rows]:
        """The same for people."""
        told = ", ".join(f"{name} {value}" for name, value in config.items())
        random = " (random weights)" if self.random else ""
        card = self.card
        rows = [("config", told), ("card", f"{card} ({card.origin})"), ("torch", torch.__version__)]
        if found := packings(self.model):
            rows.append(("experts", f"for few users a second time, as {', '.join(found)}"))
        return f"{what}: {self.name}, {self.weights}{random}", rows


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        free(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Bytes at most since `reset_peak`; beside what torch reserved, what CUDA itself holds. A CPU: of the process."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_reserved(device) + beside(device)


def beside(device: torch.device) -> int:
    """Bytes of a GPU that torch does not know of: context, libraries, other processes."""
    left, total = torch.cuda.mem_get_info(device)
    return max(0, total - left - torch.cuda.memory_reserved(device))


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def folder_of(name: str) -> Path:
    if name == "nano":
        from diffusiongemma.engine.engine import ASSETS

        return ASSETS / name
    return resolve(name, None)
