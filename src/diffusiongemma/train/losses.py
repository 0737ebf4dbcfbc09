"""The two places where the whole vocabulary appears, in chunks, so that no [N, V] tensor ever exists.

`cross_entropy` computes its gradient in the forward pass, chunk by chunk: the head is multiplied three times, as in
plain autograd, and nothing is kept but [N, D]. `look` reads a first pass: soft embeddings, entropies, candidates.

Legend: N tokens, n tokens of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 16_384


def _capped(hidden: Tensor, head: Tensor, cap: float) -> Tensor:
    """[n, D] -> float32 logits [n, V], as `DiffusionGemma.logits`"""
    return torch.tanh((hidden @ head.t()).float() / cap) * cap


def _score(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> cross-entropy [n], whether the best guess is right [n], gradient of the raw logits [n, V] in hidden's dtype"""
    logits = _capped(hidden, head, cap)
    entropy = torch.logsumexp(logits, dim=-1)
    at = torch.arange(logits.shape[1], device=logits.device)
    here = at == target[:, None]  # [n, V]; a comparison fuses, a gather does not
    loss = entropy - torch.where(here, logits, 0.0).sum(dim=-1)
    right = logits.argmax(dim=-1) == target
    slope = (torch.exp(logits - entropy[:, None]) - here.float()) * weight[:, None]
    return loss, right, (slope * (1.0 - (logits / cap) ** 2)).to(hidden.dtype)


def _read(
    hidden: Tensor, head: Tensor, temperature: Tensor, noise: Tensor, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> probabilities [n, V] in hidden's dtype, entropy [n], one sample a token [n]; `noise` [n, V] is uniform"""
    z = _capped(hidden, head, cap) / temperature[:, None]
    log_p = torch.log_softmax(z, dim=-1)
    p = torch.exp(log_p)
    entropy = -(p * log_p).sum(dim=-1)
    gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1.0 - 1e-6)))
    return p.to(hidden.dtype), entropy, (log_p + gumbel).argmax(dim=-1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _pick(function: Callable[..., Any], compile: bool, *tensors: Tensor) -> Callable[..., Any]:
    if not compile:
        return function
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return _compiled(function)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, cap: float, compile: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, rights = [], []
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            chunk = (hidden[part], target[part], weight[part])
            score = _pick(_score, compile, *chunk)
            loss, right, slope = score(chunk[0], head, chunk[1], chunk[2], cap)
            grad_hidden[part] = slope @ head
            grad_head += slope.t() @ chunk[0]
            losses.append(loss)
            rights.append(right)
        ctx.save_for_backward(grad_hidden, grad_head)
        loss, right = torch.cat(losses), torch.cat(rights)
        ctx.mark_non_differentiable(loss, right)
        return (loss * weight).sum(), loss, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        dtype = grad_hidden.dtype
        return grad_hidden * grad.to(dtype), (grad_head * grad).to(dtype), None, None, None, None


_cross_entropy: Callable[..., tuple[Tensor, Tensor, Tensor]] = _CrossEntropy.apply


def cross_entropy(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, cap: float, compile: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, D], head [V, D], target and weight [N] -> weighted mean, loss [N], best guess is right [N]"""
    normal = weight.float() / weight.sum().clamp(min=1e-9)
    # The gradient is formed in hidden's dtype: scaled up to near 1, so that bfloat16 and float16 keep small slopes.
    scale = float(target.shape[0])
    total, loss, right = _cross_entropy(hidden, head, target, normal * scale, cap, compile)
    return total / scale, loss, right


@torch.no_grad()
def look(
    hidden: Tensor, head: Tensor, temperature: Tensor, cap: float, compile: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, D], temperature [N] -> mean embedding under softmax(logits / temperature) [N, D] (not yet scaled),
    entropy [N], one sampled token a position [N]"""
    parts = []
    for start in range(0, hidden.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        chunk = (hidden[part], temperature[part], torch.rand(len(hidden[part]), head.shape[0], device=hidden.device))
        p, entropy, sample = _pick(_read, compile, *chunk)(chunk[0], head, chunk[1], chunk[2], cap)
        parts.append((p @ head, entropy, sample))
    soft, entropies, samples = (torch.cat(column) for column in zip(*parts, strict=True))
    return soft, entropies, samples
