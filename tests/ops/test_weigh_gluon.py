"""The head in Gluon. Triton's interpreter knows no Gluon, so here it is compiled, for a card that is not there, and a
model of who waits for whom is run; its numbers are compared with `weigh_triton`'s on a card, bit for bit, by
`scripts/check_ops.py` ("as by Triton")."""

from ops.triton_cpu import DEVICE  # isort: skip

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.ops import weigh_triton
from diffusiongemma.ops.vocab import Rules, ban, make_table
from diffusiongemma.ops.weigh_gluon import STAGES
from ops import hopper
from ops.stream_model import Barrier, Part, Ring, in_any_order, wait

COMPILE = """
import json, re, sys
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.weigh_gluon import MOST, head_kernel
from diffusiongemma.ops.weigh_triton import _head_kernel
from ops.hopper import aligned, compiled, facts

kind, fixed = sys.argv[1], sys.argv[2] == "fixed"
eight = kind != "bf16"
depth = 128 if eight else 64
given = dict(temperature="*fp32", peak="*fp32", best="*i32", mass="*fp32", tilt="*fp32", rows="i32", vocab="i32")
given |= dict.fromkeys(("x_scale", "w_scale"), "*fp32") if eight else {}

def head(source, kernel, types, known, **options):
    kinds = {name: (given | types).get(name, "constexpr") for name in kernel.arg_names}
    none = dict.fromkeys(("x_scale", "w_scale", "pin", "banned", "banned_set"))
    known = none | dict(D=2816, CAP=30.0, FIXED=fixed) | known
    known = {name: value for name, value in known.items() if kinds.get(name) == "constexpr"}
    return compiled(source(kernel, kinds, known, aligned(kinds, "vocab")), **options)

def twin(rules):
    tile = f"tensordesc<{kind}[128, {depth}]>"
    types = dict(x=tile, w=tile, weights="*bf16", words="i32")
    types |= dict.fromkeys(("pin", "banned", "banned_set"), "*i32") if rules else {}
    known = dict(EIGHT=eight, INT=kind == "i8", PINS=rules, BANS=rules, BLOCK_N=128, BLOCK_V=128, BLOCK_K=depth,
                 HOPPER=1)
    return head(ASTSource, _head_kernel, types, known, num_warps=4, num_stages=3)

tile = f"tensordesc<{kind}[128, {depth}],{gl.NVMMASharedLayout(128, 1024 // depth, 2)!r}>"
out = f"tensordesc<bf16[64, 128],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
mine = head(GluonASTSource, head_kernel, dict(x=tile, w=tile, weights=out), {}, num_warps=4, maxnreg=MOST)
ROUND = r"\\b((?:add|sub|mul|fma|div|max|ex2|rsqrt|cvt)\\.\\S*f32\\S*)\\s"
LAID = r"\\(tensor<128x128x[if]32, #(\\w+)>\\) -> tensor<128x"  # how the numbers lie that become one a row
plain, ruled = twin(False).asm, twin(True).asm
print(json.dumps(facts(mine) | {
    "barriers": re.findall(r"mbarrier\\.init\\S* \\[\\S+\\], (\\d+);", mine.asm["ptx"]),
    "bytes": sorted(set(re.findall(r"expect_tx\\S* \\S+ \\[\\S+\\], (\\d+);", mine.asm["ptx"]))),
    "operations": re.findall(ROUND, mine.asm["ptx"].replace("ex2.approx.ftz", "ex2.approx")),
    "of_twin": re.findall(ROUND, plain["ptx"]), "laid": [re.findall(LAID, each["ttgir"]) for each in (plain, ruled)],
}))
"""


def each_number(operations: list[str], groups: int) -> dict[str, int]:
    """How often each operation is there for the half of a tile, 64 numbers a thread; those of rows do not count"""
    return {name: n // groups // 64 for name, n in Counter(operations).items() if n // groups >= 64}


PRODUCTS = {"i8": "k32.s32.s8.s8", "fp8e4nv": "k32.f32.e4m3.e4m3", "bf16": "k16.f32.bf16.bf16"}


@pytest.mark.parametrize(
    ("kind", "how"), [("i8", "fixed"), ("i8", "free"), ("fp8e4nv", "fixed"), ("bf16", "fixed"), ("bf16", "free")]
)
def test_compiles_for_hopper_with_the_operations_of_its_twin(kind: str, how: str) -> None:
    found = hopper.run(COMPILE, kind, how)
    assert found["products"] == [f"wgmma.mma_async.sync.aligned.m64n128{PRODUCTS[kind]}"] * 16
    assert found["threads"] == 384, "two groups that multiply, and who brings"
    assert found["barriers"] == ["1"] * (2 * STAGES.value + 2), "of each stage two, and of each group whether it may go"
    assert found["bytes"] == [str(2 * 128 * 128)], "of a stage: of 128 positions and 128 tokens"
    assert found["copies"] == 2 * STAGES.value + 2 + 4, "the first stages, one of all others; weights of four halves"
    assert found["waits"] == 3, "every part waits by itself for the launch before"
    assert found["spilled"] <= 32, "numbers go to memory for want of registers"
    assert not found["serialised"], "the tensor cores wait after every product"
    assert found["told"]
    assert not found["unguarded"], "told before all warps are there"
    assert not found["unused"], "barriers whose memory others get"
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
    for table in (int8, fp8, none):
        own, few = (weigh_triton.head_blocks(few, table.weight.dtype) for few in (False, True))
        assert weigh_triton.streams(table, free, own, bf16)
        assert not weigh_triton.streams(table, free, own, torch.float32), "weights of another format"
        assert not weigh_triton.streams(table, replace(free, pin=some), own, bf16)
        assert not weigh_triton.streams(table, free, few, bf16), "few rows"
    bans = replace(free, banned=ban([[3]], 96, DEVICE), banned_set=some)
    assert not weigh_triton.streams(int8, bans, blocks, bf16)
    assert not weigh_triton.streams(none, free, blocks, bf16), "lines of 256 bytes"
    odd = make_table(weight[:84], "int8")
    assert not weigh_triton.streams(odd, free, blocks, bf16), "rows that bulk copies cannot store"


# ---- who waits for whom ------------------------------------------------------------------------------------------


class Program:
    """The parts of a program, as `stream_model` has those of its kernel. `slow`: weights of a tile are ready when the
    products of the next have begun, and not before. `by_turns`: off, a group does not wait until it may go."""

    def __init__(self, items: int, steps: int, stages: int, slow: bool = False, by_turns: bool = True) -> None:
        self.items, self.steps, self.stages = items, steps, stages
        self.slow, self.by_turns = slow, by_turns
        self.ready, self.free = ([Barrier(1) for _ in range(stages)] for _ in "rf")
        self.go = [Barrier(1), Barrier(1)]
        self.tokens, self.positions = ([(-1, -1)] * stages for _ in range(2))
        self.begun, self.made = list[tuple[int, int]](), list[tuple[int, int]]()

    def parts(self) -> list[Part]:
        return [self.bring(), self.weigh(0), self.weigh(1)]

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
        place, may = mine * self.steps, 1 - mine
        for item in range(mine, self.items, 2):
            if self.by_turns:
                yield from wait(self.go[mine], may)
            yield from self._multiply(item, Ring(self.stages, place // self.stages & 1, place % self.stages))
            while self.slow and item + 1 < self.items and (item + 1, 0) not in self.begun:
                yield
            self.made.append((item, mine))
            place += 2 * self.steps
            may ^= 1

    def _multiply(self, item: int, ring: Ring) -> Part:
        for k in range(self.steps):
            yield from wait(self.ready[ring.at], ring.phase)
            assert self.tokens[ring.at] == self.positions[ring.at] == (item, k), "a stage holds something else"
            self.begun.append((item, k))
            yield
            if k > 0:
                self._ended(item, k - 1, ring)
            ring.step()
            yield
        self.go[1 - item % 2].arrive()
        yield
        self._ended(item, self.steps - 1, ring)
        yield

    def _ended(self, item: int, k: int, ring: Ring) -> None:
        """The products of the stage before"""
        assert self.tokens[ring.at - 1] == (item, k), "overwritten while it was multiplied"
        self.free[ring.at - 1].arrive()


@settings(max_examples=100, deadline=None)
@given(items=st.integers(1, 7), steps=st.integers(1, 15), stages=st.integers(2, 6), slow=st.booleans(),
       seed=st.integers(0, 1000))  # fmt: skip
@example(items=9, steps=22, stages=STAGES.value, slow=True, seed=0)  # as for the 26B
@example(items=9, steps=2, stages=STAGES.value, slow=True, seed=0)
def test_the_work_ends_in_any_order(items: int, steps: int, stages: int, slow: bool, seed: int) -> None:
    program = Program(items, steps, stages, slow)
    in_any_order(program.parts(), seed)
    assert sorted(program.made) == [(item, item % 2) for item in range(items)]
    assert program.begun == [(item, k) for item in range(items) for k in range(steps)], "one tile after another"


@pytest.mark.parametrize("steps", [6, 7, 13, 22])
def test_a_group_that_does_not_wait_takes_what_is_the_others(steps: int) -> None:
    """Whether a stage's turn is an odd one does not say which it is."""
    with pytest.raises(AssertionError, match="a stage holds something else"):  # noqa: PT012
        for seed in range(100):
            in_any_order(Program(4, steps, STAGES.value, by_turns=False).parts(), seed)
