"""Time and error of the kernels for the vocabulary end, attention and the small operations, at the 26B-A4B geometry.

    python scripts/bench_kernels_vocab.py [--only NAME] [--sweep] [--list] [--serial]

Every line: microseconds (median, in a CUDA graph), the floor (the larger of bytes over 4.33 TB/s and operations over
790 or 1,580 TFLOP/s), their ratio, and the relative error against float64 on the same (quantised) numbers. Below some
4 microseconds a launch is what is timed. `torch` lines are what the network does without kernels. A kernel that fails
is a line too. `--sweep` times other layouts instead. Needs a Hopper card, torch and triton only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from diffusiongemma.ops import (
    attention_cached,
    attention_join_triton,
    attention_triton,
    fused,
    heads_triton,
    norm_triton,
    router_triton,
    soft_triton,
    vocab,
    vocab_triton,
    weigh_triton,
)
from diffusiongemma.ops.attention import attend_canvas
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.kernels import compiling
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.quant import FP8

READ, BF16_RATE, FP8_RATE = 4.33e12, 790e12, 1580e12
D, V, CANVAS, EXPERTS, CAP, EPS = 2816, 262_144, 256, 128, 30.0, 1e-6
SLIDING, FULL = (16, 8, 256), (16, 2, 512)  # query heads, K/V heads, head size
LONGEST = 1 << 20  # tokens
GPU = torch.device("cuda")
BF16 = torch.bfloat16


@dataclass
class Case:
    name: str
    run: Callable[[], object]
    bytes: float = 0.0
    flops: float = 0.0
    rate: float = BF16_RATE
    error: Callable[[], str] | None = None


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=GPU, dtype=torch.float32 if dtype == torch.float64 else BF16) * scale).to(dtype)


# ---- the vocabulary end ------------------------------------------------------------------------------------------


def rules_for(rows: int) -> vocab.Rules:
    return vocab.Rules(torch.rand(rows, device=GPU) * 0.4 + 0.4, torch.rand(rows, device=GPU))


def ruled(rules: vocab.Rules) -> vocab.Rules:
    """As a recorded graph has it: pins and bans are looked at, and a few are there."""
    rows = len(rules.temperature)
    pin = torch.full((rows,), -1, dtype=torch.int32, device=GPU)
    pin[:8] = torch.arange(1000, 1008, dtype=torch.int32, device=GPU)
    which = torch.zeros(rows, dtype=torch.int32, device=GPU)
    return replace(rules, pin=pin, banned=vocab.ban([[0, 1, 2, 106, V - 1]], V, GPU), banned_set=which)


def vocab_error(hidden: Tensor, table: vocab.Table, rules: vocab.Rules, how: dict[str, object], rows: int = 8) -> str:
    got = vocab_triton.vocab_end(hidden, table, rules, CAP, 53.0, **how)  # type: ignore[arg-type]
    some = slice(len(hidden) - rows, len(hidden)) if len(hidden) >= rows else slice(0, len(hidden))
    part = rules.rows(some.start, some.stop)
    want = vocab.vocab_end(hidden[some], table, part, CAP, 53.0, torch.float64)
    assert got.soft is not None
    assert want.soft is not None
    torch.cuda.empty_cache()
    agree = float((got.argmax[some] == want.argmax).float().mean())
    same = float((got.sample[some] == want.sample).float().mean())
    entropy = float((got.entropy[some] - want.entropy).abs().max())
    logprob = float((got.logprob[some] - want.logprob).abs().max())
    soft = relative(got.soft[some], want.soft)
    return f"soft {soft:.1e} entropy {entropy:.0e} logp {logprob:.0e} argmax {agree:.0%} sample {same:.0%}"


def even_parts(w: vocab_triton.Weighed) -> soft_triton.Parts:
    """Factors of one: rescaling again and again must not end in zeros"""
    ones = torch.ones_like(w.stats.mass)
    return soft_triton.Parts(w.weights, ones, ones[:, 0].contiguous() / V, w.stats.mass, w.tile, w.fixed)


def skipping_case(table: vocab.Table, unsure: int, flops: float) -> Case:
    """Made-up positions that are sure of a token each, as late in a canvas, but for a few. No measure of real text."""
    tokens = torch.randint(0, V, (CANVAS,), device=GPU)
    own = (table.weight[tokens].float() * table.scale[tokens]).to(BF16)
    own = own / own.float().norm(dim=1, keepdim=True) * 20 + randn(CANVAS, D) * 0.5
    own[torch.randperm(CANVAS, device=GPU)[:unsure]] = randn(unsure, D).float()
    hidden, rules = own.to(BF16), rules_for(CANVAS)

    def error() -> str:
        args = (hidden, table, rules, CAP, 53.0)
        got, whole = vocab_triton.vocab_end(*args, skip=1e-3), vocab_triton.vocab_end(*args)
        blocks = weigh_triton.head_blocks(False, torch.int8)
        weighed = vocab_triton.Weighed(*weigh_triton.weigh_fused(*args[:4], blocks), CAP, False)
        factor, share, _ = vocab_triton.result(rules, weighed)
        parts = soft_triton.Parts(weighed.weights, factor, share, weighed.stats.mass, weighed.tile, False)
        kept = soft_triton.needed(parts, 1e-3, 128).tiles.float().mean() / factor.shape[1]
        return f"soft {relative(got.soft, whole.soft):.1e} from that of all, {kept:.1%} of the tiles read"

    return Case(
        f"ALL int8, {unsure} of 256 unsure, skip 1e-3", lambda: vocab_triton.vocab_end(hidden, table, rules, CAP, 53.0,
        skip=1e-3), 2.0 * V * D, 2 * flops, FP8_RATE, error,
    )  # fmt: skip


def vocab_cases() -> Iterator[Case]:
    weight = randn(V, D, scale=0.05)
    hidden = randn(CANVAS, D)
    rules = rules_for(CANVAS)
    flops = 2.0 * CANVAS * V * D
    weights = 2.0 * CANVAS * V  # bytes of the bfloat16 weights
    plain = vocab.Table(weight)
    yield Case("torch LM head bf16", lambda: F.linear(hidden, weight), V * D * 2 + weights, flops)
    probs = torch.rand(CANVAS, V, device=GPU).to(BF16)
    yield Case("torch soft bf16", lambda: probs @ weight, V * D * 2 + weights, flops)

    def weigh(
        table: vocab.Table, rules: vocab.Rules = rules, x: Tensor = hidden, few: bool = False, fixed: bool = False,
        stream: bool = True,
    ):  # fmt: skip
        blocks = weigh_triton.head_blocks(few, table.weight.dtype)
        return lambda: weigh_triton.weigh_fused(x, table, rules, CAP, blocks, fixed, stream)

    yield Case("head fused bf16", weigh(plain), V * D * 2 + weights, flops)
    yield Case("head fused bf16, pins and bans", weigh(plain, ruled(rules)), V * D * 2 + weights, flops)
    logits = F.linear(hidden, weight)
    yield Case("weigh logits (after a library)", lambda: weigh_triton.weigh_logits(logits, rules, CAP), 2 * weights)
    weighed = vocab_triton.Weighed(*weigh(plain)(), CAP, False)
    parts = even_parts(weighed)
    yield Case("result of all tiles", lambda: vocab_triton.result(rules, weighed), 20.0 * parts.mass.numel())
    yield Case("rescale bf16", lambda: soft_triton.rescale(parts, BF16), 2 * weights)
    yield Case("rescale fp8", lambda: soft_triton.rescale(parts, FP8), 1.5 * weights)
    yield Case("which tiles are needed", lambda: soft_triton.needed(parts, 1e-3, 128), 8.0 * parts.mass.numel())
    fixed = parts._replace(fixed=True)

    def soft(table: vocab.Table, how: str = "fused", parts: soft_triton.Parts = parts, skip: float = 0.0):
        return lambda: soft_triton.soft_embed(parts, table, 53.0, BF16, how, skip)  # type: ignore[arg-type]

    yield Case("soft bf16, rescaled on the way", soft(plain), V * D * 2 + weights, flops)
    yield Case("soft bf16, rescale and library", soft(plain, "library"), V * D * 2 + weights, flops)
    yield Case("soft bf16, nothing to rescale", soft(plain, parts=fixed), V * D * 2 + weights, flops)
    yield Case("soft bf16, nothing to rescale, library", soft(plain, "library", fixed), V * D * 2 + weights, flops)
    ways = [("fused", "fused"), ("fused", "library"), ("library", "library")]
    for (how, soft_how), coldest in itertools.product(ways, (None, 0.4)):
        way: dict[str, object] = {"how": how, "soft_how": soft_how, "coldest": coldest}
        yield Case(
            f"ALL bf16 {how}/{soft_how}{', coldest 0.4' if coldest else ''}",
            lambda way=way: vocab_triton.vocab_end(hidden, plain, rules, CAP, 53.0, **way),
            2 * V * D * 2, 2 * flops, BF16_RATE, lambda way=way: vocab_error(hidden, plain, rules, way),
        )  # fmt: skip
    mixed = plain.with_soft()
    yield Case(
        "ALL bf16 head, fp8 soft", lambda: vocab_triton.vocab_end(hidden, mixed, rules, CAP, 53.0),
        3.0 * V * D, 1.5 * flops, BF16_RATE, lambda: vocab_error(hidden, mixed, rules, {}),
    )  # fmt: skip
    yield Case("soft fp8", soft(mixed), V * D + weights / 2, flops, FP8_RATE)
    yield Case("soft fp8, skipping allowed but nothing to skip", soft(mixed, skip=1e-9), V * D + weights / 2, flops,
               FP8_RATE)  # fmt: skip
    small, unit = soft_triton.rescale(parts, FP8), torch.ones((), device=GPU)
    for fast in (False, True):
        yield Case(
            f"torch soft fp8{', fast sums' if fast else ''}",
            lambda fast=fast: torch._scaled_mm(small, mixed.soft.t(), unit, unit, out_dtype=BF16, use_fast_accum=fast),
            V * D + weights / 2, flops, FP8_RATE,
        )  # fmt: skip
    for kind in ("int8", "fp8"):
        table = replace(vocab.make_table(weight, kind), soft=mixed.soft, soft_scale=mixed.soft_scale)
        for users, fixed, stream in itertools.product((1, 8), (False, True), (True, False)):
            x = hidden.repeat(users, 1)
            call = weigh(table, rules_for(len(x)), x, fixed=fixed, stream=stream)
            name = f"head fused {kind}, {len(x)} rows{', fixed' if fixed else ''}{'' if stream else ', by Triton'}"
            yield Case(name, call, V * D + users * weights, users * flops, FP8_RATE)
        yield Case(f"head fused {kind}, pins and bans", weigh(table, ruled(rules)), V * D + weights, flops, FP8_RATE)
        if kind == "fp8":
            yield Case(
                "torch LM head fp8", lambda table=table: weigh_triton.library_fp8(hidden, table),
                V * D + weights, flops, FP8_RATE,
            )  # fmt: skip
        for how in ("fused",) if kind == "int8" else ("fused", "library"):
            way = {"how": how}
            yield Case(
                f"ALL {kind} {how}",
                lambda table=table, way=way: vocab_triton.vocab_end(hidden, table, rules, CAP, 53.0, **way),
                2.0 * V * D, 2 * flops, FP8_RATE, lambda table=table, way=way: vocab_error(hidden, table, rules, way),
            )  # fmt: skip
        for unsure in (0, 1, 16) if kind == "int8" else ():
            yield skipping_case(table, unsure, flops)
        one, one_rules = hidden[:1], rules.rows(0, 1)
        yield Case(f"head fused {kind}, 1 row", weigh(table, one_rules, one, True), V * D, 2.0 * V * D, FP8_RATE)
    yield Case("head fused bf16, 1 row", weigh(plain, rules.rows(0, 1), hidden[:1], True), 2 * V * D, 2.0 * V * D)
    many, many_rules = randn(4 * CANVAS, D), rules_for(4 * CANVAS)
    yield Case(
        "ALL bf16 fused, 4 users", lambda: vocab_triton.vocab_end(many, plain, many_rules, CAP, 53.0),
        2 * V * D * 2, 8 * flops, BF16_RATE, lambda: vocab_error(many, plain, many_rules, {}),
    )  # fmt: skip
    seed, where = torch.arange(CANVAS, device=GPU), torch.arange(CANVAS, device=GPU, dtype=torch.int32)
    yield Case("draws", lambda: vocab_triton.draws(seed, where, where, V), 28.0 * CANVAS)


# ---- attention ---------------------------------------------------------------------------------------------------


@cache
def attention_inputs(kind: tuple[int, int, int], length: int, new: int, rows: int = 1, slots: int | None = None):
    heads, kv_heads, size = kind
    slots = slots or max(16, length)
    q, k, v = randn(rows * new, heads, size, scale=size**-0.25), *(randn(rows * new, kv_heads, size) for _ in range(2))
    k *= size**-0.25
    keys, values = randn(rows, kv_heads, slots, size, scale=size**-0.25), randn(rows, kv_heads, slots, size)
    index = torch.arange(rows, dtype=torch.int32, device=GPU)
    prefix = Prefix(keys, values, index, torch.full((rows,), length, dtype=torch.int32, device=GPU))
    begin = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=GPU)
    return q, k, v, prefix, New(begin, new)


def attention_case(name, kind, length, new, causal, window, rows=1, slots=None, blocks=None) -> Case:
    heads, kv_heads, size = kind
    length, new = min(length, LONGEST), min(new, LONGEST)
    q, k, v, prefix, fresh = attention_inputs(kind, length, new, rows, slots)
    held = min(length, prefix.keys.shape[2])
    # keys that a query sees, on average
    each = torch.arange(held + 1, held + new + 1) if causal else torch.tensor([held + new])
    keys = float(each.clamp_max((window if causal else None) or held + new).double().mean())
    moved = rows * 2.0 * size * (2 * kv_heads * (held + new) + 2 * heads * new)

    def error() -> str:
        got = attention_triton.attend(q, k, v, prefix, fresh, causal, window, blocks)
        one = slice(0, new)
        wide = Prefix(prefix.keys[:1].double(), prefix.values[:1].double(), prefix.row[:1], prefix.length[:1])
        inputs = (t[one].double() for t in (q, k, v))
        want = attention_cached.attend(*inputs, wide, New(fresh.begin[:2], new), causal, window)
        return f"{relative(got[one], want):.1e}"

    return Case(
        name, lambda: attention_triton.attend(q, k, v, prefix, fresh, causal, window, blocks),
        moved, rows * 4.0 * new * heads * size * keys, BF16_RATE, error,
    )  # fmt: skip


def attention_cases() -> Iterator[Case]:
    ring = 1023
    for length in (512, 1023):
        q, k, v, prefix, _ = attention_inputs(SLIDING, min(length, LONGEST), CANVAS)
        rows = [torch.cat([c[0], t.transpose(0, 1)], 1) for c, t in ((prefix.keys, k), (prefix.values, v))]
        yield Case(f"torch canvas sliding {length}", lambda q=q, rows=rows: attend_canvas(q, *rows))
        yield attention_case(f"canvas sliding {length}", SLIDING, length, CANVAS, False, ring, slots=ring)
    for length in (512, 8192, 32_768):
        yield attention_case(f"canvas full {length}", FULL, length, CANVAS, False, None)
    yield attention_case("canvas sliding 512, 8 users", SLIDING, 512, CANVAS, False, ring, 8, ring)
    yield attention_case("canvas full 512, 8 users", FULL, 512, CANVAS, False, None, 8)
    yield attention_case("commit sliding 512", SLIDING, 512, CANVAS, True, 1024, slots=ring)
    yield attention_case("commit full 512", FULL, 512, CANVAS, True, None)
    yield attention_case("prefill sliding 2048", SLIDING, 0, 2048, True, 1024, slots=ring)
    yield attention_case("prefill full 2048", FULL, 0, 2048, True, None)
    yield attention_case("one token sliding 1023", SLIDING, 1023, 1, True, 1024, slots=ring)
    yield attention_case("one token full 512", FULL, 512, 1, True, None)
    yield attention_case("one token full 32768", FULL, 32_768, 1, True, None)
    _, k, v, prefix, new = attention_inputs(SLIDING, 512, CANVAS, slots=ring)
    moved = 2.0 * 2 * k.numel() * 2
    yield Case("store sliding", lambda: attention_join_triton.store(k, v, prefix, new), moved)


# ---- the small ones ----------------------------------------------------------------------------------------------


def small_cases() -> Iterator[Case]:
    x, a, b = (randn(CANVAS, D) for _ in range(3))
    w = [randn(D) for _ in range(4)]
    scalar = torch.tensor([0.7], device=GPU, dtype=BF16)
    row = 2.0 * CANVAS * D
    wide = [t.double() for t in (x, a, b)]
    wide_w = [t.double() for t in w]

    def norm64(t: Tensor, weight: Tensor) -> Tensor:
        return t * (t.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight

    yield Case("torch rms norm", lambda: rms_norm(x, w[0], EPS), 2 * row)
    yield Case(
        "rms norm", lambda: norm_triton.rms_norm(x, w[0], EPS), 2 * row,
        error=lambda: f"{relative(norm_triton.rms_norm(x, w[0], EPS), norm64(wide[0], wide_w[0])):.1e}",
    )  # fmt: skip
    residual = wide[0] + norm64(wide[1], wide_w[0])
    yield Case("torch after attention", lambda: fused.after_attention(x, a, *w[:3], EPS), 5 * row)
    for quant in (None, FP8):
        call = lambda quant=quant: norm_triton.after_attention(x, a, *w[:3], EPS, quant)  # noqa: E731
        yield Case(
            f"after attention{' fp8' if quant else ''}", call, (3 + 2 / (2 if quant else 1)) * row,
            error=lambda call=call: " ".join(
                f"{relative(got, want):.1e}"
                for got, want in zip(
                    (lambda r: (r[0], r[1].wide(), r[2].wide()))(call()),
                    (residual, norm64(residual, wide_w[1]), norm64(residual, wide_w[2])), strict=True,
                )
            ),
        )  # fmt: skip
    both = norm64(norm64(wide[1], wide_w[0]) + norm64(wide[2], wide_w[1]), wide_w[2])
    out = (wide[0] + both) * scalar.double()
    weights = (w[0], w[1], w[2])
    yield Case(
        "torch after feed-forward", lambda: fused.after_feed_forward(x, a, b, weights, scalar, w[3], EPS), 5 * row
    )
    for quant in (None, FP8):
        call = lambda quant=quant: norm_triton.after_feed_forward(x, a, b, weights, scalar, w[3], EPS, quant)  # noqa: E731
        yield Case(
            f"after feed-forward{' fp8' if quant else ''}", call, (4 + 1 / (2 if quant else 1)) * row,
            error=lambda call=call: " ".join(
                f"{relative(got, want):.1e}"
                for got, want in zip(
                    (lambda r: (r[0], r[1].wide()))(call()), (out, norm64(out, wide_w[3])), strict=True
                )
            ),
        )  # fmt: skip
    yield Case("quantise rows fp8", lambda: norm_triton.quantize_rows(x, FP8), 1.5 * row)
    for name, (heads, kv_heads, size), shared in (("sliding", SLIDING, False), ("full", FULL, True)):
        frequency = fused.rope_frequency(size, 1e6 if shared else 1e4, 0.25 if shared else 1.0, GPU)
        at = torch.arange(30_000, 30_000 + CANVAS, device=GPU)
        yield Case(f"rope tables {name}", lambda at=at, f=frequency: heads_triton.rope_at(at, f, BF16))
        rope = fused.rope_at(at, frequency, BF16)
        qkv = randn(CANVAS, (heads + kv_heads * (1 if shared else 2)) * size)
        both_w = randn(size), randn(size)
        args = (qkv, *both_w, rope, heads, kv_heads, EPS)
        yield Case(f"torch heads {name}", lambda args=args: fused.split_heads(*args))

        def error(args=args) -> str:
            exact = (args[0].float(), args[1].float(), args[2].float(), tuple(t.float() for t in args[3]), *args[4:])
            pairs = zip(heads_triton.split_heads(*args), fused.split_heads(*exact), strict=True)
            return " ".join(f"{relative(got, want):.1e}" for got, want in pairs)

        moved = 2.0 * qkv.numel() * (2 if not shared else 2 + kv_heads / (heads + kv_heads))
        yield Case(f"heads {name}", lambda args=args: heads_triton.split_heads(*args), moved, error=error)
    proj, per_expert = randn(EXPERTS, D), randn(EXPERTS)
    route = (x, proj, w[0], per_expert, 8, EPS)

    def route_error() -> str:
        index, weight = router_triton.route(*route)
        want, want_weight = fused.route(*(t.float() for t in route[:4]), 8, EPS)
        agree = (index == want).all(dim=1)
        same = float((index == want).float().mean())
        return f"{relative(weight[agree], want_weight[agree]):.1e}, same experts {same:.1%}"

    yield Case("torch router", lambda: fused.route(*route), row + 2.0 * EXPERTS * D)
    yield Case(
        "router", lambda: router_triton.route(*route), row + 2.0 * EXPERTS * D, 2.0 * CANVAS * D * EXPERTS,
        error=route_error,
    )  # fmt: skip


# ---- other layouts -----------------------------------------------------------------------------------------------


def sweep_cases() -> Iterator[Case]:
    blocks = attention_triton.Blocks
    sliding = [(128, 64, 4, 8, 3), (128, 64, 2, 8, 3), (128, 64, 8, 8, 3), (128, 32, 4, 8, 4), (128, 32, 4, 8, 6)]
    sliding += [(64, 64, 2, 4, 3), (64, 64, 1, 4, 3), (64, 32, 4, 4, 3), (64, 32, 4, 4, 3, True), (64, 32, 2, 4, 6)]
    for layout in sliding:
        for length, users in ((512, 1), (1023, 1), (512, 8)):
            name = f"sweep sliding {length} x{users} {layout}"
            yield attention_case(name, SLIDING, length, CANVAS, False, 1023, users, 1023, blocks(*layout))
    wide = attention_triton.WideBlocks
    full = [
        wide(128, 128, 256, 2, score_warps=4, score_stages=3, resident=2),
        wide(128, 128, 256, 1, score_warps=4, score_stages=3, resident=2),
        wide(128, 128, 256, 4, score_warps=4, score_stages=3, resident=2),
        wide(128, 256, 256, 2),
        wide(128, 256, 256, 2, score_stages=3),
        wide(128, 128, 256, 2, score_warps=8, score_stages=3),
        wide(128, 128, 128, 2, score_warps=4, score_stages=3, resident=2, warps=4, stages=3),
        wide(128, 128, 256, 2, score_warps=4, score_stages=3, resident=2, stages=3),
    ]
    for layout in full:
        for length, users in ((512, 1), (8192, 1), (32_768, 1), (512, 8)):
            name = f"sweep full {length} x{users} {tuple(layout)}"
            yield attention_case(name, FULL, length, CANVAS, False, None, users, blocks=layout)
    for layout in [(16, 64, 16, 4, 3), (16, 32, 32, 4, 3), (16, 128, 8, 4, 2)]:
        name = f"sweep one sliding {layout}"
        yield attention_case(name, SLIDING, 1023, 1, True, 1024, 1, 1023, blocks(*layout))
    for layout in [(16, 32, 64, 4, 3), (16, 64, 64, 4, 2), (16, 32, 128, 4, 3)]:
        for length in (512, 32_768):
            name = f"sweep one full {length} {layout}"
            yield attention_case(name, FULL, length, 1, True, None, blocks=blocks(*layout))
    x, proj, scale, per_expert = randn(CANVAS, D), randn(EXPERTS, D), randn(D), randn(EXPERTS)
    routes = [(16, 256, 256, 4, 1), (16, 256, 64, 4, 1), (16, 256, 256, 8, 1), (32, 128, 128, 4, 1)]
    for layout in [*routes, (16, 128, 128, 4, 1), (16, 256, 256, 4, 2)]:
        r = router_triton.Blocks(*layout)
        yield Case(f"sweep router {layout}", lambda r=r: router_triton.route(x, proj, scale, per_expert, 8, EPS, r))
    yield from sweep_vocab_cases()


def sweep_vocab_cases() -> Iterator[Case]:
    weight, hidden, rules = randn(V, D, scale=0.05), randn(CANVAS, D), rules_for(CANVAS)
    flops, moved = 2.0 * CANVAS * V * D, 2.0 * V * D + 2.0 * CANVAS * V
    table = vocab.Table(weight)

    def head(name: str, table: vocab.Table, layout: tuple[int, ...], fixed: bool = False) -> Case:
        b, half = weigh_triton.Blocks(*layout), table.scale is not None
        return Case(
            f"sweep head {name} {layout}{' fixed' if fixed else ''}",
            lambda: weigh_triton.weigh_fused(hidden, table, rules, CAP, b, fixed, stream=False),
            moved / (2 if half else 1), flops, FP8_RATE if half else BF16_RATE,
        )  # fmt: skip

    # 16 programs on a multiprocessor: one for each tile
    heads = [(128, 256, 64, 8, 4), (128, 256, 64, 8, 4, 16), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4)]
    for layout in [*heads, (128, 128, 64, 4, 3, 2), (128, 128, 64, 4, 3, 32)]:
        yield head("bf16", table, layout)
    yield head("bf16", table, heads[0], True)
    parts = even_parts(
        vocab_triton.Weighed(
            *weigh_triton.weigh_fused(hidden, table, rules, CAP, weigh_triton.head_blocks(False, BF16)), CAP, False
        )
    )
    eight, other = vocab.make_table(weight, "int8", soft=True), vocab.make_table(weight, "fp8")
    heads = [(128, 256, 128, 8, 4), (128, 256, 128, 8, 4, 16), (128, 256, 128, 8, 3), (256, 128, 128, 8, 4)]
    for layout in [*heads, (128, 128, 128, 4, 3, 2), (128, 128, 128, 4, 3, 32)]:
        yield head("int8", eight, layout)
        yield head("fp8", other, layout)

    def soft(name: str, parts: soft_triton.Parts, table: vocab.Table, layout: tuple[int, ...], steps: int) -> Case:
        s, half = soft_triton.Blocks(*layout), table.soft is not None

        def call() -> Tensor:
            before, soft_triton.FP8_STEPS = soft_triton.FP8_STEPS, steps
            try:
                return soft_triton.soft_embed(parts, table, 53.0, BF16, blocks=s)
            finally:
                soft_triton.FP8_STEPS = before

        def error() -> str:
            want = parts.weights[:4].float() * parts.share[:4, None] @ table.wide_soft(torch.float32) * 53.0
            return f"{relative(call()[:4], want):.1e}"

        rate = FP8_RATE if half else BF16_RATE
        return Case(f"sweep soft {name} {layout} {steps}", call, moved / (2 if half else 1), flops, rate, error)

    for layout in [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4)]:
        yield soft("bf16 fixed", parts._replace(fixed=True), table, layout, 64)
    for layout in [(128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 4), (128, 256, 64, 8, 6)]:
        yield soft("fp8", parts, eight, layout, 64)
    for steps in (32, 128, 512):
        yield soft("fp8", parts, eight, (128, 256, 128, 8, 4), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--sweep", action="store_true", help="other layouts instead")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument("--serial", action="store_true", help="compile one after another, as each is needed")
    parser.add_argument("--tiny", action="store_true", help="does it run at all? Small shapes, on a CPU, no times")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.tiny:
        shrink()
    start = time.perf_counter()
    cases: list[Case] = []
    for group in [sweep_cases] if args.sweep else [small_cases, attention_cases, vocab_cases]:
        try:
            cases += [case for case in group() if args.only in case.name]
        except Exception:  # one group's inputs must not stop the table
            print(f"{group.__name__} FAILED\n{traceback.format_exc(limit=4)}")
    if args.list:
        print("\n".join(case.name for case in cases))
        return
    if not args.serial and not args.tiny:
        compile_all(cases)
    made = time.perf_counter() - start
    name = "a CPU" if args.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; inputs and compiling took {made:.0f} s")
    print(f"{'kernel':<56}{'us':>9}{'floor':>9}{'ratio':>7}  error against float64")
    results = [measure(case) for case in cases]
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "kernels": results}))


def shrink() -> None:
    global D, V, CANVAS, EXPERTS, LONGEST, GPU, SLIDING, FULL
    D, V, CANVAS, EXPERTS, LONGEST, GPU = 64, 1024, 24, 16, 40, torch.device("cpu")
    SLIDING, FULL = (4, 2, 32), (4, 1, 512)


def compile_all(cases: list[Case]) -> None:
    """Many kernels side by side; one that does not compile says so when it is launched."""
    with compiling():
        for case in cases:
            if not case.name.startswith("torch"):
                with contextlib.suppress(Exception):  # told when it is measured
                    case.run()


def measure(case: Case) -> dict[str, object]:
    floor = 1e6 * max(case.bytes / READ, case.flops / case.rate)
    error, micros = "", None
    try:
        case.run()
        if GPU.type == "cuda":
            torch.cuda.synchronize()
        if case.error is not None:
            error = case.error()
        micros = 1e3 * do_bench_cudagraph(case.run, rep=20, return_mode="median") if GPU.type == "cuda" else 0.0
        ratio = f"{micros / floor:.2f}" if floor else ""
        print(f"{case.name:<56}{micros:>9.1f}{floor:>9.1f}{ratio:>7}  {error}", flush=True)
    except Exception as failure:  # one kernel must not stop the table
        error = f"FAILED {type(failure).__name__}: {str(failure).strip().splitlines()[0][:150] if str(failure) else ''}"
        print(f"{case.name:<56}{'':>9}{floor:>9.1f}{'':>7}  {error}", flush=True)
    return {"name": case.name, "us": micros, "floor_us": round(floor, 2), "error": error}


if __name__ == "__main__":
    main()
