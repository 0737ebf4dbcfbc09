"""DiffusionGemma: one stack of layers, used in two modes that share every weight.

`encode` reads text causally and writes the cache. `denoise` reads a canvas of noisy tokens in both directions over
that cache and says what each of them should be. Between the two lies everything this package does.

Legend: B rows, T text tokens, L canvas tokens, N packed tokens of all rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import InputError
from diffusiongemma.model.cache import CacheRow, KVCache
from diffusiongemma.model.layers import MLP, Layer, Pass, RMSNorm
from diffusiongemma.ops.linear import linear
from diffusiongemma.ops.norm import rms_norm


class SelfConditioning(MLP):
    """What the previous step believed, mixed into the canvas embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.eps = config.rms_norm_eps
        self.pre_norm = RMSNorm(config.hidden_size, self.eps)

    def forward(self, x: Tensor, soft: Tensor | None = None) -> Tensor:
        """x, soft [N, D] -> [N, D]; no soft embeddings (the first step) means zeros, and zeros stay zeros."""
        if soft is not None:
            x = x + super().forward(self.pre_norm(soft))
        return rms_norm(x, None, self.eps)


class Embedding(nn.Module):
    """The vocabulary: rows of it on the way in, products with it on the way out. A quantised one may replace it."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, D]"""
        return F.embedding(tokens, self.weight)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> its product with every row [N, V]"""
        return linear(hidden, self.weight)

    def mean(self, probs: Tensor) -> Tensor:
        """probs [N, V] -> the mean of the rows under them [N, D]"""
        return linear(probs.to(self.dtype), self.weight.t())

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


class DiffusionGemma(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.self_conditioning = SelfConditioning(config)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    # ---- the two modes -------------------------------------------------------------------------------------------

    def encode(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | None = None) -> Tensor:
        """tokens [B, T] -> hidden [B, T, D]; causal; appends to the cache.

        `lengths`: how many tokens of each row are real (the rest is padding on the right, and comes back as zeros).
        """
        counts = self._check(tokens, cache, lengths)
        for row, count in zip(cache.rows, counts, strict=True):
            row.check_room(count)
        return _unpack(self.encode_packed(_pack(tokens, counts), cache.rows, counts), counts, tokens.shape[1])

    def encode_packed(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> Tensor:
        """tokens [N] -> hidden [N, D]: `encode` without padding and checks."""
        hidden = self._run("encode", self.embed(tokens), rows, counts)
        for row, count in zip(rows, counts, strict=True):
            row.advance(count)
        return hidden

    def remember_packed(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> None:
        """`encode_packed` where nobody asks for hidden states: the last layer makes only its keys and values."""
        x = self.embed(tokens)
        run = Pass.over("encode", rows, counts, self.config, x.dtype, x.device)
        modules: list[Any] = list(self.layers)
        for layer in modules[:-1]:
            x = layer(x, run)
        modules[-1].self_attn.remember(modules[-1].input_layernorm(x), run)
        for row, count in zip(rows, counts, strict=True):
            row.advance(count)

    def denoise(
        self,
        canvas: Tensor,
        cache: KVCache,
        self_conditioning: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """canvas [B, L] -> logits [B, L, V]; both directions; never writes the cache.

        `self_conditioning`: the processed logits [B, L, V] of the previous step, None on the first.
        `lengths`: how wide the canvas of each row is (the rest is padding, and comes back as zeros).
        """
        counts = self._check(canvas, cache, lengths)
        soft = None
        if self_conditioning is not None:
            if self_conditioning.shape != (*canvas.shape, self.config.vocab_size):
                raise InputError(
                    f"self_conditioning must be [B, L, V] = {[*canvas.shape, self.config.vocab_size]}, "
                    f"got {list(self_conditioning.shape)}"
                )
            soft = self.soft_embed(_pack(self_conditioning, counts))
        hidden = self.denoise_packed(_pack(canvas, counts), soft, cache.rows, counts)
        return _unpack(self.logits(hidden), counts, canvas.shape[1])

    def denoise_packed(self, canvas: Tensor, soft: Tensor | None, rows: list[CacheRow], counts: list[int]) -> Tensor:
        """canvas [N], soft [N, D] or None -> hidden [N, D]: `denoise` without padding, checks and head."""
        return self._run("denoise", self.self_conditioning(self.embed(canvas), soft), rows, counts)

    # ---- the two ends --------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [N, D], scaled"""
        x: Tensor = self.embed_tokens(tokens)
        return x * self._embed_scale()

    def soft_embed(self, logits: Tensor) -> Tensor:
        """Processed logits [N, V] -> the mean embedding under their softmax [N, D], scaled."""
        return self.mean_embed(F.softmax(logits, dim=-1, dtype=torch.float32))

    def mean_embed(self, probs: Tensor) -> Tensor:
        """Probabilities [N, V] -> the mean embedding under them [N, D], scaled."""
        soft: Tensor = self.embed_tokens.mean(probs)
        return soft * self._embed_scale()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., V], float32, soft-capped"""
        cap = self.config.final_logit_softcapping
        raw = self.embed_tokens.project(hidden.flatten(0, -2)).float()
        if raw.requires_grad:
            capped = torch.tanh(raw / cap) * cap
        else:
            # The same by exponentials, which a CPU has much faster. (A sigmoid is faster still, but rounds the last few
            # numbers of a tensor differently, and which are last depends on the batch.)
            capped = raw.mul_(2 / cap).exp_().add_(1).reciprocal_().mul_(-2 * cap).add_(cap)
        return capped.view(*hidden.shape[:-1], -1)

    def _embed_scale(self) -> Tensor:
        # Rounded to the weights' dtype, as the checkpoint was trained.
        return torch.full((), self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; also of its cache."""
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    # ---- in between ----------------------------------------------------------------------------------------------

    def _run(self, mode: Literal["encode", "denoise"], x: Tensor, rows: list[CacheRow], counts: list[int]) -> Tensor:
        """x [N, D] -> [N, D]: all layers and the last norm"""
        run = Pass.over(mode, rows, counts, self.config, x.dtype, x.device)
        for layer in self.layers:
            x = layer(x, run)
        out: Tensor = self.norm(x)
        return out

    def _check(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | None) -> list[int]:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(f"tokens must be integers of shape [B, T], got {tokens.dtype} {list(tokens.shape)}")
        if tokens.shape[0] != cache.batch_size:
            raise InputError(f"{tokens.shape[0]} rows of tokens for a cache of {cache.batch_size}")
        counts = [tokens.shape[1]] * tokens.shape[0] if lengths is None else [int(n) for n in lengths]
        if len(counts) != tokens.shape[0] or not all(0 <= n <= tokens.shape[1] for n in counts):
            raise InputError(f"lengths must be {tokens.shape[0]} numbers from 0 to {tokens.shape[1]}, got {counts}")
        if sum(counts) == 0:
            raise InputError("there is no token to read")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise InputError(f"token ids must be from 0 to {self.config.vocab_size - 1}, got {low} to {high}")
        return counts

    # ---- making one ----------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int = 1, max_length: int = 1024, rollback: int = 0) -> KVCache:
        make = (self.config, max_length, self.dtype, self.device, rollback)
        return KVCache([CacheRow(*make) for _ in range(batch_size)])

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> DiffusionGemma:
        """Random weights, the same for the same seed; norms and scales stay 1."""
        generator = torch.Generator(device=self.embed_tokens.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if not name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale")):
                parameter.normal_(0.0, std, generator=generator)
        return self


def _pack(x: Tensor, counts: list[int]) -> Tensor:
    """[B, T, ...] -> [N, ...]: the real tokens of every row, one after another"""
    if all(n == x.shape[1] for n in counts):
        return x.flatten(0, 1)
    return torch.cat([row[:n] for row, n in zip(x, counts, strict=True)])


def _unpack(x: Tensor, counts: list[int], width: int) -> Tensor:
    """[N, ...] -> [B, T, ...], zeros where a row is shorter"""
    if all(n == width for n in counts):
        return x.view(len(counts), width, *x.shape[1:])
    out = x.new_zeros(len(counts), width, *x.shape[1:])
    for row, part in zip(out, x.split(counts), strict=True):
        row[: part.shape[0]] = part
    return out
