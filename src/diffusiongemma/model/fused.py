"""The network as a chain of fused operations over a pool of cache rows: what a CUDA graph records.

`FusedNetwork` shares every weight with the `DiffusionGemma` that it is made from, and computes the same. All that may
change from pass to pass is in device tensors (`Batch`), and nothing in a pass asks the host.

Legend: B rows, N packed tokens of all rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING
from diffusiongemma.errors import InputError
from diffusiongemma.model.backend import Ops
from diffusiongemma.model.fused_weights import FusedLayer, mlp_of, quant_of, table_of
from diffusiongemma.model.network import DiffusionGemma
from diffusiongemma.model.pool import CachePool
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.fused import Rows, rope_frequency
from diffusiongemma.ops.kernels import untried
from diffusiongemma.ops.one import Router
from diffusiongemma.ops.rope import Rope
from diffusiongemma.ops.routing import counters

Mode = Literal["encode", "denoise"]
Overlap = Literal["draw", "encode", "denoise"]
T = TypeVar("T")

CACHED = 256  # tokens: what a layer leaves of so many stays in an H200's L2 cache


@dataclass(frozen=True)
class Batch:
    """Which rows a pass goes over, and where their new tokens lie."""

    offsets: Tensor  # [layers, B] int32: `CachePool.offsets`
    length: Tensor  # [B] int32: tokens that each row has cached
    positions: Tensor  # [N] int32: of the new tokens in their rows
    new: New
    reach: int  # no row gets longer than that: `CachePool.reach_for`

    def __len__(self) -> int:
        return self.positions.shape[0]


Part = tuple[Mode, Batch]  # some of the tokens of a pass: those of the first come first


class FusedNetwork:
    def __init__(
        self,
        model: DiffusionGemma,
        pool: CachePool,
        ops: Ops,
        overlap: Sequence[Overlap] = (),
        packed: bool = False,
    ) -> None:
        """`overlap`: in which passes the dense MLP runs on a stream of its own, beside router and experts: where a row
        has one new token ("draw"), in other encoding ("encode"), over canvases ("denoise"). `packed`: experts that are
        packed are read that way where that is faster."""
        self.model, self.pool, self.ops, self.config = model, pool, ops, model.config
        self.eps, self.dtype, self.device = model.config.rms_norm_eps, model.dtype, model.device
        modules: list[Any] = list(model.layers)
        self.layers = [FusedLayer.of(layer, packed) for layer in modules]
        self.conditioning = mlp_of(model.self_conditioning)
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
        self._known = not untried(self.device)  # of others nobody knows what their caches gain, and what they lose
        self._parted = False  # since the last join

    # ---- the two modes -------------------------------------------------------------------------------------------

    def encode(self, tokens: Tensor, batch: Batch) -> Tensor:
        """tokens [N] -> hidden [N, D]; causal; the new tokens go into the cache (who calls advances the rows)"""
        return self._run(self.embed(tokens), ("encode", batch))

    def remember(self, tokens: Tensor, batch: Batch) -> None:
        """`encode` where nobody asks for hidden states: the last layer makes only its keys and values"""
        self._run(self.embed(tokens), ("encode", batch), hidden=False)

    def denoise(self, canvas: Tensor, soft: Tensor, batch: Batch) -> Tensor:
        """canvas [N], soft [N, D] (zeros on the first step) -> hidden [N, D]; never writes the cache"""
        return self._run(self._conditioned(canvas, soft), ("denoise", batch))

    def turn(self, block: Tensor, batch: Batch, canvas: Tensor, soft: Tensor, behind: Batch) -> Tensor:
        """`remember` a block, and `denoise` the canvases behind it, in one pass, which reads the experts once -> hidden
        of the canvases. What `behind` says is cached, this pass caches."""
        x = torch.cat([self.embed(block), self._conditioned(canvas, soft)])
        return self._run(x, ("encode", batch), ("denoise", behind), hidden=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [N, D], scaled"""
        return self.model.embed(tokens)

    def _conditioned(self, canvas: Tensor, soft: Tensor) -> Tensor:
        conditioning: Any = self.model.self_conditioning
        believed = self.ops.norm_rows(soft, conditioning.pre_norm.weight, self.eps, self.conditioning.quant())
        x = self.embed(canvas) + self.conditioning(self.ops, believed)
        return self.ops.norm_rows(x, None, self.eps).values

    # ---- in between ----------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, *parts: Part, hidden: bool = True) -> Tensor:
        """x [N, D] -> [N, D]: all layers and the last norm; not `hidden`: of tokens that are encoded only the cache is
        filled"""
        positions = _cat([batch.positions for _, batch in parts])
        rope = {kind: self.ops.rope_at(positions, f, self.dtype) for kind, f in self._frequency.items()}
        mode, last = parts[-1]
        kind: Overlap = "draw" if mode == "encode" and last.new.most == 1 else mode
        beside = kind in self.overlap and self._side is not None
        first = self.layers[0]
        h = self.ops.norm_rows(x, first.module.input_layernorm.weight, self.eps, quant_of(first.qkv))
        few = kind == "draw" and len(x) <= self.ops.few
        counts = self._counts(len(x))
        spent = list[Tensor]()
        try:
            for at, layer in enumerate(self.layers):
                heads = self._heads(layer, h, rope[layer.kind])
                if not hidden and at + 1 == len(self.layers):
                    x, parts, heads = self._store(at, x, parts, heads)
                    if not parts:
                        break
                mixed = self._attend(layer, at, parts, *heads)
                self._forget(spent, beside)
                branch = self.ops.linear(mixed, layer.o)
                placing = self._placing(counts, at, len(x))
                x, h, spent = self._feed_forward(layer, at, parts, x, branch, beside, few, placing)
                if not self._forgets(len(x), beside):
                    spent.clear()  # of many tokens that is much memory
        except BaseException:
            if self._parted:
                self._join()  # what runs beside may be at memory that is somebody else's from here on
            raise
        return h.values

    def _counts(self, tokens: int) -> Tensor | None:
        """What every layer places its pairs by, zeros all: no layer has to clear them, and no pass finds another's"""
        experts = self.config.num_experts
        if not self.ops.places(tokens, experts, self.config.top_k_experts):
            return None
        many, _ = counters(experts, tokens * self.config.top_k_experts)
        return torch.zeros(len(self.layers), many, dtype=torch.int32, device=self.device)

    def _placing(self, counts: Tensor | None, at: int, tokens: int) -> Tensor | None:
        """Those of a layer, which may have fewer tokens left"""
        experts, top_k = self.config.num_experts, self.config.top_k_experts
        if counts is None or not self.ops.places(tokens, experts, top_k):
            return None
        return counts[at, : counters(experts, tokens * top_k)[0]]

    def _store(
        self, at: int, x: Tensor, parts: Sequence[Part], heads: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Part, ...], tuple[Tensor, ...]]:
        """In the last layer: tokens that are encoded go into the cache -> what is left of the pass"""
        left, first = list[Part](), 0
        for mode, batch in parts:
            if mode == "encode":
                _, k, v = (t[first : first + len(batch)] for t in heads)
                self.ops.store(k, v, self._prefix(at, batch), batch.new)
                first += len(batch)
            else:
                left.append((mode, batch))
        return x[first:], tuple(left), tuple(t[first:] for t in heads)

    def _attend(self, layer: FusedLayer, at: int, parts: Sequence[Part], q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """Queries, keys and values of all parts -> what each token has seen, all heads side by side. A part sees what
        those before it have left in the cache."""
        quant = self.ops.quant_for(len(q), layer.o)
        mixed, first = list[Rows](), 0
        for mode, batch in parts:
            causal = mode == "encode"
            window = layer.window if causal else layer.canvas_window
            heads = (t[first : first + len(batch)] for t in (q, k, v))
            prefix = self._prefix(at, batch)
            mixed.append(self.ops.attend(*heads, prefix, batch.new, causal, window, quant, keep=causal))
            first += len(batch)
        scales = [rows.scale for rows in mixed if rows.scale is not None]
        return Rows(_cat([rows.values for rows in mixed]), _cat(scales) if scales else None)

    def _prefix(self, at: int, batch: Batch) -> Prefix:
        return self.pool.prefix(at, batch.offsets[at], batch.length, batch.reach)

    def _heads(self, layer: FusedLayer, h: Rows, rope: Rope) -> tuple[Tensor, ...]:
        """The norm of x, [N, D] -> its queries, keys and values"""
        attention = layer.module.self_attn
        qkv = self.ops.linear(self.ops.rows_for(h, layer.qkv), layer.qkv)
        norms = (attention.q_norm.weight, attention.k_norm.weight)
        return self.ops.split_heads(qkv, *norms, rope, layer.heads, layer.kv_heads, self.eps)

    def _feed_forward(
        self,
        layer: FusedLayer,
        at: int,
        parts: Sequence[Part],
        x: Tensor,
        branch: Tensor,
        beside: bool,
        few: bool,
        counts: Tensor | None,
    ) -> tuple[Tensor, Rows, list[Tensor]]:
        """x, attention's contribution [N, D] -> the layer's output, its norm for what follows, and what nobody reads
        any more; `few`: of up to `ops.few` rows with one new token each; `counts`: pairs are placed by them"""
        m, ops, placed = layer.module, self.ops, None
        # One kernel makes the rows of both branches: quantised, if both want that.
        quant = layer.mlp.quant() if layer.mlp.quant() == quant_of(layer.up) else None
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
        to_sparse = ops.rows_for(to_sparse, layer.up)
        sparse = ops.experts(to_sparse, index, weight, layer.up, layer.down, placed, layer.packed)
        dense = join()
        after = (
            m.post_feedforward_layernorm_1.weight,
            m.post_feedforward_layernorm_2.weight,
            m.post_feedforward_layernorm.weight,
        )
        scalar, *behind = (m.encoder_scalar if mode == "encode" else m.decoder_scalar for mode, _ in parts)
        other = (len(parts[0][1]), *behind) if behind else None
        if at + 1 < len(self.layers):
            following, quant = self.layers[at + 1].module.input_layernorm.weight, quant_of(self.layers[at + 1].qkv)
        else:
            following, quant = self.model.norm.weight, None
        out, h = ops.after_feed_forward(x, dense, sparse, after, scalar, following, self.eps, quant, other)
        return out, h, [x, dense, sparse]

    def _forgets(self, tokens: int, beside: bool) -> bool:
        """Is what a layer leaves of so many tokens forgotten? That of more would not stay in the L2 cache until the
        experts are read, that of a few is nothing."""
        return self._known and self.ops.few < tokens <= CACHED and (beside or self._side is None)

    def _forget(self, spent: list[Tensor], beside: bool) -> None:
        """What the layer before has left, on the other stream, which is joined when the dense MLP is done. The caller
        holds it until then."""
        if spent:
            self._begun(lambda: self.ops.forget(spent), beside)

    def _begun(self, work: Callable[[], T], beside: bool) -> Callable[[], T]:
        """Start this now, `beside`: on the other stream; what comes back waits for it.

        No tensor is freed early: what the other stream reads lives until the join, and what it makes is read before
        it begins again.
        """
        if not beside:
            out = work()
            return lambda: out
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._parted = True
        with torch.cuda.stream(self._side):
            out = work()

        def join() -> T:
            self._join()
            return out

        return join

    def _join(self) -> None:
        """What follows waits for the other stream. Only where they have `_parted`: a recording knows no stream but
        those that wait for it."""
        assert self._side is not None
        self._parted = False
        torch.cuda.current_stream(self.device).wait_stream(self._side)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
