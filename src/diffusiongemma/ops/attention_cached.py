"""Attention of a whole batch: new tokens of many rows, packed, over what each row has cached and over each other.

`attend` is the definition, row by row in plain torch; `attention_triton.attend` has the same signature and reads all
lengths on the device, so that a recorded CUDA graph serves any of them.

Legend: B rows, N new tokens of all rows, H query heads, K key/value heads, Dh head size, R rows of the cache, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.errors import InputError
from diffusiongemma.ops.fused import Rows, quantize_rows


@dataclass(frozen=True)
class Prefix:
    """What is cached in one layer. The token at position p lies in slot p mod S: a ring, or all of it if S suffices."""

    keys: Tensor  # [R, K, S, Dh]
    values: Tensor  # [R, K, S, Dh]
    row: Tensor  # [B] int32: which row of the cache belongs to which row of the batch
    length: Tensor  # [B] int32: how many tokens the row has cached


@dataclass(frozen=True)
class New:
    """How the new tokens lie: those of row b from begin[b] to begin[b + 1]."""

    begin: Tensor  # [B + 1] int32
    most: int  # that any row may have: it fixes the grid and how the work is laid out, so it is the host's to know


def attend(
    q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, new: New, causal: bool, window: int | None = None
) -> Tensor:
    """q [N, H, Dh], k and v [N, K, Dh] -> [N, H, Dh]

    Causal: a query sees the `window` tokens up to itself (None: all). Otherwise: all new tokens of its row, and the
    last `window` cached ones, the same for every query.
    """
    check(q, k, v, prefix, new)
    out = torch.empty_like(q)
    begins, slots = new.begin.tolist(), prefix.keys.shape[2]
    for b, (row, length) in enumerate(zip(prefix.row.tolist(), prefix.length.tolist(), strict=True)):
        part = slice(begins[b], begins[b + 1])
        count = begins[b + 1] - begins[b]
        at = torch.arange(max(0, length - slots), length, device=q.device)  # the positions that are cached
        keys = torch.cat([prefix.keys[row][:, at % slots], k[part].transpose(0, 1)], dim=1)
        values = torch.cat([prefix.values[row][:, at % slots], v[part].transpose(0, 1)], dim=1)
        own = torch.arange(length, length + count, device=q.device)
        key_at, query_at = torch.cat([at, own])[None, :], own[:, None]
        if causal:
            seen = key_at <= query_at
            seen &= key_at > query_at - (window or 1 << 40)
        else:
            seen = (key_at >= length - (window or 1 << 40)).expand(count, -1)
        out[part] = _plain(q[part], keys, values, seen)
    return out


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    new: New,
    causal: bool,
    window: int | None = None,
    quant: torch.dtype | None = None,
    keep: bool = False,
) -> Rows:
    """As `attend`, for the product that follows: -> [N, H Dh], rounded to `quant` where that is given. `keep`: then the
    new tokens go into the cache, as `store` puts them there."""
    mixed = attend(q, k, v, prefix, new, causal, window).flatten(1)
    if keep:
        store(k, v, prefix, new)
    return Rows(mixed) if quant is None else Rows(*quantize_rows(mixed, quant))


def _plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [T, H, Dh], k and v [K, S, Dh], seen [T, S] -> [T, H, Dh]; computed in float32 or wider"""
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(1, (k.shape[0], -1))  # [T, K, G, Dh]
    scores = torch.einsum("tkgd,ksd->kgts", grouped, k.to(dtype)).masked_fill(~seen, -torch.inf)
    return torch.einsum("kgts,ksd->tkgd", scores.softmax(dim=-1), v.to(dtype)).flatten(1, 2).to(q.dtype)


def store(k: Tensor, v: Tensor, prefix: Prefix, new: New) -> None:
    """Write the new tokens, k and v [N, K, Dh], behind what is cached; of more than a ring holds, the last."""
    begins, slots = new.begin.tolist(), prefix.keys.shape[2]
    for b, (row, length) in enumerate(zip(prefix.row.tolist(), prefix.length.tolist(), strict=True)):
        first = max(begins[b], begins[b + 1] - slots)
        at = torch.arange(length + first - begins[b], length + begins[b + 1] - begins[b], device=k.device) % slots
        prefix.keys[row].index_copy_(1, at, k[first : begins[b + 1]].transpose(0, 1).to(prefix.keys.dtype))
        prefix.values[row].index_copy_(1, at, v[first : begins[b + 1]].transpose(0, 1).to(prefix.values.dtype))


def check(q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, new: New) -> None:
    """Shapes that do not fit together would read beyond a tensor's end."""
    tokens, _, head_dim = q.shape
    kv_heads, rows = k.shape[1], prefix.row.shape[0]
    problems = [
        k.shape != (tokens, kv_heads, head_dim) or v.shape != k.shape,
        q.shape[1] % kv_heads != 0,
        prefix.keys.shape[1] != kv_heads or prefix.keys.shape[3] != head_dim,
        prefix.values.shape != prefix.keys.shape,
        prefix.length.shape != (rows,) or new.begin.shape != (rows + 1,),
    ]
    if any(problems):
        shapes = (q, k, v, prefix.keys, prefix.values, prefix.row, prefix.length, new.begin)
        raise InputError(f"shapes do not fit together: {', '.join(str(list(t.shape)) for t in shapes)}")
