"""The fast runner on the 26B with random weights: how fast is it?"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from runner_small import SMALL
from runner_stage import BF16, DEVICE, TINY, check, figures, kind_of, part, say, seat

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Limits
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Lane
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.model.support import unsupported
from diffusiongemma.ops.fused import Rows

LARGE = SMALL if TINY else ModelConfig.preset("26b-a4b")


def large_network(kind: str | None) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind, 64 if kind == "int4" else None)
    return random_network(LARGE, scheme, DEVICE, BF16)


def back_to_back(work: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds a run when they follow each other without a gap"""
    if TINY:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def profile(work: Callable[[], object], most: int = 25) -> None:
    """What the kernels of one run take"""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        work()
        torch.cuda.synchronize()
    times, calls = defaultdict[str, float](float), Counter[str]()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    say(f"kernels of one step: {sum(calls.values())} calls, {sum(times.values()):.0f} us in all")
    for name in sorted(times, key=lambda n: -times[n])[:most]:
        print(f"          {times[name]:9.1f} us  {calls[name]:4d} x {times[name] / calls[name]:7.1f}  {name[:110]}")


@torch.inference_mode()
def experts_hit(lane: Lane) -> None:
    """The share of experts that a step touches, layer by layer"""
    ops, shares = lane.network.ops, list[float]()

    def spy(x: Rows, index: torch.Tensor, *args: object) -> torch.Tensor:
        shares.append(index.unique().numel() / LARGE.num_experts)
        return ops.experts(x, index, *args)

    lane.network.ops = replace(ops, experts=spy)
    lane.step(kind_of(lane, 1))
    lane.network.ops = ops
    say(f"experts hit: {min(shares):.1%} to {max(shares):.1%} of a layer's, {sum(shares) / len(shares):.1%} on average")


@dataclass
class Large:
    kind: str
    users: list[int]

    def gigabytes(self) -> str:
        return "" if TINY else f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"

    def note(self, name: str, value: float) -> None:
        figures[f"{self.kind} {name}"] = round(value, 3)
        say(f"{self.kind} {name}: {value:.3f} ms  {self.gigabytes()}")

    def run(self) -> None:
        if not TINY:
            torch.cuda.reset_peak_memory_stats()
        model = large_network(None if self.kind == "bf16" else self.kind)
        say(f"{self.kind}: weights are made, {self.gigabytes()}")
        if reason := unsupported(model):
            check(f"{self.kind}: supported", False, reason)
            return
        width = LARGE.canvas_length
        prefix, far = (16, 40) if TINY else (512, 32768)
        one = CacheRow.bytes_for(LARGE, prefix + width, BF16)
        many = max(1, *self.users)
        room = many * one + CacheRow.bytes_for(LARGE, far + width, BF16)
        limits = Limits(max_bytes=room, max_rows=many, chunk=16 if TINY else 512)
        runner = FastRunner(model, triton_ops(), limits)
        network = runner.network
        rows = [runner.new_row(prefix + width) for _ in range(many)]
        say(f"{self.kind}: runner is made, {self.gigabytes()}")
        with torch.inference_mode():
            part(f"{self.kind} prefill", lambda: self.prefill(runner, rows[0], prefix))
        for row in rows:
            row.length = prefix  # zeros stand for keys and values
        lane = runner.lane(width)
        seat(lane, rows)
        part(f"{self.kind} experts hit", lambda: experts_hit(lane))

        def step(users: int, name: str, of: Lane) -> None:
            began = time.perf_counter()
            work = of.recorded(kind_of(of, users))
            say(f"{self.kind}: recorded in {time.perf_counter() - began:.2f} s")
            with torch.inference_mode():
                self.note(f"step {name}", back_to_back(work))

        part(f"{self.kind} step", lambda: step(1, "1 user", lane))
        if not TINY:
            part(f"{self.kind} profile", lambda: profile(lane.recorded(kind_of(lane, 1))))

        def after() -> None:
            network.overlap, overlap = (), network.overlap
            other = Lane(runner.slate, 1, width)
            seat(other, rows[:1])
            step(1, "1 user, MLP after the experts", other)
            network.overlap = overlap

        part(f"{self.kind} overlap", after)

        def distant() -> None:
            row = runner.new_row(far + width)
            row.length = far
            seat(lane, [row])
            with torch.inference_mode():
                self.note(f"step 1 user, prefix {far}", back_to_back(lane.recorded(kind_of(lane, 1))))
            seat(lane, rows)

        part(f"{self.kind} far", distant)
        part(f"{self.kind} commit", lambda: self.commit(runner, rows[0], prefix, width))
        for users in self.users:
            if users > 1:
                part(f"{self.kind} {users} users", lambda users=users: step(users, f"{users} users", lane))

    def prefill(self, runner: FastRunner, row: CacheRow, count: int) -> None:
        tokens = torch.randint(3, 260, (count,))

        def once() -> None:
            row.length = 0
            runner.slate.encode(tokens, [row], [count])

        once()
        self.note(f"prefill of {count}", back_to_back(once, 5))

    @torch.inference_mode()
    def commit(self, runner: FastRunner, row: CacheRow, prefix: int, width: int) -> None:
        tokens = torch.randint(3, 260, (width,))

        def once() -> None:
            row.length = prefix
            runner.slate.encode(tokens, [row], [width])

        once()
        self.note(f"commit of {width}", back_to_back(once, 5))
