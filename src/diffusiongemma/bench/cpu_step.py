"""One denoising step on a CPU, ours and Transformers' on the same weights in the same run.

`dgemma bench cpu-step --peer transformers`, or `--preset nano`: the embedded model, in int8 as the engine runs it and
in float32. Each number format has its own floor.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from diffusiongemma.bench.floor import expected_hit, step_work
from diffusiongemma.bench.hardware import card_of
from diffusiongemma.bench.peer import VISION, import_transformers
from diffusiongemma.bench.subject import folder_of
from diffusiongemma.bench.timing import Outcome, alternate, machine, median_ratio
from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import count_parameters, describe, ensure_room, footprint, formats_in

NANO = "nano"


@torch.inference_mode()
def measure_cpu_step(preset: str, prefix: int, rounds: int, peer: str | None, seed: int = 0) -> Outcome:
    model = plain = _network(preset, seed)
    if preset == NANO:
        model = load_model(folder_of(NANO))
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (1, prefix), generator=generator)
    canvas = torch.randint(0, config.vocab_size, (1, config.canvas_length), generator=generator)

    ran = {"diffusiongemma": model} if plain is model else {"diffusiongemma": model, "float32": plain}
    wide = [*ran][-1]  # what the peer stands beside: it has no integers
    contestants: dict[str, Callable[[], Tensor]] = {}
    for name, network in ran.items():
        contestants[name], first = _step(network, tokens, canvas)
    if peer is not None:
        contestants[peer] = _transformers_step(plain, tokens, canvas, first)
        difference = (contestants[peer]() - contestants[wide]()).abs().max().item()

    seconds = alternate(contestants, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    parameters = count_parameters(model)
    rows = [("parameters", f"{parameters / 1e6:.1f} M"), ("prefix + canvas", f"{prefix} + {config.canvas_length}")]
    card, width = card_of(torch.device("cpu")), config.canvas_length
    works = {name: step_work(network, 1, prefix, width, expected_hit(network, width)) for name, network in ran.items()}
    floors = {name: work.seconds(card) for name, work in works.items()}
    for name, work in works.items():
        rates = f"at {card.read / 1e9:.3g} GB/s and {card.rate(work.bits) / 1e9:.3g} GFLOP/s"
        rows += [(f"floor of {work.bits}-bit numbers", f"{1e3 * floors[name]:.1f} ms, {rates}")]
    for name, value in medians.items():
        ratio = value / floors[wide if name == peer else name]
        rows += [(name, f"{1e3 * value:.1f} ms a step, ratio {ratio:.2f}")]
    result = {"bench": "cpu-step", "preset": preset, "prefix": prefix, "parameters": parameters, **machine()}
    result |= {"machine": card.to_dict(), "floor_ms": {name: 1e3 * floor for name, floor in floors.items()}}
    result["milliseconds"] = {name: round(1e3 * value, 2) for name, value in medians.items()}
    if plain is not model:
        ratio = median_ratio(seconds["float32"], seconds["diffusiongemma"])
        rows += [("float32 : diffusiongemma", f"{ratio:.3f}")]
        result["float32_ratio"] = round(ratio, 4)
    if peer is not None:
        ratio = median_ratio(seconds[peer], seconds["diffusiongemma"])
        rows += [(f"{peer} : diffusiongemma", f"{ratio:.3f}"), ("largest logit difference", f"{difference:.1e}")]
        result |= {"ratio": round(ratio, 4), "difference": difference}
    weights = "float32" if plain is model else describe(formats_in(model).values())
    return Outcome(f"one denoising step, {preset}, {weights} on {torch.get_num_threads()} threads", rows, result)


def _network(preset: str, seed: int) -> DiffusionGemma:
    """In float32: random weights, or those of the embedded model."""
    if preset == NANO:
        return load_model(folder_of(NANO), quantize="none")
    config = ModelConfig.preset(preset, vision_config=VISION)
    ensure_room(footprint(config, None, torch.float32), "cpu")
    return DiffusionGemma(config).init_weights(seed).eval()


def _step(model: DiffusionGemma, tokens: Tensor, canvas: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """A conditioned step over these tokens, and the logits that it is conditioned on."""
    cache = model.new_cache(1, tokens.shape[1] + canvas.shape[1])
    model.encode(tokens, cache)
    first = model.denoise(canvas, cache)
    return lambda: model.denoise(canvas, cache, first), first


def _transformers_step(model: DiffusionGemma, tokens: Tensor, canvas: Tensor, first: Tensor) -> Callable[[], Tensor]:
    """The same step there, on the same weights by way of a saved folder, with its default attention and experts."""
    transformers = import_transformers()
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        there = transformers.DiffusionGemmaForBlockDiffusion
        peer = there.from_pretrained(Path(folder) / "model", dtype=torch.float32).eval()
    cache = transformers.DynamicCache(config=peer.config.get_text_config())
    peer.model.encoder(input_ids=tokens, past_key_values=cache)

    def step() -> Tensor:
        out: Tensor = peer(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=first).logits
        return out

    return step
