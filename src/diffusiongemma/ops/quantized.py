"""Modules that hold quantised weights and stand in for the plain ones, with the same call.

A `QuantWeight` is the two tensors of a format (`ops/quant.py`). The module around it calls one function, `run`, which
is chosen once after loading (`use_kernels`): the torch references here, or a kernel with the same signature:

- linear:  run(x [N, I], q, scale) -> [N, O]
- experts: run(x [N, D], index [N, k], weight [N, k], gate_up q, gate_up scale, down q, down scale) -> [N, D]

int8 and int4 references dequantise on the fly, a block of rows at a time, and multiply in x's dtype. The fp8 reference
does what the tensor cores do: it rounds the activations to fp8 too, one scale a token, and sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diffusiongemma.ops import int4
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.linear import linear
from diffusiongemma.ops.quant import BLOCK, FP8, Format, Kind, dequantize, quantize_tokens

LinearRun = Callable[[Tensor, Tensor, Tensor], Tensor]
ExpertsRun = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class QuantWeight(nn.Module):
    """q and scale of one weight [..., O, I], as they are stored; or, after `to_runtime`, as 4-bit kernels read them.

    `gated`: the first half of the rows are gates, the second what they gate.
    """

    q: Tensor
    scale: Tensor
    runtime = False

    def __init__(self, shape: tuple[int, ...], fmt: Format, gated: bool = False) -> None:
        super().__init__()
        self.shape, self.format, self.gated = shape, fmt, gated
        self.register_buffer("q", torch.empty(fmt.q_shape(shape), dtype=fmt.dtype))
        self.register_buffer("scale", torch.empty(fmt.scale_shape(shape), dtype=fmt.scale_dtype))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(*self.stored(), dtype)

    def unfit(self) -> str | None:
        """Why kernels cannot read this weight, or None."""
        rows, columns = self.shape[-2:]
        return int4.unfit(rows, columns, self.format.group) if self.format.kind == "int4" else None

    def to_runtime(self) -> None:
        """Lay 4-bit numbers out anew, in their own memory; other formats lie as kernels want them already."""
        if self.format.kind != "int4" or self.runtime:
            return
        self.q, self.scale = int4.from_stored(self.q, self.scale, self.gated)
        self.runtime = True

    def stored(self, expert: int | None = None) -> tuple[Tensor, Tensor]:
        """q and scale in the stored layout, of one expert or of all that there is."""
        q, scale = (self.q, self.scale) if expert is None else (self.q[expert], self.scale[expert])
        return int4.to_stored(q, scale, self.gated) if self.runtime else (q, scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantWeight:
        """Moves like any module, but `model.to(bfloat16)` must not touch what the format fixes."""
        for name in ("q", "scale"):
            old = getattr(self, name)
            new = fn(old)
            setattr(self, name, new if new.dtype == old.dtype else old.to(new.device))
        return self


class QuantLinear(nn.Module):
    """Stands in for `ops.linear.Linear`."""

    run: LinearRun

    def __init__(self, in_features: int, out_features: int, fmt: Format, gated: bool = False) -> None:
        super().__init__()
        self.weight = QuantWeight((out_features, in_features), fmt, gated)
        self.run = LINEAR[fmt.kind]

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        out: Tensor = self.run(x, self.weight.q, self.weight.scale)
        if self.weight.runtime and self.weight.gated:  # kernels make a tile of gates beside its ups
            out = out.unflatten(1, (-1, 2, int4.PAIRS)).transpose(1, 2).flatten(1)
        return out


class QuantExperts(nn.Module):
    """Stands in for `model.layers.Experts`."""

    run: ExpertsRun

    def __init__(self, experts: int, hidden: int, width: int, fmt: Format) -> None:
        super().__init__()
        self.gate_up_proj = QuantWeight((experts, 2 * width, hidden), fmt, gated=True)
        self.down_proj = QuantWeight((experts, hidden, width), fmt)
        self.run = EXPERTS[fmt.kind]

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x [N, D], index and weight [N, k] -> [N, D]"""
        up, down = self.gate_up_proj, self.down_proj
        return self.run(x, index, weight, up.q, up.scale, down.q, down.scale)


class QuantEmbedding(nn.Module):
    """Stands in for `model.network.Embedding`; the references never quantise activations here, whatever the format.

    `dtype`: what comes out on the way in, as the plain weight's dtype says it there.
    """

    project_run: LinearRun
    mean_run: LinearRun

    def __init__(self, vocab: int, hidden: int, fmt: Format, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = QuantWeight((vocab, hidden), fmt)
        self.dtype = dtype
        self.project_run, self.mean_run = linear_dequantised, mean_dequantised

    @property
    def device(self) -> torch.device:
        return self.weight.q.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantEmbedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype  # what a plain weight would get
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, D]"""
        return dequantize(self.weight.q[tokens], self.weight.scale[tokens], self.dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> its product with every row [N, V]"""
        return self.project_run(hidden, self.weight.q, self.weight.scale)

    def mean(self, probs: Tensor) -> Tensor:
        """probs [N, V] -> the mean of the rows under them [N, D]"""
        return self.mean_run(probs.to(self.dtype), self.weight.q, self.weight.scale)


def use_kernels(root: nn.Module, linear_run: LinearRun, experts_run: ExpertsRun) -> list[str]:
    """Put kernels in for the references, once, after loading; 4-bit weights are laid out for them.

    What they cannot read keeps its reference, and comes back by name with the reason.
    """
    left: list[str] = []
    for name, module in root.named_modules():
        if not isinstance(module, QuantLinear | QuantExperts):
            continue
        weights = [weight for weight in module.children() if isinstance(weight, QuantWeight)]
        if reason := next(filter(None, (weight.unfit() for weight in weights)), None):
            left.append(f"{name}: {reason}")
            continue
        for weight in weights:
            weight.to_runtime()
        if isinstance(module, QuantLinear):
            module.run = linear_run
        else:
            module.run = experts_run
    return left


# ---- references --------------------------------------------------------------------------------------------------


def linear_dequantised(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """x [N, I], q and scale of [O, I] -> [N, O] in x's dtype"""
    return torch.cat([linear(x, dequantize(*part, x.dtype)) for part in _row_blocks(q, scale)], dim=1)


def linear_fp8(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """The same with activations in fp8; products of fp8 numbers are exact in float32, sums nearly so."""
    assert q.dtype == FP8, "this product is for fp8 weights"
    tokens, token_scale = quantize_tokens(x)
    wide = tokens.float()
    out = torch.cat([linear(wide, part.float()) * s.t() for part, s in _row_blocks(q, scale)], dim=1)
    return (out * token_scale).to(x.dtype)


def mean_dequantised(probs: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """probs [N, V], q and scale of [V, D] -> [N, D] in probs' dtype; blocks are summed in float32"""
    total = probs.new_zeros(probs.shape[0], q.shape[1], dtype=torch.float32)
    at = 0
    for part, s in _row_blocks(q, scale):
        share = probs[:, at : at + part.shape[0]]
        total += linear(share.float(), dequantize(part, s, probs.dtype).t().float())
        at += part.shape[0]
    return total.to(probs.dtype)


def _row_blocks(q: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = max(8, BLOCK // q.shape[1])
    return list(zip(q.split(rows), scale.split(rows), strict=True))


def _experts(product: LinearRun) -> ExpertsRun:
    """Expert after expert with this product; experts without tokens are not touched."""

    def run(
        x: Tensor, index: Tensor, weight: Tensor, up_q: Tensor, up_s: Tensor, down_q: Tensor, down_s: Tensor
    ) -> Tensor:
        out = x.new_zeros(*index.shape, x.shape[1])  # [N, k, D]
        for expert in index.unique().tolist():
            token, slot = (index == expert).nonzero(as_tuple=True)
            hidden = product(geglu(product(x[token], up_q[expert], up_s[expert])), down_q[expert], down_s[expert])
            out[token, slot] = hidden * weight[token, slot, None].to(x.dtype)
        return out.sum(dim=1)

    return run


LINEAR: dict[Kind, LinearRun] = {"int8": linear_dequantised, "int4": linear_dequantised, "fp8": linear_fp8}
EXPERTS: dict[Kind, ExpertsRun] = {kind: _experts(product) for kind, product in LINEAR.items()}
