"""Attention of one row: its new tokens over its cached prefix and over themselves.

Shapes: H query heads, K key/value heads, T new tokens, C cached tokens, S = C + T, Dh head size.
The score scale is 1: the norms on queries and keys set it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops.threads import shared

# Queries that are computed together. On a CPU blocks begin at multiples of this in the text itself, wherever a prompt
# was cut: a query's result has the same bits in one piece, in chunks or token by token, and so have kept prefixes.
CPU_BLOCK = 16
GPU_BLOCK = 1024  # only bounds the mask, which is GPU_BLOCK x S


def attend_canvas(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, H, Dh], k and v [K, S, Dh] -> [T, H, Dh]; every query sees every key."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    # The queries of one group share a K/V head, so they are simply more rows of it: no copy of K/V, no mask.
    rows = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    with shared(2 * q.numel() * k.shape[1]):
        out = F.scaled_dot_product_attention(rows[None], k[None], v[None], scale=1.0)[0]
    return out.view(kv_heads, heads // kv_heads, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """q [T, H, Dh], k and v [K, S, Dh] -> [T, H, Dh]; the new tokens stand at `start` …, the keys end with them.

    A query sees the `window` keys up to itself (None: all).
    """
    tokens, heads, head_dim = q.shape
    kv_heads, keys = k.shape[0], k.shape[1]
    end = start + tokens
    block = GPU_BLOCK if q.is_cuda else CPU_BLOCK
    outs = []
    for begin in range(start - start % block, end, block):
        stop = begin + block
        first = 0 if window is None else max(0, begin - window + 1)
        rows = _cut(q.transpose(0, 1), start, begin, stop)  # [H, block, Dh]
        k_part, v_part = (_cut(t, end - keys, first, stop) for t in (k, v))
        query_at = torch.arange(begin, stop, device=q.device)[:, None]
        key_at = torch.arange(first, stop, device=q.device)[None, :]
        seen = key_at <= query_at
        if window is not None:
            seen &= key_at > query_at - window
        # As in `attend_canvas`, the queries of a group are more rows of their K/V head.
        group = heads // kv_heads
        with shared(2 * rows.numel() * k_part.shape[1]):
            out = F.scaled_dot_product_attention(
                rows.reshape(1, kv_heads, group * block, head_dim),
                k_part[None],
                v_part[None],
                attn_mask=seen.repeat(group, 1),
                scale=1.0,
            )
        out = out.reshape(heads, block, head_dim)  # not every backend of torch's gives whole heads in a row
        outs.append(out[:, max(start - begin, 0) : min(end, stop) - begin])
    return torch.cat(outs, dim=1).transpose(0, 1)


def _cut(x: Tensor, at: int, first: int, stop: int) -> Tensor:
    """x [h, n, Dh], whose tokens stand at `at` … -> those at first … stop - 1, zeros where x has none"""
    have = x[:, max(first - at, 0) : max(stop - at, 0)]
    before, after = max(at - first, 0), max(stop - at - x.shape[1], 0)
    return F.pad(have, (0, 0, before, after)) if before or after else have
