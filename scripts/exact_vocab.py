"""The vocabulary end in float64: logits, what is read of them, and the soft embedding.

Legend: N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from exact_limits import (
    A_FEW,
    BF16,
    E4M3,
    E4M3_LEAST,
    SOFT_RUN,
    SOFT_TOP,
    SPREAD,
    SUM_PLAIN,
    Part,
    sum_float32,
    sum_fp8,
    to_bf16,
    to_int8,
    together,
)
from torch import Tensor

from diffusiongemma.ops import vocab
from diffusiongemma.ops.quant import FP8_MAX
from diffusiongemma.ops.vocab import Reading, Rules, Table

PIECE = 1 << 16  # tokens whose embeddings are made wide at once


@dataclass(frozen=True)
class Asked:
    """What the reading of each position obeys, as plain lists."""

    temperature: Tensor  # [N]
    uniform: Tensor  # [N]
    banned: list[list[int]]  # for each position; empty: none anywhere
    pins: list[int]  # for each position, -1 for none; empty: none anywhere

    def rules(self, tokens: int) -> Rules:
        device = self.temperature.device
        pin = torch.tensor(self.pins, dtype=torch.int32, device=device) if self.pins else None
        sets = [list(one) for one in dict.fromkeys(tuple(one) for one in self.banned if one)]
        if not sets:
            return Rules(self.temperature, self.uniform, pin)
        which = [sets.index(one) if one else -1 for one in self.banned]
        words = vocab.ban(sets, tokens, device)
        return Rules(self.temperature, self.uniform, pin, words, torch.tensor(which, dtype=torch.int32, device=device))

    def apply(self, z: Tensor) -> Tensor:
        z = z / self.temperature.double()[:, None]
        for row, tokens in enumerate(self.banned):
            z[row, tokens] = -torch.inf
        for row, token in enumerate(self.pins):
            if token >= 0:
                z[row] = -torch.inf
                z[row, token] = 0.0
        return z


@dataclass(frozen=True)
class Embeddings:
    """The tied embeddings: bfloat16 as they are, or int8 with their fp8 copy, beside what they were before that."""

    plain: Tensor  # [V, D] bfloat16
    table: Table

    @classmethod
    def of(cls, plain: Tensor, eight: bool) -> Embeddings:
        return cls(plain, vocab.make_table(plain, "int8" if eight else None, soft=eight))

    @property
    def eight(self) -> bool:
        return self.table.scale is not None

    def pieces(self) -> Iterator[slice]:
        for first in range(0, len(self.plain), PIECE):
            yield slice(first, min(first + PIECE, len(self.plain)))

    def before(self, piece: slice) -> Tensor:
        return self.plain[piece].double()

    def wide(self, piece: slice) -> Tensor:
        scale = self.table.scale
        return self.table.weight[piece].double() * (1.0 if scale is None else scale[piece].double())

    def soft(self, piece: slice) -> Tensor:
        if self.table.soft is None or self.table.soft_scale is None:
            return self.wide(piece)
        return self.table.soft[:, piece].double().t() * self.table.soft_scale.double()

    def soft_off(self, piece: slice) -> Tensor:
        """How far the copy is from what it was: rounded to int8 by rows, then to fp8 by columns"""
        numbers = self.before(piece)
        column = self.plain.abs().amax(dim=0).double() / FP8_MAX
        return together(torch.maximum(E4M3 * numbers.abs(), E4M3_LEAST * column), to_int8(numbers))


@dataclass(frozen=True)
class Belief:
    """Logits [N, V] after the cap, temperature and rules; how far each may be off; and their distribution"""

    z: Tensor
    off: Tensor
    logp: Tensor
    probs: Tensor

    @classmethod
    def of(cls, raw: Tensor, off: Tensor, asked: Asked, cap: float) -> Belief:
        z = asked.apply(cap * torch.tanh(raw / cap))  # which is nowhere steeper than 1
        off = (off + A_FEW * cap) / asked.temperature.double()[:, None]
        logp = z.log_softmax(dim=1)
        return cls(z, off, logp, logp.exp())

    def at(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return numbers.gather(1, tokens.clamp(0, numbers.shape[1] - 1)[:, None]).squeeze(1)


def raw_logits(hidden: Tensor, x: Tensor, e: Embeddings, form: bool) -> tuple[Tensor, Tensor]:
    """hidden [N, D] bfloat16, x [N, D] float64 as it is multiplied -> logits [N, V], and how far those may be off"""
    plain, want, off = hidden.double(), [], []
    for piece in e.pieces():
        wide = e.wide(piece)
        size = (x.square() @ wide.square().t()).sqrt()
        raw = x @ wide.t()
        # Sums of int8 numbers are whole numbers, and exact; only their scales are not.
        bound = A_FEW * raw.abs() if e.eight else sum_float32(x.shape[1]) * size
        if form:
            before = e.before(piece)
            moved = plain.square() @ to_int8(before).square().t() + to_int8(plain).square() @ before.square().t()
            raw, bound = plain @ before.t(), together(bound, moved.sqrt())
        want.append(raw)
        off.append(bound)
    return torch.cat(want, dim=1), torch.cat(off, dim=1)


def read(got: Reading, belief: Belief, asked: Asked) -> list[Part]:
    """All but the soft embedding, each figure with the most that it may be off"""
    z, probs, logp = belief.z, belief.probs, belief.logp
    best, likely = z.max(dim=1)
    below = torch.where(probs > 0, best[:, None] - z, 0.0)
    entropy = (probs * -logp.clamp_min(-1e30)).sum(dim=1)
    mean = (probs * belief.off).sum(dim=1)  # how far logits move the logarithm of the sum of all weights
    first, second = (probs * below).sum(dim=1), (probs * below.square()).sum(dim=1)
    moved = mean + SUM_PLAIN * (1 + first)  # an exponential's argument is a float32: the larger, the less exact
    tilted = (probs * (logp.clamp_min(-1e30) + entropy[:, None]).abs() * belief.off).sum(dim=1)
    forbidden = torch.stack([belief.at(tokens, probs) == 0 for tokens in (got.argmax, got.sample)])
    own, sampled = belief.at(got.argmax, belief.off), belief.at(got.sample, belief.off)
    after = belief.at(got.sample, probs.cumsum(dim=1))
    before, uniform = after - belief.at(got.sample, probs), asked.uniform.double()
    astray = torch.maximum(before - uniform, uniform - after).clamp_min(0)
    gap = best - belief.at(got.argmax, z)
    none = torch.zeros_like(gap)
    return [
        Part("tokens that may not stand", forbidden, torch.zeros_like(forbidden), how="equal"),
        Part("argmax", gap, none, own + belief.at(likely, belief.off), "most"),
        # How far the uniform number lies outside of the sample's stretch. Weights in a tile are bfloat16.
        Part("sample", astray, none, BF16 + mean + moved, "most"),
        Part("entropy", got.entropy, entropy, tilted + SUM_PLAIN * (1 + first + second), "most"),
        Part("logprob", got.logprob, belief.at(got.argmax, logp), own + moved, "most"),
        # Of the sample it is made of its weight, which is bfloat16.
        Part("sample logprob", got.sample_logprob, belief.at(got.sample, logp), BF16 + sampled + moved, "most"),
    ]


def soft(got: Reading, belief: Belief, e: Embeddings, scale: float, form: bool) -> Part:
    """The mean embedding under the probabilities, times the scale"""
    p = belief.probs
    # Weights are stored in bfloat16 and scaled in it; with the copy, then rounded to fp8, their largest being at 256.
    moved = 2**0.5 * BF16 * p
    if e.eight:
        least = E4M3_LEAST / SOFT_TOP * p.amax(dim=1, keepdim=True)
        moved = together(moved, torch.maximum(E4M3 * p, least.expand_as(p)))
    summed = sum_fp8(SOFT_RUN) if e.eight else sum_float32(p.shape[1]) + BF16  # a vendor may add parts in bfloat16
    believed = p * belief.off.clamp_max(1.0)
    rows: Callable[[slice], Tensor] = e.before if form else e.soft
    shape = (len(p), e.plain.shape[1])
    want, square = (torch.zeros(shape, dtype=torch.float64, device=p.device) for _ in "ab")
    for piece in e.pieces():
        wide = rows(piece)
        want += p[:, piece] @ wide
        share = moved[:, piece].square() + believed[:, piece].square() + (summed * p[:, piece]).square()
        square += share @ wide.square()
        if form:
            square += p[:, piece].square() @ e.soft_off(piece).square()
    shifted = believed.norm(dim=1, keepdim=True) * want.abs()  # the sum of all weights moves with the logits
    bound = together(square.sqrt(), shifted, to_bf16(want), SUM_PLAIN * want)
    return Part("soft", got.soft, want * scale, bound * scale)  # type: ignore[arg-type]


def vocab_end(
    got: Reading, hidden: Tensor, x: Tensor, e: Embeddings, asked: Asked, cap: float, scale: float | None
) -> list[Part]:
    """x [N, D] float64: the hidden states as they are multiplied, rounded where the embeddings are 8-bit"""
    belief = Belief.of(*raw_logits(hidden, x, e, form=False), asked, cap)
    return read(got, belief, asked) + ([] if scale is None else [soft(got, belief, e, scale, form=False)])


def vocab_form(
    got: Reading, hidden: Tensor, x: Tensor, e: Embeddings, asked: Asked, cap: float, scale: float | None
) -> list[Part]:
    """The same against embeddings and hidden states before they were rounded: the log-probability and the soft one"""
    belief = Belief.of(*raw_logits(hidden, x, e, form=True), asked, cap)
    own = belief.at(got.argmax, belief.off)
    spread = (belief.probs * belief.off).norm(dim=1)
    # Errors that know nothing of each other still raise the sum of all weights, by half of their squares.
    most = SPREAD * together(own, spread) + 0.5 * (belief.probs * belief.off.square()).sum(dim=1) + SUM_PLAIN
    found = [Part("logprob", got.logprob, belief.at(got.argmax, belief.logp), most, "most")]
    return found + ([] if scale is None else [soft(got, belief, e, scale, form=True)])
