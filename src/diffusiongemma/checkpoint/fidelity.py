"""What quantising cost: by layer and part from the errors of the tensors, and end to end from the logits.

The end-to-end probe is random tokens, so it needs no tokenizer and no data: each prompt is encoded and a random canvas
denoised over it, once without and once with self-conditioning. The networks run one after the other and are compared
by their recorded logits, so they need not fit into memory together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from diffusiongemma.checkpoint.entries import TensorError
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma

PARTS = ("attention", "dense MLP", "experts", "embeddings")
_PARTS = {"self_attn": "attention", "mlp": "dense MLP", "experts": "experts", "embed_tokens": "embeddings"}


@dataclass(frozen=True)
class PartError:
    """Tensors of one part of one layer (None: not in a layer) taken together. `relative` is that of all numbers."""

    layer: int | None
    part: str
    format: str
    relative: float
    worst: float  # relative error of its worst tensor
    cosine: float  # of its worst tensor
    numbers: int
    nbytes: int


def by_part(errors: Iterable[TensorError]) -> list[PartError]:
    """In the order of the layers."""
    groups: dict[tuple[int | None, str], list[TensorError]] = {}
    for error in errors:
        match = re.fullmatch(r"(?:layers\.(\d+)\.)?(\w+)\..*", error.parameter)
        assert match is not None, error.parameter
        groups.setdefault((None if match[1] is None else int(match[1]), _PARTS[match[2]]), []).append(error)
    rows = []
    for (layer, part), found in sorted(groups.items(), key=lambda item: (item[0][0] is None, item[0][0] or 0)):
        numbers = sum(e.numbers for e in found)
        # Rows of one part have like norms, so the mean of the squared relative errors stands for that of all.
        relative = (sum(e.numbers * e.relative**2 for e in found) / numbers) ** 0.5
        worst, cosine = max(e.relative for e in found), min(e.cosine for e in found)
        rows.append(
            PartError(layer, part, str(found[0].format), relative, worst, cosine, numbers, sum(e.nbytes for e in found))
        )
    return rows


@dataclass(frozen=True)
class Agreement:
    """How far the logits of two networks agree over the same positions."""

    positions: int
    cosine: float  # mean over positions
    worst_cosine: float
    argmax: float  # share of positions with the same best token
    kl: float  # mean divergence of the second's distribution from the first's, nats

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@torch.inference_mode()
def record(model: DiffusionGemma, prompts: int = 4, length: int = 48, canvas: int = 32, seed: int = 0) -> list[Tensor]:
    """Logits [canvas, V] on the CPU, two for each random prompt."""
    if min(prompts, length, canvas) < 1:
        raise CheckpointError("a comparison needs at least one prompt, one token of prompt and one of canvas")
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    soft = torch.empty(0)
    for _ in range(prompts):
        shape, vocab = (1, length + canvas), model.config.vocab_size
        tokens = torch.randint(vocab, shape, generator=generator).to(model.device)
        # What the previous step believed must be the same for both networks: a guess at some tokens, not its own.
        soft = torch.zeros(1, canvas, vocab, device=model.device)
        guess = torch.randint(vocab, (1, canvas, 1), generator=generator).to(model.device)
        soft.scatter_(2, guess, 10.0)
        cache = model.new_cache(1, length)
        model.encode(tokens[:, :length], cache)
        for belief in (None, soft):
            found.append(model.denoise(tokens[:, length:], cache, belief)[0].float().cpu())
    return found


def compare(reference: Iterable[Tensor], other: Iterable[Tensor]) -> Agreement:
    """Two recordings of the same probes."""
    cosines, same, divergences = [], [], []
    for a, b in zip(reference, other, strict=True):
        cosines.append(torch.cosine_similarity(a.double(), b.double(), dim=-1))
        same.append(a.argmax(-1) == b.argmax(-1))
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
    cosine, equal, kl = torch.cat(cosines), torch.cat(same), torch.cat(divergences)
    return Agreement(
        len(cosine), float(cosine.mean()), float(cosine.min()), float(equal.double().mean()), float(kl.mean())
    )
