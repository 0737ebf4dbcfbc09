"""How far from float64 an operation may be: what its number formats allow, each figure with its reason, in one place.

A reference (`exact_small.py`, `exact_products.py`, `exact_attention.py`, `exact_vocab.py`) gives two tensors: what the
result should be, in float64, and how far rounding may move each number of it, its bound. Bounds are made of the figures
below by three rules:

- one rounding moves a number by at most half a step of its format, and the bound says the whole half step;
- many roundings that know nothing of each other add up as the root of their squares (`together`). Rounding moves a
  number by 0.4 of the half step on average, so such a bound is more than twice what is to be expected;
- what may go one way every time (a sum that is cut off and not rounded) is added up as if it always did.

A result is within its limits if the norm of its error is at most the norm of the bounds, and no number is further off
than `SPREAD` times its own bound. The first finds what is slightly wrong everywhere, the second one wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from diffusiongemma.ops.quant import FP8, FP8_MAX

# bfloat16 keeps 8 bits of a number: half a step is at most 2^-8 of it.
BF16 = 2.0**-8
# float8 e4m3 keeps 4 bits: 2^-4 of a number at most.
E4M3 = 2.0**-4
# Below 2^-6, numbers of e4m3 are 2^-9 apart, however small: half a step is 2^-10, times the row's scale.
E4M3_LEAST = 2.0**-10
# int8 with a scale a row: the largest number is 127 steps, and half a step is the same for all numbers of the row.
INT8_STEPS = 127.0
# int4 with a scale a group: without clipping the largest is 7 steps. The scale is searched for the least squared error,
# this one being among the candidates, so the error of a group is no larger in the mean. The scale is itself bfloat16,
# which moves the largest number, 7 steps, by 7 x 2^-8 of a step.
INT4_STEPS = 7.0
INT4_HALF = 0.5 + INT4_STEPS * BF16
# float32 keeps 24 bits: 2^-24 rounded, 2^-23 cut off, as tensor cores do it.
FP32 = 2.0**-24
FP32_CUT = 2.0**-23
# Tensor cores add 16 products of bfloat16 at once (32 of 8 bits), so a sum over K numbers is K / 16 additions.
AT_ONCE, AT_ONCE_8 = 16, 32
# Hopper's tensor cores keep about 14 bits of a sum of fp8 products, and cut the rest off.
FP8_SUM_CUT = 2.0**-13
# A handful of operations in float32 beside a sum: exponentials and roots are within 2 steps, a product within half.
A_FEW = 16 * FP32
# Sums of the vocabulary end that are no products: at most 256 numbers of a tile one after another, then pairs of sums.
SUM_PLAIN = 256 * FP32 + A_FEW
# The soft embedding in fp8: the largest weight of a row is put at 256, and a sum is put away (in float32) after 64
# steps of 128 numbers.
SOFT_TOP, SOFT_RUN = 256.0, 64 * 128
# Six standard deviations: a bound of half a step stands for one of at most 1 / √3 of it, so this is 6.9. One of 10^9
# numbers is further off by chance; a single rounding never is.
SPREAD = 4.0

How = Literal["norm", "most", "equal"]


def together(*terms: Tensor) -> Tensor:
    """Of bounds that know nothing of each other"""
    total = terms[0].square()
    for term in terms[1:]:
        total = total + term.square()
    return total.sqrt()


def to_bf16(x: Tensor) -> Tensor:
    """How far rounding to bfloat16 moves numbers x"""
    return BF16 * x.abs()


def to_fp8(x: Tensor) -> Tensor:
    """The same for fp8 with a scale a row (the last dimension), whose largest number is put at 448"""
    return torch.maximum(E4M3 * x.abs(), E4M3_LEAST * fp8_scale(x))


def fp8_scale(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1, keepdim=True) / FP8_MAX


def to_int8(x: Tensor) -> Tensor:
    """The same for int8 with a scale a row"""
    return (0.5 * int8_scale(x)).expand_as(x)


def int8_scale(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1, keepdim=True) / INT8_STEPS


def to_int4(x: Tensor, group: int) -> Tensor:
    """The same for int4 with a scale for every `group` numbers of a row"""
    groups = x.unflatten(-1, (-1, group))
    half = INT4_HALF * groups.abs().amax(dim=-1, keepdim=True) / INT4_STEPS
    return torch.flatten(half.expand_as(groups), -2)


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """How far a result x [N, D] moves when it is stored: as bfloat16 (None), fp8 or int8"""
    return to_bf16(x) if dtype is None else to_fp8(x) if dtype == FP8 else to_int8(x)


def sum_float32(count: int) -> float:
    """Of a sum of so many products of bfloat16 or int8 numbers in float32, as a share of the sum's size"""
    return -(-count // AT_ONCE) * FP32_CUT + A_FEW


def sum_fp8(count: int) -> float:
    """The same for products of fp8 numbers"""
    return -(-count // AT_ONCE_8) * FP8_SUM_CUT + A_FEW


@dataclass(frozen=True)
class Part:
    """One result beside what it should be. `how`:

    - norm: as above.
    - most: figures that stand alone (an entropy, a gap): bounds are the most there may be, and no spread is added.
    - equal: whole numbers and copies; what counts is how many differ. There is no bound.
    """

    what: str
    got: Tensor
    want: Tensor
    bound: Tensor | None = None
    how: How = "norm"


def same_bits(what: str, got: Tensor, want: Tensor) -> Part:
    """Of two kernels that make the same in one order"""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    assert got.dtype == want.dtype, f"{what}: {got.dtype} where {want.dtype} is wanted"
    return Part(what, got.view(whole), want.view(whole), how="equal")


def named(name: str, parts: list[Part]) -> list[Part]:
    return [replace(part, what=f"{name} {part.what}".strip()) for part in parts]


@dataclass(frozen=True)
class Verdict:
    error: float
    limit: float
    worst: float  # the largest share that any number has taken of what it may be off
    good: bool


def judge(part: Part) -> Verdict:
    """NaN is never within a limit."""
    if part.got.shape != part.want.shape:
        raise ValueError(f"{part.what}: a result of {list(part.got.shape)} where {list(part.want.shape)} is wanted")
    if part.how == "equal":
        differ = int((part.got != part.want).sum())
        return Verdict(differ, 0.0, 0.0 if differ == 0 else torch.inf, differ == 0)
    assert part.bound is not None
    off, bound = (part.got.double() - part.want).abs(), part.bound.expand_as(part.want)
    allowed = bound * (SPREAD if part.how == "norm" else 1.0)
    share = torch.where(off == 0, 0.0, off / allowed).nan_to_num(nan=torch.inf).flatten()
    at = int(share.argmax())
    worst = float(share[at])
    if part.how == "most":
        error, limit = float(off.flatten()[at]), float(allowed.flatten()[at])
    else:
        size = max(float(part.want.norm()), torch.finfo(torch.float64).tiny)
        error, limit = float(off.norm()) / size, float(bound.norm()) / size
    return Verdict(error, limit, worst, error <= limit and worst <= 1.0)
