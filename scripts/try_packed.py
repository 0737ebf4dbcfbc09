# ruff: noqa: E402
"""A trial for a card: experts whose weights lie packed beside the plain ones (`packed_weights.py`). The same bits? How
fast? Nothing of it is used by the engine.

    python3 scripts/try_packed.py alone [--kinds 7,12,6] [--tokens 256,512] [--runs 12]
    python3 scripts/try_packed.py layers [--kinds 7,12] [--layers 6] [--rounds 9]
    python3 scripts/try_packed.py text [--kinds 7] [--rounds 5]

26B-A4B geometry on one Hopper card; 7: fp8 in 7 bits, 12: bfloat16 in 12, 6: fp8 in 6.

alone: both products of a layer's experts, in several ways of running the kernel, evenly and unevenly routed; the twin
is the kernel for plain weights, with the numbers that the packed ones hold (as the tensor cores get them), and all bits
must be its own. layers: a canvas of 256 over 512 tokens through some layers, each way by turns. text: 1,024 tokens of
one user at 16 fixed steps a canvas, plain and packed engines by turns.

Weights are rounded to what has a place before they are used, so both sides compute with the same numbers. The exit code
is 1 if bits differ in `alone`. (In `layers` fp8 ones may: there plain weights are multiplied as they are, and what is
normal there may be subnormal when packed; how far apart they are is printed.) Without a card, `layers --tiny` checks
the script itself, without packed kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts"), str(ROOT / "tests" / "ops")]
CUDA = torch.cuda.is_available()
if not CUDA:
    import triton_cpu  # noqa: F401  # turns Triton's interpreter on, before Triton is imported

import bench_layers
from bench_stream import BANDWIDTH, EXPERTS, HIDDEN, SETS, WIDTH, microseconds, placed, recorded
from packed_gluon import Packed, Way, packed_streamed
from packed_weights import PACKINGS, Packing, lifted, pack, shrunk

from diffusiongemma.bench.subject import Subject, Target
from diffusiongemma.engine import fast
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.model.fused_weights import FusedLayer
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.rows_triton import quantize_rows

QUANT = {"7": "fp8", "6": "fp8", "12": "bf16"}
BEST = {"7": Way(3, 96), "6": Way(4, 96), "12": Way(4, 96)}  # a guess until `alone` has run: these leave the MLP room
TRIED = (Way(3, 96), Way(4, 96), Way(4, 112), Way(5, 96, 3), Way(5, 128, 3), Way(3, 80, programs=3))
BLOCKS = (32, 64)


# ---- alone -------------------------------------------------------------------------------------------------------


@dataclass
class Experts:
    """A layer's, packed, and its twin in plain numbers"""

    packed: Packed
    plain: tuple[Tensor, Tensor | None, Tensor, Tensor | None]

    def weights(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """All that must be read: plain, packed"""
        w = self.packed
        return self.plain, (w.up, w.up_scale, w.down, w.down_scale)


def experts_of(packing: Packing) -> Experts:
    (up, up_scale, up_plain), (down, down_scale, down_plain) = (
        _matrix(2 * WIDTH, HIDDEN, packing, True),
        _matrix(HIDDEN, WIDTH, packing, False),
    )
    scales = (up_scale, down_scale) if packing.dtype == FP8 else (None, None)
    plain = (up_plain, scales[0], down_plain, scales[1])
    return Experts(Packed(packing, up, up_scale, down, down_scale, HIDDEN, WIDTH), plain)


def _matrix(rows: int, columns: int, packing: Packing, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> packed, its scales, and plain: in bfloat16 as large as they are, in fp8 as the tensor cores get them"""
    plain = torch.empty(EXPERTS, rows, columns, dtype=packing.dtype, device="cuda")
    q, scale = torch.empty_like(plain), torch.empty(EXPERTS, rows, 1, device="cuda")
    for expert in range(EXPERTS):
        w = torch.randn(rows, columns, device="cuda") * 0.02
        own = w.abs().amax(-1, keepdim=True) / 448 if packing.dtype == FP8 else torch.ones(rows, 1, device="cuda")
        q[expert], back = shrunk((w / own).to(packing.dtype), packing)
        scale[expert] = own * back
        plain[expert] = lifted(q[expert], packing) * (1 if packing.dtype == FP8 else back)
    return pack(q, packing, gated), scale, plain


def alone(args: argparse.Namespace) -> int:
    """-> how many comparisons failed"""
    failed = 0
    for packing in (PACKINGS[kind] for kind in args.kinds):
        sets = [experts_of(packing) for _ in range(SETS)]
        plain, packed = (sum(t.nbytes for t in w if t is not None) / BANDWIDTH * 1e6 for w in sets[0].weights())
        print(f"{packing.name}: floor {packed:.1f} us, of plain ones {plain:.1f}", flush=True)
        for tokens in args.tokens:
            failed += sum(compared(sets, packing, tokens, even, args.runs) for even in (True, False))
        del sets
        torch.cuda.empty_cache()
    return failed


def compared(sets: list[Experts], packing: Packing, tokens: int, even: bool, runs: int) -> int:
    """-> how many comparisons failed"""
    from diffusiongemma.ops.experts_gluon import experts_streamed

    where = placed(tokens, even, "bf16" if packing.size == 2 else "fp8")[2]
    marks = [torch.zeros_like(where.marks) for _ in range(SETS)]

    def taken(i: int) -> Placed:
        marks[
            (i + 1) % SETS
        ].zero_()  # two launches before they are used: one may begin before that before it has ended
        return replace(where, marks=marks[i % SETS])

    def plain(x: Rows, i: int) -> Tensor:
        return experts_streamed(x, taken(i), *sets[i % SETS].plain)

    def small(x: Rows, i: int, way: Way) -> Tensor:
        return packed_streamed(x, taken(i), sets[i % SETS].packed, way)

    print(f"  {tokens} tokens, {'even' if even else 'skewed'}, blocks of {where.block}")
    ways, failed = list[Way](), 0
    for way in TRIED:
        try:
            unequal = sum(_differ(plain(x, i), small(x, i, way)) for i, x in _rows(tokens, packing, runs))
        except Exception as error:  # a way that the card has no room for
            print(f"    {way}: {str(error)[:200]}", flush=True)
            continue
        failed += unequal
        ways.append(way)
        print(f"    {way}: {unequal} of {runs} runs unequal", flush=True)
    _, x = next(_rows(tokens, packing, 1))
    graphs = [recorded(lambda i: plain(x, i)), *(recorded(lambda i, way=way: small(x, i, way)) for way in ways)]  # type: ignore[misc]
    before, *after = (us / SETS for us in microseconds([graph.replay for graph in graphs]))
    print(f"    plain: {before:.1f} us")
    for way, us in zip(ways, after, strict=True):
        print(f"    {way}: {us:.1f} ({us / before:.3f})", flush=True)
    return failed


def _rows(tokens: int, packing: Packing, runs: int) -> Iterator[tuple[int, Rows]]:
    for i in range(runs):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield i, quantize_rows(x) if packing.dtype == FP8 else Rows(x)


def _differ(one: Tensor, two: Tensor) -> bool:
    if torch.equal(one, two):
        return False
    off = ((one.float() - two.float()).norm() / one.float().norm()).item()
    print(f"    {(one != two).sum().item()} of {one.numel()} numbers differ, by {off:.2e}", flush=True)
    return True


# ---- in a network ------------------------------------------------------------------------------------------------


@dataclass
class PackedOps:
    """Operations that take packed weights where blocks are small, and the plain ones elsewhere. `prepare` first."""

    packing: Packing
    way: Way
    kept: dict[int, Packed] = field(default_factory=dict)  # by where the plain ones lie

    def prepare(self, model: DiffusionGemma) -> None:
        """Round what the network multiplies to what has a place, and pack it."""
        modules: list[Any] = list(model.layers)
        for layer in map(FusedLayer.of, modules):
            (up, up_scale), (down, down_scale) = (
                self._packed(*layer.up, gated=True),
                self._packed(*layer.down, gated=False),
            )
            hidden, width = layer.down[0].shape[1:]
            self.kept[layer.up[0].data_ptr()] = Packed(self.packing, up, up_scale, down, down_scale, hidden, width)

    def _packed(self, w: Tensor, scale: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
        parts = list[Tensor]()
        backs = list[Tensor]()
        for expert in w:
            q, back = shrunk(expert, self.packing)
            expert.copy_(lifted(q, self.packing).float() * back)
            parts.append(pack(q[None], self.packing, gated))
            backs.append(back)
        back = torch.stack(backs)
        return torch.cat(parts), back if scale is None else scale * back

    def over(self, ops: Ops) -> Ops:
        def experts(
            x: Rows, index: Tensor, weight: Tensor, up: Weight, down: Weight, where: Placed | None = None
        ) -> Tensor:
            packed = self.kept.get(up[0].data_ptr())
            if CUDA and packed is not None and where is not None and where.block in BLOCKS:
                return packed_streamed(ops.rows_for(x, up), where, packed, self.way)
            return ops.experts(x, index, weight, up, down, where)

        return replace(ops, experts=experts)


@torch.inference_mode()
def layers(args: argparse.Namespace) -> None:
    config = bench_layers.config_of(args.layers, args.tiny)
    for kind in args.kinds:
        torch.manual_seed(0)
        scheme = None if QUANT[kind] == "bf16" else Scheme.parse(QUANT[kind])
        model = random_network(config, scheme, bench_layers.DEVICE, torch.bfloat16, std=0.02)
        packed = PackedOps(PACKINGS[kind], BEST[kind])
        packed.prepare(model)
        limits = fast.Limits(max_bytes=1 << (22 if args.tiny else 31), max_rows=2, chunk=16 if args.tiny else 2048)
        runner = FastRunner(model, triton_ops(), limits, graphs=CUDA)
        for users in (1, 2):
            work = canvases(runner, users, args.tiny)
            replays, bits = list[Callable[[], object]](), list[Tensor]()
            ways = [triton_ops().roomy(), *(replace(packed, way=way).over(triton_ops().roomy()) for way in tried(kind))]
            for runner.network.ops in ways:
                replay, out = bench_layers.recorded(runner.recorder, work)
                replay()
                replays.append(replay)
                bits.append(out[0].clone())
            off = max(((one.float() - bits[0].float()).norm() / bits[0].float().norm()).item() for one in bits[1:])
            times = microseconds(replays, args.rounds, bench_layers.AT_ONCE) if CUDA else [0.0] * len(ways)
            told = f"{PACKINGS[kind].name}, {users} users, off by {off:.1e}"
            print(f"{told}: plain {times[0] / args.layers:.1f} us a layer", flush=True)
            for way, us in zip(tried(kind), times[1:], strict=True):
                print(f"  {way}: {us / args.layers:.1f}", flush=True)
        del runner, model, packed
        if CUDA:
            torch.cuda.empty_cache()


def tried(kind: str) -> list[Way]:
    return list(dict.fromkeys((BEST[kind], Way(3, 96), Way(4, 96), Way(4, 112))))


def canvases(runner: FastRunner, users: int, tiny: bool) -> Callable[[], Tensor]:
    """A pass over so many users' canvases, over a prompt each"""
    width, prefix = (8, 16) if tiny else (256, 512)
    rows = [runner.new_row(prefix + width) for _ in range(users)]
    x = torch.randn(users * prefix, runner.network.config.hidden_size).to(runner.network.device, torch.bfloat16)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": runner.network.device}

    def batch(each: int, held: int) -> bench_layers.Batch:
        return bench_layers.Batch(
            runner.pool.offsets(rows).to(runner.network.device), torch.full((users,), held, **numbers),
            torch.arange(held, held + each, **numbers).repeat(users),
            bench_layers.New(torch.arange(users + 1, **numbers) * each, each), runner.pool.reach_for(prefix + width),
        )  # fmt: skip

    filled, behind = batch(prefix, 0), batch(width, prefix)
    bench_layers.ahead(runner.network.device, lambda: runner.network._run(x, ("encode", filled)))
    runner.network._run(x, ("encode", filled))
    return lambda: runner.network._run(x[: users * width], ("denoise", behind))


def text(args: argparse.Namespace) -> None:
    from bench_turns import run

    args.prompt, args.tokens, args.uneven = 512, 1024, False
    for kind in args.kinds:
        subject = Subject.make(Target(quant=QUANT[kind]))
        packed = PackedOps(PACKINGS[kind], BEST[kind])
        packed.prepare(subject.model)
        kinds = {"plain": triton_ops(), "packed": packed.over(triton_ops())}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for name, ops in (*kinds.items(), *kinds.items()):
            picked, made = mock.patch.object(fast, "triton_ops", return_value=ops), subject.engine(1, 512 + 1024)
            with picked, made as engine:
                run(engine, 1, args, 0)  # records
                found[name] += [run(engine, 1, args, i + 1)[0] for i in range(args.rounds)]
        ms = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
        speeds = ", ".join(f"{name} {one:.1f} ms, {1e3 * args.tokens / one:,.0f} tok/s" for name, one in ms.items())
        print(f"{PACKINGS[kind].name}: {speeds} ({ms['packed'] / ms['plain']:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alone", "layers", "text"))
    parser.add_argument("--kinds", type=lambda told: told.split(","), default=["7", "12"])
    parser.add_argument("--tokens", type=lambda told: [int(n) for n in told.split(",")], default=[256, 512])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(PACKINGS):
        parser.error(f"no packing is called {', '.join(sorted(unknown))}: {', '.join(PACKINGS)} are")
    if not CUDA and (args.what != "layers" or not args.tiny):
        parser.error("there is no GPU: `layers --tiny` checks the script itself")
    if CUDA:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    sys.exit(1 if {"alone": alone, "layers": layers, "text": text}[args.what](args) else 0)


if __name__ == "__main__":
    main()
