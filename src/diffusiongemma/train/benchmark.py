"""How fast a recipe trains here: each task's micro-batch for a few ways to run it, and where the time goes.

Nothing is saved. `busy` is the time that kernels ran: far below the wall time, the GPU waits for the host, and larger
micro-batches help; near it, the kernels themselves are the limit, and the table says which.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from diffusiongemma.train.flops import peak_flops
from diffusiongemma.train.loop import Trainer
from diffusiongemma.train.recipe import Recipe
from diffusiongemma.train.report import Window, per_second
from diffusiongemma.train.rows import Rows


def run_benchmark(recipe: Recipe, out: Path, device: torch.device, seconds: float) -> None:
    """Prints speed and MFU of every task for micro-batch sizes and expert paths, each for its part of `seconds`."""
    size = recipe.run.micro_tokens
    variants = [("grouped", size), ("dense", size), ("grouped", 2 * size)]
    if device.type != "cuda":
        variants = [("loop", size)]
    for number, (path, size) in enumerate(variants):
        run = replace(recipe.run, micro_tokens=size, experts=path, workers=0)
        with tempfile.TemporaryDirectory() as folder:
            try:
                trainer = Trainer(replace(recipe, run=run), Path(folder), device)
                start = time.monotonic()
                trainer.warm_up()
                print(f"{path} {size}: warm-up {time.monotonic() - start:.1f} s", flush=True)
                _measure(trainer, seconds / len(variants))
                if number == 0 and device.type == "cuda":
                    _profile(trainer)
            except (RuntimeError, NotImplementedError) as error:
                print(f"{path} {size}: failed, {str(error).splitlines()[0]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(trainer: Trainer, seconds: float) -> None:
    """One line a task, and one for the optimiser."""
    tasks = trainer.recipe.tasks
    for number, task in enumerate(tasks):
        rows = trainer.batches.draw(number, 0)  # making rows is not what is measured
        took = _time(trainer, rows, seconds / (len(tasks) + 1))
        tokens, flops = trainer._tokens(rows), trainer.flops[task.name]
        peak = peak_flops(trainer.device)
        mfu = f", MFU {100 * flops / took / peak:.1f}%" if peak else ""
        print(f"  {task.name}: {tokens} tokens, {1e3 * took:.1f} ms, {per_second(tokens / took)}{mfu}", flush=True)
    prepared = [trainer.batches[step] for step in range(2)]
    trainer.train_step(prepared[0], Window())
    _wait(trainer.device)
    start, window = time.monotonic(), Window()
    trainer.train_step(prepared[1], window)
    _wait(trainer.device)
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB at most" if trainer.device.type == "cuda" else ""
    print(f"  a step of {window.tokens} tokens: {1e3 * (time.monotonic() - start):.1f} ms{memory}", flush=True)


def _time(trainer: Trainer, rows: Rows, seconds: float) -> float:
    """Mean seconds of forward and backward of one micro-batch"""
    _work(trainer, rows)
    _wait(trainer.device)
    start, count = time.monotonic(), 0
    while count < 2 or time.monotonic() - start < seconds:
        _work(trainer, rows)
        count += 1
        if count % 4 == 0:
            _wait(trainer.device)  # else the host would run ahead, and the time be up before the work is done
    _wait(trainer.device)
    return (time.monotonic() - start) / count


def _work(trainer: Trainer, rows: Rows) -> None:
    """As a step does it"""
    recorded = trainer.graphs.get(rows.task)
    if recorded is None:
        trainer._backward(rows)
    else:
        recorded(rows)


def _profile(trainer: Trainer, top: int = 28) -> None:
    """The kernels of one micro-batch of every task, by time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for number, task in enumerate(trainer.recipe.tasks):
        rows = trainer.batches.draw(number, 0)
        _work(trainer, rows)
        _wait(trainer.device)
        with torch.profiler.profile(activities=activities) as profile:
            start = time.monotonic()
            _work(trainer, rows)
            _wait(trainer.device)
            wall = time.monotonic() - start
        events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in events)
        launches = sum(e.count for e in events)
        print(f"  {task.name}: busy {busy / 1e3:.1f} of {1e3 * wall:.1f} ms, {launches} kernels", flush=True)
        for event in events[: top if number == 0 else top // 3]:
            name = event.key if len(event.key) <= 110 else event.key[:107] + "..."
            print(f"    {event.self_device_time_total / 1e3:7.2f} ms {event.count:5d} x {name}", flush=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
