"""Attention of one row: its new tokens over its cached prefix and over themselves.

Shapes: H query heads, K key/value heads, T new tokens, C cached tokens, S = C + T, Dh head size.
The score scale is 1: the norms on queries and keys set it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 1024  # bounds the mask to QUERY_BLOCK x S, however long the prompt is


def attend_canvas(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, H, Dh], k and v [K, S, Dh] -> [T, H, Dh]; every query sees every key."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    # The queries of one group share a K/V head, so they are simply more rows of it: no copy of K/V, no mask.
    rows = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(rows[None], k[None], v[None], scale=1.0)[0]
    return out.view(kv_heads, heads // kv_heads, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [T, H, Dh], k and v [K, S, Dh] -> [T, H, Dh]; query i stands at key C + i and sees `window` keys up to it."""
    tokens, keys = q.shape[0], k.shape[1]
    cached = keys - tokens
    heads = q.transpose(0, 1)  # [H, T, Dh]
    outs = []
    for start in range(0, tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, tokens)
        first = 0 if window is None else max(0, cached + start - window + 1)
        last = cached + stop
        block = heads[None, :, start:stop]
        k_block, v_block = k[None, :, first:last], v[None, :, first:last]
        if last - first == stop - start and (window is None or stop - start <= window):
            out = F.scaled_dot_product_attention(block, k_block, v_block, is_causal=True, scale=1.0, enable_gqa=True)
        else:
            query_at = torch.arange(cached + start, cached + stop, device=q.device)[:, None]
            key_at = torch.arange(first, last, device=q.device)[None, :]
            seen = key_at <= query_at
            if window is not None:
                seen &= key_at > query_at - window
            out = F.scaled_dot_product_attention(block, k_block, v_block, attn_mask=seen, scale=1.0, enable_gqa=True)
        outs.append(out[0])
    return torch.cat(outs, dim=1).transpose(0, 1)
