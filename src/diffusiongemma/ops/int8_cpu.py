"""8-bit weights on a CPU: products of small integers, four times as fast as float32 where the CPU has them.

Activations become int8 too, one scale a token. Sums of such products are integers, exact in whatever order they are
added: they have the same bits alone, in any batch and on any CPU. Where there is no fast integer product
(`cpu.fast_int8`), float32 computes the same integers: stretches of `EXACT` products stay below 2^24, up to which it
counts without rounding. Scales, and with them the table for the mean of embeddings, are float32.

`use_int8` puts these in for the references of `ops/quantized.py`, which leave the activations as they are.

Legend: N tokens, I inputs, O outputs, D hidden, k experts a token, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusiongemma.ops.cpu import fast_int8
from diffusiongemma.ops.experts import geglu, join_pairs, sort_pairs
from diffusiongemma.ops.linear import linear
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear, mean_dequantised
from diffusiongemma.ops.threads import shared

LARGEST = 127
FASTER = 4  # times as fast as float32
EXACT = (1 << 24) // (LARGEST * (LARGEST + 1))  # products whose sum float32 holds exactly; others' weights have -128


def use_int8(root: nn.Module) -> None:
    """Put integer products in for the references, once, after loading; every weight must be int8, on the CPU.

    A network that is moved or gets another dtype afterwards still computes, if not as fast.

    The embedding table is kept in float32 as well, for speed alone: every step takes the mean of embeddings, and with
    the table dequantised each time that took 1.4 to 9 times as long (docs/log.md). It is 16 MiB for nano, and would be
    3 GB for the 26B.
    """
    fast_int8()  # tried here, before there are threads: it forks
    for module in root.modules():
        if isinstance(module, QuantLinear):
            module.run = linear_int8
        elif isinstance(module, QuantExperts):
            module.run = experts_int8
        elif isinstance(module, QuantEmbedding):
            module.project_run = linear_int8
            # Probabilities do not fit eight bits: what is unlikely counts, too, for there is much of it.
            module.mean_run = partial(_mean, module.weight.dequantize())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] float32 -> int8 [N, I], scale [N, 1]; a row with NaN or infinity has such a scale"""
    scale = x.abs().amax(dim=1, keepdim=True).div_(LARGEST)  # 25 times as fast as the infinity norm
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 1.0)
    return (x / scale).round_().to(torch.int8), scale


def linear_int8(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """x [N, I], q [O, I] int8, scale [O, 1] -> [N, O] in x's dtype"""
    return _product(*quantize_rows(x.float()), q, scale).to(x.dtype)


def experts_int8(
    x: Tensor, index: Tensor, weight: Tensor, up_q: Tensor, up_s: Tensor, down_q: Tensor, down_s: Tensor
) -> Tensor:
    """x [N, D], index and weight [N, k] -> [N, D]; up_q [E, 2 I, D] and down_q [E, D, I] with a scale a row"""
    order, counts = sort_pairs(index, up_q.shape[0])
    rows, scales = (part[order // index.shape[1]] for part in quantize_rows(x.float()))
    out = rows.new_empty(len(order), down_q.shape[1], dtype=torch.float32)
    for expert, (first, end) in enumerate(pairwise([0, *counts.cumsum(0).tolist()])):
        if first < end:  # experts without tokens are not touched
            part = slice(first, end)
            hidden = geglu(_product(rows[part], scales[part], up_q[expert], up_s[expert]))
            out[part] = _product(*quantize_rows(hidden), down_q[expert], down_s[expert])
    return join_pairs(out, order, weight).to(x.dtype)


def _product(rows: Tensor, row_scale: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """rows [N, I] int8, row_scale [N, 1], q [O, I] int8, scale [O, 1] -> [N, O] float32"""
    return sums(rows, q).float().mul_(row_scale).mul_(scale.view(1, -1))


def sums(rows: Tensor, q: Tensor) -> Tensor:
    """rows [N, I], q [O, I], both int8 -> rows @ q.T [N, O] int32"""
    # Over a single number torch 2.13 gives zeros for this product.
    fast = rows.is_cpu and rows.shape[1] > 1 and fast_int8()
    with shared(rows.shape[0] * q.numel() // (FASTER if fast else 1)):
        return torch._int_mm(rows, q.t()) if fast else sums_in_float32(rows, q)


def sums_in_float32(rows: Tensor, q: Tensor) -> Tensor:
    """The same integers without an instruction for them."""
    parts = zip(rows.split(EXACT, dim=1), q.split(EXACT, dim=1), strict=True)
    first, *rest = (F.linear(a.float(), b.float()).to(torch.int32) for a, b in parts)
    return sum(rest, first)


def _mean(table: Tensor, probs: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """probs [N, V] -> [N, D]: the rows of the table under them"""
    if (probs.device, probs.dtype) != (table.device, table.dtype):  # moved after loading
        return mean_dequantised(probs, q, scale)
    return linear(probs, table.t())
