"""Everything a step needs to know of the logits, in one pass over them.

The logits of a canvas are large (256 x 262,144 in float32 is 268 MB), so what is wanted of them is computed together,
a few positions at a time, while they are in the processor's cache: softmax, entropy, best token, a sample, its
log-probability. `read_logits_plainly` says the same in five separate passes; a test holds the two equal.

L positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_BYTES = 1 << 20  # what is kept warm at once
STRETCH = 128  # tokens whose sum or maximum is taken first
# A logit this far below the best counts as forbidden, whose logit is -inf: numbers beyond float32's normal range are
# slow to compute with (30 times, on a CPU), and no sample ever falls on them.
LEAST = -80.0
NOTHING = 2e-35  # just above exp(LEAST)


@dataclass(frozen=True)
class Beliefs:
    """What the network believes of each canvas position, at the step's temperature."""

    probs: Tensor  # [L, V] float32; also what self-conditioning reads
    argmax: Tensor  # [L] int64
    sample: Tensor  # [L] int64
    entropy: Tensor  # [L] nats
    logprob: Tensor  # [L] of the argmax token


def read_logits(logits: Tensor, temperature: float, uniforms: Tensor) -> Beliefs:
    """logits [L, V] float32, which are overwritten by the probabilities; uniforms [L] -> Beliefs"""
    length, vocab = logits.shape
    argmax = torch.empty(length, dtype=torch.int64, device=logits.device)
    entropy = torch.empty(length, dtype=torch.float32, device=logits.device)
    logprob = torch.empty_like(entropy)
    sums = torch.empty(length, -(-vocab // STRETCH), dtype=torch.float32, device=logits.device)
    block = length if logits.is_cuda else max(1, BLOCK_BYTES // (4 * vocab))
    for start in range(0, length, block):
        part = slice(start, start + block)
        z = logits[part].div_(temperature)
        argmax[part], best = _best(z)
        z.sub_(best[:, None]).clamp_min_(LEAST)
        weights = F.threshold(z.exp(), NOTHING, 0.0, inplace=True)
        torch.sum(_stretch(weights, 0.0), dim=-1, out=sums[part])
        total = sums[part].sum(dim=-1)
        logprob[part] = -total.log()
        # H = log(sum exp z) - sum(p z)
        entropy[part] = (total.log() - torch.linalg.vecdot(weights, z) / total).clamp_min_(0.0)
        torch.div(weights, total[:, None], out=z)
    return Beliefs(logits, argmax, _pick(logits, sums, uniforms.to(logits.device)), entropy, logprob)


def _stretch(x: Tensor, filler: float) -> Tensor:
    """[n, V] -> [n, stretches, STRETCH]: the vocabulary in stretches, whose sums and maxima are cheap"""
    missing = -x.shape[1] % STRETCH
    padded = F.pad(x, (0, missing), value=filler) if missing else x
    return padded.view(x.shape[0], -1, STRETCH)


def _best(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [n, V] -> argmax [n], maximum [n]; first the stretch, then within it (an argmax over all of V is slow)"""
    table = _stretch(z, -torch.inf)
    stretch = table.amax(dim=-1).argmax(dim=-1)
    best, token = table[torch.arange(z.shape[0], device=z.device), stretch].max(dim=-1)
    return stretch * STRETCH + token, best


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """weights [n, V], uniforms [n] -> the token at which the share of the weights passes the uniform number"""
    return _pick(weights, _stretch(weights, 0.0).sum(dim=-1), uniforms)


def _pick(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    stretch, rest = _pass(sums, uniforms)
    rows = torch.arange(weights.shape[0], device=weights.device)
    token, _ = _pass(_stretch(weights, 0.0)[rows, stretch], rest)
    return stretch * STRETCH + token


def _pass(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """weights [n, m], uniforms [n] -> which weight the uniform number falls on, and where on it, in [0, 1)"""
    below = weights.cumsum(dim=-1)
    target = uniforms[:, None] * below[:, -1:]
    # Rounding may run past the last weight that is not 0; it must not be picked for that.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=-1, keepdim=True)
    at = torch.minimum(torch.searchsorted(below, target, right=True), last)
    weight = weights.gather(1, at)
    inside = (target - (below.gather(1, at) - weight)) / weight.clamp_min(torch.finfo(weights.dtype).tiny)
    return at.squeeze(1), inside.squeeze(1).clamp_(0.0, 1.0)


def read_logits_plainly(logits: Tensor, temperature: float, uniforms: Tensor) -> Beliefs:
    """The slow twin of `read_logits`: one line a quantity."""
    z = logits / temperature
    probs = z.softmax(dim=-1)
    entropy = torch.distributions.Categorical(logits=z).entropy()
    return Beliefs(probs, z.argmax(dim=-1), pick(probs, uniforms), entropy, z.log_softmax(dim=-1).amax(dim=-1))
