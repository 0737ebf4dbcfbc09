# ruff: noqa: E402
"""A trial for a card: experts whose weights lie packed beside the plain ones (`packed_weights.py`). The same bits? How
fast? Nothing of it is used by the engine.

    timeout -s KILL 120 python3 scripts/try_packed.py alone --kinds 7 --tokens 256 --ways 1 --runs 4   # does it end?
    python3 scripts/try_packed.py alone [--kinds 7,12,6] [--tokens 256,512] [--runs 12] [--ways 9]
    python3 scripts/try_packed.py layers [--kinds 7] [--layers 6] [--rounds 9]
    python3 scripts/try_packed.py text [--kinds 7] [--rounds 5]

26B-A4B geometry on one Hopper card; 7: fp8 in 7 bits, 12: bfloat16 in 12, 6: fp8 in 6. One kind a process is best.

alone: both products of a layer's experts, in several ways of running the kernel, evenly and unevenly routed; the twin
is the kernel for plain weights, with the numbers that the packed ones hold (as the tensor cores get them), and all bits
must be its own, also where launches follow each other in a graph. Then without unpacking, and without products, for the
time alone: what a miss is due to. layers: canvases of one and two users over 512 tokens through some layers, each way
by turns; this decides. text: 1,024 tokens of one user at 16 fixed steps a canvas, plain and packed engines by turns.

In `layers` and `text` weights are rounded to what has a place before they are used, so both sides compute with the same
numbers. The exit code is 1 if bits differ, packed weights were not used at all, or a way does not run. (fp8 bits of
`layers` may differ a little: plain weights are multiplied as they are there, and what is normal then may be subnormal
when packed. The kernel's twin in `alone` has the same numbers to the bit.) Without a card, `layers --tiny` goes through
the script itself, without packed kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
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
from bench_layers import DEVICE
from bench_stream import BANDWIDTH, EXPERTS, HIDDEN, SETS, WIDTH, microseconds, placed, recorded
from packed_gluon import Packed, Way, packed_streamed
from packed_weights import PACKINGS, Packing, lifted, pack, shrunk

from diffusiongemma.bench.subject import Subject, Target, free
from diffusiongemma.engine import Limits, fast
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
NARROW = (Way(4, 96), Way(3, 96, 1), Way(3, 96, 2))
# By rows of a block, the best guess first. All but Way(4, 96) and Way(5, 96, 3) of 7 bits, and Way(4, 96) of the others
# in blocks of 64 rows, leave the dense MLP its room.
WAYS = {
    "7": {32: (Way(3, 96, 1), Way(3, 96, 2), Way(4, 96, 2), Way(5, 96, 3)), 64: (Way(3, 96, 1), Way(4, 96, 2))},
    "6": {32: NARROW, 64: (Way(3, 96, 1), Way(4, 96, 2))},
    "12": {32: NARROW, 64: (Way(3, 96, 1), Way(4, 96, 2))},
}
OFF = 1e-3  # of fp8 in a few layers, at most


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
    plain = torch.empty(EXPERTS, rows, columns, dtype=packing.dtype, device=DEVICE)
    q, scale = torch.empty_like(plain), torch.empty(EXPERTS, rows, 1, device=DEVICE)
    for expert in range(EXPERTS):
        w = torch.randn(rows, columns, device=DEVICE) * 0.02
        own = w.abs().amax(-1, keepdim=True) / 448 if packing.dtype == FP8 else torch.ones(rows, 1, device=DEVICE)
        q[expert], back = shrunk((w / own).to(packing.dtype), packing)
        scale[expert] = own * back
        near = lifted(q[expert], packing)
        plain[expert] = near if packing.dtype == FP8 else near * back
    return pack(q, packing, gated), scale, plain


def alone(args: argparse.Namespace) -> int:
    """-> how many comparisons failed"""
    failed = 0
    for kind in args.kinds:
        packing = PACKINGS[kind]
        sets = [experts_of(packing) for _ in range(SETS)]
        plain, packed = (sum(t.nbytes for t in w if t is not None) / BANDWIDTH * 1e6 for w in sets[0].weights())
        print(f"{packing.name}: floor {packed:.1f} us, of plain ones {plain:.1f}", flush=True)
        for tokens in args.tokens:
            for even in (True, False):
                failed += Comparison(sets, kind, tokens, even).run(args.ways if even else 1, args.runs)
        del sets
        torch.cuda.empty_cache()
    return failed


class Comparison:
    """Of so many tokens, routed evenly or not"""

    def __init__(self, sets: list[Experts], kind: str, tokens: int, even: bool) -> None:
        self.sets, self.kind, self.tokens, self.even = sets, kind, tokens, even
        self.packing = PACKINGS[kind]
        self.placed = placed(tokens, even, "bf16" if QUANT[kind] == "bf16" else "fp8")[2]
        self.marks = [torch.zeros_like(self.placed.marks) for _ in sets]

    def run(self, ways: int, runs: int) -> int:
        """-> how many comparisons failed"""
        known = WAYS[self.kind][self.placed.block][:ways]
        print(f"  {self.tokens} tokens, {'even' if self.even else 'skewed'}, blocks of {self.placed.block}", flush=True)
        failed, good = 0, list[Way]()
        for way in known:
            try:
                unequal = sum(_differ(*self.both(i, way)) for i in range(runs))
            except Exception as error:
                print(f"    {way} does not run: {str(error)[:200]}", flush=True)
                failed += 1
                continue
            failed += unequal
            good.append(way)
            print(f"    {way}: {unequal} of {runs} runs unequal", flush=True)
        if good and CUDA:
            failed += self.times(good)
        return failed

    def rows(self) -> Rows:
        x = torch.randn(self.tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        return quantize_rows(x) if self.packing.dtype == FP8 else Rows(x)

    def both(self, i: int, way: Way) -> tuple[Tensor, Tensor]:
        """Alone on the card, one after another"""
        x, found = self.rows(), list[Tensor]()
        for chosen in (None, way):
            for marks in self.marks:
                marks.zero_()
            _wait()
            found.append(self.one(x, i, chosen))
            _wait()
        return found[0], found[1]

    def one(self, x: Rows, i: int, way: Way | None) -> Tensor:
        """The i-th set of weights; None: plain. Marks of the next launch are zeroed two launches before they are used:
        see `bench_stream.call`."""
        from diffusiongemma.ops.experts_gluon import experts_streamed

        i %= len(self.sets)
        self.marks[(i + 1) % len(self.marks)].zero_()
        where = replace(self.placed, marks=self.marks[i])
        if way is None:
            return experts_streamed(x, where, *self.sets[i].plain)
        return packed_streamed(x, where, self.sets[i].packed, way)

    def times(self, ways: list[Way]) -> int:
        """Of graphs, by turns; what they leave must be the same -> how many do not"""
        x, best = self.rows(), ways[0]
        less = [replace(best, without=what) for what in ("unpacking", "products")] if self.even else []
        kept: dict[Way | None, list[Tensor]] = {way: [] for way in (None, *ways, *less)}
        graphs = []
        for way, out in kept.items():
            for marks in self.marks:
                marks.zero_()

            def work(i: int, way: Way | None = way, out: list[Tensor] = out) -> None:
                out.append(self.one(x, i, way))

            graphs.append(recorded(work))
            del out[: -len(self.sets)]  # those of the graph are left
        before, *after = (us / SETS for us in microseconds([graph.replay for graph in graphs]))
        _wait()
        unequal = sum(_differ(*pair) for way in ways for pair in zip(kept[None], kept[way], strict=True))
        print(f"    plain: {before:.1f} us; in graphs {unequal} of {len(ways) * SETS} unequal")
        for way, us in zip((*ways, *less), after, strict=True):
            print(f"    {way}: {us:.1f} ({us / before:.3f})", flush=True)
        return unequal


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


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
    ways: dict[int, Way]  # by rows of a block
    kept: dict[int, Packed] = field(default_factory=dict)  # by where the plain ones lie
    taken: int = 0  # times that packed ones were used

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
            if packed is None or where is None or where.block not in self.ways:
                return ops.experts(x, index, weight, up, down, where)
            self.taken += 1
            if not CUDA:
                return ops.experts(x, index, weight, up, down, where)
            return packed_streamed(ops.rows_for(x, up), where, packed, self.ways[where.block])

        return replace(ops, experts=experts)


@torch.inference_mode()
def layers(args: argparse.Namespace) -> int:
    """-> how many ways failed"""
    config, failed = bench_layers.config_of(args.layers, args.tiny), 0
    for kind in args.kinds:
        torch.manual_seed(0)
        scheme = None if QUANT[kind] == "bf16" else Scheme.parse(QUANT[kind])
        model = random_network(config, scheme, DEVICE, torch.bfloat16, std=0.02)
        packed = PackedOps(PACKINGS[kind], {})
        packed.prepare(model)
        limits = Limits(max_bytes=1 << (22 if args.tiny else 31), max_rows=2, chunk=16 if args.tiny else 2048)
        runner = FastRunner(model, triton_ops(), limits, graphs=CUDA)
        for users in (1, 2):
            failed += _by_turns(runner, packed, kind, users, args)
        del runner, model, packed
        if CUDA:
            torch.cuda.empty_cache()
    return failed


def _by_turns(runner: FastRunner, packed: PackedOps, kind: str, users: int, args: argparse.Namespace) -> int:
    work, failed = canvases(runner, users, args.tiny), 0
    block = 16 if args.tiny else 32 * users
    ways = dict.fromkeys(WAYS[kind][32 * users][: args.ways])
    told, replays, bits = list[str](), list[Callable[[], object]](), list[Tensor]()
    for way in (None, *ways):
        mine = replace(packed, ways={} if way is None else {block: way}, taken=0)
        runner.network.ops = mine.over(triton_ops().roomy())
        try:
            replay, out = bench_layers.recorded(runner.recorder, work)
            replay()
            _wait()
        except Exception as error:
            print(f"  {way} does not run: {str(error)[:200]}", flush=True)
            failed += 1
            continue
        if way is not None and not mine.taken:
            print(f"  {way}: packed weights were not used")
            failed += 1
        told.append(f"{'plain' if way is None else way}")
        replays.append(replay)
        bits.append(out[0].clone())
    times = microseconds(replays, args.rounds, bench_layers.AT_ONCE) if CUDA else [0.0] * len(told)
    print(f"{PACKINGS[kind].name}, {users} users")
    for name, us, one in zip(told, times, bits, strict=True):
        off = ((one.float() - bits[0].float()).norm() / bits[0].float().norm()).item()
        failed += not off <= (OFF if PACKINGS[kind].dtype == FP8 else 0.0)
        print(f"  {name}: {us / args.layers:.1f} us a layer, off by {off:.1e}", flush=True)
    return failed


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


def text(args: argparse.Namespace) -> int:
    """-> how many kinds failed"""
    failed = 0
    for kind in args.kinds:
        failed += _texts(kind, args)
        free(DEVICE)
    return failed


def _texts(kind: str, args: argparse.Namespace) -> int:
    from bench_turns import run

    args.prompt, args.tokens, args.uneven = 512, 1024, False
    subject = Subject.make(Target(quant=QUANT[kind]))
    packed = PackedOps(PACKINGS[kind], {block: ways[0] for block, ways in WAYS[kind].items()})
    packed.prepare(subject.model)
    ops = {"plain": triton_ops(), "packed": packed.over(triton_ops())}
    found: dict[str, list[float]] = {name: [] for name in ops}
    for name in (*ops, *ops):
        picked, made = mock.patch.object(fast, "triton_ops", return_value=ops[name]), subject.engine(1, 512 + 1024)
        with picked, made as engine:
            for i in range(args.rounds + 2):
                seconds, _ = run(engine, 1, args, i)
                found[name] += [seconds] * (i >= 2)  # the first ones record
        del engine, made
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    speeds = ", ".join(f"{name} {one:.1f} ms, {1e3 * args.tokens / one:,.0f} tok/s" for name, one in ms.items())
    told = f"{ms['packed'] / ms['plain']:.3f}; packed weights used {packed.taken} times"
    print(f"{PACKINGS[kind].name}: {speeds} ({told})", flush=True)
    return not packed.taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alone", "layers", "text"))
    parser.add_argument("--kinds", type=lambda told: told.split(","), default=["7", "12"])
    parser.add_argument("--tokens", type=lambda told: [int(n) for n in told.split(",")], default=[256, 512])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--ways", type=int, default=9, help="so many at most, the best guess first")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
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
