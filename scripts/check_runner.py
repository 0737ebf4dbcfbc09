# ruff: noqa: E402
"""The fast runner on a card: is it right (small networks), and how fast is it (26B-A4B with random weights)?

    python scripts/check_runner.py [--only small,fp8,int4,bf16] [--users 8,16] [--tiny]

small: graph against eager, batched against alone, kernels against plain torch, in every number format, with pins; and
which bits of a canvas, if any, depend on what is beside it.
fp8, int4, bf16: a step of one user over 512 tokens with the dense MLP beside the experts and after them, what its
kernels take, over 32,768 tokens, for several users, and peak memory. `--tiny` runs all of it without a card, in
Triton's interpreter. A part that fails prints why, and the next begins.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops")]
TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    import triton_cpu  # noqa: F401
    from triton.runtime import interpreter

    float_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, precision, imprecise):  # type: ignore[no-untyped-def]  # integers too
        if a.dtype.scalar != tl.int8:
            return float_dot(self, a, b, d, precision, imprecise)
        product = np.matmul(a.data.astype(np.int64), b.data.astype(np.int64)).astype(np.int32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion import (
    Constraint,
    Denoiser,
    EntropyBound,
    Forbidden,
    LinearTemperature,
    Pins,
    SeededDraws,
    StableAndConfident,
)
from diffusiongemma.engine import Commit, Draft, End, Engine, Limits, Request, SamplingParams, slate
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Kind, Lane
from diffusiongemma.engine.runner import Runner
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.model.support import unsupported
from diffusiongemma.ops import kernels
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quantized import QuantWeight
from diffusiongemma.ops.vocab import Reading
from diffusiongemma.text.bytes import byte_tokenizer

DEVICE = torch.device("cpu" if TINY else "cuda")
if TINY:
    slate.LEAST = 16  # the interpreter takes its time for every token
BF16 = torch.bfloat16
BEGAN = time.perf_counter()
figures: dict[str, object] = {}
failed: list[str] = []


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def part(name: str, work: Callable[[], object]) -> None:
    try:
        try:
            work()
        except Exception as error:
            if TINY or not kernels.EARLY or "CUDA error" in str(error):
                raise
            say(f"{name} failed ({type(error).__name__}: {error}); once more, with no launch before its time")
            failed.append(f"{name}, launched early")
            kernels.EARLY = False
            work()
    except Exception as error:
        failed.append(name)
        say(f"FAILED {name}: {type(error).__name__}: {error}")
        traceback.print_exc()
        if "CUDA error" in str(error):  # nothing works after it
            finish()
            raise SystemExit(1) from None


def finish() -> None:
    print(json.dumps({"failed": failed, "seconds": round(time.perf_counter() - BEGAN, 1), **figures}), flush=True)


def check(name: str, good: bool, told: object = "") -> None:
    say(f"{'ok  ' if good else 'BAD '} {name} {told}")
    if not good:
        failed.append(name)


# ---- small networks: is it right? --------------------------------------------------------------------------------

SMALL = ModelConfig.preset(
    "tiny", vocab_size=384 if TINY else 4096, hidden_size=128 if TINY else 512, intermediate_size=64 if TINY else 512,
    moe_intermediate_size=64 if TINY else 128, num_hidden_layers=2 if TINY else 6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16 if TINY else 256, num_global_key_value_heads=1,
    global_head_dim=32 if TINY else 512, num_experts=16 if TINY else 32, top_k_experts=2 if TINY else 4,
    sliding_window=8 if TINY else 128, canvas_length=8 if TINY else 256,
    layer_types=("sliding_attention", "full_attention") * (1 if TINY else 3), eos_token_ids=(1,),
)  # fmt: skip
LIMITS = Limits(max_bytes=1 << (20 if TINY else 28), max_rows=4, chunk=16 if TINY else 512)


def small_network(kind: str | None) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind, 64 if kind == "int4" else None)
    model = random_network(SMALL, scheme, DEVICE, BF16, std=0.05)
    model.self_conditioning.down_proj.weight.mul_(0.1)  # else rounding errors grow from step to step
    return model


def requests() -> list[Request]:
    width, steps = SMALL.canvas_length, 1 if TINY else 6
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 260, (n,), generator=random).tolist() for n in ((3, 9) if TINY else (40, 300, 700))]
    asked = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams.build(max_new_tokens=width, steps=steps, seed=i, early_stop=i != 1, entropy_bound=2.0)
        pins = {1: 70, width // 2: 71} if i == 1 else {}
        asked.append(Request(tuple(prompt), params, pins, forbidden=(9, 10) if i == 1 else ()))
    return asked


def run_all(model: DiffusionGemma, runner: Runner, asked: Sequence[Request]) -> list[list[list[object]]]:
    """Every draft and block of each request"""
    with Engine(model, byte_tokenizer(), limits=LIMITS, runner=runner) as engine:
        handles = [engine.submit(request) for request in asked]
        found = []
        for handle in handles:
            told: list[list[object]] = []
            for event in handle:
                if isinstance(event, Draft):
                    told.append([event.tokens, event.accepted, event.entropy])
                elif isinstance(event, Commit):
                    told.append([event.tokens])
                elif isinstance(event, End) and event.error:
                    raise RuntimeError(event.error)
            found.append(told)
    return found


def agreement(a: list[list[list[object]]], b: list[list[list[object]]]) -> str:
    """How many of the best tokens of each draft are the same, and how far apart the first entropies are"""
    first, same, total = 0.0, 0, 0
    for one, two in zip(a, b, strict=True):
        first = max(first, float((torch.tensor(one[0][2]) - torch.tensor(two[0][2])).abs().max()))
        for x, y in zip(one, two, strict=False):
            same += sum(p == q for p, q in zip(x[0], y[0], strict=False))  # type: ignore[arg-type]
            total += len(x[0])  # type: ignore[arg-type]
    return f"{same / max(1, total):.1%} of the tokens in all steps, first entropies within {first:.1e}"


FIELDS = ("tokens", "accepted", "entropy")


def tell_differences(a: list[list[list[object]]], b: list[list[list[object]]]) -> None:
    """Of each request: the first draft that differs, in what, and how far apart its entropies are"""
    for number, (one, two) in enumerate(zip(a, b, strict=True)):
        if len(one) != len(two):
            say(f"      request {number}: {len(one)} events against {len(two)}")
        at = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), None)
        if at is None:
            continue
        x, y = one[at], two[at]
        fields = [name for name, p, q in zip(FIELDS, x, y, strict=False) if p != q]
        told = f"differs first, in {', '.join(fields)}"
        if len(x) == len(y) == len(FIELDS):
            apart = (torch.tensor(x[2]) - torch.tensor(y[2])).abs()
            places = [f"{name} {sum(p != q for p, q in zip(x[i], y[i], strict=True))}" for i, name in enumerate(FIELDS)]  # type: ignore[arg-type,call-overload]
            told += f"; entropies apart by {float(apart.max()):.1e} at most; positions: {', '.join(places)}"
        say(f"      request {number}: event {at + 1} of {len(one)} {told}")


# ---- which bits depend on what is beside a canvas? ---------------------------------------------------------------

Bits = dict[str, torch.Tensor]


def apart(a: Bits, b: Bits) -> str:
    """The names of what differs, with how far it is apart; empty: nothing does"""
    found = []
    for name, value in a.items():
        if not torch.equal(value, b[name]):
            off = (value.double() - b[name].double()).abs()
            found.append(f"{name} ({int((off > 0).sum())} of {off.numel()}, {float(off.max()):.1e})")
    return ", ".join(found)


@torch.inference_mode()
def bits(name: str, model: DiffusionGemma) -> None:
    """The first canvas alone, and beside others: more rows, pins and banned tokens, a longer prefix"""
    runner = FastRunner(model, triton_ops(exact=True), LIMITS, graphs=False)
    lengths = (5, 9, 3, 20) if TINY else (40, 300, 700, 2100)
    prompts = [torch.randint(3, 260, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    rows = [runner.new_row(n) for n in lengths]
    encoded = runner.slate.encode(prompts[0], rows[:1], [lengths[0]]).clone()
    rows[0].length = 0
    packed = runner.slate.encode(torch.cat(prompts[:2]), rows[:2], list(lengths[:2]))
    told = apart({"hidden": encoded}, {"hidden": packed[: lengths[0]]})
    check(f"{name}: bits of a prompt beside another", not told, told)
    for row, prompt in zip(rows[2:], prompts[2:], strict=True):
        for part_of in prompt.split(LIMITS.chunk or 512):
            runner.slate.encode(part_of, [row], [len(part_of)])
    width = SMALL.canvas_length
    ruled = [Forbidden((9, 10)), Pins({1: 70, width // 2: 71})]
    companies: dict[str, tuple[list[CacheRow], dict[int, list[Constraint]]]] = {
        "one more": (rows[:2], {}),
        "two more": (rows[:3], {}),
        "one with pins and banned tokens": (rows[:2], {1: ruled}),
        "a longer one": ([rows[0], rows[3]], {}),
    }
    count = 1 if TINY else 3  # the interpreter takes half a minute for each
    for warm in (True,) if TINY else (True, False):
        lane = Lane(runner.network, runner.recorder, 4, width, warm, ruled=True)
        alone = step_bits(lane, rows[:1], {}, count)
        for company, (others, rules) in companies.items():
            steps = enumerate(zip(alone, step_bits(lane, others, rules, count), strict=True))
            told = next((f"step {i + 1}: {found}" for i, pair in steps if (found := apart(*pair))), "")
            check(f"{name}: bits of a {'warm' if warm else 'cold'} canvas beside {company}", not told, told)


def step_bits(lane: Lane, rows: Sequence[CacheRow], rules: dict[int, list[Constraint]], steps: int) -> list[Bits]:
    """What the first of these canvases gets, step by step"""
    seat(lane, rows, rules)
    width, ops, network, found = lane.width, lane.network.ops, lane.network, list[Bits]()

    def spy(hidden: torch.Tensor, *args: object, **options: object) -> Reading:
        reading = ops.vocab_end(hidden, *args, **options)
        made = {"hidden": hidden, **{name: getattr(reading, name) for name in READ}}
        found.append({part: value[:width].clone() for part, value in made.items()})
        return reading

    network.ops = replace(ops, vocab_end=spy)
    for _ in range(steps):
        lane.step(kind_of(lane, len(rows)))
        board, out = lane.board, lane.board.out[0].clone()
        found[-1] |= {"accepted": out[2 * width : 3 * width], "mean and end": out[3 * width :]}
        found[-1] |= {"next tokens": board.tokens[0].clone(), "next soft": board.soft[0].clone()}
    network.ops = ops
    return found


READ = ("argmax", "sample", "entropy", "logprob", "sample_logprob", "soft")


def small(kind: str | None) -> None:
    name, asked = kind or "bf16", requests()
    model = small_network(kind)
    if reason := unsupported(model):
        check(f"{name}: supported", False, reason)
        return
    plain_model = copy.deepcopy(model)
    made: dict[str, list[list[list[object]]]] = {}

    def runner(exact: bool, graphs: bool = True, **options: Any) -> FastRunner:
        return FastRunner(model, triton_ops(exact), LIMITS, graphs=graphs, **options)

    made["exact"] = run_all(model, runner(exact=True), asked)
    say(f"{name}: {len(asked)} requests with graphs")
    if not TINY:  # the interpreter has neither graphs nor streams
        made["eager"] = run_all(model, runner(exact=True, graphs=False), asked)
        check(f"{name}: graph against eager", made["exact"] == made["eager"])
        made["overlap"] = run_all(model, runner(exact=True, overlap=()), asked)
        check(f"{name}: MLP beside the experts", made["exact"] == made["overlap"])
        sorting = FastRunner(model, replace(triton_ops(exact=True), placing=0), LIMITS)
        check(f"{name}: pairs placed against sorted", made["exact"] == run_all(model, sorting, asked))
        made["waiting"] = run_all(model, runner(exact=True, ahead=False), asked)
        check(f"{name}: a step ahead and not", made["exact"] == made["waiting"])
        tell_differences(made["exact"], made["waiting"])
        alone = [run_all(model, runner(exact=True), [request])[0] for request in asked]
        check(f"{name}: batched against alone", made["exact"] == alone, agreement(made["exact"], alone))
        tell_differences(made["exact"], alone)
        made["graph"] = run_all(model, runner(exact=False), asked)
        apart = [run_all(model, runner(exact=False), [request])[0] for request in asked]
        say(f"{name}: with the vendor's products, batched against alone: {agreement(made['graph'], apart)}")
    held = [made["exact"][1][0][0][at] == token for at, token in asked[1].pins.items()]  # type: ignore[index]
    check(f"{name}: pins hold", all(held))
    bits(name, model)
    against_truth(name, model, plain_model)


def widened(model: DiffusionGemma) -> DiffusionGemma:
    """The same weights in float32, quantised no more: the truth that roundings are measured against"""
    exact = random_network(SMALL, None, DEVICE, torch.float32)
    stored = {name: module for name, module in model.named_modules() if isinstance(module, QuantWeight)}
    for name, parameter in exact.named_parameters():
        parameter.data = stored[name].dequantize() if name in stored else model.get_parameter(name).float()
    return exact


@torch.inference_mode()
def against_truth(name: str, model: DiffusionGemma, plain: DiffusionGemma) -> None:
    """Hidden states of prompts, then of a canvas over each: the kernels must be as close to float32 as plain torch is.

    The two may be far from each other where two experts are nearly as good: rounding then decides, in either.
    """
    exact, runner = widened(plain), FastRunner(model, triton_ops(), LIMITS)
    count, width, tries = (13, 8, 3) if TINY else (500, 256, 2)
    lane, ops = runner.lane(width), runner.network.ops
    errors: dict[str, list[torch.Tensor]] = {"kernels": [], "plain": []}
    for seed in range(tries):
        prompt = torch.randint(3, 260, (count,), generator=torch.Generator().manual_seed(seed))
        row, seen = runner.new_row(count), list[torch.Tensor]()
        got = [runner.slate.encode(prompt, [row], [count]).clone()]
        seat(lane, [row])
        canvas = lane.board.tokens[0].clone()

        def spy(hidden: torch.Tensor, *rest: object, seen: list[torch.Tensor] = seen, **more: object) -> object:
            seen.append(hidden.clone())
            return ops.vocab_end(hidden, *rest, **more)

        runner.network.ops = replace(ops, vocab_end=spy)
        lane.step(kind_of(lane, 1))
        runner.network.ops = ops
        found = {"kernels": [*got, seen[0]]}
        for kind, network in (("plain", plain), ("truth", exact)):
            other = CacheRow(SMALL, count, network.dtype, DEVICE)
            encoded = network.encode_packed(prompt.to(DEVICE), [other], [count])
            found[kind] = [encoded, network.denoise_packed(canvas, None, [other], [width])]
        for kind, collected in errors.items():
            for a, b in zip(found[kind], found["truth"], strict=True):
                collected.append((a.double() - b.double()).norm(dim=1) / b.double().norm(dim=1))
    of, plain_of = (float(torch.cat(errors[kind]).median()) for kind in ("kernels", "plain"))
    told = f"{of:.1e} from float32, plain torch {plain_of:.1e} (median of {len(torch.cat(errors['plain']))} tokens)"
    check(f"{name}: as close to the truth as plain torch", of < 1.5 * plain_of + 2e-3, told)


# ---- the 26B: how fast is it? ------------------------------------------------------------------------------------

LARGE = SMALL if TINY else ModelConfig.preset("26b-a4b")
STEPS = Denoiser(LARGE.vocab_size, LinearTemperature(0.4, 0.8, 1 << 20), EntropyBound(0.1), StableAndConfident(1, 1e-6))


def large_network(kind: str | None) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind, 64 if kind == "int4" else None)
    return random_network(LARGE, scheme, DEVICE, BF16)


def seat(lane: Lane, rows: Sequence[CacheRow], rules: dict[int, list[Constraint]] | None = None) -> None:
    """Canvases over these rows, without requests; some with rules"""
    pooled = [row for row in rows if isinstance(row, PoolRow)]
    for i in range(len(rows)):
        constraints = [] if rules is None else rules.get(i, [])
        denoiser = replace(STEPS, vocab_size=lane.network.config.vocab_size, constraints=constraints)
        lane.board.put(i, denoiser, denoiser.start(lane.width, SeededDraws(i), DEVICE), None, i, 0)
    lane.offsets[:, : len(rows)].copy_(lane.network.pool.offsets(pooled))
    lane.length[: len(rows)].copy_(torch.tensor([row.length for row in rows], dtype=torch.int32))


def kind_of(lane: Lane, users: int) -> Kind:
    return Kind(users, lane.network.pool.reach_for(int(lane.length[:users].max())))


def milliseconds(work: Callable[[], object], repeat: int = 20) -> float:
    """The median of several runs, each timed on the device"""
    if TINY:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    for _ in range(3):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in marks)
    return times[len(times) // 2]


def back_to_back(work: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds a run when they follow each other without a gap"""
    if TINY:
        return milliseconds(work)
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
            other = Lane(network, runner.recorder, 1, width)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="small,fp8,int4,bf16")
    parser.add_argument("--users", default="8,16")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    say(f"torch {torch.__version__}, {'Triton interpreter' if TINY else torch.cuda.get_device_name()}")
    only = chosen.only.split(",")
    users = [2] if TINY else [int(n) for n in chosen.users.split(",") if n]
    if "small" in only:
        for kind in (None, "fp8", "int4", "int8"):
            part(f"small {kind or 'bf16'}", lambda kind=kind: small(kind))
    for kind in ("fp8", "int4", "bf16"):
        if kind in only:
            part(kind, Large(kind, users).run)
            gc.collect()
            if not TINY:
                torch.cuda.empty_cache()
    finish()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
