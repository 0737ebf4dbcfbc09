"""What quantising cost: by layer and part from the errors of the tensors, and end to end from the logits.

End to end, samples are compared, of random tokens or of a text: each prompt is encoded and a canvas denoised over it,
once without and once with self-conditioning. The networks run one after the other and are compared by their recorded
logits, so they need not fit into memory together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from diffusiongemma.checkpoint.entries import TensorError
from diffusiongemma.checkpoint.samples import Sample, random_samples
from diffusiongemma.model import DiffusionGemma

PARTS = ("attention", "dense MLP", "experts", "embeddings")
TINY = 1e-30
KEPT = 64  # positions of a canvas, from all over it: the logits of all 256 would be half a gigabyte a sample
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
    product: float | None  # relative error of what they give on the samples that they were fitted to
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
        fitted = [e.product for e in found if e.product is not None]
        product = (sum(change for change, _ in fitted) / max(sum(whole for _, whole in fitted), TINY)) ** 0.5
        size = sum(e.nbytes for e in found)
        fmt = str(found[0].format)
        rows.append(PartError(layer, part, fmt, relative, worst, cosine, product if fitted else None, numbers, size))
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
def record(model: DiffusionGemma, samples: Sequence[Sample] | None = None) -> list[Tensor]:
    """Logits [L, V] of up to 64 positions on the CPU, two for each sample; None: four of random tokens."""
    found: list[Tensor] = []
    vocab = model.config.vocab_size
    for sample in random_samples(vocab, 4) if samples is None else samples:
        prompt, noisy = (tokens[None].to(model.device) for tokens in (sample.prompt, sample.noisy))
        cache = model.new_cache(1, prompt.shape[1])
        model.encode(prompt, cache)
        # What the previous step believed must be the same for both networks: these tokens, not their own.
        soft = torch.zeros(1, noisy.shape[1], vocab, device=model.device)
        soft.scatter_(2, sample.believed.to(model.device)[None, :, None], 10.0)
        at = torch.linspace(0, noisy.shape[1] - 1, min(KEPT, noisy.shape[1]), device=model.device).round().long()
        for belief in (None, soft):
            found.append(model.denoise(noisy, cache, belief)[0, at].float().cpu())
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
