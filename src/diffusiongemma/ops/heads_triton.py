# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Queries, keys and values out of one product: their norms and the rotary embedding in one kernel. Twins of `fused`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.kernels import unavailable
from diffusiongemma.ops.rope import Rope


def supported(qkv: Tensor, head_dim: int) -> str | None:
    """Why the functions of this module cannot run, or None."""
    if reason := unavailable(qkv.device):
        return reason
    if head_dim & (head_dim - 1):
        return f"the head size must be a power of two, not {head_dim}"
    if qkv.dtype not in (torch.bfloat16, torch.float32):
        return f"heads must be bfloat16 or float32, not {qkv.dtype}"
    return None


@triton.jit
def _heads_kernel(
    qkv, q_weight, k_weight, cos, sin, q, k, v, eps, H: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, all of q, of k or of v: HEADS x 2 HALF numbers"""
    total: tl.constexpr = H + K if SHARED else H + 2 * K
    token, first = (tl.program_id(0) // (total // HEADS)).to(tl.int64), tl.program_id(0) % (total // HEADS) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, HALF)[None, :] + 0 * head  # as wide as the heads, so that what is shared is read where it is used
    if first < H:  # a weight is constant: it is read before the wait
        w_a, w_b = tl.load(q_weight + c).to(tl.float32), tl.load(q_weight + HALF + c).to(tl.float32)
    else:
        w_a, w_b = tl.load(k_weight + c).to(tl.float32), tl.load(k_weight + HALF + c).to(tl.float32)
    ready(HOPPER)
    at = qkv + (token * total + head) * (2 * HALF) + c
    a, b = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    cosine = tl.load(cos + token * HALF + c).to(tl.float32)
    sine = tl.load(sin + token * HALF + c).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
    a *= inverse
    b *= inverse
    kv = tl.where(head < H + K, head - H, head - H - K)
    into = (token * K + kv) * (2 * HALF) + c
    if first >= (H if SHARED else H + K):
        tl.store(v + into, a.to(v.dtype.element_ty))
        tl.store(v + into + HALF, b.to(v.dtype.element_ty))
    if first < H + K:
        a *= w_a
        b *= w_b
        x, y = (a * cosine - b * sine).to(q.dtype.element_ty), (b * cosine + a * sine).to(q.dtype.element_ty)
        if first < H:
            into = (token * H + head) * (2 * HALF) + c
            tl.store(q + into, x)
            tl.store(q + into + HALF, y)
        else:
            tl.store(k + into, x)
            tl.store(k + into + HALF, y)


@triton.jit
def _rope_kernel(positions, frequency, cos, sin, HALF: tl.constexpr, HOPPER: tl.constexpr):
    ready(HOPPER)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequency + c)
    tl.store(cos + row * HALF + c, tl.cos(angle).to(cos.dtype.element_ty))
    tl.store(sin + row * HALF + c, tl.sin(angle).to(sin.dtype.element_ty))


def split_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Rope, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused.split_heads`."""
    qkv = qkv.contiguous()
    tokens, head_dim = qkv.shape[0], q_weight.shape[0]
    total = qkv.shape[1] // head_dim
    shared = total == heads + kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k, v = torch.empty(2, tokens, kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    # A warp has 512 numbers, 16 bytes a load. Bits depend on a head's size alone: its sum stays inside a warp.
    together = math.gcd(heads, kv_heads, 8)
    cos, sin = rope
    run(
        _heads_kernel, tokens * total // together,
        qkv, q_weight, k_weight, cos.contiguous(), sin.contiguous(), q, k, v, eps,
        H=heads, K=kv_heads, SHARED=shared, HALF=head_dim // 2, HEADS=together,
        num_warps=max(1, together * head_dim // 512),
    )  # fmt: skip
    return q, k, v


def rope_at(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> Rope:
    """As `fused.rope_at`: positions [N], frequency [Dh / 2] -> cos, sin [N, Dh / 2]"""
    cos, sin = torch.empty(2, positions.shape[0], frequency.shape[0], dtype=dtype, device=positions.device)
    run(_rope_kernel, len(positions), positions, frequency, cos, sin, HALF=frequency.shape[0], num_warps=1)
    return cos, sin
