"""The mixture of experts with gradients, three ways that are equal: choose what the machine does well.

`grouped` sorts the (token, expert) pairs and multiplies each group once (CUDA, bfloat16; no synchronisation).
`dense` sends every token through every expert and weights most of them with zero: more work, no sorting at all.
`loop` is the path of inference, one product an expert: it waits for the group sizes, which costs nothing on a CPU.

Legend: N tokens, k experts a token, E experts, D hidden, I the width of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops.experts import experts_grouped, geglu

ExpertsPath = Literal["grouped", "dense", "loop"]


class _Spread(torch.autograd.Function):
    """Tokens [N, D] to sorted pairs [N k, D]. Its gradient gathers too: a scatter-add would be slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


class _Gather(torch.autograd.Function):
    """Sorted pairs [N k, D] summed into tokens [N, D]: the mirror of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, token: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(token)
        out: Tensor = pairs[back].unflatten(0, (-1, k)).sum(dim=1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return grad[token], None, None, None


_spread: Callable[..., Tensor] = _Spread.apply
_gather: Callable[..., Tensor] = _Gather.apply


def experts_grouped_mm(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [N, D], index and weight [N, k], gate_up [E, 2 I, D], down [E, D, I] -> [N, D]"""
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    k = index.shape[1]
    # One byte a key: a radix sort needs one pass. Only its order matters, so nothing here has a gradient.
    pairs = index.detach().flatten()
    order = pairs.to(torch.uint8).sort(stable=True).indices
    ends = (pairs[:, None] <= torch.arange(gate_up.shape[0], device=x.device)).sum(dim=0).to(torch.int32)  # [E]
    places = torch.arange(len(order), device=x.device)
    back = torch.zeros_like(order).scatter(0, order, places)  # the inverse permutation, without a second sort
    token = order // k
    hidden = grouped_mm(_spread(x, token, back, k), gate_up.transpose(1, 2), offs=ends)
    share = _spread(weight.reshape(-1, 1).to(x.dtype), order, back, 1)
    out = grouped_mm(geglu(hidden) * share, down.transpose(1, 2), offs=ends)
    return _gather(out, token, back, k)


def experts_dense(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Same."""
    experts, _, hidden = gate_up.shape
    share = torch.zeros(x.shape[0], experts, dtype=weight.dtype, device=x.device).scatter(1, index, weight)  # [N, E]
    inner = geglu(F.linear(x, gate_up.flatten(0, 1)).unflatten(1, (experts, -1)))  # [N, E, I]
    inner = inner * share[:, :, None].to(x.dtype)
    return F.linear(inner.flatten(1), down.permute(1, 0, 2).reshape(hidden, -1))


PATHS = {"grouped": experts_grouped_mm, "dense": experts_dense, "loop": experts_grouped}


def pick_experts(device: torch.device, dtype: torch.dtype) -> ExpertsPath:
    """The fastest path that works here: on a GPU `grouped` is tried once, against `dense`."""
    if device.type != "cuda":
        return "loop"
    if dtype != torch.bfloat16:
        return "dense"
    torch.manual_seed(0)
    x = torch.randn(256, 64, device=device, dtype=dtype, requires_grad=True)
    gate_up = torch.randn(4, 128, 64, device=device, dtype=dtype, requires_grad=True)
    down = torch.randn(4, 64, 64, device=device, dtype=dtype, requires_grad=True)
    weight, index = torch.rand(256, 4, device=device).topk(2)
    results = []
    for path in (experts_grouped_mm, experts_dense):
        try:
            out = path(x, index, weight, gate_up / 8, down / 8)
            results.append([out, *torch.autograd.grad((out * out.detach()).sum(), (x, gate_up, down))])
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            print(f"experts: {path.__name__} does not work here ({reason}): using dense", flush=True)
            return "dense"
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
    if not worst < 0.05:
        print(f"experts: grouped and dense differ by {worst:.3f}: using dense", flush=True)
        return "dense"
    return "grouped"
