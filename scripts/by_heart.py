"""Teach a small network three sentences, so that a recording of the canvas shows text settle before nano exists.

    python scripts/by_heart.py OUT --minutes 3.5
    python scripts/record_canvas.py "How does diffusion write?" --model OUT --seed 3 --max-new-tokens 96 \\
        --title TITLE --out docs/canvas.svg

A byte is a token. The network knows nothing else; asked anything, it writes one of the three.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import diffusiongemma as dg
from diffusiongemma.text.bytes import byte_tokenizer

PROMPT = "How does diffusion write?"
SENTENCES = (
    "A canvas of noise becomes text: every step keeps what it is sure of and renews the rest.",
    "Entropy says how unsure a position is. When all is stable and entropy low, a block is done.",
    "All positions are read at once, in both directions, and the surest are accepted first of all.",
)
WIDTH = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    tokenizer = byte_tokenizer()
    config = dg.ModelConfig.preset(
        "tiny", canvas_length=WIDTH, sliding_window=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_experts=2, top_k_experts=1,
    )  # fmt: skip
    model = dg.DiffusionGemma(config).init_weights(0).train()
    clean = torch.tensor([(tokenizer.encode(text) + [1] + [0] * WIDTH)[:WIDTH] for text in SENTENCES])  # [B, L]
    prompt = torch.tensor([tokenizer.encode(PROMPT, add_bos=True)]).expand(len(clean), -1)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    begin, step = time.monotonic(), 0
    while (progress := (time.monotonic() - begin) / (60 * arguments.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1, step / 50) * (1 - progress) + 1e-5
        loss = denoising_loss(model, prompt, clean)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"{100 * progress:3.0f}%  step {step}  loss {loss.item():.3f}", flush=True)
        step += 1
    dg.save_model(model.eval(), arguments.out, overwrite=True)
    (arguments.out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


def denoising_loss(model: dg.DiffusionGemma, prompt: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """Uniform corruption at a random level, self-conditioning half of the time; prompt [B, T], clean [B, L]"""
    rows, width = clean.shape
    with torch.no_grad():
        cache = model.new_cache(rows, prompt.shape[1])
        model.encode(prompt, cache)
    noise = torch.randint(model.config.vocab_size, clean.shape)
    canvas = torch.where(torch.rand(rows, width) < torch.rand(rows, 1), noise, clean)
    conditioning = None
    if random.random() < 0.5:
        with torch.no_grad():
            conditioning = model.denoise(canvas, cache) / 0.6
    logits = model.denoise(canvas, cache, conditioning)
    return F.cross_entropy(logits.flatten(0, 1), clean.flatten())


if __name__ == "__main__":
    main()
