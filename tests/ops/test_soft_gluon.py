"""The soft embedding's product on Hopper. Triton's interpreter knows no Gluon, so here it is compiled, for a card that
is not there, a model of who waits for whom is run, and its cut is made in torch; its numbers are compared on a card:
`scripts/check_ops.py`."""

from ops.triton_cpu import DEVICE  # isort: skip

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.ops import soft_gluon, soft_triton
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.soft_gluon import APART, BK, PARTS, RUN, STAGES, Cut
from diffusiongemma.ops.vocab import Table
from ops import hopper
from ops.stream_model import Barrier, Part, Ring, wait

COMPILE = """
import json, re, sys
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.soft_gluon import APART, OPTIONS, PARTS, STAGES, soft_product_kernel
from ops.hopper import aligned, compiled, facts

layout = gl.NVMMASharedLayout(128, 8, 2)
types = dict(p=f"tensordesc<fp8e4nv[256, 128],{layout!r}>", w=f"tensordesc<fp8e4nv[64, 128],{layout!r}>", part="*fp32",
             rows="i32")
known = dict(D=int(sys.argv[1]), STEPS=2048, PARTS=PARTS, APART=APART, STAGES=STAGES)
known |= {name: value for name, value in OPTIONS.items() if name.isupper()}
kinds = {name: types.get(name, "constexpr") for name in soft_product_kernel.arg_names}
options = {name: value for name, value in OPTIONS.items() if name.islower()}
kernel = compiled(GluonASTSource(soft_product_kernel, kinds, known, aligned(kinds)), **options)
added = re.findall(r"(red|atom)\\.global\\S*\\.add\\.v2\\.f32", kernel.asm["ptx"])
print(json.dumps(facts(kernel) | {"added": len(added)}))
"""


@pytest.mark.parametrize("width", [2816, 64])  # with columns of three groups and one of two; with one group alone
def test_compiles_for_hopper(width: int) -> None:
    found = hopper.run(COMPILE, width)
    assert found["threads"] == 512, "three groups that multiply, and a warp that asks"
    assert found["shared"] <= 227 << 10
    assert found["waits"] >= 4, "every part waits by itself for the launch before"
    assert found["products"]
    assert found["copies"]
    assert found["told"]
    assert found["added"] == 3 * 64, "two numbers at once, by the L2 cache"
    assert found["spilled"] == 0, "numbers go to memory for want of registers"
    assert not found["serialised"], "the tensor cores wait after every product"
    assert not found["unguarded"], "told before all warps are there"
    assert not found["unused"], "barriers whose memory others get"


# ---- the cut -----------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    column: int  # the first
    groups: int
    part: int
    begin: int  # steps along the vocabulary
    end: int


def units_of(cut: Cut) -> list[Unit]:
    """As `soft_gluon._unit` numbers them"""
    columns = [(part, 192 * column, 3, cut.parts) for part in range(cut.parts) for column in range(cut.full)]
    columns += [(part, 192 * cut.full, cut.rest, cut.few) for part in range(cut.few)]
    cuts = [(part * cut.steps // parts, (part + 1) * cut.steps // parts) for part, _, _, parts in columns]
    return [Unit(column, groups, part, *cut) for (part, column, groups, _), cut in zip(columns, cuts, strict=True)]


@given(st.integers(1, 300), st.integers(1, 3000), st.sampled_from((3, 9, 36)))
def test_every_product_is_in_one_unit(width: int, vocab: int, parts: int) -> None:
    """(in multiples of 16)"""
    cut = Cut(16 * width, 16 * vocab, parts)
    units = units_of(cut)
    assert len(units) == cut.units
    assert len({(u.column, u.part) for u in units}) == len(units)
    columns = sorted({(u.column, u.groups) for u in units})
    assert columns[0][0] == 0
    for (column, groups), (following, _) in zip(columns, [*columns[1:], (16 * width, 0)], strict=True):
        assert column + 64 * groups - 63 <= following <= column + 64 * groups
        steps = [(u.begin, u.end) for u in units if u.column == column]
        assert steps[0][0] == 0
        assert [a for _, a in steps] == [b for b, _ in steps[1:]] + [-(-16 * vocab // BK.value)]
        assert len(steps) == (cut.parts if column < cut.edge else cut.few)


def runs(unit: Unit, group: int) -> list[int]:
    """Steps of one sum of the tensor cores"""
    ends = [min(unit.begin + RUN.value - APART * group, unit.end)]
    while ends[-1] < unit.end:
        ends.append(min(ends[-1] + RUN.value, unit.end))
    return [b - a for a, b in zip([unit.begin, *ends], ends, strict=False)]


def test_the_26b_fills_an_h200_and_puts_its_sums_away_by_turns() -> None:
    cut = Cut(2816, 262144)
    assert cut.units == 132
    for unit in units_of(cut):
        assert abs((unit.end - unit.begin) * unit.groups / 3 - 2048 / 9) < 1, "all units take the same time"
        for group in range(unit.groups):
            assert max(runs(unit, group)) <= soft_triton.FP8_STEPS
            assert len(runs(unit, group)) == (4 if unit.groups == 3 else 6), "no more often than it must be"


def product_plain(p: torch.Tensor, table: torch.Tensor, cut: Cut) -> torch.Tensor:
    """As `soft_gluon.product`; parts that a column has not are nobody's business"""
    rows, width = len(p), len(table)
    part = torch.full((cut.parts, -(-rows // 8), width, 8), torch.nan, device=p.device)
    for unit in units_of(cut):
        along = slice(unit.begin * BK.value, unit.end * BK.value)
        columns = slice(unit.column, unit.column + 64 * unit.groups)
        sums = p[:, along].float() @ table[columns, along].float().t()
        padded = torch.nn.functional.pad(sums, (0, 0, 0, -rows % 8))
        part[unit.part, :, columns] = padded.unflatten(0, (-1, 8)).transpose(1, 2)
    return part


@pytest.mark.parametrize(("rows", "width", "vocab"), [(8, 192, 1280), (5, 160, 1296), (18, 320, 1168), (3, 64, 16)])
def test_sums_of_parts_are_the_soft_embedding(rows: int, width: int, vocab: int) -> None:
    g = torch.Generator().manual_seed(rows)
    p = (torch.rand(rows, vocab, generator=g) * 256).to(DEVICE, FP8)
    table = Table(torch.randn(vocab, width, generator=g).to(DEVICE)).with_soft()
    share = torch.rand(rows, generator=g).to(DEVICE)
    assert table.soft is not None
    cut = Cut(width, vocab)
    made = product_plain if DEVICE.type == "cpu" else soft_gluon.product
    got = soft_gluon.total(made(p, table.soft, cut), share, table, 8.0, torch.float32, cut)
    want = p.double() / 256 * share[:, None] @ table.wide_soft(torch.float64) * 8
    assert (got.double() - want).norm() < (1e-6 if DEVICE.type == "cpu" else 1e-3) * want.norm()


def test_when_the_product_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(torch.randn(64, 32, device=DEVICE)).with_soft()
    ones = torch.ones(4, 1, device=DEVICE)
    parts = soft_triton.Parts(torch.rand(4, 64, device=DEVICE), ones, ones[:, 0].contiguous(), ones, 64, False)
    plain = soft_triton.soft_embed(parts, table, 1.0, torch.float32, blocks=soft_triton.soft_blocks(1))
    monkeypatch.setattr(soft_triton, "gluon", lambda device: True)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(soft_gluon, "product", lambda *given: asked.append(given[0]) or product_plain(*given))
    torch.testing.assert_close(soft_triton.soft_embed(parts, table, 1.0, torch.float32), plain)
    assert [p.dtype for p in asked] == [FP8]
    soft_triton.soft_embed(parts, table, 1.0, torch.float32, skip=1e-9)
    soft_triton.soft_embed(parts, Table(table.weight), 1.0, torch.float32)
    assert len(asked) == 1, "tiles may be left out, or the table is not fp8"


# ---- who waits for whom ------------------------------------------------------------------------------------------


class Program:
    """The parts of a program, as generators that a test runs in any order; every `yield` is a place where another part
    may run. Copies arrive when they are asked for."""

    def __init__(self, cut: Cut, blocks: int, program: int, programs: int, stages: int) -> None:
        self.units, self.stages = [unit for unit in units_of(cut) for _ in range(blocks)], stages
        self.mine = range(program, cut.units * blocks, programs)
        self.ready, self.free = ([Barrier(n) for _ in range(stages)] for n in (1, 3))
        self.holds: list[tuple[int, int] | None] = [None] * stages
        self.done = [list[tuple[int, int]]() for _ in range(3)]

    def steps(self, at: int) -> range:
        return range(self.units[at].begin, self.units[at].end)

    def ask(self) -> Part:
        first = list(self.steps(self.mine[0]))[: self.stages]
        for k, step in enumerate(first):  # of the table, before the launch before has ended; the rows behind it
            self.holds[k] = self.mine[0], step
        yield
        for k in range(len(first)):
            self.ready[k].arrive()
        ring = Ring(self.stages, 1 - len(first) // self.stages, len(first) % self.stages)
        for at in self.mine:
            for step in self.steps(at)[len(first) if at == self.mine[0] else 0 :]:
                yield from wait(self.free[ring.at], ring.phase)
                self.holds[ring.at] = at, step
                yield
                self.ready[ring.at].arrive()
                ring.step()

    def sums(self, group: int) -> Part:
        ring = Ring(self.stages, 0)
        for at in self.mine:
            unit = self.units[at]
            if group >= unit.groups:
                for _ in self.steps(at):
                    yield from wait(self.ready[ring.at], ring.phase)
                    self.free[ring.at].arrive()
                    ring.step()
                    yield
                continue
            step = unit.begin
            for run in runs(unit, group):
                for k in range(run):
                    yield from wait(self.ready[ring.at], ring.phase)
                    assert self.holds[ring.at] == (at, step), "a stage holds something else"
                    yield
                    if k > 0:
                        self.free[ring.at - 1].arrive()
                        assert self.holds[ring.at] == (at, step), "overwritten while it is read"
                    self.done[group].append((at, step))
                    ring.step()
                    step += 1
                    yield
                if run:
                    self.free[ring.at - 1].arrive()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_work_ends_in_any_order(data: st.DataObject) -> None:
    draw = data.draw
    cut = Cut(draw(st.sampled_from((64, 192, 256, 320))), draw(st.sampled_from((16, 1024, 4096, 90112))), PARTS)
    blocks, programs = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    program = draw(st.integers(0, min(programs, cut.units * blocks) - 1))
    made = Program(cut, blocks, program, programs, draw(st.sampled_from((2, 3, STAGES))))
    parts, choose, still = [made.ask(), *map(made.sums, range(3))], random.Random(draw(st.integers(0, 99))), 0
    while parts:
        part = choose.choice(parts)
        before = sum(map(len, made.done))
        try:
            for _ in range(choose.choice((1, 3, 20))):
                next(part)
        except StopIteration:
            parts.remove(part)
        still = 0 if sum(map(len, made.done)) > before else still + 1
        assert still < 5000, "everybody waits"
    for group, done in enumerate(made.done):
        mine = [at for at in made.mine if made.units[at].groups > group]
        assert done == [(at, step) for at in mine for step in made.steps(at)]
