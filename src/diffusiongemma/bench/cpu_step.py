"""One denoising step on a CPU, ours and Transformers' on the same weights in the same run.

`python -m diffusiongemma.bench cpu-step --peer transformers`
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from diffusiongemma.bench.timing import alternate, machine, median_ratio, report
from diffusiongemma.checkpoint import save_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.model import DiffusionGemma

# The smallest vision tower Transformers can build: its model class insists on having one.
_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "position_embedding_size": 32,
}


@torch.inference_mode()
def cpu_step(preset: str, prefix: int, rounds: int, peer: str | None, seed: int = 0) -> None:
    config = ModelConfig.preset(preset, vision_config=_VISION)
    model = DiffusionGemma(config).init_weights(seed).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (1, prefix), generator=generator)
    canvas = torch.randint(0, config.vocab_size, (1, config.canvas_length), generator=generator)

    cache = model.new_cache(1, prefix + config.canvas_length)
    model.encode(tokens, cache)
    first = model.denoise(canvas, cache)
    contestants: dict[str, Callable[[], Tensor]] = {"diffusiongemma": lambda: model.denoise(canvas, cache, first)}
    if peer is not None:
        contestants[peer] = _transformers_step(model, tokens, canvas, first)
        difference = (contestants[peer]() - contestants["diffusiongemma"]()).abs().max().item()

    seconds = alternate(contestants, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    parameters = sum(p.numel() for p in model.parameters())
    rows = [("parameters", f"{parameters / 1e6:.1f} M"), ("prefix + canvas", f"{prefix} + {config.canvas_length}")]
    rows += [(name, f"{1e3 * value:.1f} ms a step") for name, value in medians.items()]
    result = {"bench": "cpu-step", "preset": preset, "prefix": prefix, "parameters": parameters, **machine()}
    result["milliseconds"] = {name: round(1e3 * value, 2) for name, value in medians.items()}
    if peer is not None:
        ratio = median_ratio(seconds[peer], seconds["diffusiongemma"])
        rows += [(f"{peer} : diffusiongemma", f"{ratio:.3f}"), ("largest logit difference", f"{difference:.1e}")]
        result |= {"ratio": round(ratio, 4), "difference": difference}
    report(f"one denoising step, {preset}, float32 on {torch.get_num_threads()} threads", rows, result)


def _transformers_step(model: DiffusionGemma, tokens: Tensor, canvas: Tensor, first: Tensor) -> Callable[[], Tensor]:
    """The same step there, on the same weights by way of a saved folder, with its default attention and experts."""
    try:
        from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
    except ImportError:
        raise DiffusionGemmaError("the peer needs `pip install 'transformers>=5.17'`") from None
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        peer = DiffusionGemmaForBlockDiffusion.from_pretrained(Path(folder) / "model", dtype=torch.float32).eval()
    cache = DynamicCache(config=peer.config.get_text_config())
    peer.model.encoder(input_ids=tokens, past_key_values=cache)

    def step() -> Tensor:
        out: Tensor = peer(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=first).logits
        return out

    return step
