"""The operations that `FusedNetwork` is made of: chosen once, as Triton kernels or as their torch twins.

Weights are pairs (numbers, scale or None) in any format of `ops/product.py`. Dense products go to the vendor's kernels
where those were measured to be faster, those of a few rows to kernels that do without tensor cores; with `exact`
neither, because sums would depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.ops import attention_cached, fused, kernels, one, product, routing, sampler, tiles, vocab
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.one import Routed
from diffusiongemma.ops.packed import Packed
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.tiles import block_rows, format_of
from diffusiongemma.ops.vocab import Reading, Rules, Table

LEAST_EXPERTS = 16  # that the router's kernels can choose from
VENDOR_ROWS = 64  # from so many rows on, a bfloat16 product is the vendor's
VENDOR_ROWS_FP8 = 256  # the same for fp8, of matrices that are wider than deep; of others from four times as many on


def wants_fp8(weight: Weight) -> bool:
    """Is it multiplied with fp8 numbers? Weights in fp8 are, and 4-bit ones that lie in tiles of row pairs."""
    return weight[0].dtype in (FP8, torch.uint8)


@dataclass(frozen=True)
class Ops:
    """Signatures as in `ops/`; N tokens, D hidden, k experts a token."""

    name: str
    norm_rows: Callable[..., Rows]
    # `eager`, of this and `place`: what follows may be launched before their turn has come (`early_triton.run`)
    after_attention: Callable[..., tuple[Tensor, Rows, Rows]]
    after_feed_forward: Callable[..., tuple[Tensor, Rows]]
    quantize_rows: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    rope_at: Callable[..., tuple[Tensor, Tensor]]
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    route: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Rows]  # `attend_rows`: rounded for the next product, and kept in the cache where asked
    store: Callable[..., None]  # new keys and values into the cache, without attention
    # `slim`, of both: in programs that leave room for others on their multiprocessor
    linear: Callable[..., Tensor]  # x [N, K], weight of [O, K] -> [N, O]
    geglu: Callable[..., Rows]  # x [N, K], weight of [2 O, K] -> [N, O], in fp8 where x is
    # x, index, weight [N, k], up, down -> [N m, D]: a row for each of a token's experts, or (m = 1) their sum
    # `placed`: from `place`, where that was used; the weights are in it. `packed`: up and down once more
    experts: Callable[..., Tensor]
    vocab_end: Callable[..., Reading]  # as `vocab_triton.vocab_end`
    draws: Callable[..., tuple[Tensor, Tensor]]
    prepare: Callable[..., tuple[Tensor, Tensor, Tensor]]  # `ops/sampler.py`: before the vocabulary end
    decide: Callable[..., None]  # … and after it
    # as `route`, then the experts' weight; `counts`: zeros, `routing.counters` -> index, weight, and where they are
    place: Callable[..., tuple[Tensor, Tensor, Placed]]
    route_one: Callable[..., Routed]  # after_attention and route of up to `few` rows with one new token each
    streams: Callable[[int, int, Weight, Weight], bool]  # tokens, k, up, down: are placed pairs' experts streamed?
    # Nobody reads these any more: they need not be written to memory. Runs beside what follows.
    forget: Callable[[Sequence[Tensor]], None]
    few: int = 0  # up to so many rows, products take them as they are
    # Up to so many tokens, pairs are placed while they are picked; of more they are sorted. What experts make of placed
    # ones lies in lists with room for all tokens each: 92 MB for 512 tokens of the 26B (`experts_triton.gate_up`).
    placing: int = 512
    reading: int = 1024  # positions that the vocabulary end reads at once: 0.8 GB

    def places(self, tokens: int, experts: int, top_k: int) -> bool:
        """Is `place` used? Not where most experts have no token: all of them have a first block there. Nor where there
        are too few experts for its kernel."""
        return self.few < tokens <= self.placing and LEAST_EXPERTS <= experts <= tokens * top_k

    def roomy(self) -> Ops:
        """The same for a card with memory to spare"""
        return replace(self, placing=4 * self.placing, reading=2 * self.reading)

    def quant_for(self, rows: int, weight: Weight) -> torch.dtype | None:
        """What so many rows are rounded to for a product with this weight"""
        return FP8 if wants_fp8(weight) and rows > self.few else None

    def rows_for(self, x: Rows, weight: Weight) -> Rows:
        """x as this weight wants it."""
        quant = self.quant_for(len(x.values), weight)
        return x if quant is None or x.values.dtype == quant else Rows(*self.quantize_rows(x.values, quant))


# ---- torch -------------------------------------------------------------------------------------------------------


def torch_ops() -> Ops:
    return Ops(
        "torch",
        fused.norm_rows,
        _torch_after_attention,
        fused.after_feed_forward,
        fused.quantize_rows,
        fused.rope_at,
        fused.split_heads,
        fused.route,
        attention_cached.attend_rows,
        attention_cached.store,
        _torch_linear,
        _torch_geglu,
        _torch_experts,
        _torch_vocab_end,
        vocab.draws,
        sampler.prepare,
        sampler.decide,
        _torch_place,
        one.route(fused.after_attention, fused.route),
        lambda *_: False,
        fused.forget,
    )


def _torch_after_attention(*args: Any, eager: bool = False) -> tuple[Tensor, Rows, Rows]:
    return fused.after_attention(*args)


def _torch_linear(x: Rows, weight: Weight, slim: bool = False) -> Tensor:
    return product.product(x, *weight).values


def _torch_geglu(x: Rows, weight: Weight, slim: bool = False) -> Rows:
    return _like(x, product.product(x, *weight, gated=True))


def _like(x: Rows, hidden: Rows) -> Rows:
    return Rows(*fused.quantize_rows(hidden.values, FP8)) if x.values.dtype == FP8 else hidden


def _torch_place(
    x: Tensor, proj: Tensor, scale: Tensor, per_expert: Tensor, top_k: int, eps: float, up: Weight, *, counts: Tensor,
    eager: bool = False,
) -> tuple[Tensor, Tensor, Placed]:  # fmt: skip
    index, weight = fused.route(x, proj, scale, per_expert, top_k, eps)
    return index, weight, routing.place(index, weight, len(proj), block_rows(index.numel(), len(proj)))


def _torch_experts(
    x: Rows, index: Tensor, weight: Tensor, up: Weight, down: Weight, placed: Placed | None = None,
    packed: Packed | None = None,
) -> Tensor:  # fmt: skip
    experts = up[0].shape[0]
    plan = placed or routing.route(index, experts, block_rows(index.numel(), experts))
    hidden = _like(x, product.product(x, *up, gated=True, routing=plan))
    share = weight if placed is None else placed.share
    return product.product(hidden, *down, routing=plan, share=share.flatten()).values


def _torch_vocab_end(
    hidden: Tensor,
    table: Table,
    rules: Rules,
    cap: float,
    embed_scale: float | None,
    few: bool = False,
    coldest: float | None = None,
    at_once: int = 0,
) -> Reading:
    return vocab.vocab_end(hidden, table, rules, cap, embed_scale)


# ---- Triton ------------------------------------------------------------------------------------------------------


def triton_ops(exact: bool = False, few: bool = True, stream: bool = True, cpp: bool = True) -> Ops:
    """Import only where `kernels.unavailable` has found nothing. `few`: off, a few rows go the way of many; `stream`:
    off, each product of the experts is a kernel of its own everywhere; `cpp`: off, no kernel in CUDA C++ is used."""
    from diffusiongemma.ops import (
        attention_join_triton,
        attention_triton,
        experts_triton,
        few_triton,
        heads_triton,
        linear_triton,
        norm_triton,
        product_cuda,
        product_triton,
        router_one_triton,
        router_triton,
        rows_triton,
        sampler_triton,
        sweep_triton,
        vocab_triton,
    )

    few_rows = few_triton.FEW if few and not exact else 0

    def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype != FP8:
            return norm_triton.quantize_rows(x, dtype)
        rows = rows_triton.quantize_rows(x)
        assert rows.scale is not None
        return rows.values, rows.scale

    def route(x: Tensor, proj: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        # Tensor cores want 16 columns at least; so few experts as in the embedded model are quickly done without.
        kernel = proj.shape[0] >= LEAST_EXPERTS
        return router_triton.route(x, proj, *rest) if kernel else fused.route(x, proj, *rest)

    def place(
        x: Tensor, proj: Tensor, scale: Tensor, per_expert: Tensor, k: int, eps: float, up: Weight, *, counts: Tensor,
        eager: bool = False,
    ) -> tuple[Tensor, Tensor, Placed]:  # fmt: skip
        block = block_rows(len(x) * k, len(proj), format_of(up[0]))
        return router_triton.place(x, proj, scale, per_expert, k, eps, block, counts, eager)

    def linear(x: Rows, weight: Weight, slim: bool = False) -> Tensor:
        w, scale = weight
        rows, inputs = x.values.shape
        if rows <= few_rows:
            return few_triton.few(x, w, scale)
        if slim:
            return product_triton.product(x, w, scale, tile=tiles.SLIM).values
        if cpp and (tile := product_cuda.tile_for(x, w)) is not None:
            return product_cuda.product(x, w, scale, tile)
        if exact or kernels.interpreted():
            return product_triton.product(x, w, scale).values
        if w.dtype == x.values.dtype and scale is None and rows >= VENDOR_ROWS:
            return F.linear(x.values, w)
        many = rows >= VENDOR_ROWS_FP8 * (1 if w.shape[0] > inputs else 4)
        many = many and not kernels.untried(w.device)  # who is not Hopper refuses it (pytorch#192707)
        if w.dtype == FP8 and many and x.scale is not None and x.scale.shape[1] == 1:  # it knows one scale a row only
            assert scale is not None
            return torch._scaled_mm(x.values, w.t(), x.scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        return product_triton.product(x, w, scale).values

    def geglu(x: Rows, weight: Weight, slim: bool = False) -> Rows:
        if len(x.values) <= few_rows:
            return Rows(few_triton.few(x, *weight, gated=True))
        return linear_triton.geglu_linear(x, *weight, tile=tiles.SLIM_GATED if slim else None)

    def experts(
        x: Rows, index: Tensor, weight: Tensor, up: Weight, down: Weight, placed: Placed | None = None,
        packed: Packed | None = None,
    ) -> Tensor:  # fmt: skip
        return experts_triton.experts_pairs(
            x, index, weight, *up, *down, few=few_rows > 0, placed=placed, stream=stream, packed=packed
        )

    def streams(tokens: int, k: int, up: Weight, down: Weight) -> bool:
        block = block_rows(tokens * k, up[0].shape[0], format_of(up[0]))
        return stream and experts_triton.streams(block, up[0], down[0])

    def vocab_end(
        hidden: Tensor,
        table: Table,
        rules: Rules,
        cap: float,
        embed_scale: float | None,
        few: bool = False,
        coldest: float | None = None,
        at_once: int = vocab_triton.CHUNK,
    ) -> Reading:
        # The vendor's bfloat16 product is the faster one; but before it, ours makes more than a product on the way.
        library = not exact and table.soft is None and not kernels.interpreted()
        how: Literal["library", "fused"] = "library" if library else "fused"
        return vocab_triton.vocab_end(
            hidden, table, rules, cap, embed_scale, soft_how=how, few=few, coldest=coldest, at_once=at_once
        )

    return Ops(
        "triton",
        norm_triton.norm_rows,
        norm_triton.after_attention,
        norm_triton.after_feed_forward,
        quantize_rows,
        heads_triton.rope_at,
        heads_triton.split_heads,
        route,
        attention_triton.attend_rows,
        attention_join_triton.store,
        linear,
        geglu,
        experts,
        vocab_end,
        vocab_triton.draws,
        sampler_triton.prepare,
        sampler_triton.decide,
        place,
        router_one_triton.route,
        streams,
        sweep_triton.forget,
        few_rows,
    )
