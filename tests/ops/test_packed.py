"""`scripts/try_packed.py`, a trial that waits for a card: which numbers have a place, where their bits lie, that the
instructions make them again, what the kernel would read, and that it compiles for Hopper and leaves room beside it."""

from ops.triton_cpu import DEVICE  # isort: skip

import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.ops import fused, tiles
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8, Format, quantize
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.tiles import Shape
from ops import hopper
from scripted import load_script

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a card the script itself compares")

script = load_script("try_packed")

import packed_weights  # noqa: E402  # beside the script, which has made it found
from packed_weights import PACKINGS, SEVEN, SIX, TWELVE, Packing  # noqa: E402

EVERY = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from packed_gluon import packed_kernel
from ops.hopper import aligned, compiled, facts

kind, without = sys.argv[2:4]
slots, block, stages, registers, lag, few = map(int, sys.argv[4:])
size = 2 if kind == "bf16" else 1
line, row = (gl.NVMMASharedLayout(bytes_, 8 * size, 2) for bytes_ in (128, 32))
pieces = f"tensordesc<{'i16' if size == 2 else 'u8'}[16, {128 // size}],{line!r}>"
types = dict(x=f"*{kind}", x_scale="*fp32", w_up=pieces, up_scale="*fp32", w_down=pieces, down_scale="*fp32",
             hidden="*bf16", rounded=f"*{kind}", h_rows=f"tensordesc<{kind}[{block}, {32 // size}],{row!r}>",
             h_scale="*fp32", out="*bf16", order="*i32", share="*fp32", counts="*i32", beyond="*i32", marks="*i32",
             each="i32")
known = dict(D=2816, I=704, APART=1408 // size, TOP_K=8, EXPERTS=128, T=block, SLOTS=slots, LEFT=4 if slots == 7 else 3,
             STAGES=stages, LAG=lag, FEW=few, WITHOUT=without)
if size == 2:
    for name in ("x_scale", "h_scale"):
        types[name], known[name] = "constexpr", None
kinds = {name: types.get(name, "constexpr") for name in packed_kernel.arg_names}
source = GluonASTSource(packed_kernel, kinds, known, aligned(kinds))
print(json.dumps(facts(compiled(source, num_warps=4, maxnreg=registers))))
"""


def rows_of(packing: Packing, *shape: int) -> Tensor:
    w = torch.randn(*shape)
    return quantize(w, Format("fp8"))[0] if packing.dtype == FP8 else w.to(torch.bfloat16)


def back_again(q: Tensor, back: Tensor, packing: Packing) -> Tensor:
    return packed_weights.lifted(q, packing).float() * back


# ---- which numbers have a place ----------------------------------------------------------------------------------


def test_what_rounding_to_places_changes() -> None:
    torch.manual_seed(0)
    for packing, most, same in ((SEVEN, 3e-4, 0.98), (SIX, 1.5e-2, 0.7), (TWELVE, 5e-9, 0.9999)):
        w = rows_of(packing, 256, 2816)
        near = back_again(*packed_weights.shrunk(w, packing), packing)
        change = ((near - w.float()).norm() / w.float().norm()).item()
        assert most / 3 < change < most, packing.name
        assert (near == w.float()).float().mean() > same, packing.name


@EVERY
def test_what_has_a_place_stays(packing: Packing) -> None:
    w = back_again(*packed_weights.shrunk(rows_of(packing, 8, 256), packing), packing).to(packing.dtype)
    q, back = packed_weights.shrunk(w, packing)
    assert torch.equal(back_again(q, back, packing), w.float())
    codes = q.view(packing.kind).to(torch.int32) & (0xFF if packing.size == 1 else 0xFFFF)
    assert not (codes & ~packing.kept).any(), "upper bits of an exponent are not zero"
    assert torch.equal(back.log2(), back.log2().round())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16))
def test_any_row_of_bfloat16_is_nearly_itself(numbers: list[float]) -> None:
    w = torch.tensor([numbers]).to(torch.bfloat16)
    near = back_again(*packed_weights.shrunk(w, TWELVE), TWELVE)
    assert near.isfinite().all()
    assert ((near - w.float()).abs() <= w.float().abs().max() * 2.0**-22).all()


# ---- where their bits lie ----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(("gated", "shape"), [(True, (384, 256)), (False, (256, 192)), (False, (128, 64))])
def test_pieces_come_back(packing: Packing, gated: bool, shape: tuple[int, int]) -> None:
    q, _ = packed_weights.shrunk(rows_of(packing, 3, *shape), packing)
    lying = packed_weights.pack(q, packing, gated)
    left = 2 * shape[1] * packing.size // 32 % packing.whole  # pieces that lie there as they are
    whole = q.numel() * packing.size - 3 * shape[0] // 128 * left * 2048
    assert lying.numel() == whole * packing.stored // packing.whole + q.numel() * packing.size - whole
    again = packed_weights.unpack(lying, packing, shape, gated)
    assert torch.equal(again.view(packing.kind), q.view(packing.kind))


@EVERY
def test_every_bit_of_the_last_piece_is_carried_once(packing: Packing) -> None:
    every = (1 << 8 * packing.size) - 1
    carried, taken = 0, dict.fromkeys(range(packing.stored), packing.kept)
    for carrier, bits, shift in packing.fields:
        lies = bits << shift if shift > 0 else bits >> -shift
        assert not carried & bits
        assert not taken[carrier] & lies, "two numbers in one place"
        carried |= bits
        taken[carrier] |= lies
    assert carried == packing.kept
    assert set(taken.values()) == {every}, "a bit is not used"


def test_where_a_kernel_finds_a_product() -> None:
    """With its own arithmetic: pieces of 16 lines from `line` on, two a step"""
    torch.manual_seed(1)
    for packing, gated, (outputs, inputs) in ((SEVEN, True, (256, 384)), (SEVEN, False, (256, 192)),
                                              (SIX, False, (128, 192)), (TWELVE, True, (128, 128))):  # fmt: skip
        q, _ = packed_weights.shrunk(rows_of(packing, 2, outputs, inputs), packing)
        lines = packed_weights.pack(q, packing, gated).view(-1, 128)
        x, found = torch.randn(inputs, 3, dtype=torch.float64), torch.zeros(2, outputs, 3, dtype=torch.float64)
        halves, tiles_of_expert = inputs * packing.size // 64, outputs // 128
        left = 4 if packing.slots == 7 else packing.stored
        for tile in range(2 * tiles_of_expert):
            one, two = tile % tiles_of_expert * (64 if gated else 128), outputs // 2 if gated else 64
            line = tile * ((halves // 2 * packing.slots + halves % 2 * left) * 16)
            for half in range(0, halves, 2):
                many = 8 if half + 1 < halves else 4
                slots = packing.slots if many == 8 else left
                pieces = lines[line : line + slots * 16].view(slots, 64, -1).view(packing.kind)
                line += slots * 16
                if many == 8 or packing.whole == 4:
                    pieces = torch.cat([torch.stack(packed_weights.made(list(group), packing))
                                        for group in pieces.split(packing.stored)])  # fmt: skip
                assert len(pieces) == many
                for n, piece in enumerate(pieces):
                    numbers = packed_weights.lifted(piece.view(packing.dtype), packing).double()
                    first = half * 64 // packing.size + n // 2 * (32 // packing.size)
                    rows = slice(one + n % 2 * two, one + n % 2 * two + 64)
                    found[tile // tiles_of_expert, rows] += numbers @ x[first : first + numbers.shape[1]]
        expected = packed_weights.lifted(q, packing).double() @ x
        assert torch.allclose(found, expected, rtol=1e-12), packing.name


# ---- instructions ------------------------------------------------------------------------------------------------


def run_code(packing: Packing, stored: list[np.ndarray]) -> list[np.ndarray]:
    """What the PTX does, an instruction a line, to registers of 32 bits"""
    many = packing.whole
    held: dict[str, np.ndarray] = {f"${many + n}": word.copy() for n, word in enumerate(stored)}
    for line in packed_weights.code(packing).splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        name, to, *of = re.split(r",? ", line.rstrip(";"))
        a, *more = (held[one] if one in held else np.uint32(int(one, 0)) for one in of)
        if name == "mov.b32":
            held[to] = a
        elif name == "and.b32":
            held[to] = a & more[0]
        elif name in ("shr.b32", "shl.b32"):
            held[to] = a >> more[0] if name == "shr.b32" else a << more[0]
        elif name == "lop3.b32":
            assert more[2] == 0xEA
            held[to] = a & more[0] | more[1]
        else:
            assert name == "mul.bf16x2"
            halves = [
                torch.from_numpy(np.broadcast_to(w, stored[0].shape).copy().view(np.int16))
                .view(torch.bfloat16)
                .double()
                for w in (a, more[0])
            ]
            held[to] = (halves[0] * halves[1]).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)
    return [held[f"${n}"] for n in range(many)]


@EVERY
def test_instructions_make_all_pieces(packing: Packing) -> None:
    q, _ = packed_weights.shrunk(rows_of(packing, 1, 128, 512), packing)
    pieces = (
        packed_weights.pack(q, packing, False)
        .flatten()
        .view(packing.kind)
        .view(-1, packing.stored, 1024 * 2 // packing.size)
    )
    stored = [pieces[:, n].contiguous() for n in range(packing.stored)]
    made = [packed_weights.lifted(one.view(packing.dtype), packing) for one in packed_weights.made(stored, packing)]
    words = run_code(packing, [one.numpy().view(np.uint32) for one in stored])
    for expected, found in zip(made, words, strict=True):
        assert torch.equal(torch.from_numpy(found.copy().view(np.uint8)), expected.contiguous().view(torch.uint8))


# ---- the kernel --------------------------------------------------------------------------------------------------

SLIM = max(
    tiles.shared_bytes(Shape("fp8", 2816, 2816, 0, False, 256), tiles.SLIM),
    tiles.shared_bytes(Shape("fp8", 2816, 2112, 0, True, 256), tiles.SLIM_GATED),
)


def compiled(name: str, way: Any, block: int) -> dict[str, Any]:
    packing = PACKINGS[name]
    kind = "bf16" if packing.size == 2 else "fp8e4nv"
    numbers = (packing.slots, block, way.stages, way.registers, way.lag, way.few)
    return hopper.run(COMPILE, script.ROOT / "scripts", kind, way.without, *numbers)


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("name", PACKINGS)
def test_compiles_for_hopper_and_leaves_room(name: str, block: int) -> None:
    way, wide = script.WAYS[name][block][0], PACKINGS[name].size == 2
    found = compiled(name, way, block)
    assert found["threads"] == 256, "one group that multiplies, and four single warps"
    assert found["waits"] == (4 if wide else 5), "every part waits by itself for the launch before"
    assert len(found["products"]) == (32 if wide else 40)
    assert not found["serialised"], "the tensor cores wait after every product"
    assert not found["unguarded"], "told before all warps are there"
    assert found["spilled"] <= (0 if block == 32 else 16)
    assert way.programs * (found["shared"] + 1024) + SLIM + 1024 <= 228 << 10, "the dense MLP does not fit beside it"
    assert (64 << 10) - way.programs * found["threads"] * way.registers >= 16 << 10, "… for want of registers"


def test_variants_that_tell_what_takes_the_time() -> None:
    way = script.WAYS["7"][32][0]
    assert not compiled("7", replace(way, without="products"), 32)["products"]
    assert len(compiled("7", replace(way, without="unpacking"), 32)["products"]) == 40


def test_ways_end() -> None:
    for known in script.WAYS.values():
        for ways in known.values():
            assert all(way.lag < way.stages for way in ways)


# ---- the script --------------------------------------------------------------------------------------------------


def test_a_network_is_rounded_and_packed() -> None:
    for kind in ("7", "12"):
        scheme = None if kind == "12" else script.Scheme.parse("fp8")
        model = script.random_network(script.bench_layers.config_of(2, True), scheme, "cpu", torch.bfloat16)
        ops = script.PackedOps(PACKINGS[kind], {})
        before = script.FusedLayer.of(model.layers[0]).down[0].clone()
        ops.prepare(model)
        assert len(ops.kept) == 2
        layer = script.FusedLayer.of(model.layers[0])
        held = ops.kept[layer.up[0].data_ptr()]
        for (w, scale), tiles_, row_scale, gated in ((layer.up, held.up, held.up_scale, True),
                                                     (layer.down, held.down, held.down_scale, False)):  # fmt: skip
            q = packed_weights.unpack(tiles_, held.packing, tuple(w.shape[1:]), gated)
            plain = w.float() if scale is None else w.float() * scale
            assert torch.equal(packed_weights.lifted(q, held.packing).float() * row_scale, plain)
        changed = (layer.down[0].float() - before.float()).norm() / before.float().norm()
        assert changed < 1e-3


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few experts, and kernels of torch that use marks up as those of a card do"""

    def use_up(placed: Placed) -> None:
        assert not placed.marks.any(), "another launch has used these marks"
        placed.marks.fill_(1)

    def product(x: Rows, placed: Placed, up: Tensor) -> Tensor:
        use_up(placed)
        return up.float().sum() + x.values.float()

    fake = ModuleType("experts_gluon")
    fake.experts_streamed = lambda x, placed, up, *_: product(x, placed, up)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusiongemma.ops.experts_gluon", fake)

    def packed(x: Rows, placed: Placed, w: Any, way: Any) -> Tensor:
        if way.lag == 2:
            raise RuntimeError("out of resource")
        plain = packed_weights.unpack(w.up, w.packing, (2 * w.width, w.hidden), True)
        numbers = packed_weights.lifted(plain, w.packing).float()
        wide = w.packing.dtype == torch.bfloat16
        return product(x, placed, (numbers * w.up_scale).to(torch.bfloat16) if wide else numbers)

    monkeypatch.setattr(script, "packed_streamed", packed)
    monkeypatch.setattr(script, "quantize_rows", lambda x: Rows(*fused.quantize_rows(x, FP8)))
    for module, names in ((script, {"EXPERTS": 16, "HIDDEN": 128, "WIDTH": 64}),
                          (script.placed.__globals__, {"EXPERTS": 16, "TOP": 2})):  # fmt: skip
        for name, number in names.items():
            if isinstance(module, dict):
                monkeypatch.setitem(module, name, number)
            else:
                monkeypatch.setattr(module, name, number)
    stray = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, device=None: stray(*shape))
    spread = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *ends, device=None: spread(*ends))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("kind", ["7", "12"])
def test_comparisons_have_marks_of_their_own(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also behind a way that does not run, and with other numbers of runs than of sets"""
    sets = [script.experts_of(PACKINGS[kind]) for _ in range(2)]
    right, wrong = script.Way(3, 96, 1), script.Way(3, 96, 2)
    monkeypatch.setitem(script.WAYS, kind, dict.fromkeys((16, 32, 64), (right, wrong, right)))
    assert script.Comparison(sets, kind, 64, True).run(9, 5) == 1
    told = capsys.readouterr().out
    assert told.count("0 of 5 runs unequal") == 2
    assert "Way(stages=3, registers=96, lag=2, programs=2, few=40, without='') does not run: out of resource" in told
    sets[0].plain[0].view(torch.uint8)[0] += 1
    assert script.Comparison(sets, kind, 64, True).run(1, 4) == 2, "what differs is told"
