from ops.triton_cpu import DEVICE  # isort: skip

import re

import pytest
import torch

from diffusiongemma.ops import few_triton, int4, int4_triton, product, product_triton, quant
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.routing import Routing, route
from diffusiongemma.ops.tiles import Tile

FORMATS = ["bf16", "int8", "fp8", "pairs-32", "pairs-64"]
EIGHT = ("fp8", "pairs-32", "pairs-64")  # activations are fp8


def kept(fmt: str, *shape: int, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    w = torch.randn(shape) * shape[-1] ** -0.5
    if fmt == "bf16":
        return w.to(torch.bfloat16).to(DEVICE), None
    kind, _, group = fmt.partition("-")
    q, scale = quant.quantize(w, quant.parse_format("int4" if group else kind, int(group) if group else None))
    if kind == "pairs":
        q, scale = int4.pack_pairs(quant.unpack_int4(q), scale, gated)
    return q.to(DEVICE), scale.to(DEVICE)


def rows_of(fmt: str, x: torch.Tensor) -> Rows:
    return Rows(*quant.quantize_tokens(x)) if fmt in EIGHT else Rows(x)


def tokens(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width).to(torch.bfloat16).to(DEVICE)


def routing_for(count: int, k: int, experts: int, block: int) -> tuple[Routing, torch.Tensor]:
    index = torch.rand(count, experts).topk(k).indices.to(DEVICE)
    return route(index, experts, block), torch.rand(count * k, device=DEVICE) + 0.1


def error(a: Rows, b: Rows) -> float:
    return float((a.wide().double() - b.wide().double()).norm() / b.wide().double().norm())


def same(x: Rows, w: torch.Tensor, scale: torch.Tensor | None, tile: Tile | None = None, **how) -> None:
    """Both round sums to bfloat16, which may fall either way; then a quantised result may be one step of fp8 off."""
    found = product_triton.product(x, w, scale, tile=tile, **how)
    expected = product.product(x, w, scale, **how)
    assert found.values.shape == expected.values.shape
    assert found.values.dtype == expected.values.dtype
    assert error(found, expected) < (1e-2 if how.get("quantise") else 4e-3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 128), (40, 192, 256), (17, 320, 128)])
def test_dense(fmt: str, gated: bool, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x = rows_of(fmt, tokens(rows, inputs))
    same(x, *kept(fmt, outputs * (1 + gated), inputs, gated=gated), gated=gated, quantise=gated and fmt == "fp8")


@pytest.mark.parametrize("fmt", FORMATS[:3])
@pytest.mark.parametrize("outputs", [40, 100])
def test_outputs_that_fill_no_tile(fmt: str, outputs: int) -> None:
    torch.manual_seed(1)
    same(rows_of(fmt, tokens(5, 128)), *kept(fmt, outputs, 128))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", [16, 32])
def test_by_expert(fmt: str, block: int) -> None:
    torch.manual_seed(2)
    routing, share = routing_for(30, 3, 5, block)
    up = kept(fmt, 5, 256, 192, gated=True)
    same(rows_of(fmt, tokens(30, 192)), *up, gated=True, quantise=fmt == "fp8", routing=routing)
    same(rows_of(fmt, tokens(90, 128)), *kept(fmt, 5, 256, 128), routing=routing, share=share)


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("fmt", ["fp8", "pairs-64"])
def test_experts_with_few_rows_take_half_a_tile(fmt: str, rows: int) -> None:
    torch.manual_seed(6)
    many = rows * 5 // 4
    routing, share = routing_for(many, 2, 5, rows)
    sizes = routing.table[2] - routing.table[1]
    assert (sizes > rows // 2).any()
    assert ((sizes > 0) & (sizes <= rows // 2)).any()
    x, w = rows_of(fmt, tokens(many, 256)), kept(fmt, 5, 128, 256, gated=True)
    same(x, *w, gated=True, routing=routing, tile=Tile(rows, 64, 4, 2, half=True, turns=2))
    same(rows_of(fmt, tokens(2 * many, 128)), *kept(fmt, 5, 128, 128), routing=routing, share=share,
         tile=Tile(rows, 128, 4, 2, half=True))  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS[:3])
@pytest.mark.parametrize(("more", "counts"), [(16, [20, 32, 33, 47, 48, 60]), (32, [20, 32, 33, 48, 49, 70])])
def test_rows_beside_the_tile(fmt: str, more: int, counts: list[int]) -> None:
    """Blocks as tiles of 32 and some more: experts with fewer than 32 rows, with up to half of those more, with up to
    all of them, and beyond."""
    torch.manual_seed(8)
    index = torch.arange(6).repeat_interleave(torch.tensor(counts))[torch.randperm(sum(counts))].view(-1, 2).to(DEVICE)
    routing, share = route(index, 6, 32 + more), torch.rand(index.numel(), device=DEVICE) + 0.1
    assert (routing.table[0] >= 0).sum() == 7
    tile = Tile(32, 64, 4, 2, more=more)
    x, up = rows_of(fmt, tokens(len(index), 192)), kept(fmt, 6, 200, 192)
    same(x, *up, gated=True, routing=routing, tile=tile)
    hidden, down = rows_of(fmt, tokens(index.numel(), 64)), kept(fmt, 6, 128, 64)
    same(hidden, *down, routing=routing, share=share, tile=tile)
    if DEVICE.type == "cuda":  # the interpreter leaves the order of sums to numpy
        found = product_triton.product(x, *up, gated=True, routing=routing, tile=tile).values
        small = product_triton.product(x, *up, gated=True, routing=route(index, 6, 16), tile=Tile(16, 64, 4, 2)).values
        assert torch.equal(found, small)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_tile_gives_the_same(fmt: str) -> None:
    torch.manual_seed(3)
    x, w = rows_of(fmt, tokens(50, 256)), kept(fmt, 256, 256, gated=True)
    wide = 64 if fmt.startswith("pairs") else 128  # which is what a byte of two weights was packed for
    for tile in (Tile(16, 64, 4, 2), Tile(32, wide, 8, 3, turns=2), Tile(64, 64, 4, 1)):
        same(x, *w, tile=tile, gated=True, quantise=fmt == "fp8")
        if DEVICE.type == "cuda":  # the interpreter leaves the order of sums to numpy
            first = product_triton.product(x, *w, tile=Tile(16, 64, 4, 2), gated=True).values
            assert torch.equal(product_triton.product(x, *w, tile=tile, gated=True).values, first)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_the_others(fmt: str) -> None:
    torch.manual_seed(4)
    x, w = tokens(20, 128), kept(fmt, 128, 128)
    together = product_triton.product(rows_of(fmt, x), *w, tile=Tile(16, 128, 4, 2)).values
    alone = product_triton.product(rows_of(fmt, x[7:8]), *w, tile=Tile(16, 128, 4, 2)).values
    assert torch.equal(together[7:8], alone)


def test_large_and_tiny_scales_survive_four_bits() -> None:
    torch.manual_seed(5)
    q = torch.randint(-8, 8, (128, 128), dtype=torch.int8)
    for size in (1e-30, 1e-6, 300.0):
        pairs, scale = int4.pack_pairs(q, torch.full((128, 2), size).to(torch.bfloat16), False)
        same(rows_of("pairs-64", tokens(16, 128)), pairs.to(DEVICE), scale.to(DEVICE))


def test_what_a_card_makes_of_a_byte() -> None:
    """The interpreter does not see the instructions that unpack: they are done here, for every byte, beside others."""
    byte = torch.arange(256)
    beside = torch.stack((byte, byte.flip(0), byte * 73 % 256, byte ^ 0x5A), dim=1).to(torch.uint8)
    registers = {"$2": beside.view(torch.int32).long() & 0xFFFFFFFF}
    do = {
        "and.b32": lambda a, b: a & b,
        "shr.u32": lambda a, b: a >> b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
    }
    lines = re.findall(r"(\S+) (\S+), (.*);", str(int4_triton.HALVES.value))
    assert len(lines) == 1 + 7
    for name, target, given in lines[1:]:
        numbers = (registers[part] if part in registers else int(part, 0) for part in given.split(", "))
        registers[target] = do[name](*numbers) & 0xFFFFFFFF
    halves = [registers[name].int().view(torch.uint8).view(quant.FP8).float() * 256 for name in ("$0", "$1")]
    wanted = [nibble >> 1 ^ -(nibble & 1) for nibble in ((beside & 15).to(torch.int8), (beside >> 4).to(torch.int8))]
    assert [h.tolist() for h in halves] == [w.tolist() for w in wanted]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_small_integers_are_summed_exactly_in_four_bits(group: int, few: bool) -> None:
    """Also on tensor cores, which keep some 14 bits of a sum of fp8 products"""
    torch.manual_seed(9)
    q = torch.randint(-8, 8, (256, 192), dtype=torch.int8)
    scale = 2.0 ** torch.randint(-10, -7, (256, 192 // group))
    w = [part.to(DEVICE) for part in int4.pack_pairs(q, scale, False)]
    x = Rows(torch.randint(-3, 4, (3 if few else 20, 192)).to(quant.FP8).to(DEVICE), torch.ones(20, 1, device=DEVICE))
    out = few_triton.few(x, *w) if few else product_triton.product(x, *w).values
    exact = x.values.double() @ (q.unflatten(-1, (-1, group)) * scale[..., None].double()).flatten(-2).t().to(DEVICE)
    assert torch.equal(out, exact.to(torch.bfloat16))


@pytest.mark.parametrize("fmt", EIGHT)
def test_rows_are_rounded_where_the_weight_wants_it(fmt: str) -> None:
    torch.manual_seed(7)
    x, w = tokens(5, 128), kept(fmt, 128, 128)
    assert error(product_triton.product(Rows(x), *w), product.product(rows_of(fmt, x), *w)) < 4e-3


def test_says_why_it_cannot_run(monkeypatch) -> None:
    w = torch.zeros(100, 128, dtype=torch.bfloat16)
    assert product_triton.supported(DEVICE, w, 128) is None
    assert "weights of torch.float64" in str(product_triton.supported(DEVICE, w.double(), 128))
    assert "multiple of 16 inputs" in str(product_triton.supported(DEVICE, w, 120))
    assert "weights of torch.int32" in str(product_triton.supported(DEVICE, w.int(), 128))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "need a CUDA device" in str(product_triton.supported(torch.device("cpu"), w, 128))
