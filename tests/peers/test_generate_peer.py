"""Fed the same random draws, the engine writes what Transformers' `generate` writes, token for token.

Both sides ask one `Tape` a row for their draws. It numbers them by block and step, because in a batch Transformers goes
on drawing for rows that are already done.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma import generation_diffusion_gemma as stock_generation
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

import diffusiongemma as dg
from diffusiongemma.diffusion.beliefs import pick
from diffusiongemma.engine import Request, SamplingParams, collect
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.engine.params import released_params
from diffusiongemma.text.bytes import byte_tokenizer

from .stock import save_stock, stock_model

pytestmark = pytest.mark.peer
VOCAB = 400
# Few layers, small weights: a sample falls the same way on both sides only if rounding is not amplified on its way.
CALM: dict[str, Any] = dict(
    vocab_size=VOCAB,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    gain=0.5,
)


def test_transformers_reads_the_embedded_models_settings() -> None:
    theirs = stock_generation.DiffusionGemmaGenerationConfig.from_pretrained(ASSETS / "nano")
    ours, ends, *_ = released_params(ASSETS / "nano")
    assert isinstance(theirs.sampler_config, EntropyBoundSamplerConfig)
    assert theirs.sampler_config.entropy_bound == ours.entropy_bound
    assert (theirs.max_denoising_steps, theirs.t_min, theirs.t_max) == (ours.steps, ours.t_min, ours.t_max)
    assert (theirs.stability_threshold, theirs.confidence_threshold) == (ours.stability, ours.confidence)
    assert tuple(theirs.eos_token_id) == ends


class Tape:
    """One row's chance. A request for tokens that follows no request for uniforms starts a new block."""

    def __init__(self, seed: int, row: int) -> None:
        self.key = (seed, row)
        self.block, self.step, self.fresh = -1, 0, True

    def _generator(self, kind: int) -> torch.Generator:
        mixed = hash((*self.key, self.block, self.step, kind)) % (1 << 62)
        return torch.Generator().manual_seed(mixed)

    def uniforms(self, count: int) -> torch.Tensor:
        self.step, self.fresh = self.step + 1, False
        return torch.rand(count, generator=self._generator(0))

    def tokens(self, count: int, vocab_size: int) -> torch.Tensor:
        if self.fresh:
            self.block, self.step = self.block + 1, 0
        self.fresh = True
        return torch.randint(0, vocab_size, (count,), generator=self._generator(1))


class FedTorch:
    """`torch` as the stock sampler sees it, with its two sources of chance replaced."""

    def __init__(self, tapes: list[Tape]) -> None:
        self.tapes = tapes

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randint(self, low: int, high: int, size: tuple[int, int], device: Any = None) -> torch.Tensor:
        return torch.stack([tape.tokens(size[1], high) for tape in self.tapes])

    def multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        count = probs.shape[0] // len(self.tapes)
        return pick(probs, torch.cat([tape.uniforms(count) for tape in self.tapes]))[:, None]


def generate_there(monkeypatch, stock, prompts: list[list[int]], seed: int, blocks: int, options: dict[str, Any]):
    tapes = [Tape(seed, row) for row in range(len(prompts))]
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with monkeypatch.context() as patch:
        patch.setattr(stock_generation, "torch", FedTorch(tapes))
        out = stock.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=blocks * stock.config.canvas_length,
            max_denoising_steps=options["steps"],
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=options["entropy_bound"]),
            t_min=options["t_min"],
            t_max=options["t_max"],
            stability_threshold=options["stability"],
            confidence_threshold=options["confidence"],
            eos_token_id=list(options["eos"]),
            pad_token_id=0,
        )
    return out.sequences[:, width:], out.tokens_per_forward


def generate_here(engine, prompts: list[list[int]], seed: int, blocks: int, options: dict[str, Any]):
    sampling = {k: v for k, v in options.items() if k != "eos"}
    params = SamplingParams.build(
        max_new_tokens=blocks * engine.model.config.canvas_length, stop_tokens=options["eos"], **sampling
    )
    handles = [
        engine.submit(Request(tuple(prompt), params, ends=False), draws=Tape(seed, row))
        for row, prompt in enumerate(prompts)
    ]
    return [collect(handle) for handle in handles]


CASES = {
    "as-released": (dict(), dict()),
    "all-48-steps": (dict(canvas_length=8), dict(confidence=1e-9)),
    "early-stop": (dict(), dict(confidence=2.0, steps=24)),
    "stop-at-once": (dict(canvas_length=12), dict(confidence=9.0, stability=0)),
    "very-stable": (dict(num_experts=4, top_k_experts=4), dict(confidence=3.0, stability=3, steps=30)),
    "bold": (dict(sliding_window=3, canvas_length=10), dict(entropy_bound=5.0, steps=12, t_min=0.1, t_max=1.4)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_generate_token_for_token(case, monkeypatch, tmp_path) -> None:
    changes, options = CASES[case]
    options = dict(steps=48, entropy_bound=0.1, t_min=0.4, t_max=0.8, stability=1, confidence=0.005) | options
    stock = stock_model(seed=1, **{**CALM, "canvas_length": 16, **changes})
    with torch.no_grad():  # peaked logits, so that entropies range from settled to open
        stock.model.decoder.norm.weight.mul_(20.0)
    engine = dg.Engine(dg.load_model(save_stock(stock, tmp_path)), byte_tokenizer())
    rng = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(3, VOCAB, (n,), generator=rng).tolist()  # noqa: E731
    with engine:
        for prompts in ([draw(5)], [draw(2), draw(13), draw(7)]):
            check(monkeypatch, stock, engine, prompts, 1, options | {"eos": (1,)})
            # Now end on tokens that are certain to come up, in different blocks of different rows.
            free = generate_here(engine, prompts, 2, 3, options | {"eos": (1,)})
            ends = {result.tokens[len(result.tokens) * (row + 1) // 4] for row, result in enumerate(free)}
            check(monkeypatch, stock, engine, prompts, 2, options | {"eos": tuple(sorted(ends))})


def check(monkeypatch, stock, engine, prompts, seed, options) -> None:
    blocks = 3
    there, speed = generate_there(monkeypatch, stock, prompts, seed, blocks, options)
    here = generate_here(engine, prompts, seed, blocks, options)
    for row, result in enumerate(here):
        expected = there[row].tolist()
        end = next((i for i, token in enumerate(expected) if token in options["eos"]), None)
        assert result.tokens == expected[:end]
        assert result.finish_reason == ("length" if end is None else "stop")
        counted = sum(token != 0 for token in expected)
        assert result.metrics.decoder_forwards == round(counted / speed[row].item())


def test_the_tape_reaches_both_sides(monkeypatch, tmp_path) -> None:
    """Another seed must give other tokens, or the test above would compare nothing."""
    stock = stock_model(seed=1, **CALM)
    options = dict(steps=6, entropy_bound=0.1, t_min=0.4, t_max=0.8, stability=1, confidence=0.005, eos=(1,))
    with dg.Engine(dg.load_model(save_stock(stock, tmp_path)), byte_tokenizer()) as engine:
        a, b = (generate_here(engine, [[5, 6, 7]], seed, 2, options)[0].tokens for seed in (1, 2))
    c = generate_there(monkeypatch, stock, [[5, 6, 7]], 1, 2, options)[0][0].tolist()
    assert a == c
    assert a != b
