"""How many of the experts a pass reaches, layer by layer: what random weights must have in common with real text.

They do not have it by themselves. The belief of a random network is nearly even, so its mean embedding is the same for
all positions; the norm before self-conditioning blows that up, all positions become alike from the second step on, and
all go to the same few experts: a step then seems twice as fast as it is. `spread` takes that away.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.layers import Router

HEAT = 0.6  # about the middle of the released schedule
PREFIX = 512  # where experts go depends little on more


@torch.no_grad()
def spread(model: DiffusionGemma) -> None:
    """Let a random network's belief say nothing: the same work, and positions that stay different."""
    down: nn.Module = model.self_conditioning.down_proj
    for name, tensor in (*down.named_parameters(), *down.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and (name == "weight" or name.endswith("scale")):
            tensor.zero_()


@torch.inference_mode()
def experts_hit(model: DiffusionGemma, users: int, prefix: int, canvas: int | None) -> list[float]:
    """Share of experts that a denoising step reaches in each layer; `canvas` None: one token a row, causal.

    Plain passes over random tokens, all rows with the same prefix. The picks of the second step are counted: it is
    conditioned on what the first believed, as all but one step of a canvas are.
    """
    config, generator = model.config, torch.Generator().manual_seed(1)
    length = min(prefix, PREFIX)

    def draw(count: int) -> Tensor:
        return torch.randint(0, config.vocab_size, (count,), generator=generator).to(model.device)

    (first,) = model.new_cache(1, length + 1).rows
    model.encode_packed(draw(length), [first], [length])
    rows = [first, *(first.fork() for _ in range(users - 1))]
    shares: list[float] = []

    def count(module: nn.Module, inputs: object, out: tuple[Tensor, Tensor]) -> None:
        shares.append(out[0].unique().numel() / config.num_experts)

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, Router)]
    try:
        new = canvas or 1
        if canvas is None:
            model.encode_packed(draw(users), rows, [1] * users)
        else:
            counts = [new] * users
            hidden = model.denoise_packed(draw(users * new), None, rows, counts)
            soft = torch.cat([model.soft_embed(model.logits(part) / HEAT) for part in hidden.split(counts)])
            shares.clear()
            model.denoise_packed(draw(users * new), soft, rows, counts)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(shares) == config.num_hidden_layers
    return shares
