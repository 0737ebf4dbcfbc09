"""The network in training: whole batches with gradients, through the same modules as inference.

All rows of a micro-batch have one prefix length P and one canvas length L. Attention then needs no mask: the encoder is
plainly causal, in a window or not, and a canvas sees all keys of its own prefix and of itself. `encode` reads prefix
and canvas cleanly and hands out the keys and values of the prefix, with gradients; `denoise` reads noisy canvases over
them.

Only attention knows rows, everything else works on flat tokens [N, D] and is what `torch.compile` gets: two functions
a layer, compiled once for all layers and all sizes.

Legend: B rows, P prefix, L canvas, T = P + L, R = views * B canvases, N flat tokens, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, LayerType
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.layers import Layer
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.rope import Rope, rope_tables
from diffusiongemma.train.experts import PATHS, ExpertsPath

KeysValues = tuple[Tensor, Tensor]  # [B, P, K, Dh] each


@dataclass
class Routing:
    """What the routers of all layers did in one pass: share of the tokens and mean probability of every expert."""

    load: Tensor  # [layers, E], no gradient; sums to 1 a layer
    probability: Tensor  # [layers, E], with gradient; sums to 1 a layer


class TrainingForward:
    def __init__(self, model: DiffusionGemma, experts: ExpertsPath = "loop", compile: bool = False) -> None:
        self.model, self.config = model, model.config
        self.experts = experts
        self._rope: dict[tuple[int, int, int], dict[LayerType, Rope]] = {}
        self._before: Callable[..., Any] = before_attention
        self._after: Callable[..., Any] = after_attention
        self.compiled = compile
        if compile:
            torch._dynamo.config.recompile_limit = 64
            self._before, self._after = torch.compile(before_attention), torch.compile(after_attention)

    def encode(self, tokens: Tensor, prefix: int) -> tuple[Tensor, list[KeysValues], Routing]:
        """tokens [B, T] -> hidden [N, D], keys and values of the first `prefix` tokens in every layer, routing"""
        rows, length = tokens.shape
        x, kept = self.model.embed(tokens.flatten()), []
        routing: list[tuple[Tensor, Tensor]] = []
        for layer in self._layers():
            q, k, v = (t.unflatten(0, (rows, length)) for t in self._project(layer, x, (rows, 0, length)))
            kept.append((k[:, :prefix], v[:, :prefix]))
            mixed = attend(q, k, v, causal=True, window=layer.self_attn.window)
            x = self._finish(layer, x, mixed, layer.encoder_scalar, routing)
        return self.model.norm(x), kept, _stack(routing)

    def denoise(self, canvas: Tensor, soft: Tensor | None, prefix: list[KeysValues]) -> tuple[Tensor, Routing]:
        """canvas [R, L], soft [N, D] or None -> hidden [N, D]; canvas r reads the prefix of row r mod B."""
        rows, length = canvas.shape
        start = prefix[0][0].shape[1]
        x = self.model.self_conditioning(self.model.embed(canvas.flatten()), soft)
        routing: list[tuple[Tensor, Tensor]] = []
        for layer, (old_k, old_v) in zip(self._layers(), prefix, strict=True):
            q, k, v = (t.unflatten(0, (rows, length)) for t in self._project(layer, x, (rows, start, length)))
            window = layer.self_attn.canvas_window
            keys, values = (_with_prefix(old, new, window) for old, new in ((old_k, k), (old_v, v)))
            mixed = attend(q, keys, values, causal=False, window=None)
            x = self._finish(layer, x, mixed, layer.decoder_scalar, routing)
        return self.model.norm(x), _stack(routing)

    # ---- one layer -----------------------------------------------------------------------------------------------

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def _project(self, layer: Layer, x: Tensor, where: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self._tables(where, x.dtype, x.device)[layer.self_attn.kind]
        if self.compiled:
            for tensor in (x, cos, sin):
                torch._dynamo.mark_dynamic(tensor, 0)
        out: tuple[Tensor, Tensor, Tensor] = self._before(layer, x, cos, sin)
        return out

    def _finish(
        self, layer: Layer, x: Tensor, mixed: Tensor, scalar: Tensor, routing: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        flat = mixed.flatten(0, 1).flatten(1)  # [N, H Dh]
        if self.compiled:
            flat = flat.clone()  # a view would bring the strides of its base into the compiled code's conditions
            for tensor in (x, flat):
                torch._dynamo.mark_dynamic(tensor, 0)
        out, load, probability = self._after(layer, x, flat, scalar, self.experts)
        routing.append((load, probability))
        result: Tensor = out
        return result

    def _tables(self, where: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[LayerType, Rope]:
        """Rotary tables of `rows` equal rows that stand at `start`; there are few such places, so they are kept."""
        if where not in self._rope:
            rows, start, length = where
            c = self.config
            at = torch.arange(start, start + length, device=device).repeat(rows)
            full = (c.global_head_dim, c.global_rope_theta, c.global_partial_rotary_factor)
            self._rope[where] = {
                SLIDING: rope_tables(at, c.head_dim, c.rope_theta, 1.0, dtype),
                FULL: rope_tables(at, *full, dtype),
            }
        return self._rope[where]


def before_attention(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D] -> q [N, H, Dh], k and v [N, K, Dh]"""
    return layer.self_attn.project(layer.input_layernorm(x), (cos, sin))


def after_attention(
    layer: Layer, x: Tensor, mixed: Tensor, scalar: Tensor, experts: ExpertsPath
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], mixed [N, H Dh] -> the layer's output [N, D]; load and mean probability of the experts [E]"""
    x = x + layer.post_attention_layernorm(layer.self_attn.o_proj(mixed))
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(x)))
    router = layer.router
    # The router's own forward keeps the chosen weights only; balancing needs all probabilities.
    scores = router.proj(rms_norm(x, None, router.eps) * router.scale * router.root)
    probability = F.softmax(scores, dim=-1, dtype=torch.float32)  # [N, E]
    index = _best(probability.detach(), router.top_k)
    # Picking by a mask instead of an index keeps scatters out of the gradient.
    chosen = (index[:, :, None] == torch.arange(probability.shape[1], device=x.device)).float()  # [N, k, E]
    weight = (chosen * probability[:, None, :]).sum(dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True) * (chosen * router.per_expert_scale.float()).sum(dim=-1)
    own = layer.experts
    mixture = PATHS[experts](layer.pre_feedforward_layernorm_2(x), index, weight, own.gate_up_proj, own.down_proj)
    sparse = layer.post_feedforward_layernorm_2(mixture)
    x = x + layer.post_feedforward_layernorm(dense + sparse)
    load = chosen.sum(dim=(0, 1)) / index.numel()
    return x * scalar, load, probability.mean(dim=0)


def _best(probability: Tensor, k: int) -> Tensor:
    """[N, E] -> the k largest [N, k]; repeated maxima fuse into one kernel, where `topk` would sort."""
    best, at = [], torch.arange(probability.shape[1], device=probability.device)
    for _ in range(k):
        best.append(probability.argmax(dim=-1))
        probability = torch.where(at == best[-1][:, None], -1.0, probability)
    return torch.stack(best, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """q [B, T, H, Dh], k and v [B, S, K, Dh] -> [B, T, H, Dh]"""
    if causal and window is not None and q.shape[1] > window:
        return _windowed(q, k, v, window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0, enable_gqa=gqa)
    return out.transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`attend`, causal, where a token sees itself and the `window - 1` before it; `_masked` says the same slowly"""
    if not _has_flash(q):
        return _masked(q, k, v, window)
    # torch's public attention has no window but by a mask, which keeps it off this kernel.
    length, span = q.shape[1], {"window_size_left": window - 1, "window_size_right": 0}
    flash = torch.ops.aten._flash_attention_forward
    out: Tensor = flash(q, k, v, None, None, length, length, 0.0, True, False, scale=1.0, **span)[0]
    return out


def _has_flash(q: Tensor) -> bool:
    halves, head = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    fits = q.is_cuda and halves and head <= 256 and head % 8 == 0
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _masked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    at = torch.arange(q.shape[1], device=q.device)
    behind = at[:, None] - at[None, :]
    mask = (behind >= 0) & (behind < window)
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.repeat_interleave(groups, dim=2).transpose(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)


def _with_prefix(old: Tensor, new: Tensor, window: int | None) -> Tensor:
    """Prefix [B, P, K, Dh] before canvas [R, L, K, Dh]: canvas r has the prefix of row r mod B."""
    if window is not None and old.shape[1] > window:
        old = old[:, -window:]
    rows, wanted = old.shape[0], new.shape[0]
    if rows != wanted:
        old = old.expand(-(-wanted // rows), *old.shape).flatten(0, 1)[:wanted]
    return torch.cat([old, new], dim=1)


def _stack(routing: list[tuple[Tensor, Tensor]]) -> Routing:
    return Routing(torch.stack([load for load, _ in routing]), torch.stack([p for _, p in routing]))
