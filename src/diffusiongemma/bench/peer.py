"""Transformers on the same geometry in the same run: eager, random weights, a denoising step as its `generate` does it.

Weights of both would not fit beside each other on many cards: one is made, measured and freed, then the other.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from diffusiongemma.bench.floor import expected_hit, step_work
from diffusiongemma.bench.step import step_seconds
from diffusiongemma.bench.subject import Subject, Target, free
from diffusiongemma.bench.timing import Outcome, note, slope, synchronise
from diffusiongemma.checkpoint import pick_device, pick_dtype
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.model.quantize import ensure_room, footprint

# The smallest vision tower Transformers can build: its model class insists on having one.
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "position_embedding_size": 32,
}


def import_transformers() -> Any:
    try:
        import transformers
        from transformers import DiffusionGemmaForBlockDiffusion  # noqa: F401
    except ImportError:
        raise DiffusionGemmaError("the peer needs `pip install 'transformers>=5.17'`") from None
    return transformers


def measure_vs_transformers(
    preset: str = "26b-a4b",
    prefix: int = 512,
    steps: int = 4,
    repeat: int = 3,
    device: str = "auto",
) -> Outcome:
    """Plain weights on both sides. A step of each is a slope over its own loop, sampler and stop rule included."""
    transformers = import_transformers()
    where = pick_device(device)
    theirs, parameters = _their_step(transformers, preset, prefix, steps, repeat, where)
    note(f"Transformers: {1e3 * theirs:.3f} ms a step")
    free(where)
    subject = Subject.make(Target(preset, device=device))
    model, card = subject.model, subject.card
    width = model.config.canvas_length
    with subject.engine(1, prefix + width) as engine:
        ours = step_seconds(engine, 1, prefix, width, 4 * steps, repeat)
    floor = step_work(model, 1, prefix, width, expected_hit(model, width)).seconds(card)
    config = {"prefix": prefix, "canvas": width, "steps": steps, "repeat": repeat}
    title, rows = subject.heading(
        f"a denoising step here and in Transformers {transformers.__version__}, eager", **config
    )
    rows += [
        ("floor", f"{1e3 * floor:.3f} ms"),
        ("figure", f"{1e3 * ours:.3f} ms"),
        ("ratio", f"{ours / floor:.2f}"),
        ("Transformers", f"{1e3 * theirs:.3f} ms, {theirs / floor:.2f} times the floor"),
        ("Transformers : diffusiongemma", f"{theirs / ours:.2f}"),
    ]
    result = subject.facts("vs-transformers", **config) | {
        "ms": 1e3 * ours, "floor_ms": 1e3 * floor, "ratio": ours / floor, "transformers_ms": 1e3 * theirs,
        "transformers": transformers.__version__, "speedup": theirs / ours, "parameters_there": parameters,
    }  # fmt: skip
    return Outcome(title, rows, result)


def _their_step(
    transformers: Any, preset: str, prefix: int, steps: int, repeat: int, device: torch.device
) -> tuple[float, int]:
    """Seconds of a step of `generate`, and how many parameters its model has."""
    ours = ModelConfig.preset(preset, vision_config=VISION)
    config = transformers.DiffusionGemmaConfig.from_dict(ours.to_dict())
    dtype = pick_dtype("auto", device, [])
    ensure_room(footprint(ours, None, dtype), device)
    with device:
        model = transformers.DiffusionGemmaForBlockDiffusion._from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(107, config.text_config.vocab_size, (1, prefix), generator=generator).to(device)
    options = {
        "max_new_tokens": config.canvas_length, "confidence_threshold": 1e-9, "eos_token_id": None, "pad_token_id": 0,
        "disable_compile": True,
    }  # fmt: skip

    @torch.inference_mode()
    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_denoising_steps=count, **options)
        synchronise(device)
        return time.perf_counter() - start

    run(1)
    seconds = slope(lambda: run(1), lambda: run(1 + steps), steps, repeat)
    return seconds, sum(p.numel() for p in model.parameters())
