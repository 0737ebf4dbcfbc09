"""The mixture of experts: every token through its k experts, weighted and summed.

Shapes: N tokens, k experts a token, E experts, D hidden, I the width of one expert.
`experts_reference` is the definition. `experts_grouped` sorts the (token, expert) pairs by expert, so that each
expert is one product over a contiguous slice; it is what runs on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops.linear import ROWS, linear
from diffusiongemma.ops.threads import shared

MAX_WASTE = 2.5  # rows of the padded batch for each real one, up to which one batched product is the faster way


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
    order, counts = sort_pairs(index, gate_up.shape[0])
    room = -(-int(counts.max()) // ROWS) * ROWS
    balanced = gate_up.shape[0] * room <= MAX_WASTE * len(order)
    way = _all_at_once if balanced else _one_by_one
    return join_pairs(way(x[order // index.shape[1]], counts, room, gate_up, down), order, weight)


def sort_pairs(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """index [N, k] -> the (token, expert) pairs by expert [N k], and how many each expert has [E]"""
    picked = index.flatten()
    return picked.argsort(stable=True), torch.bincount(picked, minlength=experts)


def join_pairs(out: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """out [N k, D] in this order, weight [N, k] -> [N, D]: the results of each token, weighted and summed"""
    out = out * weight.flatten()[order, None].to(out.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].view(*weight.shape, -1).sum(dim=1)


def _all_at_once(rows: Tensor, counts: Tensor, room: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """rows [N k, D] by expert -> [N k, D]: batched products, each expert padded to `room`."""
    experts = gate_up.shape[0]
    expert = torch.arange(experts, device=rows.device).repeat_interleave(counts)
    place = expert * room + torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[expert]
    padded = rows.new_zeros(experts * room, rows.shape[1]).index_copy(0, place, rows)
    with shared(room * (gate_up.numel() + down.numel())):
        hidden = geglu(torch.bmm(padded.view(experts, room, -1), gate_up.transpose(1, 2)))
        return torch.bmm(hidden, down.transpose(1, 2)).flatten(0, 1)[place]


def _one_by_one(rows: Tensor, counts: Tensor, room: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same, expert after expert: for when few experts get most tokens and padding would waste the most."""
    groups = rows.split(counts.tolist())
    parts = [linear(geglu(linear(group, up)), back) for group, up, back in zip(groups, gate_up, down, strict=True)]
    return torch.cat(parts)
