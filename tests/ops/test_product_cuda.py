"""Products in CUDA C++. There is no interpreter for it, so here they are compiled, for a card that is not there, and a
model of who waits for whom is run; their numbers are compared on a card, bit for bit: `scripts/check_ops.py` ("as by
Triton") and `scripts/bench_products.py`."""

from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.ops import few_triton, kernels, nvrtc, product_cuda, product_triton
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product_cuda import MEASURED, Tile, kernel_of, tile_for, unfit
from diffusiongemma.ops.quant import FP8
from ops.hopper import Machine
from ops.stream_model import Barrier, Part, in_any_order, wait

TILES = sorted({tile for known in MEASURED.values() for _, tile in known})
BF16 = torch.bfloat16
CARD = torch.device("cuda")


@pytest.fixture
def _cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these kernels ran here"""
    monkeypatch.setattr(kernels, "cpp", lambda device: True)


# ---- the machine's code ------------------------------------------------------------------------------------------


def name_of(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, Tile) else str(value)


@pytest.mark.parametrize("tile", TILES, ids=name_of)
def test_compiles_for_hopper(tile: Tile) -> None:
    kernel = kernel_of(tile)
    made = Machine.of(kernel.code())
    assert made.local == 0, "numbers go to memory for want of registers"
    assert made.count("LDL", "STL") == 0
    assert -(-made.registers // 8) * 8 * tile.threads <= 1 << 16
    assert kernel.shared + made.shared <= 228 << 10, "with what the system has of each program"
    products = [line.split()[0] for line in made.code if "GMMA." in line]
    assert products
    assert len(products) % 4 == 0, "a stage is four of them"
    assert set(products) == {f"QGMMA.64x{tile.outputs}x32.F32.E4M3.E4M3"}
    waits = sum("WARPGROUP.DEPBAR" in line for line in made.code)
    assert waits <= len(products) // 4 + 1, "the tensor cores wait after every product"
    assert made.count("MEMBAR") == 0, "who brings waits for the whole card"
    assert made.count("UTMALDG") > 2
    assert made.count("ACQBULK") == 2, "every part waits by itself for the launch before"
    assert made.count("PREEXIT") == 1


def test_what_is_spilled_or_fenced_would_be_seen() -> None:
    """Of the same compiler and the same tools"""
    text = """
    extern "C" __global__ void __launch_bounds__(1024) kernel(float* x) {
        float all[99];
        for (int i = 0; i < 99; ++i) all[i] = x[i * threadIdx.x];
        __threadfence();
        for (int i = 0; i < 99; ++i) x[i] = all[static_cast<int>(all[i]) % 99];
    }
    """
    made = Machine.of(nvrtc.compiled(text, ()))
    assert made.local >= 4 * 99
    assert made.count("LDL", "STL") >= 99
    assert made.count("MEMBAR") == 1
    assert made.registers > 8


@pytest.mark.parametrize("tile", TILES, ids=name_of)
def test_what_the_launch_before_writes_is_read_when_it_has_ended(tile: Tile) -> None:
    """The scales of the two rows of a thread"""
    code = Machine.of(kernel_of(tile).code()).code
    found = list[Counter[str]]()  # loads behind each wait, and what ended them: products, copies, the program
    for line in code:
        name = line.split()[0]
        if name == "ACQBULK":
            found.append(Counter())
        elif found and not found[-1]["end"]:
            found[-1].update(["load"] if name.startswith("LDG.") else [])
            assert "CONSTANT" not in name, "what was just written is read as if it had always been there"
            found[-1].update(["end"] if re.match(r".GMMA|UTMALDG|EXIT|STG", name) else [])
    assert sorted(each["load"] for each in found) == [0, 2]


@pytest.mark.parametrize("tile", [*TILES, *(Tile(64, outputs, 4) for outputs in range(8, 257, 8))], ids=name_of)
def test_eight_rows_of_a_result_lie_in_different_banks(tile: Tile) -> None:
    assert tile.pitch % 16 == 0
    assert 2 * tile.outputs <= tile.pitch < 2 * tile.outputs + 64
    banks = [(row * tile.pitch // 4 + word) % 32 for row in range(8) for word in range(4)]
    assert len(set(banks)) == 32


@pytest.mark.parametrize("tile", TILES, ids=name_of)
def test_ring_and_result_fit(tile: Tile) -> None:
    ring = tile.stages * (tile.rows + tile.outputs) * 128
    assert tile.shared >= 1023 + ring, "which begins at a multiple of 1,024"
    assert tile.shared >= 1023 + tile.rows * tile.pitch
    assert (tile.rows + tile.outputs) * 128 % 1024 == 0, "eight swizzled lines begin there, in every stage"
    assert tile.rows * 128 % 1024 == 0
    assert tile.outputs <= 256, "the widest product"
    assert tile.stages >= 2


# ---- compiling ---------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"does not compile.*\n.*error: identifier \"unheard_of\" is undefined"):
        nvrtc.compiled('extern "C" __global__ void kernel() { unheard_of(); }', ())


def test_names_are_defined_before_the_source() -> None:
    text = '#if THIS != 3\n#error another\n#endif\nextern "C" __global__ void KERNEL() {}'
    assert b"found_here" in nvrtc.compiled(text, (("THIS", 3), ("KERNEL", "found_here")))
    with pytest.raises(RuntimeError, match="another"):
        nvrtc.compiled(text, (("THIS", 4), ("KERNEL", "found_here")))


@pytest.mark.usefixtures("_cpp")
def test_where_kernels_are_compiled_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, compiled, loaded = list[int](), nvrtc.compiled, list[int]()
    monkeypatch.setattr(nvrtc, "compiled", lambda text, names: asked.append(dict(names)["BN"]) or compiled(text, names))
    monkeypatch.setattr(nvrtc.Kernel, "_function", lambda self, device: loaded.append(device))
    x, w, scale = fp8(66, 256), torch.zeros(200, 256).to(FP8), torch.ones(200, 1)
    token = kernels._compile_only.set(True)
    try:
        made = product_cuda.product(x, w, scale, TILES[0])
    finally:
        kernels._compile_only.reset(token)
    assert asked == [TILES[0].outputs]
    assert loaded == []
    assert made.shape == (66, 200)
    assert made.dtype == BF16


def test_a_kernel_is_compiled_once() -> None:
    kernel = kernel_of(TILES[0])
    assert kernel_of(Tile(*TILES[0])) is kernel
    assert kernel.code() is kernel.code()
    assert replace(kernel).code() is kernel.code(), "the code is known by what it is made of"


# ---- whether they can run ----------------------------------------------------------------------------------------


def lacks(what: str) -> Any:
    def version() -> Any:
        raise RuntimeError(what)

    return version


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (SimpleNamespace(nvrtcVersion=lambda: (0, 12, 3)), None),
        (SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)), None),
        (SimpleNamespace(nvrtcVersion=lambda: (0, 12, 2)), "they need NVRTC 12.3 or newer, here is 12.2"),
        (SimpleNamespace(nvrtcVersion=lambda: (0, 9, 9)), "they need NVRTC 12.3 or newer, here is 9.9"),
        (SimpleNamespace(nvrtcVersion=lambda: (7, 12, 9)), "NVRTC answers 7"),
        (SimpleNamespace(nvrtcVersion=lacks("no libnvrtc")), "cuda-bindings and NVRTC .* not to be had: no libnvrtc"),
        (None, "cuda-bindings and NVRTC .* not to be had: .*cuda"),
    ],
)
def test_why_there_are_no_kernels_in_cuda(library: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "card", lambda device: kernels.Card((9, 0), 227 << 10, 132))
    monkeypatch.setattr(kernels, "current", lambda device: nullcontext())
    monkeypatch.setattr(nvrtc, "probe", lambda device: None)
    bindings = None if library is None else SimpleNamespace(nvrtc=library)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    told = kernels.cpp_unavailable(CARD)
    if reason is None:
        assert told is None
    else:
        assert re.search(reason, str(told))


def test_the_library_of_this_machine_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "card", lambda device: kernels.Card((9, 0), 227 << 10, 132))
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    assert kernels.cpp_unavailable(CARD) == "CUDA C++ has no interpreter"
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    assert kernels.cpp_unavailable(torch.device("meta")) is None
    assert kernels.cpp_unavailable(torch.device("cpu")) == "CUDA C++ has no interpreter"


def test_a_driver_that_takes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be older than NVRTC; then others do the work, and no request ends with an error."""
    tried = list[torch.device]()

    def probe(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("cuda.bindings.driver answers CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(kernels, "card", lambda device: kernels.Card((9, 0), 227 << 10, 132))
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "current", lambda device: nullcontext())
    monkeypatch.setattr(nvrtc, "probe", probe)
    told = kernels.cpp_unavailable(CARD)
    assert told is not None
    assert told.startswith("the driver does not take what NVRTC makes: cuda.bindings.driver answers")
    assert tried == [CARD]
    monkeypatch.setattr(nvrtc, "probe", tried.append)
    assert kernels.cpp_unavailable(CARD) is None


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_cards_do_without_and_the_log_says_so_once(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "card", lambda device: kernels.Card(capability, 99 << 10, 128))
    kernels.cpp.cache_clear()
    try:
        with caplog.at_level("INFO"):
            assert not any(kernels.cpp(CARD) for _ in ("one product", "another"))
    finally:
        kernels.cpp.cache_clear()
    said = f"others do their work: they are laid out for Hopper (9.0), this card has {kernels.dotted(capability)}"
    assert caplog.text.count(said) == 1


# ---- which products are theirs -----------------------------------------------------------------------------------


def fp8(rows: int, inputs: int) -> Rows:
    return Rows(torch.zeros(rows, inputs).to(FP8), torch.ones(rows, 1))


def bare(rows: int, inputs: int, dtype: torch.dtype = FP8) -> Tensor:
    """A weight without numbers"""
    return torch.empty(rows, inputs, dtype=dtype, device="meta")


def meta(rows: int, inputs: int) -> Rows:
    return Rows(bare(rows, inputs), torch.empty(rows, 1, device="meta"))


@pytest.mark.usefixtures("_cpp")
def test_what_does_not_fit() -> None:
    x, w = fp8(8, 128), torch.zeros(24, 128).to(FP8)
    wide = torch.zeros(8, 128, dtype=BF16)
    assert unfit(x, w) is None
    assert unfit(Rows(wide), w.to(BF16)) == "no kernel for torch.bfloat16 times torch.bfloat16"
    assert unfit(x, w.to(BF16)) == "no kernel for torch.float8_e4m3fn times torch.bfloat16"
    assert unfit(Rows(torch.zeros(8, 160).to(FP8)[:, :128], x.scale), w) is None, "rows further apart"
    assert unfit(Rows(wide), w) == "no kernel for torch.bfloat16 times torch.float8_e4m3fn"
    assert unfit(Rows(wide.to(torch.int8)), w.float().to(torch.int8)) == "no kernel for torch.int8 times torch.int8"
    assert unfit(x, w[None]) == "no kernel for torch.float8_e4m3fn times torch.float8_e4m3fn"
    for scale in (None, torch.ones(8, 2)):
        assert unfit(Rows(x.values, scale), w) == "rows in fp8 have one scale each"
    together = "the numbers of a row lie together"
    assert unfit(Rows(torch.zeros(128, 8).to(FP8).t(), x.scale), w) == together
    assert unfit(x, torch.zeros(128, 24).to(FP8).t()) == together
    assert unfit(x, torch.zeros(24, 256).to(FP8)[:, :128]) == together
    begin = "rows begin at multiples of 16 bytes"
    assert unfit(Rows(torch.zeros(8, 136).to(FP8)[:, :128], x.scale), w) == begin
    assert unfit(Rows(torch.zeros(8, 160).to(FP8)[:, 8:136], x.scale), w) == begin
    assert unfit(fp8(8, 72), torch.zeros(24, 72).to(FP8)) == begin
    assert unfit(x, torch.zeros(24 * 128 + 8).to(FP8)[8:].view(24, 128)) == begin
    assert unfit(fp8(8, 192), torch.zeros(24, 192).to(FP8)) == "sums are made 128 numbers at a time"
    assert unfit(x, w[:20]) == "a row of the result is written 8 numbers at a time"


def test_nothing_fits_where_they_do_not_run() -> None:
    assert unfit(fp8(8, 128), torch.zeros(24, 128).to(FP8)) == "there are no kernels in CUDA C++ here"
    assert tile_for(fp8(256, 4096), bare(2816, 4096)) is None
    with pytest.raises(AssertionError, match="no kernels in CUDA"):
        product_cuda.product(fp8(8, 128), torch.zeros(24, 128).to(FP8), torch.ones(24, 1), TILES[0])


BEHIND = {65: (64, 88, 8), 256: (64, 88, 8), 385: (128, 88, 8), 512: (128, 88, 8), 897: (128, 176, 5),
          1024: (128, 176, 5), 1921: (128, 176, 5), 2048: (128, 176, 5)}  # fmt: skip
SLIDING = dict.fromkeys((129, 256), (128, 128, 5))
FULL = {129: (128, 144, 5), 256: (128, 144, 5), 257: (128, 256, 4), 384: (128, 256, 4), 385: (128, 144, 5),
          512: (128, 144, 5)}  # fmt: skip
NEITHER = (1, 64, 513, 896, 1025, 1920, 2049, 4096)


@pytest.mark.usefixtures("_cpp")
@pytest.mark.parametrize(
    ("inputs", "outputs", "known", "none"),
    [
        (4096, 2816, BEHIND, (*NEITHER, 257, 384)),  # behind the attention of a sliding layer
        (8192, 2816, BEHIND, (*NEITHER, 257, 384)),  # … and of a full one
        (2816, 8192, SLIDING, (*NEITHER, 128, 257, 512, 1024, 2048)),  # queries, keys and values of a sliding layer
        (2816, 9216, FULL, (*NEITHER, 128, 1024, 2048)),  # … and of a full one
        (2816, 4096, {}, (*BEHIND, *FULL)),
        (2112, 2816, {}, (*BEHIND, *FULL)),
    ],
)
def test_which_products_have_a_tile(
    inputs: int, outputs: int, known: dict[int, tuple[int, int, int]], none: tuple[int, ...]
) -> None:
    w = bare(outputs, inputs)
    assert {rows: tile_for(meta(rows, inputs), w) for rows in known} == known
    assert {tile_for(meta(rows, inputs), w) for rows in none} == {None}
    for rows in known:
        assert tile_for(Rows(bare(rows, inputs, BF16)), bare(outputs, inputs, BF16)) is None, "another format"
        assert tile_for(Rows(bare(rows, inputs, BF16)), w) is None
        assert tile_for(meta(rows, inputs), w[None]) is None


@pytest.mark.usefixtures("_cpp")
def test_operations_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in slim programs, not of a few rows, and not where it is switched off"""
    ways, taken = [triton_ops(), triton_ops(exact=True)], list[str]()  # what they import must not see the stand-ins
    for module, name in ((product_cuda, "product"), (product_triton, "product"), (few_triton, "few")):
        told = f"{module.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(module, name, lambda *args, told=told, **_: taken.append(told) or Rows(torch.zeros(1)))

    def way(ops: Ops, rows: int, **options: Any) -> list[str]:
        taken.clear()
        ops.linear(meta(rows, 4096), (bare(2816, 4096), torch.ones(2816, 1)), **options)
        return list(taken)

    for ops in ways:
        assert way(ops, 256) == ["product_cuda.product"]
        assert way(ops, 256, slim=True) == ["product_triton.product"]
        assert way(ops, 300) == ["product_triton.product"]
    assert way(ways[0], 1) == ["few_triton.few"]
    assert way(triton_ops(cpp=False), 256) == ["product_triton.product"]


# ---- who waits for whom ------------------------------------------------------------------------------------------


class Full(Barrier):
    """One arrival, and so many copies as it was told of"""

    def __init__(self) -> None:
        super().__init__(1)
        self.missing = 0

    def expect(self, copies: int) -> None:
        assert self.missing == 0 < self.pending, "more arrivals than a phase has"
        self.missing, self.pending = copies, 0

    def landed(self) -> None:
        assert self.missing > 0, "a copy that nobody expects"
        self.missing -= 1
        if self.missing == 0:
            self.pending, self.phase = 1, self.phase ^ 1


class Program:
    """Of `product.cu`: its parts as generators; copies land when they like, and the launch before ends when it likes.
    `fault`: what is done otherwise than there."""

    def __init__(self, steps: int, stages: int, groups: int, fault: str = "") -> None:
        self.steps, self.stages, self.groups, self.fault = steps, stages, groups, fault
        self.full = [Full() for _ in range(stages)]
        self.empty = [Barrier(1 if fault == "one for all" else groups) for _ in range(stages)]
        self.holds = {name: [-1] * stages for name in "xw"}
        self.readers = [list[tuple[int, int]]() for _ in range(stages)]  # groups, and the step they are at
        self.through = Barrier(groups)
        self.flying, self.ended, self.put = 0, False, list[int]()
        self.parts: list[Part] = [self.before(), self.bring(), *map(self.sum_up, range(groups))]

    def before(self) -> Part:
        for _ in range(9):
            yield
        self.ended = True

    def wait_before(self) -> Part:
        while not self.ended:
            yield

    def fetch(self, what: str, at: int, step: int) -> None:
        def fly() -> Part:
            yield
            assert what == "w" or self.ended, "rows that are not there yet"
            assert not self.readers[at], "overwritten while it is read"
            self.holds[what][at] = step
            self.flying -= 1
            self.full[at].landed()

        self.flying += 1
        self.parts.append(fly())

    def bring(self) -> Part:
        ahead = min(self.steps, self.stages)
        for s in range(ahead):
            self.full[s].expect(2)
            self.fetch("w", s, s)
            yield
        yield from self.wait_before()
        for s in range(ahead):
            self.fetch("x", s, s)
            yield
        for s in range(ahead, self.steps):
            at = s % self.stages
            if self.fault != "nobody waits":
                yield from wait(self.empty[at], (s // self.stages + 1) & 1)
            self.full[at].expect(2)
            yield
            for what in "wx":
                self.fetch(what, at, s)
                yield

    def sum_up(self, group: int) -> Part:
        yield from self.wait_before()
        at, turn = 0, 0
        for s in range(self.steps):
            yield from wait(self.full[at], turn)
            assert self.holds["x"][at] == self.holds["w"][at] == s, "a stage holds something else"
            self.readers[at].append((group, s))
            yield
            last = at - 1 if at > 0 else self.stages - 1
            if s > 0:
                self._read(last, group, s - 1)
            yield
            if self.fault == "too soon":
                self.empty[at].arrive()
            elif s > 0:
                self.empty[last].arrive()
            at += 1
            if at == self.stages:
                at, turn = 0, turn ^ 1
            yield
        self._read(at - 1, group, self.steps - 1)
        yield
        if self.fault != "nobody waits for the others":
            self.through.arrive()
            yield from wait(self.through, 0)
        assert self.flying == 0, "a copy would overwrite the result"
        assert not any(self.readers), "the ring is still read"
        self.put.append(group)

    def _read(self, at: int, group: int, step: int) -> None:
        """Products of a step have ended"""
        assert self.holds["x"][at] == self.holds["w"][at] == step, "overwritten while it is read"
        self.readers[at].remove((group, step))


def run(program: Program, seed: int, patience: int = 100_000) -> None:
    in_any_order(program.parts, seed, patience)
    assert sorted(program.put) == list(range(program.groups))


@settings(max_examples=150, deadline=None)
@given(steps=st.integers(1, 20), stages=st.integers(2, 8), groups=st.integers(1, 2), seed=st.integers(0, 1000))
@example(steps=22, stages=8, groups=1, seed=0)
@example(steps=64, stages=5, groups=2, seed=0)
def test_the_work_ends_in_any_order(steps: int, stages: int, groups: int, seed: int) -> None:
    run(Program(steps, stages, groups), seed)


@pytest.mark.parametrize(
    ("fault", "groups", "told"),
    [
        ("too soon", 1, "overwritten while it is read"),
        ("one for all", 2, "more arrivals than a phase has|overwritten while it is read|holds something else"),
        ("nobody waits", 1, "overwritten while it is read|more arrivals|holds something else"),
        ("nobody waits for the others", 2, "the ring is still read"),
    ],
)
def test_other_ways_would_not_do(fault: str, groups: int, told: str) -> None:
    with pytest.raises(AssertionError, match=told):  # noqa: PT012
        for seed in range(100):
            run(Program(9, 3, groups, fault=fault), seed)


def test_a_ring_of_one_stage_would_not_end() -> None:
    """It is told to be empty when the next is multiplied."""
    run(Program(1, 1, 1), 0)
    with pytest.raises(AssertionError, match="everybody waits"):
        run(Program(2, 1, 1), 0, patience=1000)
