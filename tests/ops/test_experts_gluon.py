"""Experts that are streamed. Triton's interpreter knows no Gluon, so here they are compiled, for a card that is not
there, and a model of who waits for whom is run; their numbers are compared on a card: `scripts/check_ops.py` ("as
sorted"), `scripts/bench_stream.py` and `scripts/bench_layers.py`."""

from ops.triton_cpu import DEVICE  # isort: skip

from collections.abc import Generator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.model.backend import triton_ops
from diffusiongemma.ops import experts_triton, kernels, pairs_gluon, routing, tiles, wide_gluon
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.stream_gluon import MOST, ROUNDS
from ops import hopper, stream_model
from ops.stream_model import Taking, Work, run

COMPILE = """
import json, sys
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.experts_gluon import STAGES, experts_kernel
from ops.hopper import aligned, compiled, facts

kind, block = sys.argv[1], int(sys.argv[2])
wide, quant = (128, True) if kind == "fp8e4nv" else (64, False)
layout = gl.NVMMASharedLayout(128, 1024 // wide, 2)
tile = f"tensordesc<{kind}[64, {wide}],{layout!r}>"
types = dict(x=f"*{kind}", x_scale="*fp32", w_up=tile, up_scale="*fp32", w_down=tile, down_scale="*fp32",
             hidden="*bf16", rounded=f"*{kind}", h_rows=tile.replace("[64", f"[{block}"), h_scale="*fp32",
             out="*bf16", order="*i32", share="*fp32", counts="*i32", beyond="*i32", marks="*i32", each="i32")
known = dict(D=256, I=192, APART=384 if quant else 192, TOP_K=2, EXPERTS=16, T=block, BK=wide,
             STAGES=STAGES[block], WIDTH=256, REGISTERS=128, FEW=80)
if not quant:
    for name in ("x_scale", "up_scale", "down_scale", "h_scale"):
        types[name], known[name] = "constexpr", None
kinds = {name: types.get(name, "constexpr") for name in experts_kernel.arg_names}
source = GluonASTSource(experts_kernel, kinds, known, aligned(kinds))
print(json.dumps(facts(compiled(source, num_warps=4, maxnreg=112))))
"""


PAIRS = """
import json, sys
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.pairs_gluon import FEW, LAG, REGISTERS, STAGES, pairs_kernel
from ops.hopper import aligned, compiled, facts

lines, rows = (gl.NVMMASharedLayout(width, 8, 2) for width in (128, 64))
tile = f"tensordesc<u8[32, 128],{lines!r}>"
types = dict(x="*fp8e4nv", x_scale="*fp32", w_up=tile, up_scale="*i32", w_down=tile, down_scale="*i32", hidden="*bf16",
             rounded="*fp8e4nv", h_rows=f"tensordesc<fp8e4nv[16, 64],{rows!r}>", h_scale="*fp32", out="*bf16",
             order="*i32", share="*fp32", counts="*i32", beyond="*i32", marks="*i32", each="i32", mask="i32")
known = dict(D=256, I=192, APART=384, TOP_K=2, EXPERTS=16, T=32, STAGES=STAGES, LAG=LAG, FEW=FEW)
sided = ("up_pages", "down_pages", "processors")
if sys.argv[1] == "sided":
    types |= dict.fromkeys(sided, "*i32")
else:
    known |= dict.fromkeys(sided)
kinds = {name: types.get(name, "constexpr") for name in pairs_kernel.arg_names}
source = GluonASTSource(pairs_kernel, kinds, known, aligned(kinds))
print(json.dumps(facts(compiled(source, num_warps=4, maxnreg=REGISTERS))))
"""
WIDE_KERNEL = """
import json, sys
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from diffusiongemma.ops.wide_gluon import MOST_REGISTERS, NUMBERS, wide_kernel
from ops.hopper import aligned, compiled, facts

layout = gl.NVMMASharedLayout(128, 8, 2)
tile = f"tensordesc<fp8e4nv[64, 128],{layout!r}>"
types = dict(x="*fp8e4nv", x_scale="*fp32", w_up=tile, up_scale="*fp32", w_down=tile, down_scale="*fp32",
             hidden="*bf16", rounded="*fp8e4nv", h_rows=tile.replace("[64", "[32"), h_scale="*fp32", out="*bf16",
             order="*i32", share="*fp32", counts="*i32", beyond="*i32", marks="*i32", each="i32")
known = dict(D=2816, I=704, APART=1408, TOP_K=8, EXPERTS=128, **NUMBERS[int(sys.argv[1])])
kinds = {name: types.get(name, "constexpr") for name in wide_kernel.arg_names}
source = GluonASTSource(wide_kernel, kinds, known, aligned(kinds))
print(json.dumps(facts(compiled(source, num_warps=4, maxnreg=MOST_REGISTERS))))
"""


def check_code(found: dict[str, Any]) -> None:
    assert found["products"]
    assert found["copies"]
    assert found["spilled"] <= 16, "numbers go to memory for want of registers"
    assert not found["serialised"], "the tensor cores wait after every product"
    assert found["told"]
    assert not found["unguarded"], "told before all warps are there"
    assert not found["unused"], "barriers whose memory others get"


@pytest.mark.parametrize(("kind", "block"), [("fp8e4nv", 32), ("bf16", 32), ("fp8e4nv", 64), ("bf16", 64)])
def test_compiles_for_hopper_and_leaves_room_beside_it(kind: str, block: int) -> None:
    found = hopper.run(COMPILE, kind, block)
    assert found["threads"] == 384, "two groups that multiply, and four single warps"
    assert found["waits"] == 6, "every part waits by itself for the launch before"
    check_code(found)
    assert found["shared"] + hopper.slim(kind) + 2048 <= 228 << 10, "the dense MLP does not fit beside it"


@pytest.mark.parametrize("how", ["plain", "sided"])
def test_4_bit_experts_compile_for_hopper_and_leave_room_beside_two_programs(how: str) -> None:
    found = hopper.run(PAIRS, how)
    assert found["threads"] == 256, "one group that multiplies, and four single warps"
    assert found["waits"] == 5, "every part waits by itself for the launch before"
    check_code(found)
    taken = pairs_gluon.PROGRAMS * (found["shared"] + 1024)
    assert taken + hopper.slim("fp8e4nv") + 1024 <= 228 << 10, "the dense MLP does not fit"
    left = (64 << 10) - pairs_gluon.PROGRAMS * found["threads"] * pairs_gluon.REGISTERS
    assert left >= 16 << 10, "… for want of registers"


@pytest.mark.parametrize("block", [128, 160])
def test_experts_of_many_rows_compile_for_hopper(block: int) -> None:
    found = hopper.run(WIDE_KERNEL, block)
    assert found["threads"] == 512, "two groups that multiply, four warps for rows, two that round, two single ones"
    assert found["waits"] == 6, "every part waits by itself for the launch before"
    check_code(found)
    assert found["shared"] <= 227 << 10
    numbers = wide_gluon.NUMBERS[block]
    assert 2 * numbers["REGISTERS"] + numbers["SOME"] + numbers["FEW"] <= 512, "a thread of each of four groups"


def weights(dtype: torch.dtype, hidden: int = 256, width: int = 192) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (16, 2 * width, hidden), (16, hidden, width)
    up, down = (torch.empty(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    return up, down


def test_which_experts_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not experts_triton.streams(32, *weights(FP8)), "nothing is streamed in the interpreter"
    monkeypatch.setattr(experts_triton, "gluon", lambda device: True)
    assert experts_triton.streams(32, *weights(FP8))
    assert experts_triton.streams(64, *weights(torch.bfloat16))
    assert not experts_triton.streams(160, *weights(FP8)), "blocks of many rows"
    up, down = (torch.empty(16, tiles, groups, 64, 64, dtype=torch.uint8) for tiles, groups in ((3, 4), (2, 3)))
    assert experts_triton.streams(32, up, down)
    assert not experts_triton.streams(64, up, down), "4-bit weights of two users"
    assert not experts_triton.streams(32, up[..., :32], down[..., :32]), "groups of 32"
    assert not experts_triton.streams(32, torch.empty(16, 15, 4, 64, 64, dtype=torch.uint8), down), "too wide"
    assert not experts_triton.streams(32, weights(FP8)[0], weights(torch.bfloat16)[1]), "two formats"
    assert not experts_triton.streams(32, *weights(FP8, hidden=192)), "the second product in tiles of 128"
    assert not experts_triton.streams(32, *weights(FP8, width=96)), "the first one in tiles of 64"
    assert not experts_triton.streams(32, *weights(FP8, width=1024)), "more tiles than who rounds can remember"


def test_which_experts_of_many_rows_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = weights(FP8, 768, 576)
    assert not experts_triton.streams_wide(128, *fitting), "nothing is streamed in the interpreter"
    monkeypatch.setattr(experts_triton, "gluon", lambda device: True)
    assert set(wide_gluon.NUMBERS) == {128, 160}
    for block in wide_gluon.NUMBERS:
        assert experts_triton.streams_wide(block, *fitting)
        assert not experts_triton.streams(block, *fitting), "they leave no room beside them"
    assert not experts_triton.streams_wide(64, *fitting), "blocks of few rows"
    assert not experts_triton.streams_wide(128, *weights(torch.bfloat16, 768, 576)), "another format"
    assert not experts_triton.streams_wide(128, fitting[0], weights(torch.bfloat16, 768, 576)[1]), "two formats"
    assert not experts_triton.streams_wide(128, *weights(FP8, 640, 576)), "the second product in pairs of tiles"
    assert not experts_triton.streams_wide(128, *weights(FP8, 768, 608)), "the first one in tiles of 64"
    assert not experts_triton.streams_wide(128, *weights(FP8, 768, 512)), "no more stages than the ring"
    assert not experts_triton.streams_wide(128, *weights(FP8, 512, 576)), "… in the first product"
    assert not experts_triton.streams_wide(128, *weights(FP8, 768, 1856)), "more than who rounds can remember"
    assert wide_gluon.STAGES.value == 4


def test_experts_of_many_rows_take_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = weights(FP8, 768, 576)
    index, share = torch.tensor([[0, 1]]), torch.ones(1, 2)
    rows, scale = Rows(torch.zeros(1, 768).to(FP8), torch.ones(1, 1)), torch.ones(1)
    monkeypatch.setattr(experts_triton, "gluon", lambda device: True)
    monkeypatch.setattr(wide_gluon, "experts_wide", lambda x, placed, *_: torch.tensor(placed.block))
    for block in (128, 160):
        placed = routing.place(index, share, 16, block)
        assert experts_triton.experts_pairs(rows, index, share, up, scale, down, scale, placed=placed) == block


@pytest.mark.parametrize("tokens", [1024, 1100, 1280, 1536, 1792, 2048])
def test_four_to_eight_users_are_streamed_without_room_beside_them(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their canvases, and prompts of as many tokens, where the card has memory to place so many pairs. `Ops.streams`
    asks for eager launches and a slim MLP, which begins after the router: not here."""
    monkeypatch.setattr(experts_triton, "gluon", lambda device: True)
    monkeypatch.setattr(wide_gluon, "experts_wide", lambda x, placed, *_: torch.tensor(placed.block))
    shapes = (128, 2 * 704, 2816), (128, 2816, 704)
    up, down = ((torch.empty(shape, dtype=FP8, device="meta"), torch.empty(0, device="meta")) for shape in shapes)
    ops = triton_ops().roomy()
    assert ops.places(tokens, 128, 8)
    assert not triton_ops().places(tokens, 128, 8)
    assert not ops.streams(tokens, 8, up, down)
    index, share = torch.arange(8).repeat(tokens, 1), torch.ones(tokens, 8)
    placed = routing.place(index, share, 128, tiles.block_rows(8 * tokens, 128, "fp8"))
    rows = Rows(torch.empty(tokens, 2816, dtype=FP8, device="meta"), torch.empty(tokens, 1, device="meta"))
    assert ops.experts(rows, index, share, up, down, placed).item() == (128 if tokens <= 1600 else 160)


def test_why_nothing_is_streamed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    card, capability = torch.device("cuda"), [9, 0]
    found = lambda device: kernels.Card((capability[0], capability[1]), 227 << 10, 132)  # noqa: E731
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "card", found)
    monkeypatch.setattr(triton, "__version__", "3.6.0+git1")
    assert kernels.gluon_unavailable(card) is None
    assert kernels.gluon_unavailable(torch.device("cpu"))
    for version in ("3.5.1", "3.10.0", "4.0"):
        monkeypatch.setattr(triton, "__version__", version)
        told = kernels.gluon_unavailable(card)
        assert told is not None
        assert f"3.6 to 3.9, not with {version}" in told
    capability[0] = 10
    kernels.gluon.cache_clear()
    with caplog.at_level("INFO"):
        assert not any(kernels.gluon(card) for _ in ("experts", "head"))
    kernels.gluon.cache_clear()
    assert caplog.text.count("do their work: they are laid out for Hopper (9.0), this card has 10.0") == 1


def test_marks_have_room_for_every_block() -> None:
    for experts, tokens, k in ((128, 256, 8), (16, 20, 2), (32, 512, 4), (128, 1024, 8), (128, 2048, 8)):
        many, first = routing.counters(experts, tokens * k)
        assert many % 4 == first % 4 == 0
        assert first >= experts + 1
        for block in (16, 32, 64, 128, 160):
            assert many - first >= 4 + experts + routing.most_beyond(tokens * k, block)


# ---- who waits for whom ------------------------------------------------------------------------------------------

WIDE = experts_triton.WIDEST // 64  # tiles of a block in the first product, at most


def work(rows: list[bool], experts: int, up: int = WIDE, rounds: int = ROUNDS.value, **sizes: int) -> Work:
    sizes = {"down": 2, "up_steps": 2, "down_steps": 1, "stages": 3} | sizes
    return Work(experts, rows, up, most=MOST.value, rounds=rounds, quant=sizes.pop("quant", 1) == 1, **sizes)


def check(made: Work) -> None:
    """Every tile of a block with rows was made once, and its rows rounded once; of blocks without, at most tiles that
    could be guessed"""
    for at in range(made.total):
        there, times = made.rows[made.block(at)], made.made.get(at, 0)
        most = made.groups if there or at < made.experts * made.up else 0
        assert times == most if there else times <= most, f"tile {at}"
        assert made.rounded.get(at, 0) == (there and made.quant and at < made.ups), f"rows of tile {at}"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_work_ends_in_any_order(data: st.DataObject) -> None:
    """However many programs run at once, also one alone, and whichever part is slow"""
    draw = data.draw
    experts = draw(st.sampled_from((2, 4, 8)))
    rows = draw(st.lists(st.booleans(), min_size=experts, max_size=experts)) + [True] * draw(st.integers(0, 2))
    up = draw(st.sampled_from((1, 2, 11, WIDE)))
    sizes = {"down": draw(st.sampled_from((1, 2, 7))), "up_steps": draw(st.sampled_from((1, 2, 7))),
             "down_steps": draw(st.sampled_from((1, 3))), "stages": draw(st.sampled_from((2, 3, 6))),
             "quant": draw(st.integers(0, 1))}  # fmt: skip
    kind = draw(st.sampled_from(("few rows", "4-bit weights", "many rows")))
    if kind == "4-bit weights":
        sizes |= {"quant": 1, "lag": draw(st.integers(1, sizes["stages"] - 1))}
    elif kind == "many rows":
        longer = {name: sizes["stages"] + sizes[name] for name in ("up_steps", "down_steps")}
        sizes |= {"quant": 1, "groups": 2} | longer
    made = work(rows, experts, up, **sizes)
    programs = draw(st.sampled_from((1, 2, 5, 12)))
    run(made, programs, draw(st.integers(1, programs)), draw(st.integers(0, 1000)))
    check(made)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_work_of_two_sides_ends_in_any_order(data: st.DataObject) -> None:
    """… also where only one side has programs, or has them first"""
    draw = data.draw
    experts = draw(st.sampled_from((2, 4, 8)))
    rows = draw(st.lists(st.booleans(), min_size=experts, max_size=experts)) + [True] * draw(st.integers(0, 3))
    stages = draw(st.sampled_from((2, 3, 5)))
    sizes = {"down": draw(st.sampled_from((1, 2, 7))), "up_steps": draw(st.sampled_from((1, 2, 5))),
             "down_steps": draw(st.sampled_from((1, 3))), "stages": stages, "quant": draw(st.integers(0, 1)),
             "lag": draw(st.integers(1, stages - 1)), "sides": True}  # fmt: skip
    made = work(rows, experts, draw(st.sampled_from((1, 2, 11, WIDE))), **sizes)
    programs = draw(st.sampled_from((1, 2, 5, 12)))
    sides = draw(st.sampled_from(((0, 1), (0,), (1,), (0, 0, 0, 1), (1, 1, 1, 1, 0))))
    run(made, programs, draw(st.integers(1, programs)), draw(st.integers(0, 1000)), sides=sides)
    check(made)


def test_a_side_alone_takes_the_tiles_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for the other, with more tiles to be rounded than it can remember."""
    sizes = {"up": 11, "up_steps": 1, "lag": 1, "sides": True}
    run(made := work([True] * 8, 8, **sizes), 2, 2, 0, sides=(1,))
    check(made)
    monkeypatch.setattr(stream_model.Program, "alone_at", 1000)
    with pytest.raises(AssertionError, match="everybody waits"):
        run(work([True] * 8, 8, **sizes), 2, 2, 0, patience=1000, sides=(1,))


def test_each_side_takes_its_own_tiles() -> None:
    """Where both are as quick"""
    made, own = work([True] * 8, 8, 2, up_steps=1, lag=1, sides=True), [0, 0]
    real = stream_model.Taking.next

    def watched(taking: Taking) -> Generator[None, None, int]:
        at = yield from real(taking)
        if at >= 0:
            own[at % 2 == taking.side] += 1
        return at

    with mock.patch.object(stream_model.Taking, "next", watched):
        run(made, 4, 4, 3)
    assert own[True] > 3 * own[False]


def test_rows_are_told_of_before_their_place_is_needed_again() -> None:
    assert pairs_gluon.LAG < pairs_gluon.STAGES
    run(made := work([True] * 3, 3, up_steps=7, lag=2), 2, 2, 0)
    check(made)
    with pytest.raises(AssertionError, match="everybody waits"):
        run(work([True] * 3, 3, up_steps=7, lag=3), 2, 2, 0, patience=1000)


def test_tiles_of_many_rows_need_about_as_many_stages_as_the_ring() -> None:
    """Else factors are written that the tile before the last still wants."""
    for seed in range(20):
        run(made := work([True] * 3, 3, up_steps=4, down_steps=4, groups=2), 2, 2, seed)
        check(made)

    def short() -> None:
        for seed in range(200):
            run(work([True] * 3, 3, up_steps=2, down_steps=2, stages=6, groups=2), 2, 2, seed)

    with pytest.raises(AssertionError, match="factors of another tile"):
        short()


def test_who_rounds_must_remember_all_tiles_of_a_block() -> None:
    """One program alone has to make a whole block before any of it is rounded: that is what `WIDEST` is for."""
    run(made := work([True], 1), 1, 1, 0)
    check(made)
    with pytest.raises(AssertionError, match="everybody waits"):
        run(work([True], 1, rounds=WIDE // 2), 1, 1, 0, patience=1000)
