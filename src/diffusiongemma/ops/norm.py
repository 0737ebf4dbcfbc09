"""RMS norm, computed in float32 whatever the input is, as the model was trained."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D] or None -> [..., D] in x's dtype. The weight multiplies directly (not 1 + w)."""
    wide = None if weight is None else weight.float()
    return F.rms_norm(x.float(), (x.shape[-1],), wide, eps).to(x.dtype)
