"""The network as a chain of fused operations over a pool of cache rows: what a CUDA graph records.

`FusedNetwork` shares every weight with the `DiffusionGemma` that it is made from, and computes the same. All that may
change from pass to pass is in device tensors (`Batch`), and nothing in a pass asks the host.

Legend: B rows, N packed tokens of all rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, LayerType
from diffusiongemma.errors import InputError
from diffusiongemma.model.backend import Ops, wants_fp8
from diffusiongemma.model.layers import MLP, Experts, Layer
from diffusiongemma.model.network import DiffusionGemma, Embedding
from diffusiongemma.model.pool import CachePool
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.fused import Rows, rope_frequency
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.one import Router
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear
from diffusiongemma.ops.rope import Rope
from diffusiongemma.ops.routing import counters
from diffusiongemma.ops.vocab import Table

Overlap = Literal["draw", "encode", "denoise"]


@dataclass(frozen=True)
class Batch:
    """Which rows a pass goes over, and where their new tokens lie."""

    offsets: Tensor  # [layers, B] int32: `CachePool.offsets`
    length: Tensor  # [B] int32: tokens that each row has cached
    positions: Tensor  # [N] int32: of the new tokens in their rows
    new: New
    reach: int  # no row gets longer than that: `CachePool.reach_for`


@dataclass(frozen=True)
class FusedMLP:
    up: Weight
    down: Weight

    def quant(self) -> torch.dtype | None:
        return _quant(self.up)

    def __call__(self, ops: Ops, x: Rows, slim: bool = False) -> Tensor:
        """[N, D] -> [N, D]; `slim`: in programs that leave room for others on their multiprocessor"""
        hidden = ops.geglu(ops.rows_for(x, self.up), self.up, slim)
        return ops.linear(ops.rows_for(hidden, self.down), self.down, slim)


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer as the operations take them."""

    kind: LayerType
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    canvas_window: int | None
    qkv: Weight
    o: Weight
    mlp: FusedMLP
    up: Weight
    down: Weight
    module: Layer

    @classmethod
    def of(cls, layer: Layer) -> FusedLayer:
        attention = layer.self_attn
        experts: Any = layer.experts
        return cls(
            attention.kind,
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.window,
            attention.canvas_window,
            _weight(attention.qkv_proj),
            _weight(attention.o_proj),
            _mlp(layer.mlp),
            _expert_weight(experts, "gate_up_proj"),
            _expert_weight(experts, "down_proj"),
            layer,
        )


class FusedNetwork:
    def __init__(self, model: DiffusionGemma, pool: CachePool, ops: Ops, overlap: Sequence[Overlap] = ()) -> None:
        """`overlap`: in which passes the dense MLP runs on a stream of its own, beside router and experts: where a row
        has one new token ("draw"), in other encoding ("encode"), over canvases ("denoise")."""
        self.model, self.pool, self.ops, self.config = model, pool, ops, model.config
        self.eps, self.dtype, self.device = model.config.rms_norm_eps, model.dtype, model.device
        modules: list[Any] = list(model.layers)
        self.layers = [FusedLayer.of(layer) for layer in modules]
        self.conditioning = _mlp(model.self_conditioning)
        self.table = table_of(model)
        self.embed_scale = float(torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype))
        config = self.config
        self._frequency = {
            SLIDING: rope_frequency(config.head_dim, config.rope_theta, 1.0, self.device),
            FULL: rope_frequency(
                config.global_head_dim, config.global_rope_theta, config.global_partial_rotary_factor, self.device
            ),
        }
        if unknown := sorted(set(overlap) - set(get_args(Overlap))):
            raise InputError(f"no pass is called {', '.join(unknown)}: {', '.join(get_args(Overlap))} are")
        self.overlap = tuple(overlap)
        # `route_one` counts its programs in these: zeros between any two of them, and no two networks share them.
        self._counters = torch.zeros(max(1, ops.few), dtype=torch.int32, device=self.device)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # ---- the two modes -------------------------------------------------------------------------------------------

    def encode(self, tokens: Tensor, batch: Batch) -> Tensor:
        """tokens [N] -> hidden [N, D]; causal; the new tokens go into the cache (who calls advances the rows)"""
        return self._run("encode", self.embed(tokens), batch)

    def remember(self, tokens: Tensor, batch: Batch) -> None:
        """`encode` where nobody asks for hidden states: the last layer makes only its keys and values"""
        self._run("encode", self.embed(tokens), batch, hidden=False)

    def denoise(self, canvas: Tensor, soft: Tensor, batch: Batch) -> Tensor:
        """canvas [N], soft [N, D] (zeros on the first step) -> hidden [N, D]; never writes the cache"""
        conditioning: Any = self.model.self_conditioning
        believed = self.ops.norm_rows(soft, conditioning.pre_norm.weight, self.eps, self.conditioning.quant())
        x = self.embed(canvas) + self.conditioning(self.ops, believed)
        return self._run("denoise", self.ops.norm_rows(x, None, self.eps).values, batch)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [N, D], scaled"""
        return self.model.embed(tokens)

    # ---- in between ----------------------------------------------------------------------------------------------

    def _run(self, mode: Literal["encode", "denoise"], x: Tensor, batch: Batch, hidden: bool = True) -> Tensor:
        """x [N, D] -> [N, D]: all layers and the last norm; not `hidden`: only the cache is filled"""
        rope = {kind: self.ops.rope_at(batch.positions, f, self.dtype) for kind, f in self._frequency.items()}
        kind: Overlap = "draw" if mode == "encode" and batch.new.most == 1 else mode
        beside = kind in self.overlap and self._side is not None
        first = self.layers[0]
        h = self.ops.norm_rows(x, first.module.input_layernorm.weight, self.eps, _quant(first.qkv))
        few = kind == "draw" and len(x) <= self.ops.few
        counts = self._counts(len(x))
        for at, layer in enumerate(self.layers):
            if not hidden and at + 1 == len(self.layers):
                _, *new, prefix = self._heads(layer, at, h, rope[layer.kind], batch)
                self.ops.store(*new, prefix, batch.new)
                break
            branch = self._attend(mode, layer, at, h, rope[layer.kind], batch)
            x, h = self._feed_forward(mode, layer, at, x, branch, beside, few, None if counts is None else counts[at])
        return h.values

    def _counts(self, tokens: int) -> Tensor | None:
        """What every layer places its pairs by, zeros all: no layer has to clear them, and no pass finds another's"""
        experts = self.config.num_experts
        if not self.ops.places(tokens, experts, self.config.top_k_experts):
            return None
        many, _ = counters(experts, tokens * self.config.top_k_experts)
        return torch.zeros(len(self.layers), many, dtype=torch.int32, device=self.device)

    def _attend(
        self, mode: Literal["encode", "denoise"], layer: FusedLayer, at: int, h: Rows, rope: Rope, batch: Batch
    ) -> Tensor:
        """The norm of x, [N, D] -> attention's contribution [N, D]"""
        q, k, v, prefix = self._heads(layer, at, h, rope, batch)
        causal = mode == "encode"
        window = layer.window if causal else layer.canvas_window
        quant = self.ops.quant_for(len(q), layer.o)
        mixed = self.ops.attend(q, k, v, prefix, batch.new, causal, window, quant, keep=causal)
        return self.ops.linear(mixed, layer.o)

    def _heads(
        self, layer: FusedLayer, at: int, h: Rows, rope: Rope, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor, Prefix]:
        """The norm of x, [N, D] -> its queries, keys and values, and what is cached"""
        attention = layer.module.self_attn
        qkv = self.ops.linear(self.ops.rows_for(h, layer.qkv), layer.qkv)
        norms = (attention.q_norm.weight, attention.k_norm.weight)
        heads = self.ops.split_heads(qkv, *norms, rope, layer.heads, layer.kv_heads, self.eps)
        return *heads, self.pool.prefix(at, batch.offsets[at], batch.length, batch.reach)

    def _feed_forward(
        self,
        mode: Literal["encode", "denoise"],
        layer: FusedLayer,
        at: int,
        x: Tensor,
        branch: Tensor,
        beside: bool,
        few: bool,
        counts: Tensor | None,
    ) -> tuple[Tensor, Rows]:
        """x, attention's contribution [N, D] -> the layer's output, and its norm for what follows; `few`: of up to
        `ops.few` rows with one new token each; `counts`: pairs are placed by them"""
        m, ops, placed = layer.module, self.ops, None
        # One kernel makes the rows of both branches: quantised, if both want that.
        quant = layer.mlp.quant() if layer.mlp.quant() == _quant(layer.up) else None
        before = (m.post_attention_layernorm, m.pre_feedforward_layernorm, m.pre_feedforward_layernorm_2)
        norms = tuple(norm.weight for norm in before)
        router = Router(m.router.proj.weight, m.router.scale, m.router.per_expert_scale, m.router.top_k)
        if few:
            routed = ops.route_one(x, branch, norms, router, self.eps, quant, self._counters)
            x, to_dense, to_sparse, index, weight = routed
            join = self._begun(lambda: layer.mlp(ops, to_dense), beside)
        else:
            # Streamed experts stay on all multiprocessors: they are to be there first, their weights on the way early.
            streamed = counts is not None and ops.streams(len(x), router.top_k, layer.up, layer.down)
            x, to_dense, to_sparse = ops.after_attention(x, branch, *norms, self.eps, quant, eager=streamed)
            slim = beside and streamed
            if not slim:
                join = self._begun(lambda: layer.mlp(ops, to_dense), beside)
            if counts is None:
                index, weight = ops.route(x, *router, self.eps)
            else:
                index, weight, placed = ops.place(x, *router, self.eps, layer.up, counts=counts, eager=streamed)
            if slim:
                join = self._begun(lambda: layer.mlp(ops, to_dense, slim=True), beside)
        sparse = ops.experts(ops.rows_for(to_sparse, layer.up), index, weight, layer.up, layer.down, placed)
        dense = join()
        after = (
            m.post_feedforward_layernorm_1.weight,
            m.post_feedforward_layernorm_2.weight,
            m.post_feedforward_layernorm.weight,
        )
        scalar = m.encoder_scalar if mode == "encode" else m.decoder_scalar
        if at + 1 < len(self.layers):
            following, quant = self.layers[at + 1].module.input_layernorm.weight, _quant(self.layers[at + 1].qkv)
        else:
            following, quant = self.model.norm.weight, None
        return ops.after_feed_forward(x, dense, sparse, after, scalar, following, self.eps, quant)

    def _begun(self, work: Callable[[], Tensor], beside: bool) -> Callable[[], Tensor]:
        """Start this now, `beside`: on the other stream; what comes back waits for it.

        No tensor is freed early: what the other stream reads lives until the join, and what it makes is read before
        it begins again.
        """
        if not beside:
            out = work()
            return lambda: out
        assert self._side is not None
        side, main = self._side, torch.cuda.current_stream(self.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = work()

        def join() -> Tensor:
            main.wait_stream(side)
            return out

        return join


# ---- weights -----------------------------------------------------------------------------------------------------


def table_of(model: DiffusionGemma) -> Table:
    """The embeddings as the vocabulary end reads them; 8-bit ones get their fp8 copy for the soft embedding."""
    embedding: Any = model.embed_tokens
    if isinstance(embedding, QuantEmbedding):
        return Table(embedding.weight.q, embedding.weight.scale).with_soft()
    assert isinstance(embedding, Embedding)
    return Table(embedding.weight.data)


def _weight(module: Any) -> Weight:
    if isinstance(module, QuantLinear):
        return module.weight.q, module.weight.scale
    assert isinstance(module, Linear), f"no fused product with a {type(module).__name__}"
    return module.weight.data, None


def _expert_weight(module: Any, name: str) -> Weight:
    weight = getattr(module, name)
    if isinstance(module, QuantExperts):
        return weight.q, weight.scale
    assert isinstance(module, Experts)
    return weight.data, None


def _mlp(module: MLP) -> FusedMLP:
    return FusedMLP(_weight(module.gate_up_proj), _weight(module.down_proj))


def _quant(weight: Weight) -> torch.dtype | None:
    """What the rows before a product are rounded to."""
    return FP8 if wants_fp8(weight) else None
