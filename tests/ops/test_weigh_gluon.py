"""The head in Gluon. Triton's interpreter knows no Gluon, so here it is compiled, for a card that is not there, and a
model of who waits for whom is run; its numbers are compared with `weigh_triton`'s on a card, bit for bit, by
`scripts/check_ops.py` ("as by Triton")."""

from ops.triton_cpu import DEVICE  # isort: skip

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.ops import weigh_triton
from diffusiongemma.ops.vocab import Rules, ban, make_table
from ops import hopper
from ops.stream_model import Barrier, Part, Ring, wait

COMPILE = """
import json, re, sys
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.weigh_gluon import MOST, head_kernel
from diffusiongemma.ops.weigh_triton import _head_kernel
from ops.hopper import aligned, compiled, facts

kind, fixed = sys.argv[1], sys.argv[2] == "fixed"
given = dict(x_scale="*fp32", w_scale="*fp32", temperature="*fp32", peak="*fp32", best="*i32", mass="*fp32",
             tilt="*fp32", rows="i32", vocab="i32")

def head(source, kernel, types, known, **options):
    kinds = {name: (given | types).get(name, "constexpr") for name in kernel.arg_names}
    known = dict.fromkeys(("pin", "banned", "banned_set")) | dict(D=2816, CAP=30.0, FIXED=fixed) | known
    known = {name: value for name, value in known.items() if kinds.get(name) == "constexpr"}
    return compiled(source(kernel, kinds, known, aligned(kinds, "vocab")), **options)

def twin(rules):
    tile = f"tensordesc<{kind}[128, 128]>"
    types = dict(x=tile, w=tile, weights="*bf16", words="i32")
    types |= dict.fromkeys(("pin", "banned", "banned_set"), "*i32") if rules else {}
    known = dict(EIGHT=True, INT=kind == "i8", PINS=rules, BANS=rules, BLOCK_N=128, BLOCK_V=128, BLOCK_K=128, HOPPER=1)
    return head(ASTSource, _head_kernel, types, known, num_warps=4, num_stages=3)

tile = f"tensordesc<{kind}[128, 128],{gl.NVMMASharedLayout(128, 8, 2)!r}>"
out = f"tensordesc<bf16[64, 128],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
mine = head(GluonASTSource, head_kernel, dict(x=tile, w=tile, weights=out), {}, num_warps=4, maxnreg=MOST)
ROUND = r"\\b((?:add|sub|mul|fma|div|max|ex2|rsqrt|cvt)\\.\\S*f32\\S*)\\s"
LAID = r"\\(tensor<128x128x[if]32, #(\\w+)>\\) -> tensor<128x"  # how the numbers lie that become one a row
plain, ruled = twin(False).asm, twin(True).asm
print(json.dumps(facts(mine) | {
    "operations": re.findall(ROUND, mine.asm["ptx"].replace("ex2.approx.ftz", "ex2.approx")),
    "of_twin": re.findall(ROUND, plain["ptx"]), "laid": [re.findall(LAID, each["ttgir"]) for each in (plain, ruled)],
}))
"""


def each_number(operations: list[str], groups: int) -> dict[str, int]:
    """How often each operation is there for the half of a tile, 64 numbers a thread; those of rows do not count"""
    return {name: n // groups // 64 for name, n in Counter(operations).items() if n // groups >= 64}


@pytest.mark.parametrize(("kind", "how"), [("i8", "fixed"), ("i8", "free"), ("fp8e4nv", "fixed")])
def test_compiles_for_hopper_with_the_operations_of_its_twin(kind: str, how: str) -> None:
    found = hopper.run(COMPILE, kind, how)
    sums = "s32.s8.s8" if kind == "i8" else "f32.e4m3.e4m3"
    assert found["products"] == [f"wgmma.mma_async.sync.aligned.m64n128k32.{sums}"] * 16
    assert found["threads"] == 384, "two groups that multiply, and who brings"
    assert found["waits"] == 3, "every part waits by itself for the launch before"
    assert found["spilled"] <= 32, "numbers go to memory for want of registers"
    assert not found["serialised"], "the tensor cores wait after every product"
    assert found["told"]
    assert not found["unguarded"], "told before all warps are there"
    assert found["shared"] <= 227 << 10
    assert each_number(found["operations"], 2) == each_number(found["of_twin"], 1)
    assert found["laid"] == [["mma"] * 4] * 2, "pins and bans have the twin sum in another order"


def test_which_heads_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 128, device=DEVICE)
    int8, fp8, none = make_table(weight, "int8"), make_table(weight, "fp8"), make_table(weight.bfloat16())
    free = Rules(torch.ones(4, device=DEVICE), torch.rand(4, device=DEVICE))
    some = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    blocks, bf16 = weigh_triton.head_blocks(False, torch.int8), torch.bfloat16
    if DEVICE.type == "cpu":
        assert not weigh_triton.streams(int8, free, blocks, bf16), "nothing is streamed in the interpreter"
    monkeypatch.setattr(weigh_triton, "gluon", lambda device: True)
    assert weigh_triton.streams(int8, free, blocks, bf16)
    assert weigh_triton.streams(fp8, free, weigh_triton.head_blocks(False, fp8.weight.dtype), bf16)
    assert not weigh_triton.streams(int8, replace(free, pin=some), blocks, bf16)
    bans = replace(free, banned=ban([[3]], 96, DEVICE), banned_set=some)
    assert not weigh_triton.streams(int8, bans, blocks, bf16)
    assert not weigh_triton.streams(int8, free, weigh_triton.head_blocks(True, torch.int8), bf16), "few rows"
    assert not weigh_triton.streams(none, free, blocks, bf16), "no 8-bit table"
    assert not weigh_triton.streams(int8, free, blocks, torch.float32), "weights of another format"
    odd = make_table(weight[:84], "int8")
    assert not weigh_triton.streams(odd, free, blocks, bf16), "rows that bulk copies cannot store"


# ---- who waits for whom ------------------------------------------------------------------------------------------


class Program:
    """The parts of a program, as `stream_model` has those of its kernel"""

    def __init__(self, items: int, steps: int, stages: int) -> None:
        self.items, self.steps, self.stages = items, steps, stages
        self.ready, self.free = ([Barrier(n) for _ in range(stages)] for n in (1, 2))
        self.tokens, self.positions = ([(-1, -1)] * stages for _ in range(2))
        self.made: list[tuple[int, int]] = []

    def bring(self) -> Part:
        ahead = min(self.stages, self.steps)
        for k in range(ahead):
            self.tokens[k] = (0, k)
            yield
        for k in range(ahead):
            self.positions[k] = (0, k)
            self.ready[k].arrive()  # all bytes are there
            yield
        first, ring = ahead, Ring(self.stages, 0 if ahead == self.stages else 1, ahead % self.stages)
        for item in range(self.items):
            for k in range(first, self.steps):
                yield from wait(self.free[ring.at], ring.phase)
                self.tokens[ring.at] = self.positions[ring.at] = (item, k)
                self.ready[ring.at].arrive()
                ring.step()
                yield
            first = 0

    def weigh(self, mine: int) -> Part:
        ring = Ring(self.stages, 0)
        for item in range(self.items):
            for k in range(self.steps):
                yield from wait(self.ready[ring.at], ring.phase)
                assert self.tokens[ring.at] == self.positions[ring.at] == (item, k), "a stage holds something else"
                yield
                if k > 0:  # the products before these have ended
                    assert self.tokens[ring.at - 1] == (item, k - 1), "overwritten while it was multiplied"
                    self.free[ring.at - 1].arrive()
                ring.step()
                yield
            self.free[ring.at - 1].arrive()
            yield
            self.made.append((item, mine))


@settings(max_examples=100, deadline=None)
@given(items=st.integers(1, 5), steps=st.integers(1, 9), stages=st.integers(2, 4), seed=st.integers(0, 1000))
def test_the_work_ends_in_any_order(items: int, steps: int, stages: int, seed: int) -> None:
    program, choose, still = Program(items, steps, stages), random.Random(seed), 0
    parts = [program.bring(), program.weigh(0), program.weigh(1)]
    while parts:
        part = choose.choice(parts)
        try:
            for _ in range(choose.choice((1, 1, 3, 20))):
                next(part)
            still += 1
        except StopIteration:
            parts.remove(part)
            still = 0
        assert still < 100_000, "everybody waits"
    assert sorted(program.made) == [(item, mine) for item in range(items) for mine in range(2)]
