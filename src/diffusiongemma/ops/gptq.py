"""Rounding that makes up for itself: weights are rounded by what they are multiplied with (GPTQ, Frantar et al. 2022).

Plain rounding (`ops/quant.py`) changes each weight as little as it can. What counts is the change of the product,
|X (W - W')ᵀ|, and inputs X are far from independent: what rounding one column does can be made up for by changing the
columns behind it. With the gram matrix H = XᵀX, and U upper triangular with UᵀU = H⁻¹, columns are rounded one after
another, and each one's error e is spread over those that are still to come:

    e_j = (w_j - round(w_j)) / U_jj,    w_k -= e_j U_jk  for k > j

The weights change more than by plain rounding, their product by half as much or less. The numbers are of the same
formats, so nothing that reads them knows the difference. A ridge on H stands for inputs that were not seen; the fewer
tokens there were, the larger it is, and without any this is plain rounding.

`tests/ops/test_gptq.py` has the slow twin, which inverts H anew for every column.

Legend: E experts (or 1), O outputs, I inputs, g group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusiongemma.ops.quant import FP8, FP8_MAX, Format, best_scales, nonzero, pack_int4

RIDGE = 0.05  # of the mean of H's diagonal, where there are enough tokens
ENOUGH = 5  # tokens a column
COLUMNS = 64  # rounded before their errors are spread over all that are behind them: makes products of most of the work
_TRIES = 4


def gram_of(x: Tensor) -> Tensor:
    """Inputs x [N, I] -> H [I, I], float32"""
    wide = x.float()
    return wide.t() @ wide


def quantize_fitted(weight: Tensor, gram: Tensor, tokens: Sequence[int], fmt: Format) -> tuple[Tensor, Tensor]:
    """weight [E, O, I], H [E, I, I] of so many tokens each -> q [E, O, I] (or words), scale [E, O, 1 or I/g]"""
    w = weight.float().clone()
    columns = w.shape[-1]
    u = _factor(gram.float(), tokens)
    importance = u.diagonal(dim1=-2, dim2=-1).square().reciprocal()  # [E, I]: what an error costs in the end
    numbers = torch.empty_like(w)
    scales: list[Tensor] = [] if fmt.group else [_row_scale(w, fmt)]
    width = fmt.group or COLUMNS
    for first in range(0, columns, width):
        part = slice(first, min(first + width, columns))
        if fmt.group:
            scales.append(best_scales(w[..., part], importance[:, None, part]))
        numbers[..., part], errors = _round_columns(w[..., part], u[:, part, part], scales[-1], fmt)
        w[..., part.stop :] -= errors @ u[:, part, part.stop :]
    return _stored(numbers, fmt), torch.cat(scales, dim=-1).to(fmt.scale_dtype)


def product_change(weight: Tensor, rounded: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Both [E, O, I], H [E, I, I] -> |X (w - w')|² and |X w|² of every row [E, O]"""
    before, change = weight.float(), weight.float() - rounded.float()
    return tuple((w @ gram * w).sum(-1).clamp_(min=0) for w in (change, before))  # type: ignore[return-value]


def _factor(gram: Tensor, tokens: Sequence[int]) -> Tensor:
    """H [E, I, I] -> U [E, I, I], upper triangular, UᵀU = (H + ridge)⁻¹

    With H = R Rᵀ, R upper triangular, U = R⁻¹; and R is the Cholesky factor of H with both axes turned around.
    """
    columns = gram.shape[-1]
    eye = torch.eye(columns, device=gram.device)
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # [E]
    few = torch.tensor([RIDGE * max(1, ENOUGH * columns / max(1, n)) for n in tokens], device=gram.device)
    ridge = torch.where(mean > 0, mean * few, 1.0)
    for _ in range(_TRIES):
        r, failed = torch.linalg.cholesky_ex((gram + ridge[:, None, None] * eye).flip(-1, -2))
        if not failed.any():
            break
        ridge = torch.where(failed > 0, ridge * 10, ridge)  # float32 was not enough: inputs that nearly repeat
    u: Tensor = torch.linalg.solve_triangular(r.flip(-1, -2), eye.expand_as(gram), upper=True)
    if not u.isfinite().all():  # on a GPU, NaN is no failure above
        raise ArithmeticError("inputs that are no numbers")
    return u


def _round_columns(w: Tensor, u: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """w [E, O, C], U [E, C, C], scale [E, O, 1] -> numbers [E, O, C], errors for what is behind [E, O, C]"""
    w = w.clone()
    numbers, errors = torch.empty_like(w), torch.empty_like(w)
    for j in range(w.shape[-1]):
        column = w[..., j : j + 1]
        number = _nearest(column / scale, fmt)
        error = (column - number * scale) / u[:, j, j, None, None]
        numbers[..., j : j + 1], errors[..., j : j + 1] = number, error
        w[..., j:] -= error * u[:, j : j + 1, j:]
    return numbers, errors


def _row_scale(w: Tensor, fmt: Format) -> Tensor:
    return nonzero(w.abs().amax(dim=-1, keepdim=True) / (FP8_MAX if fmt.kind == "fp8" else 127.0))


def _nearest(x: Tensor, fmt: Format) -> Tensor:
    """The nearest number of the format, as float32"""
    if fmt.kind == "fp8":
        return x.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
    low, high = (-8, 7) if fmt.kind == "int4" else (-127, 127)
    return x.round().clamp(low, high)


def _stored(numbers: Tensor, fmt: Format) -> Tensor:
    if fmt.kind == "fp8":
        return numbers.to(FP8)
    small = numbers.to(torch.int8)
    return pack_int4(small) if fmt.kind == "int4" else small
