"""Attention over cached and new tokens in float64, and what belongs into the cache after it.

Legend: N new tokens, H query heads, K key/value heads, G = H / K, Dh head size, S slots of the cache.
"""

from __future__ import annotations

import torch
from exact_limits import A_FEW, BF16, Part, sum_float32, to_bf16, together
from exact_small import rows
from torch import Tensor

from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.fused import Rows

FAR = 1 << 40


def attend(
    got: Rows, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, new: New, causal: bool, window: int | None,
    quant: torch.dtype | None,
) -> list[Part]:  # fmt: skip
    """`prefix`: the cache as it was before"""
    want = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    bound = torch.empty_like(want)
    slots, group = prefix.keys.shape[2], q.shape[1] // k.shape[1]
    begin = new.begin.tolist()
    for b, (row, length) in enumerate(zip(prefix.row.tolist(), prefix.length.tolist(), strict=True)):
        own = slice(begin[b], begin[b + 1])
        place = torch.arange(length, length + begin[b + 1] - begin[b], device=q.device)
        held = torch.arange(max(0, length - slots), length, device=q.device)
        where = torch.cat((held, place))
        if causal:
            seen = (where <= place[:, None]) & (where > place[:, None] - (window or FAR))
        else:
            seen = (where >= length - (window or FAR)).expand(len(place), -1)
        for head in range(q.shape[1]):  # memory for one head's scores is enough
            one = head // group
            keys = torch.cat((prefix.keys[row, one, held % slots], k[own, one])).double()
            values = torch.cat((prefix.values[row, one, held % slots], v[own, one])).double()
            want[own, head], bound[own, head] = _head(q[own, head].double(), keys, values, seen)
    return rows("", got, want.flatten(1), bound.flatten(1), quant)


def _head(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Dh], k and v [S, Dh], seen [T, S] -> [T, Dh], and how far that may be off before it is stored"""
    scores = (q @ k.t()).masked_fill(~seen, -torch.inf)
    probs = scores.softmax(dim=1)
    want = probs @ v
    size = (probs.square() @ v.square()).sqrt()
    # A score is a float32 sum, and so is its exponential's argument.
    largest = scores.abs().nan_to_num(posinf=0.0).amax(dim=1)
    off = sum_float32(q.shape[1]) * q.norm(dim=1) * k.norm(dim=1).max() + A_FEW * largest
    moved = off[:, None] * (size + want.abs() * probs.norm(dim=1, keepdim=True))
    # Weights are rounded to bfloat16 when they are made and when they are scaled anew. Keys are split into parts, and
    # the mean of each part is stored in bfloat16: so large as the whole, or as numbers are that are summed by chance.
    return want, together(3**0.5 * BF16 * size, to_bf16(want), moved)


def cached(prefix: Prefix, before: Prefix, k: Tensor, v: Tensor, new: New, keep: bool) -> list[Part]:
    """The cache afterwards: with the new tokens, of more than it has slots the last, and all else untouched"""
    begin, slots = new.begin.tolist(), prefix.keys.shape[2]
    parts = []
    for name, now, was, made in (("keys", prefix.keys, before.keys, k), ("values", prefix.values, before.values, v)):
        want = was.clone()
        lines = zip(prefix.row.tolist(), prefix.length.tolist(), strict=True) if keep else ()
        for b, (row, length) in enumerate(lines):
            last = torch.arange(max(begin[b], begin[b + 1] - slots), begin[b + 1], device=k.device)
            want[row][:, (length + last - begin[b]) % slots] = made[last].transpose(0, 1)
        # What was never written is NaN, which differs from itself.
        parts.append(Part(f"cached {name}", now.nan_to_num(7.0), want.nan_to_num(7.0), how="equal"))
    return parts
