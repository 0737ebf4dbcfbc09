"""Number formats of quantised weights: a matrix becomes small numbers `q` and scales, w ≈ q * scale.

| format | q                                      | scale                          | error, Gaussian rows of 2,816 |
| ------ | -------------------------------------- | ------------------------------ | ----------------------------- |
| int8   | int8, -127 … 127           [..., O, I] | float32, a row [..., O, 1]     | 0.8 %                         |
| fp8    | float8 e4m3, up to 448     [..., O, I] | float32, a row [..., O, 1]     | 2.6 %                         |
| int4   | int32 words of 8 nibbles [..., O, I/8] | bfloat16, a group [..., O, I/g] | 8.2 % (g = 32), 9.0 % (64)    |

A nibble holds one of -8 … 7, plus 8; the first number of a word has the lowest bits (as in compressed-tensors).

int8 and fp8 scales put the largest number of a row at the end of the range: clipping it gained nothing measurable. At
4 bits clipping pays: for each group the scale is searched that leaves the smallest squared error. It has the sign that
puts the largest number of the group at -8, so negative scales are as frequent as positive ones: sixteen steps instead
of fifteen, an error 5 % lower. `tests/ops/test_quant.py` holds these figures.

What is rounded here is the weights alone. `ops/gptq.py` rounds them by what they are multiplied with.

Legend: O outputs (rows), I inputs (columns), g group; leading dimensions (experts) are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.errors import ConfigError

Kind = Literal["int8", "fp8", "int4"]
KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4")
GROUPS = (32, 64)
NIBBLES = 8  # in a word
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 1 << 22  # numbers that are worked on at once: what bounds the memory beside input and output
# Of the largest number of a 4-bit group, at -8: where others may be clipped. The first puts it at -7 and clips none.
_RATIOS = (8 / 7, *(1 - 0.06 * i for i in range(8)))
_REFITS = 2


@dataclass(frozen=True)
class Format:
    """How one weight is stored. `group`: numbers of a row that share a scale; 0 is the whole row."""

    kind: Kind
    group: int = 0

    def __str__(self) -> str:
        return f"{self.kind} in groups of {self.group}" if self.group else self.kind

    @property
    def dtype(self) -> torch.dtype:
        return {"int8": torch.int8, "fp8": FP8, "int4": torch.int32}[self.kind]

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.kind == "int4" else torch.float32

    def fits(self, columns: int) -> bool:
        return self.kind != "int4" or (columns % self.group == 0 and columns % NIBBLES == 0)

    def q_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // NIBBLES) if self.kind == "int4" else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.group if self.group else 1)


def parse_format(kind: str, group: int | None = None) -> Format:
    """What a user asks for by name. `group` is for int4 only (default 64)."""
    if kind not in KINDS:
        raise ConfigError(f"no number format {kind!r}; there are: {', '.join(KINDS)}")
    if kind != "int4":
        if group is not None:
            raise ConfigError(f"{kind} has one scale a row, so a group of {group} means nothing: leave it out")
        return Format(kind)
    if group is not None and group not in GROUPS:
        raise ConfigError(f"groups of {group} are not supported: use {' or '.join(map(str, GROUPS))}")
    return Format(kind, GROUPS[-1] if group is None else group)


# ---- there and back ----------------------------------------------------------------------------------------------


def quantize(weight: Tensor, fmt: Format, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """weight [..., O, I] -> q, scale on `device` (default: the weight's); block by block, so little beside them."""
    assert fmt.fits(weight.shape[-1]), f"{weight.shape[-1]} columns do not divide into {fmt}"
    device = device or weight.device
    shape = tuple(weight.shape)
    q = torch.empty(fmt.q_shape(shape), dtype=fmt.dtype, device=device)
    scale = torch.empty(fmt.scale_shape(shape), dtype=fmt.scale_dtype, device=device)
    quantize_into(weight, fmt, q, scale)
    return q, scale


def quantize_into(weight: Tensor, fmt: Format, q: Tensor, scale: Tensor) -> None:
    """As `quantize`, into tensors that are there; q and scale may be views."""
    work = _quantize_int4 if fmt.kind == "int4" else _quantize_rows
    for w, q_out, s_out in _blocks(weight, q, scale):
        q_new, s_new = work(w.to(q.device, torch.float32), fmt)
        q_out.copy_(q_new)
        s_out.copy_(s_new)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q [..., O, I] (or words [..., O, I/8]), scale -> weight [..., O, I]"""
    columns = q.shape[-1] * (NIBBLES if q.dtype == torch.int32 else 1)
    weight = torch.empty((*q.shape[:-1], columns), dtype=dtype, device=q.device)
    dequantize_into(q, scale, weight)
    return weight


def dequantize_into(q: Tensor, scale: Tensor, weight: Tensor) -> None:
    """As `dequantize`, into a weight of any float dtype that is there (a view, another device)."""
    for q_in, s_in, out in _blocks(q, scale, weight):
        numbers = (unpack_int4(q_in) if q.dtype == torch.int32 else q_in).float()
        grouped = numbers.view(*s_in.shape, -1) * s_in.float()[..., None]
        out.copy_(grouped.view(numbers.shape))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor [..., rows, x], as 2-D views of bounded size."""
    if tensors[0].dim() > 2:
        for parts in zip(*tensors, strict=True):
            yield from _blocks(*parts)
        return
    rows = max(1, BLOCK // max(1, *(t.shape[1] for t in tensors)))
    yield from zip(*(t.split(rows) for t in tensors), strict=True)


def _quantize_rows(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """[O, I] float32 -> int8 or fp8 [O, I], scale [O, 1]"""
    limit = FP8_MAX if fmt.kind == "fp8" else 127.0
    scale = nonzero(w.abs().amax(dim=1, keepdim=True) / limit)
    if fmt.kind == "fp8":
        return (w / scale).clamp(-limit, limit).to(FP8), scale
    return (w / scale).round().clamp(-limit, limit).to(torch.int8), scale


def nonzero(scale: Tensor) -> Tensor:
    """Rows of zeros, or of numbers too small for a scale, become zeros times one."""
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 1.0, scale)


# ---- four bits ---------------------------------------------------------------------------------------------------


def _quantize_int4(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """[O, I] float32 -> words [O, I/8], scale [O, I/g] bfloat16"""
    groups = w.view(-1, fmt.group)  # [O I/g, g]
    scale = best_scales(groups)
    q = _nibbles(groups, scale).nan_to_num(0.0).to(torch.int8).view(w.shape)
    return pack_int4(q), scale.view(w.shape[0], -1).to(torch.bfloat16)


def best_scales(groups: Tensor, importance: Tensor | None = None) -> Tensor:
    """groups [..., g] float32 -> the scale of each [..., 1], rounded as it will be stored, that leaves the smallest
    squared error of all that are tried; `importance` (like groups, or to be spread over them): how much each number
    counts. NaN where a group holds infinities or NaN, so that they stay visible, as they do at 8 bits."""
    weights = torch.ones_like(groups) if importance is None else importance.expand_as(groups)
    extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    best = torch.full_like(extreme, torch.inf)
    scale = torch.ones_like(extreme)
    for ratio in _RATIOS:
        _keep_better(groups, weights, extreme * (ratio / -8), best, scale)
    for _ in range(_REFITS):  # least squares: the scale that suits the numbers which it gave
        q = _nibbles(groups, scale)
        product, square = (weights * groups * q).sum(-1, keepdim=True), (weights * q * q).sum(-1, keepdim=True)
        _keep_better(groups, weights, torch.where(square > 0, product / square, scale), best, scale)
    return torch.where(best.isfinite(), scale, torch.nan)


def _nibbles(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-8, 7)


def _keep_better(groups: Tensor, weights: Tensor, candidate: Tensor, best: Tensor, scale: Tensor) -> None:
    """Where this scale (rounded as it will be stored) leaves a smaller squared error, it replaces the best so far."""
    candidate = nonzero(candidate.to(torch.bfloat16).float())
    change = _nibbles(groups, candidate).mul_(candidate).sub_(groups).square_()
    error = change.mul_(weights).sum(dim=-1, keepdim=True)
    better = error < best
    best.copy_(torch.where(better, error, best))
    scale.copy_(torch.where(better, candidate, scale))


def pack_int4(q: Tensor) -> Tensor:
    """int8 [..., I] of -8 … 7 -> int32 words [..., I/8]; the first number has the lowest bits"""
    pairs = (q.view(*q.shape[:-1], -1, 2) + 8).view(torch.uint8)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """int32 words [..., I/8] -> int8 [..., I] of -8 … 7"""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


# ---- activations -------------------------------------------------------------------------------------------------


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] -> fp8 [N, I], scale [N, 1] float32: what the fp8 products take, one scale a token."""
    wide = x.float()
    scale = nonzero(wide.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def error_of(weight: Tensor, q: Tensor, scale: Tensor) -> tuple[float, float]:
    """Relative error |w - q s| / |w| and the cosine between the two; of a weight of zeros: 0 and 1."""
    square = change = product = other = 0.0
    for w, q_in, s_in in _blocks(weight, q, scale):
        a, b = w.to(q.device, torch.float32).flatten(), dequantize(q_in, s_in).flatten()
        square += float(a.dot(a))
        other += float(b.dot(b))
        product += float(a.dot(b))
        change += float(F.mse_loss(a, b, reduction="sum"))
    if square == 0 or other == 0:
        return (0.0, 1.0) if square == other else (1.0, 0.0)
    return (change / square) ** 0.5, min(1.0, product / (square * other) ** 0.5)
