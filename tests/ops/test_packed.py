"""Packed experts: which numbers have a place, where their bits lie, that the instructions make them again, what the
kernel would read, and that it compiles for Hopper and leaves room beside it. Its numbers are compared on a card, with
those of plain weights: `scripts/bench_stream.py`, `scripts/bench_layers.py`."""

from ops.triton_cpu import DEVICE  # isort: skip

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.ops import packed, packed_gluon, sides
from diffusiongemma.ops.packed import SEVEN, TWELVE, Packing
from diffusiongemma.ops.quant import FP8, Format, quantize
from ops import hopper

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a card scripts compare")

BOTH = {"7": SEVEN, "12": TWELVE}
EVERY = pytest.mark.parametrize("packing", BOTH.values(), ids=BOTH)
COMPILE = """
import json, sys
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.packed import PACKINGS
from diffusiongemma.ops.packed_gluon import FEW, REGISTERS, packed_kernel, ring_of
from ops.hopper import aligned, compiled, facts

kind, block = sys.argv[1], int(sys.argv[2])
packing = next(each for each in PACKINGS.values() if each.size == (2 if kind == "bf16" else 1))
size = packing.size
line, row = (gl.NVMMASharedLayout(bytes_, 8 * size, 2) for bytes_ in (128, 32))
pieces = f"tensordesc<{'i16' if size == 2 else 'u8'}[16, {128 // size}],{line!r}>"
types = dict(x=f"*{kind}", x_scale="*fp32", w_up=pieces, up_scale="*fp32", w_down=pieces, down_scale="*fp32",
             up_pages="*i32", down_pages="*i32", processors="*i32", mask="i32", hidden="*bf16", rounded=f"*{kind}",
             h_rows=f"tensordesc<{kind}[{block}, {32 // size}],{row!r}>",
             h_scale="*fp32", out="*bf16", order="*i32", share="*fp32", counts="*i32", beyond="*i32", marks="*i32",
             each="i32")
stages, lag = ring_of(block)
known = dict(D=2816, I=704, APART=1408 // size, TOP_K=8, EXPERTS=128, T=block, SLOTS=packing.slots, LEFT=packing.left,
             STAGES=stages, LAG=lag, FEW=FEW)
if size == 2:
    for name in ("x_scale", "h_scale"):
        types[name], known[name] = "constexpr", None
kinds = {name: types.get(name, "constexpr") for name in packed_kernel.arg_names}
source = GluonASTSource(packed_kernel, kinds, known, aligned(kinds))
print(json.dumps(facts(compiled(source, num_warps=4, maxnreg=REGISTERS))))
"""


def rows_of(packing: Packing, *shape: int) -> Tensor:
    w = torch.randn(*shape)
    return quantize(w, Format("fp8"))[0] if packing.dtype == FP8 else w.to(torch.bfloat16)


def near(w: Tensor, packing: Packing) -> Tensor:
    """w, rounded to what has a place"""
    return packed.restored(*packed.shrunk(w, packing), packing)


# ---- which numbers have a place ----------------------------------------------------------------------------------


def test_what_rounding_to_places_changes() -> None:
    torch.manual_seed(0)
    for packing, most, same in ((SEVEN, 3e-4, 0.98), (TWELVE, 5e-9, 0.9999)):
        w = rows_of(packing, 256, 2816)
        change = ((near(w, packing).float() - w.float()).norm() / w.float().norm()).item()
        assert most / 3 < change < most, packing.name
        assert (near(w, packing) == w).float().mean() > same, packing.name
        assert packed.lost(w[None], packing) == pytest.approx(change, rel=1e-4)
        assert change < packing.most / 8, "normally distributed rows are far from the limit"


def test_what_a_format_itself_loses_is_ten_times_what_may_be_lost() -> None:
    torch.manual_seed(0)
    plain = torch.randn(64, 2816)
    q, scale = quantize(plain, Format("fp8"))
    for packing, rounded in ((SEVEN, q.float() * scale), (TWELVE, plain.to(torch.bfloat16).float())):
        itself = ((rounded - plain).norm() / plain.norm()).item()
        assert itself == pytest.approx(10 * packing.most, rel=0.05)


def test_rows_of_which_one_number_is_huge_lose_too_much() -> None:
    w = torch.randn(3, 128, 256) * 0.4
    w[1, :, 0] = 448.0
    assert packed.lost(w[:1].to(FP8), SEVEN) < SEVEN.most < packed.lost(w.to(FP8), SEVEN)


@EVERY
def test_what_is_not_a_number_is_never_packed(packing: Packing) -> None:
    w = rows_of(packing, 1, 128, 128)
    w[0, 5, 7] = float("nan")
    assert not packed.lost(w, packing) <= packing.most


@EVERY
@pytest.mark.parametrize("factor", [1.0, 2.0**-3, 2.0**-8])
def test_what_has_a_place_stays(packing: Packing, factor: float) -> None:
    """Wherever the largest number of a row is"""
    w = near((rows_of(packing, 8, 256).float() * factor).to(packing.dtype), packing)
    q, back = packed.shrunk(w, packing)
    assert torch.equal(packed.restored(q, back, packing), w)
    codes = q.view(packing.kind).to(torch.int32) & (0xFF if packing.size == 1 else 0xFFFF)
    assert not (codes & ~packing.kept).any(), "upper bits of an exponent are not zero"
    assert torch.equal(back.log2(), back.log2().round())


@EVERY
def test_rows_of_zeros(packing: Packing) -> None:
    w = torch.zeros(2, 128, dtype=packing.dtype)
    assert torch.equal(near(w, packing), w)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16))
def test_any_row_of_bfloat16_is_nearly_itself(numbers: list[float]) -> None:
    w = torch.tensor([numbers]).to(torch.bfloat16)
    found = near(w, TWELVE)
    assert found.isfinite().all()
    assert ((found.float() - w.float()).abs() <= w.float().abs().max() * 2.0**-22).all()


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=16))
def test_any_row_of_fp8_is_nearly_itself(numbers: list[float]) -> None:
    w = torch.tensor([numbers]).to(FP8)
    found = near(w, SEVEN)
    assert ((found.float() - w.float()).abs() <= w.float().abs().max() * 2.0**-10).all()


# ---- where their bits lie ----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(("gated", "shape"), [(True, (384, 256)), (False, (256, 192)), (False, (128, 64))])
def test_pieces_come_back(packing: Packing, gated: bool, shape: tuple[int, int]) -> None:
    q, _ = packed.shrunk(rows_of(packing, 3, *shape), packing)
    lying = packed.pack(q, packing, gated)
    left = 2 * shape[1] * packing.size // 32 % packing.whole  # pieces that lie there as they are
    whole = q.numel() * packing.size - 3 * shape[0] // 128 * left * 2048
    assert lying.numel() == whole * packing.stored // packing.whole + q.numel() * packing.size - whole
    again = packed.unpack(lying, packing, shape, gated)
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
                                              (TWELVE, False, (128, 96)), (TWELVE, True, (128, 128))):  # fmt: skip
        q, _ = packed.shrunk(rows_of(packing, 2, outputs, inputs), packing)
        lying = packed.pack(q, packing, gated)
        lines = lying.view(-1, 128)
        x, found = torch.randn(inputs, 3, dtype=torch.float64), torch.zeros(2, outputs, 3, dtype=torch.float64)
        halves, tiles_of_expert = inputs * packing.size // 64, outputs // 128
        left = packing.left
        for tile in range(2 * tiles_of_expert):
            one, two = tile % tiles_of_expert * (64 if gated else 128), outputs // 2 if gated else 64
            line = tile * ((halves // 2 * packing.slots + halves % 2 * left) * 16)
            for half in range(0, halves, 2):
                many = 8 if half + 1 < halves else 4
                slots = packing.slots if many == 8 else left
                pieces = lines[line : line + slots * 16].view(slots, 64, -1).view(packing.kind)
                line += slots * 16
                if many == 8 or packing.whole == 4:
                    pieces = torch.cat([torch.stack(packed.made(list(group), packing))
                                        for group in pieces.split(packing.stored)])  # fmt: skip
                assert len(pieces) == many
                for n, piece in enumerate(pieces):
                    numbers = packed.lifted(piece.view(packing.dtype), packing).double()
                    first = half * 64 // packing.size + n // 2 * (32 // packing.size)
                    rows = slice(one + n % 2 * two, one + n % 2 * two + 64)
                    found[tile // tiles_of_expert, rows] += numbers @ x[first : first + numbers.shape[1]]
        expected = packed.lifted(q, packing).double() @ x
        assert torch.allclose(found, expected, rtol=1e-12), packing.name


@EVERY
def test_experts_are_rounded_and_packed(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "AT_ONCE", 2 * 256 * 192)  # two of three experts at once
    torch.manual_seed(2)
    up, down = rows_of(packing, 3, 256, 192), rows_of(packing, 3, 192, 128)
    assert packed.fits(up, down) is None, "outputs are no tiles"
    up, down = rows_of(packing, 3, 256, 256), rows_of(packing, 3, 256, 128)
    assert packed.fits(up, down) is packing
    scales = (torch.rand(3, 256, 1), torch.rand(3, 256, 1)) if packing is SEVEN else (None, None)
    wanted = [near(w, packing).float() * (1 if s is None else s) for w, s in zip((up, down), scales, strict=True)]
    found = packed.round_and_pack(packing, up, scales[0], down, scales[1], sides.none(torch.device("cpu")))
    both = (found.up, found.up_scale, True), (found.down, found.down_scale, False)
    for w, want, scale, (lying, factor, gated) in zip((up, down), wanted, scales, both, strict=True):
        plain = w.float() if scale is None else w.float() * scale
        assert torch.equal(plain, want), "the plain ones are not rounded"
        tiles_ = sides.laid_back(lying).view(3, w.shape[1] // 128, -1, 128)
        q = packed.unpack(tiles_, packing, (w.shape[1], w.shape[2]), gated)
        assert torch.equal(packed.lifted(q, packing).float() * factor, plain)
        if scale is not None:  # products with numbers that are twice as large have other bits
            assert torch.equal(q.view(torch.uint8), w.view(torch.uint8))
            assert factor is scale
    assert found.nbytes == sum(sided.tiles * sided.size for sided in (found.up, found.down)) + 2 * 3 * 256 * 4
    assert found.name == packing.name
    for w, lying in ((up, found.up), (down, found.down)):
        assert lying.lines.nbytes <= packed.bytes_of(w, packing) <= lying.lines.nbytes + sides.PAGE
    again = packed.round_and_pack(packing, up.clone(), scales[0], down.clone(), scales[1], found.up.sides)
    assert torch.equal(again.up.lines, found.up.lines), "what is rounded stays as it is"
    assert torch.equal(again.up_scale, found.up_scale)


@EVERY
def test_where_memory_runs_out_numbers_are_what_they_were(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    """… or rounded: a scale is never one of other codes"""
    monkeypatch.setattr(packed, "AT_ONCE", 256 * 128)  # an expert at once
    up, down = rows_of(packing, 3, 256, 128), rows_of(packing, 3, 256, 128)
    scales = (torch.rand(3, 256, 1), torch.rand(3, 256, 1)) if packing is SEVEN else (None, None)

    def numbers() -> Tensor:
        return up.float() if scales[0] is None else up.float() * scales[0]

    def short(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    before, calls, real = numbers(), [0], packed.pack

    def twice(*args: Any) -> Tensor:
        calls[0] += 1
        return real(*args) if calls[0] < 3 else short()

    monkeypatch.setattr(packed, "pack", twice)
    given = (packing, up, scales[0], down, scales[1], sides.none(torch.device("cpu")))
    for broken in (None, "lay_out"):
        if broken:
            monkeypatch.setattr(packed, "pack", real)
            monkeypatch.setattr(packed, broken, short)
        with pytest.raises(torch.OutOfMemoryError):
            packed.round_and_pack(*given)
        assert (numbers() - before).norm() <= 1e-3 * before.norm()


def test_4_bit_experts_lie_by_side_as_they_are() -> None:
    up, down = (
        torch.randint(256, (2, tiles_, groups, 64, 64), dtype=torch.uint8) for tiles_, groups in ((3, 4), (2, 3))
    )
    scales = [torch.randint(1 << 30, w.shape[:4], dtype=torch.int32) for w in (up, down)]
    assert packed.lie_in_pairs(up, down)
    assert packed.fits(up, down) is None
    found = packed.by_side(up, scales[0], down, scales[1], sides.none(torch.device("cpu")))
    for w, scale, lying, factor in (
        (up, scales[0], found.up, found.up_scale),
        (down, scales[1], found.down, found.down_scale),
    ):
        assert torch.equal(sides.laid_back(lying).view(w.shape), w)
        assert factor is scale
        assert lying.lines.nbytes <= packed.bytes_of(w, None) <= lying.lines.nbytes + sides.PAGE
    assert found.nbytes == sum(t.nbytes for t in (up, down, *scales))
    assert found.name == "4 bits by side"
    assert not packed.lie_in_pairs(up[:1], down), "an odd number of tiles"
    assert not packed.lie_in_pairs(up[..., :32], down), "groups of 32"
    assert not packed.lie_in_pairs(up.to(torch.int32), down)


def test_which_experts_can_be_packed() -> None:
    up, down = torch.empty(2, 128, 256, dtype=FP8), torch.empty(2, 256, 64, dtype=FP8)
    assert packed.fits(up, down) is SEVEN
    assert packed.fits(up, down.to(torch.bfloat16)) is None
    assert packed.fits(up.to(torch.int8), down.to(torch.int8)) is None
    assert packed.fits(torch.empty(2, 64, 256, dtype=FP8), torch.empty(2, 256, 32, dtype=FP8)) is None
    assert packed.fits(up[:1], down[:1]) is None, "one tile of the first product is no pair"
    with pytest.raises(AssertionError, match="can be neither packed nor laid out by side"):
        packed.once_more(up[:1], None, down[:1], None, sides.none(torch.device("cpu")))
    long = [torch.empty(2, outputs, inputs, dtype=FP8, device="meta") for outputs, inputs in ((128, 9472), (9472, 64))]
    assert packed.fits(*long) is None, "a pair of tiles would lie in three pages"


# ---- instructions ------------------------------------------------------------------------------------------------


def run_code(packing: Packing, stored: list[np.ndarray]) -> list[np.ndarray]:
    """What the PTX does, an instruction a line, to registers of 32 bits"""
    many = packing.whole
    held: dict[str, np.ndarray] = {f"${many + n}": word.copy() for n, word in enumerate(stored)}
    for line in packed.code(packing).splitlines():
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
    q, _ = packed.shrunk(rows_of(packing, 1, 128, 512), packing)
    pieces = (
        packed.pack(q, packing, False).flatten().view(packing.kind).view(-1, packing.stored, 1024 * 2 // packing.size)
    )
    stored = [pieces[:, n].contiguous() for n in range(packing.stored)]
    made = [packed.lifted(one.view(packing.dtype), packing) for one in packed.made(stored, packing)]
    words = run_code(packing, [one.numpy().view(np.uint32) for one in stored])
    for expected, found in zip(made, words, strict=True):
        assert torch.equal(torch.from_numpy(found.copy().view(np.uint8)), expected.contiguous().view(torch.uint8))


# ---- the kernel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 64])
@EVERY
def test_compiles_for_hopper_and_leaves_room(packing: Packing, block: int) -> None:
    wide = packing.size == 2
    found = hopper.run(COMPILE, "bf16" if wide else "fp8e4nv", block)
    assert found["threads"] == 256, "one group that multiplies, and four single warps"
    assert found["waits"] == 5, "every part waits by itself for the launch before"
    assert len(found["products"]) == (32 if wide else 40)
    assert not found["serialised"], "the tensor cores wait after every product"
    assert not found["unguarded"], "told before all warps are there"
    assert not found["unused"], "barriers whose memory others get"
    assert found["spilled"] <= (0 if block == 32 else 16)
    programs = packed_gluon.PROGRAMS
    slim = hopper.slim("bf16" if wide else "fp8e4nv")
    assert programs * (found["shared"] + 1024) + slim + 1024 <= 228 << 10, "the dense MLP does not fit beside it"
    assert (64 << 10) - programs * found["threads"] * packed_gluon.REGISTERS >= 16 << 10, "… for want of registers"


def test_rows_are_told() -> None:
    for block in (16, 32, 64):
        stages, lag = packed_gluon.ring_of(block)
        assert lag < stages
