"""How fast a recipe trains here, for a few ways to run it; nothing is saved."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from diffusiongemma.train.flops import peak_flops
from diffusiongemma.train.loop import Trainer
from diffusiongemma.train.recipe import Recipe
from diffusiongemma.train.report import Window


def run_benchmark(recipe: Recipe, out: Path, device: torch.device, seconds: float) -> None:
    """Prints tokens a second and MFU for micro-batch sizes and expert paths, each for its part of `seconds`."""
    size = recipe.run.micro_tokens
    variants = [("grouped", size), ("grouped", 2 * size), ("dense", size)]
    if device.type != "cuda":
        variants = [("loop", size)]
    for path, size in variants:
        run = replace(recipe.run, micro_tokens=size, experts=path, workers=0)
        with tempfile.TemporaryDirectory() as folder:
            try:
                trainer = Trainer(replace(recipe, run=run), Path(folder), device)
                start = time.monotonic()
                trainer.warm_up()
                warm = time.monotonic() - start
                print(f"{path} {size}: {_measure(trainer, seconds / len(variants))}, warm-up {warm:.1f} s", flush=True)
            except (RuntimeError, NotImplementedError) as error:
                print(f"{path} {size}: failed, {str(error).splitlines()[0]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(trainer: Trainer, seconds: float) -> str:
    prepared = [trainer.batches[step] for step in range(2)]  # making rows is not what is measured
    gpu = trainer.device.type == "cuda"
    trainer.train_step(prepared[0], Window())
    if gpu:
        torch.cuda.synchronize()
    window, steps = Window(), 0
    while time.monotonic() - window.start < seconds or steps < 2:
        trainer.train_step(prepared[steps % 2], window)
        window.means()
        steps += 1
    took = time.monotonic() - window.start
    peak = peak_flops(trainer.device)
    mfu = f", MFU {100 * window.flops / took / peak:.1f}%" if peak else ""
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if gpu else ""
    return f"{window.tokens / took / 1e3:.0f}k tok/s{mfu}, {1e3 * took / steps:.0f} ms a step{memory}"
