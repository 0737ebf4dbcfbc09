# ruff: noqa: E402
"""Is every operation right on this card? Each against float64, with limits that come from its number formats.

    python scripts/check_ops.py [--kind bf16,fp8,int8,int4] [--shapes 26b] [--out table.txt]
    python scripts/check_ops.py --chain
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 7 python3 scripts/check_ops.py \\
        --memcheck --kind fp8

One line a result: operation, shape, format, error, limit, and the worst single number as a share of what it may be off.
Products have two errors: arithmetic (against float64 on the same rounded numbers) and format (on those before they
were rounded). `exact_limits.py` has the limits and their reasons, `exact_shapes.py` the shapes. The exit code is 1 if a
result is outside its limit, an operation fails, or one of `Ops` is never called. Without a card, the kernels run in
Triton's interpreter, on small shapes.

--card 8.9 (or 12.0) takes the tiles, loads and launches of such a card, on this one: whether these are right, not the
other card's compiler.

--memcheck calls every kernel once, on small shapes and without references. (API errors are left out because
cuda-bindings asks the driver for functions that an older one does not have.) --chain compares no numbers: does a whole
pass give the same bits again, with a wait after every operation, and with kernels that never begin early? And tokens
one by one, a few rows at once?
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    sys.path.append(str(ROOT / "tests" / "ops"))
    import triton_cpu  # noqa: F401  # turns Triton's interpreter on, before Triton is imported

import exact_chain
from cards import CARDS
from exact_cases import DENSE, Case, Sort, layer_cases
from exact_cuda import cuda_cases
from exact_ends import attention_cases, vocab_cases
from exact_limits import Verdict, judge
from exact_one import one_cases
from exact_sampler import sampler_cases
from exact_shapes import Inputs, Shapes, shapes_of, streamed

from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.ops import kernels

KINDS = tuple(DENSE)
HEAD = f"{'operation':30} {'shape':60} {'format':15} {'result':26} {'error':>8} {'limit':>8} {'worst':>6}"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What was found; `broken` are the operations that raised an error."""

    lines: list[tuple[Case, str, Verdict]]
    broken: list[str]
    called: set[str]

    @property
    def outside(self) -> list[str]:
        return [f"{case.name}: {what}" for case, what, verdict in self.lines if not verdict.good]


def cases_of(
    kind: str, shapes: Shapes, inputs: Inputs, sort: Sort, few: int, exact: bool, card: bool
) -> list[Case]:  # fmt: skip
    """`few`: up to so many rows, products take them as they are; `card`: with what only a card can be asked"""
    return [
        *layer_cases(kind, shapes, inputs, sort, vendor=card and not exact, alone=card),
        *attention_cases(kind, shapes, inputs, few, alone=card),
        *one_cases(kind, shapes, inputs),
        *vocab_cases(kind, shapes, inputs, alone=card, exact=exact),
        *sampler_cases(shapes, inputs),
        *cuda_cases(kind, inputs),
    ]


def counted(ops: Ops) -> tuple[Ops, set[str]]:
    """The same operations, and the names of those that have been called"""
    called: set[str] = set()

    def watched(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            called.add(name)
            return op(*args, **options)

        return run

    return exact_chain.wrapped(ops, watched), called


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def check(cases: Iterable[Case], ops: Ops, say: Say, refer: bool = True) -> Outcome:
    """Calls every case; `refer`: and compares what comes back with its reference"""
    ops, called = counted(ops)
    found, broken = [], []
    for case in cases:
        try:
            got = case.call(ops)
            wait()
            for part in case.parts(got) if refer else ():
                verdict = judge(part)
                found.append((case, part.what, verdict))
                say(line(case, part.what, verdict))
        except Exception as error:
            broken.append(case.name)
            say(f"{case.name:30} {case.shape:60} {case.format:15} FAILED: {type(error).__name__}: {str(error)[:200]}")
            traceback.print_exc()
            if "CUDA error" in str(error):  # nothing works after it
                break
    return Outcome(found, broken, called)


def line(case: Case, what: str, v: Verdict) -> str:
    place = f"{case.name:30} {case.shape:60} {case.format:15} {what or 'values':26}"
    return f"{place} {v.error:8.1e} {v.limit:8.1e} {v.worst:6.2f} {'ok' if v.good else 'OUTSIDE'}"


@torch.inference_mode()
def compile_ahead(cases: Sequence[Case], ops: Ops) -> None:
    """All kernels at once, on all cores. What fails here fails again when it is called, and is told then."""

    def call_all() -> None:
        for case in cases:
            with suppress(Exception):
                case.call(ops)

    exact_chain.ahead(DEVICE, call_all)


def check_kind(kind: str, shapes: Shapes, exact: bool, refer: bool, only: str, say: Say) -> bool:
    """-> whether all is well"""
    from diffusiongemma.ops import routing_triton

    ops, began = triton_ops(exact), time.perf_counter()
    cases = cases_of(kind, shapes, Inputs(DEVICE), routing_triton.route, ops.few, exact, DEVICE.type == "cuda")
    cases = [case for case in cases if only in case.name]
    compile_ahead(cases, ops)
    outcome = check(cases, ops, say, refer)
    missing = [] if only else sorted(set(exact_chain.names(ops)) - outcome.called)
    say(
        f"{kind}: {len(cases)} calls, {len(outcome.lines)} results, {len(outcome.outside)} outside, "
        f"{len(outcome.broken)} failed{', never called: ' + ', '.join(missing) if missing else ''}, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return bool(cases) and not (outcome.outside or outcome.broken or missing)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default=",".join(KINDS), help=f"number formats: {', '.join(KINDS)}")
    parser.add_argument("--shapes", choices=("26b", "small"), help="26b where there is a card, else small")
    parser.add_argument("--only", default="", help="operations with this in their name")
    parser.add_argument("--exact", action="store_true", help="without the vendor's products and those of a few rows")
    parser.add_argument("--card", choices=CARDS, help="as if it had this compute capability")
    parser.add_argument("--out", type=Path, help="write the table into this file too")
    parser.add_argument("--memcheck", action="store_true", help="call every kernel once, without references")
    parser.add_argument("--chain", action="store_true", help="does a whole pass give the same bits again?")
    args = parser.parse_args(argv)
    args.kind = args.kind.split(",")
    if unknown := sorted(set(args.kind) - set(KINDS)):
        parser.error(f"no number format {', '.join(unknown)}; there are: {', '.join(KINDS)}")
    if args.shapes == "26b" and DEVICE.type == "cpu":
        parser.error("--shapes 26b needs a CUDA card: an interpreter would take days")
    if args.memcheck and args.chain:
        parser.error("--memcheck and --chain are two things: ask for one")
    if args.memcheck and (args.out or args.shapes == "26b"):
        parser.error("--memcheck makes no table and has small shapes: without --out and --shapes 26b")
    if args.chain and (args.out or args.shapes or args.only or args.exact):
        parser.error("--chain has shapes of its own and makes no table: without --out, --shapes, --only and --exact")
    args.shapes = args.shapes or ("small" if args.memcheck or DEVICE.type == "cpu" else "26b")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, told = parse(argv), list[str]()

    def say(text: str) -> None:
        told.append(text)
        print(text, flush=True)

    if args.card:
        processors = kernels.card(DEVICE).processors
        mock.patch.object(kernels, "card", return_value=CARDS[args.card]._replace(processors=processors)).start()
    if args.chain:
        same = [exact_chain.check(kind, DEVICE, say) for kind in args.kind]
        return 0 if all(same) else 1
    if args.memcheck:  # every tensor in memory of its own, so that what is read beside one is not another
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    else:
        say(HEAD)
    shapes = shapes_of(args.shapes)
    if args.memcheck and DEVICE.type == "cuda":
        shapes = streamed(shapes)
    good = [check_kind(kind, shapes, args.exact, not args.memcheck, args.only, say) for kind in args.kind]
    if args.out:
        args.out.write_text("\n".join(told) + "\n", encoding="utf-8")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
