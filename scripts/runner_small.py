"""The fast runner on small networks: is it right? And which bits depend on what is beside a canvas?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from runner_stage import BF16, DEVICE, TINY, check, kind_of, say, seat

from diffusiongemma.config import ModelConfig
from diffusiongemma.diffusion import Constraint, Forbidden, Pins
from diffusiongemma.engine import Commit, Draft, End, Engine, Event, Limits, Request, SamplingParams
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.lane import Lane
from diffusiongemma.engine.runner import Runner
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.packed import packings, unpackable
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.model.support import unsupported
from diffusiongemma.ops.quantized import QuantWeight
from diffusiongemma.ops.vocab import Reading
from diffusiongemma.text.bytes import byte_tokenizer

SMALL = ModelConfig.preset(
    "tiny", vocab_size=384 if TINY else 4096, hidden_size=128 if TINY else 512, intermediate_size=64 if TINY else 512,
    moe_intermediate_size=64 if TINY else 128, num_hidden_layers=2 if TINY else 6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16 if TINY else 256, num_global_key_value_heads=1,
    global_head_dim=32 if TINY else 512, num_experts=16 if TINY else 32, top_k_experts=2 if TINY else 4,
    sliding_window=8 if TINY else 128, canvas_length=8 if TINY else 256,
    layer_types=("sliding_attention", "full_attention") * (1 if TINY else 3), eos_token_ids=(1,),
)  # fmt: skip
# Experts are not packed: that rounds weights, so only what comes afterwards is the same.
LIMITS = Limits(max_bytes=1 << (20 if TINY else 28), max_rows=4, chunk=16 if TINY else 512, packed=False)


def small_network(kind: str | None, config: ModelConfig = SMALL) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind, 64 if kind == "int4" else None)
    model = random_network(config, scheme, DEVICE, BF16, std=0.05)
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


def run_all(
    model: DiffusionGemma, runner: Runner, asked: Sequence[Request], every: int = 0
) -> list[list[list[object]]]:
    """Every draft and block of each request; `every`: they come one by one, so many ticks apart"""
    with Engine(model, byte_tokenizer(), limits=LIMITS, runner=runner) as engine:
        if every:
            prepared = [engine._prepare(request, None) for request in asked]
            coming, scheduler = [sequence for sequence, _ in prepared], engine.scheduler
            while coming or scheduler.busy:
                if coming and scheduler.ticks % every == 0:
                    scheduler.add(coming.pop(0))
                scheduler.tick()
            return [_heard(handle) for _, handle in prepared]
        handles = [engine.submit(request) for request in asked]
        return [_heard(handle) for handle in handles]


def _heard(handle: Iterable[Event]) -> list[list[object]]:
    told: list[list[object]] = []
    for event in handle:
        if isinstance(event, Draft):
            told.append([event.tokens, event.accepted, event.entropy])
        elif isinstance(event, Commit):
            told.append([event.tokens])
        elif isinstance(event, End) and event.error:
            raise RuntimeError(event.error)
    return told


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
        lane = Lane(runner.slate, 4, width, warm, ruled=True)
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
    if not TINY and unpackable(model, triton_ops()) is None:  # last, for it rounds weights
        packed = FastRunner(model, triton_ops(exact=True), replace(LIMITS, packed=True))
        same = run_all(model, packed, asked) == run_all(model, runner(exact=True), asked)
        check(f"{name}: experts packed against plain", same, ", ".join(packings(model)))


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
