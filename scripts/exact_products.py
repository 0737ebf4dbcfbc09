"""Products in float64: dense, with GeGLU, by expert; in every number format.

Two errors of each. Arithmetic: against float64 on the very numbers that the product reads, weights and activations as
they were rounded. Format: against float64 on the weights and activations before any rounding.

Legend: K inputs, O outputs, E experts, k experts a token, I width of an expert, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from exact_limits import A_FEW, BF16, Part, sum_float32, sum_fp8, to_bf16, to_fp8, to_int4, to_int8, together
from exact_small import rows
from torch import Tensor

from diffusiongemma.ops import int4, quant
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8

Pair = tuple[Tensor, Tensor]  # what it should be, and how far it may be off
STEEPEST = 1.13  # the derivative of gelu is nowhere larger
GROUP = 64


@dataclass(eq=False)
class Matrix:
    """A weight of [O, K] or [E, O, K] in one format; nothing is made before it is asked for."""

    fmt: str  # bf16, fp8, int8 or int4
    make: Callable[[], Tensor]
    gated: bool = False

    @cached_property
    def plain(self) -> Tensor:
        """Before it is quantised, in bfloat16"""
        return self.make().to(torch.bfloat16)

    @cached_property
    def stored(self) -> tuple[Tensor, Tensor]:
        return quant.quantize(self.plain, quant.parse_format(self.fmt, GROUP if self.fmt == "int4" else None))

    @cached_property
    def kept(self) -> Weight:
        """As the operations take it"""
        if self.fmt == "bf16":
            return self.plain, None
        q, scale = self.stored
        return int4.pack_pairs(quant.unpack_int4(q), scale, self.gated) if self.fmt == "int4" else (q, scale)

    def before(self, expert: int | None) -> Tensor:
        """[O, K] float64, as it was before it was quantised"""
        return (self.plain if expert is None else self.plain[expert]).double()

    def wide(self, expert: int | None) -> Tensor:
        """[O, K] float64: the numbers that are multiplied"""
        if self.fmt == "bf16":
            return self.before(expert)
        q, scale = self.stored if expert is None else (t[expert] for t in self.stored)
        numbers = (quant.unpack_int4(q) if self.fmt == "int4" else q).double()
        scales = scale.double().repeat_interleave(numbers.shape[1] // scale.shape[1], dim=1)
        return numbers * scales

    def off(self, expert: int | None) -> Tensor:
        """[O, K]: how far quantising moves its numbers"""
        x = self.before(expert)
        if self.fmt == "bf16":
            return torch.zeros_like(x)
        return to_int4(x, GROUP) if self.fmt == "int4" else to_fp8(x) if self.fmt == "fp8" else to_int8(x)


@dataclass(frozen=True)
class Given:
    """Activations as a product gets them, and as they were before they were rounded to fp8 (if they were)."""

    rows: Rows
    plain: Tensor  # [N, K] bfloat16

    @property
    def eight(self) -> bool:
        return self.rows.values.dtype == FP8

    def wide(self) -> Tensor:
        values, scale = self.rows.values.double(), self.rows.scale
        return values if scale is None else values * scale.double()


def product(x: Given, w: Matrix, expert: int | None, form: bool, token: Tensor | None = None) -> Pair:
    """x [N, K], or some tokens of it, times w of [O, K] -> [N, O]; `form`: before any rounding"""
    values = x.wide() if token is None else x.wide()[token]
    wide = w.wide(expert)
    off = _summed(values, wide, x.eight, w.fmt)
    if not form:
        return values @ wide.t(), off
    plain = (x.plain if token is None else x.plain[token]).double()
    before = w.before(expert)
    bounds = [off, _size(plain, w.off(expert))]
    if x.eight:
        bounds.append(_size(to_fp8(plain), before))
    return plain @ before.t(), together(*bounds)


def _size(x: Tensor, w: Tensor) -> Tensor:
    """How large a sum of products is that know nothing of each other"""
    return (x.square() @ w.square().t()).sqrt()


def _summed(x: Tensor, w: Tensor, eight: bool, fmt: str) -> Tensor:
    """How far the sums of a product are off; 4-bit numbers are summed group by group"""
    share = sum_float32(x.shape[1])
    if eight:
        share = sum_fp8(GROUP if fmt == "int4" else x.shape[1])
    return share * _size(x, w)


def _gated(pair: Pair) -> Pair:
    """[N, 2 O], gate first -> gelu(gate) x up [N, O]"""
    (gate, up), (gate_off, up_off) = (t.chunk(2, dim=1) for t in pair)
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    # Where both are near 0, what counts is the error of one times that of the other.
    errors = together(STEEPEST * gate_off * up, gelu * up_off, STEEPEST * gate_off * up_off)
    return gelu * up, together(errors, A_FEW * gate * up)


def linear(got: Tensor, x: Given, w: Matrix, form: bool, vendor: bool) -> list[Part]:
    """`vendor`: its bfloat16 product may add parts of a sum in bfloat16 (torch allows that by default)"""
    want, off = product(x, w, None, form)
    bounds = [off, to_bf16(want)]
    if vendor:
        bounds.append(BF16 * _size(x.wide(), w.wide(None)))
    return [Part("", got, want, together(*bounds))]


def geglu(got: Rows, x: Given, w: Matrix, form: bool) -> list[Part]:
    want, off = _gated(product(x, w, None, form))
    # Before they are rounded to fp8 the numbers are rounded to bfloat16.
    return rows("", got, want, together(off, to_bf16(want)), FP8 if x.eight else None)


def experts(got: Tensor, x: Given, index: Tensor, weight: Tensor, up: Matrix, down: Matrix, form: bool) -> list[Part]:
    """x [N, D], index and weight [N, k] -> [N, D]; what lies between the two products is rounded in either reading"""
    want = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
    square = torch.zeros_like(want)
    for expert in index.unique().tolist():
        token, slot = (index == expert).nonzero(as_tuple=True)
        one, off = _through(x, up, down, expert, form, token)
        share = weight[token, slot, None].double()
        want.index_add_(0, token, share * one)
        # A pair's result is stored in bfloat16 before a token's pairs are summed.
        square.index_add_(0, token, (share * together(off, to_bf16(one))).square())
    return [Part("", got, want, together(square.sqrt(), to_bf16(want)))]


def _through(x: Given, up: Matrix, down: Matrix, expert: int, form: bool, token: Tensor) -> Pair:
    """Some tokens through both products of an expert"""
    hidden, off = _gated(product(x, up, expert, form, token))
    off = together(off, to_bf16(hidden), *([to_fp8(hidden)] if x.eight else []))
    wide = down.wide(expert)
    bounds = [_summed(hidden, wide, x.eight, down.fmt), _size(off, wide)]
    if form:
        wide = down.before(expert)
        bounds.append(_size(hidden, down.off(expert)))
    return hidden @ wide.t(), together(*bounds)
