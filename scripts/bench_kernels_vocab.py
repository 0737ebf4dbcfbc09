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
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from diffusiongemma.ops import (
    attention_cached,
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
from diffusiongemma.ops.early_triton import run
from diffusiongemma.ops.kernels import compiling
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.quant import FP8

READ, BF16_RATE, FP8_RATE = 4.33e12, 790e12, 1580e12
D, V, CANVAS, EXPERTS, CAP, EPS = 2816, 262_144, 256, 128, 30.0, 1e-6
SLIDING, FULL = (16, 8, 256), (16, 2, 512)  # query heads, K/V heads, head size
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
    return replace(rules, pin=pin, banned=vocab.ban([[0, 1, 2, 106, 255_999]], V, GPU), banned_set=which)


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

    def weigh(table: vocab.Table, rules: vocab.Rules = rules, x: Tensor = hidden, few: bool = False):
        blocks = weigh_triton.head_blocks(few, table.weight.element_size())
        return lambda: weigh_triton.weigh_fused(x, table, rules, CAP, blocks)

    yield Case("head fused bf16", weigh(plain), V * D * 2 + weights, flops)
    yield Case("head fused bf16, pins and bans", weigh(plain, ruled(rules)), V * D * 2 + weights, flops)
    logits = F.linear(hidden, weight)
    yield Case("weigh logits (after a library)", lambda: weigh_triton.weigh_logits(logits, rules, CAP), 2 * weights)
    made, stats, tile = weigh(plain)()
    factor = torch.ones_like(stats.mass)  # rescaling again and again must not end in zeros
    share = torch.ones(CANVAS, device=GPU)
    results = torch.empty(4, CANVAS, device=GPU)
    tokens = torch.empty(2, CANVAS, dtype=torch.int64, device=GPU)
    factors = torch.empty_like(factor)

    def result() -> None:
        outputs = (factors, results[0], *tokens, *results[1:])
        run(
            vocab_triton._result_kernel, CANVAS, made, rules.uniform, *stats, *outputs, V, stats.mass.shape[1],
            TILE=tile, TILES=stats.mass.shape[1], num_warps=4,
        )  # fmt: skip

    yield Case("result of all tiles", result, 20.0 * stats.mass.numel())
    yield Case("rescale bf16", lambda: soft_triton.rescale(made, factor, tile, BF16), 2 * weights)
    yield Case("rescale fp8", lambda: soft_triton.rescale(made, factor, tile, FP8), 1.5 * weights)

    def soft(table: vocab.Table, how: str = "fused"):
        return lambda: soft_triton.soft_embed(made, factor, share, tile, table, 53.0, BF16, how)  # type: ignore[arg-type]

    yield Case("soft bf16, rescaled on the way", soft(plain), V * D * 2 + weights, flops)
    yield Case("soft bf16, rescale and library", soft(plain, "library"), V * D * 2 + weights, flops)
    for how, soft_how in (("fused", "fused"), ("fused", "library"), ("library", "library"), ("library", "fused")):
        way: dict[str, object] = {"how": how, "soft_how": soft_how}
        yield Case(
            f"ALL bf16 {how}/{soft_how}",
            lambda way=way: vocab_triton.vocab_end(hidden, plain, rules, CAP, 53.0, **way),
            2 * V * D * 2, 2 * flops, BF16_RATE, lambda way=way: vocab_error(hidden, plain, rules, way),
        )  # fmt: skip
    mixed = plain.with_soft()
    yield Case(
        "ALL bf16 head, fp8 soft", lambda: vocab_triton.vocab_end(hidden, mixed, rules, CAP, 53.0),
        3.0 * V * D, 1.5 * flops, BF16_RATE, lambda: vocab_error(hidden, mixed, rules, {}),
    )  # fmt: skip
    yield Case("soft fp8", soft(mixed), V * D + weights / 2, flops, FP8_RATE)
    for kind in ("int8", "fp8"):
        table = replace(vocab.make_table(weight, kind), soft=mixed.soft, soft_scale=mixed.soft_scale)
        yield Case(f"head fused {kind}", weigh(table), V * D + weights, flops, FP8_RATE)
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
        q, k, v, prefix, _ = attention_inputs(SLIDING, length, CANVAS)
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
    yield Case("store sliding", lambda: attention_triton.store(k, v, prefix, new), moved)


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
    sliding = [(64, 64, 2, 4, 2), (64, 64, 4, 4, 2), (64, 32, 4, 4, 2), (64, 32, 2, 4, 3), (128, 64, 4, 8, 2)]
    sliding += [(128, 32, 4, 8, 3), (128, 64, 2, 8, 2), (64, 64, 1, 4, 2), (128, 128, 4, 8, 1), (64, 32, 8, 4, 2)]
    for layout in sliding:
        for length in (512, 1023):
            yield attention_case(
                f"sweep sliding {length} {layout}", SLIDING, length, CANVAS, False, 1023, 1, 1023, blocks(*layout)
            )
    full = [
        (64, 32, 2, 8, 2),
        (64, 16, 2, 8, 3),
        (64, 16, 2, 8, 4),
        (64, 64, 2, 8, 1),
        (64, 32, 4, 8, 2),
        (64, 32, 1, 8, 2),
    ]
    for layout in full:
        for length in (512, 32_768):
            yield attention_case(
                f"sweep full {length} {layout}", FULL, length, CANVAS, False, None, blocks=blocks(*layout)
            )
    one = [(16, 64, 16, 4, 3), (16, 32, 32, 4, 3), (16, 128, 8, 4, 2)]
    for layout in one:
        yield attention_case(
            f"sweep one sliding {layout}", SLIDING, 1023, 1, True, 1024, 1, 1023, blocks(*layout)
        )  # fmt: skip
    for layout in [(16, 32, 64, 4, 3), (16, 64, 64, 4, 2), (16, 32, 128, 4, 3), (16, 32, 64, 8, 4)]:
        yield attention_case(f"sweep one full 32768 {layout}", FULL, 32_768, 1, True, None, blocks=blocks(*layout))
    weight, hidden, rules = randn(V, D, scale=0.05), randn(CANVAS, D), rules_for(CANVAS)
    flops, moved = 2.0 * CANVAS * V * D, 2.0 * V * D + 2.0 * CANVAS * V
    table = vocab.Table(weight)
    heads = [
        (128, 256, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4),
        (256, 128, 64, 8, 4),
    ]
    heads += [(64, 256, 64, 4, 4), (128, 256, 32, 8, 6)]
    for layout in heads:
        b = weigh_triton.Blocks(*layout)
        yield Case(
            f"sweep head bf16 {layout}",
            lambda b=b: weigh_triton.weigh_fused(hidden, table, rules, CAP, b),
            moved,
            flops,
        )
    made, stats, tile = weigh_triton.weigh_fused(hidden, table, rules, CAP, weigh_triton.head_blocks(False, 2))
    factor, share = torch.ones_like(stats.mass), torch.ones(CANVAS, device=GPU)
    for layout in [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4), (128, 256, 128, 8, 2)]:
        s = soft_triton.Blocks(*layout)
        yield Case(
            f"sweep soft bf16 {layout}",
            lambda s=s: soft_triton.soft_embed(made, factor, share, tile, table, 53.0, BF16, "fused", s), moved, flops,
        )  # fmt: skip
    eight = vocab.make_table(weight, "int8", soft=True)
    for layout in [
        (128, 256, 128, 8, 4),
        (128, 256, 128, 8, 3),
        (128, 256, 64, 8, 6),
        (256, 128, 128, 8, 4),
        (128, 128, 128, 4, 3),
    ]:
        b = weigh_triton.Blocks(*layout)
        yield Case(
            f"sweep head int8 {layout}", lambda b=b: weigh_triton.weigh_fused(hidden, eight, rules, CAP, b),
            moved / 2, flops, FP8_RATE,
        )  # fmt: skip
        s = soft_triton.Blocks(*layout)
        yield Case(
            f"sweep soft fp8 {layout}",
            lambda s=s: soft_triton.soft_embed(made, factor, share, tile, eight, 53.0, BF16, "fused", s),
            moved / 2, flops, FP8_RATE,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--sweep", action="store_true", help="other layouts instead")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument("--serial", action="store_true", help="compile one after another, as each is needed")
    args = parser.parse_args()
    torch.manual_seed(0)
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
    if not args.serial:
        compile_all(cases)
    made = time.perf_counter() - start
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; inputs and compiling took {made:.0f} s")
    print(f"{'kernel':<40}{'us':>9}{'floor':>9}{'ratio':>7}  error against float64")
    results = [measure(case) for case in cases]
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "kernels": results}))


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
        torch.cuda.synchronize()
        if case.error is not None:
            error = case.error()
        micros = 1e3 * do_bench_cudagraph(case.run, rep=20, return_mode="median")
        ratio = f"{micros / floor:.2f}" if floor else ""
        print(f"{case.name:<40}{micros:>9.1f}{floor:>9.1f}{ratio:>7}  {error}", flush=True)
    except Exception as failure:  # one kernel must not stop the table
        error = f"FAILED {type(failure).__name__}: {str(failure).strip().splitlines()[0][:150] if str(failure) else ''}"
        print(f"{case.name:<40}{'':>9}{floor:>9.1f}{'':>7}  {error}", flush=True)
    return {"name": case.name, "us": micros, "floor_us": round(floor, 2), "error": error}


if __name__ == "__main__":
    main()
