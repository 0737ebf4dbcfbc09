# ruff: noqa: E402
"""Norms behind attention and behind the experts of the 26B-A4B by CUDA C++ (`ops/rows_cuda.py`) and Triton:
microseconds, errors, bits.

    python3 scripts/bench_rows.py [--rows 1 16 256 512 1024 2048] [--width 2816]

A graph of forty launches, each launched while the one before it runs, over as many inputs as the L2 cache has room for;
replayed by turns, medians. Beside each: how far its results are from float64, as a share of their norm, and how far
rounding may move them (`exact_limits.py`); how many of twenty runs have other bits; and whether a row has the same bits
alone and among 16 and 256. What is to be written holds NaN before. Rows that need no rounding before fp8 are compared
with the definition, bit for bit. The exit code is 1 if anything is off. "plain loads": rows are read as compilers like.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import exact_small
from bench_stream import microseconds, recorded
from exact_limits import Part, judge
from exact_shapes import Inputs

from diffusiongemma.ops import fused, kernels, norm_triton, rows_cuda
from diffusiongemma.ops.quant import FP8

LAUNCHES, RUNS, EXPERTS, EPS, CACHE = 40, 20, 8, 1e-6, 32 << 20
RELAXED, PLAIN = "ld.relaxed.gpu.global.v4", "ld.global.v4"
Made = tuple[Any, ...]
Way = Callable[..., Made]


def plain(name: str) -> Way:
    """A function of `rows_cuda`, whose kernel reads rows with plain loads"""

    def run(*args: Any, **options: Any) -> Made:
        with mock.patch.object(rows_cuda, "kernel_of", plain_kernel):
            made: Made = getattr(rows_cuda, name)(*args, **options)
            return made

    return run


_plain: dict[Any, Any] = {}
_kernel_of = rows_cuda.kernel_of


def plain_kernel(*args: Any, **options: Any) -> Any:
    key = (args, tuple(options.items()))
    if key not in _plain:
        kernel = _kernel_of(*args, **options)
        assert RELAXED in kernel.text
        _plain[key] = replace(kernel, text=kernel.text.replace(RELAXED, PLAIN), _loaded={})
    return _plain[key]


def ways_of(name: str) -> dict[str, Way]:
    return {
        "Triton": getattr(norm_triton, name),
        "CUDA C++": getattr(rows_cuda, name),
        "plain loads": plain(name),
    }


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, what is to be written holds NaN"""
    with ExitStack() as stack:
        for name in ("empty", "empty_like"):
            make = getattr(torch, name)
            stack.enter_context(mock.patch.object(torch, name, lambda *a, _make=make, **o: _filled(_make(*a, **o))))
        yield


def _filled(out: Tensor) -> Tensor:
    out.view(torch.uint8).fill_(255)
    return out


def bits(made: Made) -> list[Tensor]:
    tensors = list[Tensor]()
    for one in made:
        tensors += [one] if isinstance(one, Tensor) else [t for t in (one.values, one.scale) if t is not None]
    return [t.view(torch.uint8) for t in tensors]


def same(one: Made, other: Made, at: slice = slice(None)) -> bool:
    """`at`: of the other, the rows that the one has"""
    return all(torch.equal(a, b[at]) for a, b in zip(bits(one), bits(other), strict=True))


class Case:
    """One of both functions over inputs that take turns"""

    def __init__(self, name: str, rows: int, width: int, inputs: Inputs, **options: Any) -> None:
        self.name, self.rows, self.options = name, rows, options
        self.attention = name == "after_attention"
        per = 2 if self.attention else 2 + EXPERTS
        self.sets = [self.given(rows, width, inputs) for _ in range(max(1, min(8, CACHE // (per * rows * width * 2))))]
        self.weights = [inputs.near_one(width) for _ in range(4)]
        self.scalar, self.other = inputs.near_one(1), inputs.near_one(1)

    def given(self, rows: int, width: int, inputs: Inputs) -> list[Tensor]:
        """x, and what is added to it"""
        found = [inputs.randn(rows, width, std=std) for std in (4.0, 0.5)]
        return found if self.attention else [*found, inputs.randn(rows * EXPERTS, width, std=0.7)]

    def call(self, way: Way, rows: list[Tensor], **more: Any) -> Made:
        if self.attention:
            return way(*rows, *self.weights[:3], EPS, **self.options, **more)
        return way(*rows, tuple(self.weights[:3]), self.scalar, self.weights[3], EPS, **self.options, **more)

    def some(self, rows: list[Tensor], at: slice) -> list[Tensor]:
        """These rows of all that is given"""
        return [t.view(self.rows, -1)[at].reshape(-1, t.shape[1]) for t in rows]

    def parts(self, made: Made) -> list[Part]:
        quant = self.options.get("quant")
        if self.attention:
            return exact_small.after_attention(made, *self.sets[0], self.weights[:3], EPS, quant)  # type: ignore[arg-type]
        given = (*self.sets[0], tuple(self.weights[:3]), self.scalar, self.weights[3], EPS)
        return exact_small.after_feed_forward(made, *given, quant)  # type: ignore[arg-type]

    def check(self, way: Way) -> tuple[bool, str]:
        """-> is all as it should be? What is told of it"""
        with poisoned():
            made = self.call(way, self.sets[0])
            runs = [self.call(way, self.sets[0]) for _ in range(RUNS)]
        found = [(part.what, judge(part)) for part in self.parts(made)]
        good, moving = all(v.good for _, v in found), sum(not same(made, run) for run in runs)
        told = ", ".join(f"{what} {v.error:.2e} of {v.limit:.2e}" for what, v in found if "scale" not in what)
        worst = max(v.worst for _, v in found)
        alone = self.alone(way, made)
        behind = self.attention or self.behind(way, made)
        told += f"; worst {worst:.2f}{'' if good else ' OUTSIDE'}; {moving} of {RUNS} differ"
        told += f"{'' if alone else '; OTHER BITS AMONG OTHERS'}{'' if behind else '; THE OTHER SCALAR IS WRONG'}"
        return good and moving == 0 and alone and behind, told

    def alone(self, way: Way, made: Made) -> bool:
        """Have rows the same bits among fewer?"""
        last = self.rows - 1
        ats = [slice(last, last + 1), *(slice(0, n) for n in (1, 16, 256) if n < self.rows)]
        with poisoned():
            return all(same(self.call(way, self.some(self.sets[0], at)), made, at) for at in ats)

    def behind(self, way: Way, made: Made) -> bool:
        """Have rows from one on, and no others, another scalar?"""
        first = self.rows // 2
        with poisoned():
            both = self.call(way, self.sets[0], behind=(first, self.other))
            mine, self.scalar, theirs = self.scalar, self.other, self.scalar
            other = self.call(way, self.sets[0])
            self.scalar = theirs
        assert self.scalar is mine
        parts = zip(bits(both), bits(made), bits(other), strict=True)
        return all(torch.equal(b, torch.cat([m[:first], o[first:]])) for b, m, o in parts)

    def graph(self, way: Way) -> Callable[[], object]:
        run: Callable[[int], object] = lambda i: self.call(way, self.sets[i % len(self.sets)])  # noqa: E731
        return recorded(run, LAUNCHES).replay


@torch.inference_mode()
def measure(case: Case) -> int:
    """-> how many ways are not as they should be"""
    ways = ways_of(case.name)
    checked = {name: case.check(way) for name, way in ways.items()}
    times = microseconds([case.graph(way) for way in ways.values()], 15, 4)
    options = ", ".join("fp8" if value == FP8 else key for key, value in case.options.items() if value)
    print(f"{case.name}, {case.rows} rows{', ' if options else ''}{options}; {len(case.sets)} inputs", flush=True)
    for (name, (_, told)), us in zip(checked.items(), times, strict=True):
        print(f"  {name:<12}{us / LAUNCHES:7.2f} us; {told}", flush=True)
    return sum(not good for good, _ in checked.values())


@torch.inference_mode()
def exact(width: int, device: torch.device) -> int:
    """-> how many results are not the definition's to the bit, of rows of ±1: what weights make of them is exact"""
    wrong = 0
    inputs = Inputs(device, seed=3)
    two, half = (torch.full((n,), value, dtype=torch.bfloat16, device=device) for n, value in ((width, 2.0), (1, 0.5)))
    for spread in (0, 3, 9):
        signs = torch.where(inputs.randn(64, width) < 0, -1.0, 1.0).to(torch.bfloat16)
        sizes = torch.logspace(-spread, 0, width, device=device)
        one, other = ((inputs.randn(width).float() * sizes).to(torch.bfloat16) for _ in range(2))
        zeros = torch.zeros_like(signs)
        # On the CPU: there, a division by a number is one, and no product with its reciprocal.
        want = [fused.norm_rows(signs.cpu(), w.cpu(), 0.0, FP8) for w in (one, other)]
        with poisoned():
            made = rows_cuda.after_attention(zeros, signs, two, one, other, 0.0, FP8)
            left = rows_cuda.after_feed_forward(zeros, signs, signs, (two, two, two), half, one, 0.0, FP8)
        pairs = [((2 * signs, *want), made), ((signs, want[0]), left)]
        for expected, got in pairs:
            for e, g in zip(bits(expected), bits(got), strict=True):
                differ = int((e.cpu() != g.cpu()).sum())
                wrong += differ > 0
                if differ:
                    print(f"  exact rows, weights from 1e-{spread}: {differ} bytes of {g.numel()} differ", flush=True)
    print(f"rows that need no rounding before fp8: {'as the definition' if not wrong else f'{wrong} results DIFFER'}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 512, 1024, 2048])
    parser.add_argument("--width", type=int, default=2816)
    args = parser.parse_args()
    if not torch.cuda.is_available() or (reason := kernels.cpp_unavailable(torch.device("cuda", 0))):
        parser.error("there is no GPU" if not torch.cuda.is_available() else str(reason))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    device = torch.device("cuda", 0)
    failed = exact(args.width, device)
    for rows in args.rows:
        case = partial(Case, rows=rows, width=args.width, inputs=Inputs(device, seed=rows))
        failed += measure(case("after_attention", quant=FP8))
        failed += measure(case("after_attention", quant=FP8, eager=True))
        failed += measure(case("after_attention", quant=None))
        failed += measure(case("after_feed_forward", quant=FP8))
        failed += measure(case("after_feed_forward", quant=None))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
