"""Rotary position embeddings: plain for sliding layers, "proportional" for full ones.

Proportional means: frequencies are spread over the whole head, but only the first part of the angles turns;
the rest have frequency zero, so `cos = 1` and `sin = 0` leave those channels as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos, sin: [N, Dh / 2] each


def rope_tables(positions: Tensor, head_dim: int, theta: float, rotary_factor: float, dtype: torch.dtype) -> Rope:
    """positions [N] -> cos, sin [N, Dh / 2], rounded to the dtype that the heads have."""
    half = head_dim // 2
    turning = int(rotary_factor * head_dim // 2)
    exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequency = torch.zeros(half, dtype=torch.float32, device=positions.device)
    frequency[:turning] = 1.0 / theta**exponent
    angle = positions[:, None].float() * frequency  # [N, Dh / 2]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """x [N, H, Dh] -> rotated. Channel i turns with channel i + Dh / 2."""
    cos, sin = (t[:, None, :] for t in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
