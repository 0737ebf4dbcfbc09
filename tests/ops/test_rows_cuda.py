"""Norms in CUDA C++ behind attention and behind the experts. Here they are compiled for a card that is not there, and
their arithmetic is run on the CPU, by threads that take turns (`on_cpu.py`); what a card makes of it, and how fast, is
`scripts/bench_rows.py` and, in a layer, `scripts/bench_layers.py`."""

from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusiongemma.model.backend import triton_ops
from diffusiongemma.ops import fused, kernels, norm_triton, nvrtc, rows_cuda
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.norm_triton import KEPT
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.rows_cuda import after_attention, after_feed_forward, kernel_of, threads_for, unfit
from ops.hopper import Machine
from ops.on_cpu import COMPILER, OnCpu, Stuck
from scripted import load_script

script = load_script("bench_rows")

import exact_small  # noqa: E402  # beside the script, which has made it found
from exact_limits import judge  # noqa: E402
from exact_shapes import Inputs  # noqa: E402

WIDTH, EPS, BF16 = 2816, 1e-6, torch.bfloat16
WIDTHS = (72, 256, 2816, 4352, 8192)  # within a warp, in whole warps, in more than 16, and the widest
REGISTERS = 1 << 16  # of a multiprocessor
Given = dict[str, Any]


@pytest.fixture
def _cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these kernels ran here"""
    monkeypatch.setattr(kernels, "cpp", lambda device: True)


# ---- the machine's code ------------------------------------------------------------------------------------------


@cache
def machine(many: int, quant: bool = True, width: int = WIDTH, **options: bool) -> Machine:
    return Machine.of(kernel_of(width, many, quant, **options).code())


def split(code: Sequence[str]) -> tuple[list[str], list[str]]:
    """Instructions before the wait for the launch before, and behind it"""
    at = [i for i, line in enumerate(code) if line.startswith("ACQBULK")]
    assert len(at) == 1
    return list(code[: at[0]]), list(code[at[0] + 1 :])


def loads(code: list[str]) -> list[str]:
    return [line for line in code if line.startswith("LDG")]


@pytest.mark.parametrize("quant", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("many", [0, 1, 3, 8])
def test_compiles_for_hopper(many: int, quant: bool) -> None:
    made = machine(many, quant)
    assert made.local == 0, "numbers go to memory for want of registers"
    assert made.count("LDL", "STL") == 0
    assert 2 * -(-made.registers // 8) * 8 * threads_for(WIDTH) <= REGISTERS, "two programs fit on a multiprocessor"
    assert made.count("MEMBAR") == 0
    assert made.count("BAR") == (2 if many == 0 else 3) + quant, "one barrier an exchange"
    assert made.count("PREEXIT") == 1
    assert made.count("CALL") == 0, "a root or a division takes its slow way"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("many", [0, 8])
def test_nothing_is_spilled_at_other_widths(many: int, width: int) -> None:
    made = machine(many, width=width)
    assert made.local == 0
    assert made.count("LDL", "STL") == 0
    assert -(-made.registers // 8) * 8 * threads_for(width) <= REGISTERS


@pytest.mark.parametrize("many", [0, 1, 8])
def test_weights_are_asked_for_before_the_wait_and_rows_behind_it(many: int) -> None:
    before, behind = split(machine(many).code)
    weights = ["LDG.E.128.CONSTANT"] * (3 if many == 0 else 4) + ["LDG.E.U16.CONSTANT"] * (many > 0)
    assert sorted(line.split()[0] for line in loads(before)) == sorted(weights)
    assert not [line for line in before if line.startswith("STG")]
    assert all("CONSTANT" not in line for line in loads(behind)), "what was just written is read as if a constant"
    assert [line.split()[0] for line in loads(behind)] == ["LDG.E.128.STRONG.GPU"] * (2 + many)


@pytest.mark.parametrize("many", [0, 1, 8])
def test_all_rows_are_asked_for_before_the_first_is_used(many: int) -> None:
    _, behind = split(machine(many).code)
    into = [line.split()[1].rstrip(",") for line in loads(behind)]
    assert len(set(into)) == len(into) == 2 + many, "one waits until another has been used"
    last = max(i for i, line in enumerate(behind) if line.startswith("LDG"))
    used = [i for i, line in enumerate(behind) if line.split()[0].split(".")[0] in ("FADD", "FMUL", "FFMA", "SHFL")]
    assert last < min(used)


@pytest.mark.parametrize("eager", [True, False])
def test_what_follows_is_launched_at_its_time(eager: bool) -> None:
    before, behind = split(machine(0, eager=eager).code)
    at = before if eager else behind
    assert sum(line.startswith("PREEXIT") for line in at) == 1
    if not eager:
        assert [line.startswith(("PREEXIT", "LDG")) for line in behind].index(True) == next(
            i for i, line in enumerate(behind) if line.startswith("PREEXIT")
        ), "rows are asked for first"
    _, behind = split(machine(8).code)
    assert sum(line.startswith("PREEXIT") for line in behind) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_what_attention_left_is_kept(keep: bool) -> None:
    wide = [line.split()[0] for line in machine(0, keep=keep).code if line.startswith("STG") and "128" in line]
    assert wide == ["STG.E.EL.128" if keep else "STG.E.128"]
    plain = [line for line in machine(8).code if line.startswith("STG")]
    assert len(plain) == 3
    assert not [line for line in plain if ".EL" in line]


# ---- what the kernels are given ----------------------------------------------------------------------------------


def test_arguments_become_what_a_launch_takes() -> None:
    tensor = torch.zeros(3)
    kinds = {}
    for name, arg in {"none": None, "float": 1e-6, "int": 7, "tensor": tensor, "bool": True}.items():
        address, held = nvrtc._argument(arg)
        assert address == ctypes.addressof(held)
        kinds[name] = (type(held), held.value)
    assert kinds == {
        "none": (ctypes.c_void_p, None),
        "float": (ctypes.c_float, ctypes.c_float(1e-6).value),
        "int": (ctypes.c_int, 7),
        "tensor": (ctypes.c_void_p, tensor.data_ptr()),
        "bool": (ctypes.c_int, 1),
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, _cpp: None) -> list[tuple[str, Given, int, int, tuple[Any, ...]]]:
    """What would have been launched"""
    found = list[tuple[str, Given, int, int, tuple[Any, ...]]]()

    def run(self: nvrtc.Kernel, programs: int, threads: int, *args: Any) -> None:
        found.append((self.function, dict(self.names), programs, threads, args))

    monkeypatch.setattr(nvrtc.Kernel, "run", run)
    return found


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_arguments_behind_attention(launched: list[Any]) -> None:
    x, branch, *weights = meta(4, WIDTH), meta(4, WIDTH), *(meta(WIDTH) for _ in range(3))
    out, dense, sparse = after_attention(x, branch, *weights, 1e-5, FP8, eager=True)
    ((function, names, programs, threads, args),) = launched
    assert function == "after_attention_cuda_kernel"
    assert names == {"D": WIDTH, "M": 0, "FP8": 1, "KEEP": 1, "EAGER": 1}
    assert (programs, threads) == (4, 352)
    wanted = (x, branch, *weights, out, dense.values, dense.scale, sparse.values, sparse.scale, 1e-5)
    assert len(args) == len(wanted)
    assert all(got is want or got == want for got, want in zip(args, wanted, strict=True))
    assert (out.dtype, dense.values.dtype, sparse.values.dtype) == (BF16, FP8, FP8)
    assert dense.scale.shape == sparse.scale.shape == (4, 1)
    after_attention(x, branch, *weights, 1e-5)
    names, args = launched[1][1], launched[1][4]
    assert (names["FP8"], names["EAGER"]) == (0, 0)
    assert args[7] is None
    assert args[9] is None, "no scale"


def test_arguments_behind_the_experts(launched: list[Any]) -> None:
    x, dense, sparse = meta(4, WIDTH), meta(4, WIDTH), meta(32, WIDTH)
    weights, scalar, other, following = tuple(meta(WIDTH) for _ in range(3)), meta(1), meta(1), meta(WIDTH)
    out, rows = after_feed_forward(x, dense, sparse, weights, scalar, following, 1e-5, FP8, (3, other))
    ((function, names, programs, threads, args),) = launched
    assert function == "after_feed_forward_cuda_kernel"
    assert names == {"D": WIDTH, "M": 8, "FP8": 1, "KEEP": 0, "EAGER": 0}
    assert (programs, threads) == (4, 352)
    wanted = (x, dense, sparse, *weights, scalar, 3, other, following, out, rows.values, rows.scale, 1e-5)
    assert len(args) == len(wanted)
    assert all(got is want or got == want for got, want in zip(args, wanted, strict=True))
    after_feed_forward(x, dense, sparse[:4], weights, scalar, following, 1e-5)
    names, args = launched[1][1], launched[1][4]
    assert (names["M"], names["FP8"]) == (1, 0)
    assert args[7:9] == (0, None)
    assert args[12] is None


def test_some_rows_are_kept_and_none_need_no_launch(launched: list[Any]) -> None:
    weights = [meta(256) for _ in range(4)]
    for rows in (1, KEPT, KEPT + 1):
        after_attention(meta(rows, 256), meta(rows, 256), *weights[:3], EPS)
    assert [names["KEEP"] for _, names, *_ in launched] == [1, 1, 0]
    none = meta(0, 256)
    assert after_attention(none, none, *weights[:3], EPS)[0].shape == (0, 256)
    assert after_feed_forward(none, none, none, tuple(weights[:3]), meta(1), weights[3], EPS)[0].shape == (0, 256)
    assert len(launched) == 3


@pytest.mark.usefixtures("_cpp")
def test_where_kernels_are_compiled_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[int]()
    monkeypatch.setattr(nvrtc.Kernel, "_function", lambda self, device: loaded.append(device))
    x, weight = meta(2, 72), meta(72)
    token = kernels._compile_only.set(True)
    try:
        after_attention(x, x, weight, weight, weight, EPS, FP8)
    finally:
        kernels._compile_only.reset(token)
    assert loaded == []
    assert kernel_of(72, 0, True, keep=True) is kernel_of(72, 0, True, keep=True)


def test_a_program_is_whole_warps() -> None:
    assert [threads_for(width) for width in (8, 256, 264, 2816, 8192)] == [32, 32, 64, 352, 1024]


@pytest.mark.usefixtures("_cpp")
def test_what_does_not_fit() -> None:
    x, weight, scalar = torch.zeros(2, 72, dtype=BF16), torch.ones(72, dtype=BF16), torch.ones(1, dtype=BF16)
    pairs = torch.zeros(16, 72, dtype=BF16)
    assert unfit(x, (x, pairs), (weight, scalar)) is None
    assert unfit(x, (x, pairs), (weight, scalar), FP8) is None
    assert unfit(x, (x,), (weight,), torch.int8) == "no kernel rounds rows to torch.int8"
    no = "rows and weights are bfloat16, not torch.float32"
    assert unfit(x.float(), (x,), (weight,)) == no
    assert unfit(x, (x, pairs.float()), (weight,)) == no
    assert unfit(x, (x,), (weight, weight.float())) == no
    assert unfit(x, (x,), (weight, scalar.float())) == no
    assert unfit(meta(2, 76), (), ()) == "a thread has 8 numbers of a row"
    assert unfit(meta(2, 8192), (), ()) is None
    assert unfit(meta(2, 8200), (), ()) == "rows of 8200 numbers are too wide, 8192 is the most"
    assert unfit(x, (meta(18, 72),), ()) == "a token has 8 rows of experts at most"
    assert unfit(x, (x,), (torch.ones(144, dtype=BF16)[::2],)) == "the numbers of a weight lie together"
    begin, odd = "rows and weights begin at multiples of 16 bytes", torch.ones(148, dtype=BF16)[4:]
    assert unfit(odd.view(2, 72), (), ()) == begin
    assert unfit(x, (odd.view(2, 72),), ()) == begin
    assert unfit(x, (), (odd[:72],)) == begin
    assert unfit(x, (), (weight, odd[:1])) is None, "a scalar lies anywhere"
    assert unfit(torch.zeros(2, 80, dtype=BF16)[:, 4:76], (), ()) is None, "it is copied"


def test_nothing_fits_where_they_do_not_run() -> None:
    x, weight = torch.zeros(2, 72, dtype=BF16), torch.ones(72, dtype=BF16)
    assert unfit(x, (x,), (weight,)) == "there are no kernels in CUDA C++ here"
    with pytest.raises(AssertionError, match="no kernels in CUDA"):
        after_attention(x, x, weight, weight, weight, EPS)
    with pytest.raises(AssertionError, match="no kernels in CUDA"):
        after_feed_forward(x, x, x, (weight, weight, weight), weight[:1], weight, EPS)


@pytest.mark.usefixtures("_cpp")
def test_operations_take_them_where_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Triton's of what does not fit"""
    taken = list[str]()
    for module in (rows_cuda, norm_triton):
        for name in ("after_attention", "after_feed_forward"):
            told = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, name, lambda *args, told=told: taken.append(f"{told}, {len(args)} arguments"))
    weights = [meta(256) for _ in range(4)]

    def way(width: int = 256, quant: torch.dtype | None = FP8, **options: bool) -> list[str]:
        taken.clear()
        ops, x = triton_ops(**options), meta(2, width)
        ops.after_attention(x, x, *weights[:3], EPS, quant, eager=True)
        ops.after_feed_forward(x, x, meta(16, width), tuple(weights[:3]), meta(1), weights[3], EPS, quant, (1, meta(1)))
        return list(taken)

    ours, others = ([f"{name}, {n} arguments" for n in (8, 9)] for name in ("rows_cuda", "norm_triton"))
    assert way() == others, "off until they have been measured"
    assert way(norms=True) == way(norms=True, quant=None) == ours
    assert way(norms=True, cpp=False) == others
    assert way(norms=True, width=252) == others
    assert way(norms=True, quant=torch.int8) == others
    weights[2] = meta(256, dtype=torch.float32)
    assert way(norms=True) == others
    weights[2] = meta(256)
    x, other = meta(2, 256), (1, meta(1, dtype=torch.float32))
    triton_ops(norms=True).after_feed_forward(x, x, x, tuple(weights[:3]), meta(1), weights[3], EPS, FP8, other)
    assert taken[-1] == others[1], "the other scalar does not fit"


# ---- arithmetic, on the CPU --------------------------------------------------------------------------------------

INSTRUCTIONS = """
static void wait_before() {}
static void let_next() {}
static uint4 constants(const u16* p) { return *reinterpret_cast<const uint4*>(p); }
static u16 constant(const u16* p) { return *p; }
static uint4 written(const u16* p) { return *reinterpret_cast<const uint4*>(p); }
static void keep(u16* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }
static float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
static float reciprocal(float x) { return 1.0f / x; }
static u32 two_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 four_fp8(float a, float b, float c, float d) {
    return to_fp8(a) | to_fp8(b) << 8 | to_fp8(c) << 16 | to_fp8(d) << 24;
}
"""
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no g++")
Made = tuple[Any, ...]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, _cpp: None) -> OnCpu:
    """Kernels run here, and what they are to write holds NaN before"""
    found, empty, like = OnCpu(INSTRUCTIONS), torch.empty, torch.empty_like

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            out = make(*args, **options)
            out.view(torch.uint8).fill_(255)
            return out

        return made

    monkeypatch.setattr(nvrtc.Kernel, "run", lambda self, *args: found.run(self, *args))
    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(like))
    return found


def numbers(*shape: int, seed: int, std: float = 1.0, around: float = 0.0) -> Tensor:
    return (around + std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def behind_attention(rows: int, width: int) -> Made:
    """x, branch, weights"""
    weights = (numbers(width, seed=i, std=0.3, around=1.0) for i in range(3))
    return numbers(rows, width, seed=8, std=4.0), numbers(rows, width, seed=9, std=0.5), *weights


def behind_experts(rows: int, many: int, width: int) -> Made:
    """x, dense, sparse, weights, scalar, following"""
    *weights, following = (numbers(width, seed=i, std=0.3, around=1.0) for i in range(4))
    x, dense = numbers(rows, width, seed=8, std=4.0), numbers(rows, width, seed=9, std=0.5)
    scalar = torch.tensor([0.7], dtype=BF16)
    return x, dense, numbers(rows * many, width, seed=10, std=0.7), tuple(weights), scalar, following


def bits(made: Made) -> list[Tensor]:
    tensors = list[Tensor]()
    for one in made:
        tensors += [one] if isinstance(one, Tensor) else [one.values, *([] if one.scale is None else [one.scale])]
    return [t.view(torch.uint8) for t in tensors]


def same(one: Made, other: Made) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@compiles
@pytest.mark.parametrize("quant", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("width", WIDTHS)
def test_behind_attention_is_within_the_limits(cpu: OnCpu, width: int, quant: torch.dtype | None) -> None:
    x, branch, *weights = given = behind_attention(3, width)
    for made in (after_attention(*given, EPS, quant), fused.after_attention(*given, EPS, quant)):
        for part in exact_small.after_attention(made, x, branch, weights, EPS, quant):
            assert judge(part).good, (part.what, judge(part))


@compiles
@pytest.mark.parametrize("quant", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("width", "many"), [*((width, 8) for width in WIDTHS), (72, 1), (256, 3)])
def test_behind_the_experts_is_within_the_limits(cpu: OnCpu, width: int, many: int, quant: torch.dtype | None) -> None:
    given = behind_experts(3, many, width)
    for made in (after_feed_forward(*given, EPS, quant), fused.after_feed_forward(*given, EPS, quant)):
        for part in exact_small.after_feed_forward(made, *given, EPS, quant):
            assert judge(part).good, (part.what, judge(part))


@compiles
@pytest.mark.parametrize("quant", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("width", [72, WIDTH])
def test_a_row_has_the_same_bits_among_others_and_in_any_order(
    cpu: OnCpu, width: int, quant: torch.dtype | None
) -> None:
    attention, experts = behind_attention(5, width), behind_experts(5, 8, width)
    whole = after_attention(*attention, EPS, quant), after_feed_forward(*experts, EPS, quant)
    x, dense, sparse, *rest = experts
    alone = (
        after_attention(attention[0][3:4], attention[1][3:4], *attention[2:], EPS, quant),
        after_feed_forward(x[3:4], dense[3:4], sparse[24:32], *rest, EPS, quant),
    )
    for one, all_ in zip(alone, whole, strict=True):
        assert all(torch.equal(a, b[3:4]) for a, b in zip(bits(one), bits(all_), strict=True))
    cpu.backwards = True
    assert same(after_attention(*attention, EPS, quant), whole[0])
    assert same(after_feed_forward(*experts, EPS, quant), whole[1])


@compiles
@pytest.mark.parametrize("width", [256, 8192])
def test_numbers_that_need_no_rounding_are_rounded_once_to_fp8(cpu: OnCpu, width: int) -> None:
    """Rows of ±1 are normed already, so what a weight makes of them is exact: fp8 is as the definition has it, bit for
    bit, for weights of all sizes."""
    signs, zeros = numbers(3, width, seed=1).sign(), torch.zeros(3, width, dtype=BF16)
    signs[signs == 0] = 1
    two = torch.full((width,), 2.0, dtype=BF16)
    dense, sparse = numbers(width, seed=2), (numbers(width, seed=3).float() * torch.logspace(-9, 3, width)).to(BF16)
    made = after_attention(zeros, signs, two, dense, sparse, 0.0, FP8)
    assert torch.equal(made[0], 2 * signs)
    assert same(made[1:], (fused.norm_rows(signs, dense, 0.0, FP8), fused.norm_rows(signs, sparse, 0.0, FP8)))
    half, quarter = torch.tensor([0.5], dtype=BF16), torch.tensor([0.25], dtype=BF16)
    given = (zeros, signs, signs, (two, two, two), half, sparse, 0.0)
    for quant in (FP8, None):
        out, rows = after_feed_forward(*given, quant, (2, quarter))
        assert torch.equal(out, torch.cat([signs[:2], 0.5 * signs[2:]])), "from row 2 on the other scalar"
        assert same((rows,), (fused.norm_rows(signs, sparse, 0.0, quant),))
    assert torch.equal(after_feed_forward(*given, FP8)[0], signs)


@compiles
def test_the_other_scalar_begins_at_its_row(cpu: OnCpu) -> None:
    given, other = behind_experts(4, 2, 72), torch.tensor([1.3], dtype=BF16)
    one, two = (after_feed_forward(*given[:4], s, given[5], EPS)[0] for s in (given[4], other))
    assert not torch.equal(one, two)
    for first in range(5):
        out, _ = after_feed_forward(*given, EPS, None, (first, other))
        assert torch.equal(out, torch.cat([one[:first], two[first:]]))


@compiles
@pytest.mark.parametrize("many", [2, 8])
def test_experts_are_summed_in_order_and_rounded_as_if_stored(cpu: OnCpu, many: int) -> None:
    """… of numbers that leave something else in another order"""
    x, dense, sparse, *rest = behind_experts(3, many, 264)
    sparse[::many] *= 1e6
    sparse[1::many] = -sparse[::many]
    made = after_feed_forward(x, dense, sparse, *rest, EPS)
    assert same(made, after_feed_forward(x, dense, fused.summed(sparse, 3), *rest, EPS))
    if many > 2:
        turned = sparse.view(3, many, -1).flip(1).reshape(sparse.shape)
        assert not same(made, after_feed_forward(x, dense, turned, *rest, EPS))


@compiles
@pytest.mark.parametrize("quant", [None, FP8], ids=["bf16", "fp8"])
def test_rows_of_zeros_and_rows_that_are_lost(cpu: OnCpu, quant: torch.dtype | None) -> None:
    x, branch, *weights = behind_attention(3, 264)
    x[0] = branch[0] = 0
    branch[1, 260] = torch.nan
    out, *rows = after_attention(x, branch, *weights, EPS, quant)
    assert not out[0].any()
    assert out[1].isnan().all()
    for made in rows:
        assert not made.values[0].float().any()
        assert made.values[1].float().isnan().all()
        assert not made.values[2].float().isnan().any()
        if quant is not None:
            assert made.scale[0] == 1, "a scale of nothing is one"
            assert made.scale[1].isnan()
    alone = after_attention(x[2:], branch[2:], *weights, EPS, quant)
    assert same((out[2:], *(Rows(r.values[2:], None if r.scale is None else r.scale[2:]) for r in rows)), alone)


@compiles
@pytest.mark.parametrize(
    ("function", "old", "new", "width"),
    [
        ("attention", "    __syncthreads();\n", "", WIDTH),
        ("experts", "    __syncthreads();\n", "", WIDTH),
        ("experts", "squares(both));\n    __syncthreads();", "squares(both));", WIDTH),
        ("experts", "largest(y));\n        __syncthreads();", "largest(y));", WIDTH),
        ("attention", "    clear_slots();\n", "", WIDTH),
        ("attention", "sums[1]", "sums[0]", WIDTH),  # one place for two exchanges
        ("experts", "sums[1]", "sums[0]", WIDTH),
        ("attention", "in_row() ? sum : 0.0f", "sum", 72),
        ("experts", "in_row() ? sum : 0.0f", "sum", 72),
        ("experts", "if (!in_row()) one = two = 0.0f;", "", 72),
        ("attention", "apart > 0", "apart > 1", WIDTH),
        ("attention", "<SLOTS / 8>", "<SLOTS / 16>", WIDTH),
        ("experts", "s = wide(narrow(s));", "", WIDTH),
        ("attention", "Eight y = wide(out);", "Eight y = wide(before);", WIDTH),
        ("attention", "fmaf(fmaf(-near, s, wide), back, near)", "near", WIDTH),
        ("experts", "s < LEAST ? 1.0f : s", "2 * s", 72),
        ("experts", "at >= first", "at > first", 72),
    ],
)
def test_other_ways_would_not_do(cpu: OnCpu, function: str, old: str, new: str, width: int) -> None:
    """Each of these changes is seen: bits are others, or threads wait for each other for ever."""

    def made() -> Made:
        if function == "attention":
            return after_attention(*behind_attention(5, width), EPS, FP8)
        behind = 1, torch.tensor([1.3], dtype=BF16)
        return after_feed_forward(*behind_experts(5, 8, width), EPS, FP8, behind)

    right = made()
    cpu.changed = {old: new}
    try:
        wrong = made()
    except Stuck:
        return
    assert not same(wrong, right)


# ---- the script that compares them on a card ---------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("name", ["after_attention", "after_feed_forward"])
def test_the_script_finds_them_as_they_should_be(cpu: OnCpu, name: str) -> None:
    for quant in (None, FP8):
        case = script.Case(name, 17, 72, Inputs(torch.device("cpu")), quant=quant)
        good, told = case.check(script.ways_of(name)["CUDA C++"])
        assert good, told
        assert "0 of 20 differ" in told


@compiles
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("s < LEAST ? 1.0f : s", "1.01f * s", "OUTSIDE"),
        ("at >= first", "at > first", "THE OTHER SCALAR"),
        ("wide(pairs[0])", "wide(pairs[blockIdx.x > 9])", "OTHER BITS"),
        ("if (in_row()) *reinterpret_cast<uint4*>(x_out", "if (at < 16) *reinterpret_cast<uint4*>(x_out", "nan"),
    ],
)
def test_the_script_finds_what_is_off(cpu: OnCpu, old: str, new: str, told: str) -> None:
    cpu.changed = {old: new}
    case = script.Case("after_feed_forward", 17, 256, Inputs(torch.device("cpu")), quant=FP8)
    good, found = case.check(script.ways_of("after_feed_forward")["CUDA C++"])
    assert not good
    assert told in found


@compiles
def test_the_script_compares_with_the_definition(cpu: OnCpu, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.exact(256, torch.device("cpu")) == 0
    cpu.changed = {"fmaf(fmaf(-near, s, wide), back, near)": "near"}
    assert script.exact(256, torch.device("cpu")) > 0
    assert "DIFFER" in capsys.readouterr().out


def test_the_script_changes_how_rows_are_read() -> None:
    kernel = script.plain_kernel(72, 2, False)
    assert script.plain_kernel(72, 2, False) is kernel
    _, behind = split(Machine.of(kernel.code()).code)
    assert [line.split()[0] for line in loads(behind)] == ["LDG.E.128"] * 4
