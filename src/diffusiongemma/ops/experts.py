"""The mixture of experts: every token through its k experts, weighted and summed.

Shapes: N tokens, k experts a token, E experts, D hidden, I the width of one expert.
`experts_reference` is the definition. `experts_grouped` sorts the (token, expert) pairs by expert, so that each
expert is one product over a contiguous slice; it is what runs on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops.linear import linear


def geglu(gate_up: Tensor) -> Tensor:
    """[N, 2 I], gate first -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def experts_reference(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [N, D], index and weight [N, k], gate_up [E, 2 I, D], down [E, D, I] -> [N, D]"""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, slot = (index == expert).nonzero(as_tuple=True)
        hidden = F.linear(geglu(F.linear(x[token], gate_up[expert])), down[expert])
        out.index_add_(0, token, (hidden * weight[token, slot, None]).to(x.dtype))
    return out


def experts_grouped(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Same as `experts_reference`. A token's result does not depend on the other tokens, to the bit."""
    tokens, k = index.shape
    order = index.flatten().argsort(stable=True)  # [N k] pairs, by expert
    sizes = torch.bincount(index.flatten(), minlength=gate_up.shape[0]).tolist()
    rows = x[order // k]
    share = weight.flatten()[order, None].to(x.dtype)
    parts = []
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            stop = start + size
            # Weighting before the way down touches I numbers a pair instead of D.
            hidden = geglu(linear(rows[start:stop], gate_up[expert])) * share[start:stop]
            parts.append(linear(hidden, down[expert]))
            start = stop
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return torch.cat(parts)[back].view(tokens, k, -1).sum(dim=1)
