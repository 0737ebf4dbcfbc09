"""The vocabulary end of a step: from the last hidden states to all that the sampler wants to know of the logits.

`vocab_end` is the definition, in plain torch; `vocab_triton.vocab_end` has the same signature and keeps no float32
logits. One uniform number a position picks its sample: the token at which the running sum of the probabilities, in
the order of the vocabulary, passes it. `draws` makes such numbers from (seed, step, position) alone, so a row's chance
does not depend on its neighbours; it is Philox 4x32-10 in integers, the same to the bit on every device.

Legend: N positions, D hidden, V vocabulary, G sets of banned tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusiongemma.ops.quant import FP8, FP8_MAX, Format, dequantize, quantize

WORD = 32  # banned tokens that share an integer


@dataclass(frozen=True)
class Table:
    """The tied embeddings as the vocabulary end reads them: in their own dtype, or int8 or fp8 with a scale a row.

    `soft` is a second, transposed copy in fp8 for the soft embedding: 8-bit tensor cores read both factors along the
    dimension that is summed over. It has a scale a column of the embedding.
    """

    weight: Tensor  # [V, D] float32, bfloat16, int8 or float8_e4m3fn
    scale: Tensor | None = None  # [V, 1] float32, for 8-bit weights
    soft: Tensor | None = None  # [D, V] float8_e4m3fn
    soft_scale: Tensor | None = None  # [D] float32

    def with_soft(self) -> Table:
        """The same with the transposed fp8 copy; made in blocks of columns, so that little is needed beside it."""
        vocab, hidden = self.weight.shape
        soft = torch.empty(hidden, vocab, dtype=FP8, device=self.weight.device)
        scale = torch.empty(hidden, dtype=torch.float32, device=self.weight.device)
        for first in range(0, hidden, 128):
            part = slice(first, first + 128)
            columns = self._columns(part)  # [V, 128] float32
            limit = columns.abs().amax(dim=0).clamp_min(torch.finfo(torch.float32).tiny * FP8_MAX) / FP8_MAX
            soft[part] = (columns / limit).clamp_(-FP8_MAX, FP8_MAX).t().to(FP8)
            scale[part] = limit
        return replace(self, soft=soft, soft_scale=scale)

    def _columns(self, part: slice) -> Tensor:
        columns = self.weight[:, part].float()
        return columns if self.scale is None else columns * self.scale

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[V, D]"""
        return self.weight.to(dtype) if self.scale is None else dequantize(self.weight, self.scale, dtype)

    def wide_soft(self, dtype: torch.dtype) -> Tensor:
        """[V, D] as the soft embedding sees it"""
        if self.soft is None or self.soft_scale is None:
            return self.wide(dtype)
        return (self.soft.to(dtype) * self.soft_scale[:, None].to(dtype)).t()


def make_table(weight: Tensor, kind: str | None = None, soft: bool = False) -> Table:
    """weight [V, D] -> the table in `kind` ("int8", "fp8", None: as it is), with the fp8 copy if `soft`."""
    if kind is None:
        table = Table(weight)
    else:
        table = Table(*quantize(weight, Format(kind)))  # type: ignore[arg-type]
    return table.with_soft() if soft else table


@dataclass(frozen=True)
class Rules:
    """What the reading of each position obeys."""

    temperature: Tensor  # [N] float32
    uniform: Tensor  # [N] float32 in [0, 1)
    pin: Tensor | None = None  # [N] int32: the one token that may stand here, -1 for any
    banned: Tensor | None = None  # [G, V/32] int32: bit t % 32 of word t // 32 is set where token t is banned
    banned_set: Tensor | None = None  # [N] int32: which set bans tokens here, -1 for none

    def rows(self, first: int, end: int) -> Rules:
        part = slice(first, end)
        return Rules(
            self.temperature[part],
            self.uniform[part],
            None if self.pin is None else self.pin[part],
            self.banned,
            None if self.banned_set is None else self.banned_set[part],
        )

    def contiguous(self) -> Rules:
        """The same for kernels, which count from number to number"""
        given = (self.temperature, self.uniform, self.pin, self.banned, self.banned_set)
        return Rules(*(None if t is None else t.contiguous() for t in given))  # type: ignore[arg-type]


def ban(sets: list[list[int]], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Lists of token ids -> [G, V/32] int32, as `Rules.banned` wants it"""
    bits = torch.zeros(len(sets), -(-vocab // WORD) * WORD, dtype=torch.int64)
    for row, tokens in zip(bits, sets, strict=True):
        row[tokens] = 1
    words = (bits.view(len(sets), -1, WORD) << torch.arange(WORD)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(device)


@dataclass(frozen=True)
class Reading:
    """What is kept of the logits."""

    argmax: Tensor  # [N] int64
    sample: Tensor  # [N] int64
    entropy: Tensor  # [N] float32, nats
    logprob: Tensor  # [N] float32, of the argmax
    sample_logprob: Tensor  # [N] float32
    soft: Tensor | None  # [N, D] the mean embedding under the probabilities, scaled


def vocab_end(
    hidden: Tensor,
    table: Table,
    rules: Rules,
    cap: float,
    embed_scale: float | None,
    dtype: torch.dtype = torch.float32,
) -> Reading:
    """hidden [N, D] -> Reading, computed in `dtype`. `embed_scale` is of the soft embedding; None: do without it."""
    x = hidden.to(dtype)
    if table.scale is not None:  # 8-bit products have 8-bit numbers on both sides
        x = dequantize(*quantize(hidden.float(), Format("fp8" if table.weight.dtype == FP8 else "int8")), dtype)
    z = cap * torch.tanh(x @ table.wide(dtype).t() / cap)
    return read(z, table, rules, embed_scale, hidden.dtype)


def read(z: Tensor, table: Table, rules: Rules, embed_scale: float | None, out: torch.dtype) -> Reading:
    """Capped logits [N, V] -> Reading, with the soft embedding in the dtype `out`"""
    z = obey(z, rules) / rules.temperature[:, None]
    logprobs = z.log_softmax(dim=-1)
    probs = logprobs.exp()
    argmax = z.argmax(dim=-1)
    below = probs.cumsum(dim=-1)
    target = rules.uniform[:, None].to(below.dtype) * below[:, -1:]
    last = z.shape[1] - 1 - (probs > 0).flip(1).int().argmax(dim=-1, keepdim=True)  # rounding may not run past it
    sample = torch.minimum(torch.searchsorted(below, target, right=True), last)
    soft = None
    if embed_scale is not None:
        soft = (probs @ table.wide_soft(probs.dtype) * embed_scale).to(out)
    return Reading(
        argmax,
        sample.squeeze(1),
        -(probs * logprobs.clamp_min(-1e30)).sum(dim=-1).float(),
        logprobs.gather(1, argmax[:, None]).squeeze(1).float(),
        logprobs.gather(1, sample).squeeze(1).float(),
        soft,
    )


def obey(z: Tensor, rules: Rules) -> Tensor:
    """Logits [N, V] -> the same with -inf where a token may not stand"""
    tokens = torch.arange(z.shape[1], device=z.device)
    if rules.banned is not None and rules.banned_set is not None:
        bits = rules.banned[:, tokens // WORD] >> (tokens % WORD) & 1  # [G, V]
        sets = rules.banned_set.long()
        z = z.masked_fill((bits[sets.clamp_min(0)] > 0) & (sets >= 0)[:, None], -torch.inf)
    if rules.pin is not None:
        pinned, held = (rules.pin >= 0)[:, None], tokens == rules.pin[:, None]
        z = torch.where(pinned, torch.where(held, 0.0, -torch.inf).to(z.dtype), z)
    return z


# ---- chance ------------------------------------------------------------------------------------------------------

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(seed: Tensor, counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """seed [N] int64, counter of two [N] below 2^32 -> two random words [N] in int64, each below 2^32"""
    c0, c1 = (c.long() & _LOW for c in counter)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps beyond 64 bits: only the bits are wanted
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1


def draws(seed: Tensor, step: Tensor, position: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """seed [N] int64, step and position [N] -> uniform [N] float32 in [0, 1), token [N] int64 below `vocab`"""
    first, second = philox(seed, (position, step))
    return (first >> 8).float() * 2.0**-24, second * vocab >> 32
