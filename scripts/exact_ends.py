"""Cases of attention and of the vocabulary end (`exact_cases.py` has the others)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import exact_attention as attention
import exact_vocab as vocabulary
import torch
from exact_cases import DENSE, Case
from exact_limits import Part, named, same_bits
from exact_shapes import Inputs, LayerShape, Lines, Shapes
from exact_vocab import Asked, Embeddings
from torch import Tensor

from diffusiongemma.engine.lane import WARM
from diffusiongemma.model.backend import Ops
from diffusiongemma.ops import vocab
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.vocab import Table

SHARP = 2.0  # the standard deviation of attention scores and more or less that of logits: neither flat nor one-hot
EMBED_SCALE = 8.0


def attention_cases(kind: str, shapes: Shapes, inputs: Inputs, few: int, alone: bool) -> Iterator[Case]:
    """`few`: up to so many rows, products take them as they are. `alone`: has a row the same bits alone? (On a card: an
    interpreter leaves the order of sums to NumPy.)"""
    quant = FP8 if DENSE[kind] == "fp8" else None
    for layer in shapes.layers():
        for name, several in (("canvas", shapes.canvases), ("prompt", shapes.prompts), ("one token", shapes.ones)):
            causal = name != "canvas"
            for lines in several:
                to = quant if sum(new for _, new in lines) > few else None
                case = Attention(f"attend {name} {layer.name}", layer, lines, causal, to, shapes, inputs)
                yield case.case()
                if causal:
                    yield case.stored()
                if alone and len(lines) > 1:
                    yield case.alone()


class Attention:
    def __init__(
        self, name: str, layer: LayerShape, lines: Lines, causal: bool, quant: torch.dtype | None, shapes: Shapes,
        inputs: Inputs,
    ) -> None:  # fmt: skip
        self.name, self.causal, self.quant = name, causal, quant
        self.window = layer.window if causal else layer.canvas_window
        over = ", ".join(f"{n} over {held}" for held, n in lines)
        self.shape = f"{layer.heads} / {layer.kv_heads} heads of {layer.size}, {over}"
        count, slots, size, device = len(lines), shapes.slots(layer, lines), layer.size, inputs.device
        begin = torch.tensor([0, *(new for _, new in lines)], device=device).cumsum(0).int()
        self.new = New(begin, max(new for _, new in lines))
        tokens, sharp = int(begin[-1]), (SHARP * size**-0.5) ** 0.5
        # A token's heads lie side by side, as in `CachePool`. What was never written is NaN, and must never be read.
        keys, values = (
            torch.full((count + 1, slots, layer.kv_heads, size), torch.nan, device=device, dtype=torch.bfloat16)
            for _ in "kv"
        )
        rows = list(range(count, 0, -1))  # of the cache: one is left over
        for row, (length, _) in zip(rows, lines, strict=True):
            where = torch.arange(max(0, length - slots), length, device=device) % slots
            keys[row, where] = inputs.randn(len(where), layer.kv_heads, size, std=sharp)
            values[row, where] = inputs.randn(len(where), layer.kv_heads, size)
        lengths = torch.tensor([held for held, _ in lines], dtype=torch.int32, device=device)
        where = torch.tensor(rows, dtype=torch.int32, device=device)
        self.prefix = Prefix(keys.transpose(1, 2), values.transpose(1, 2), where, lengths)
        self.q = inputs.randn(tokens, layer.heads, size, std=sharp)
        self.k = inputs.randn(tokens, layer.kv_heads, size, std=sharp)
        self.v = inputs.randn(tokens, layer.kv_heads, size)

    def _run(self, ops: Ops, row: int | None = None) -> tuple[Rows, Prefix]:
        """On a copy of the cache, which prompts are written into"""
        prefix, new, own = self._copied(), self.new, slice(None)
        if row is not None:
            own = slice(int(new.begin[row]), int(new.begin[row + 1]))
            prefix = replace(prefix, row=prefix.row[row : row + 1], length=prefix.length[row : row + 1])
            new = New(new.begin[row : row + 2] - new.begin[row], new.most)
        q, k, v = self.q[own], self.k[own], self.v[own]
        return ops.attend(q, k, v, prefix, new, self.causal, self.window, self.quant, keep=self.causal), prefix

    def _copied(self) -> Prefix:
        keys, values = (t.transpose(1, 2).clone().transpose(1, 2) for t in (self.prefix.keys, self.prefix.values))
        return replace(self.prefix, keys=keys, values=values)

    def case(self) -> Case:
        def parts(got: tuple[Rows, Prefix]) -> list[Part]:
            given = (self.q, self.k, self.v, self.prefix, self.new, self.causal, self.window, self.quant)
            kept = attention.cached(got[1], self.prefix, self.k, self.v, self.new, keep=self.causal)
            return attention.attend(got[0], *given) + kept

        return Case(self.name, self.shape, "bf16" if self.quant is None else "fp8", self._run, parts)

    def stored(self) -> Case:
        def call(ops: Ops) -> Prefix:
            prefix = self._copied()
            ops.store(self.k, self.v, prefix, self.new)
            return prefix

        def parts(got: Prefix) -> list[Part]:
            return attention.cached(got, self.prefix, self.k, self.v, self.new, keep=True)

        return Case(self.name.replace("attend", "store"), self.shape, "bf16", call, parts)

    def alone(self) -> Case:
        last = len(self.prefix.row) - 1

        def call(ops: Ops) -> tuple[Rows, Rows]:
            return self._run(ops)[0], self._run(ops, last)[0]

        def parts(got: tuple[Rows, Rows]) -> list[Part]:
            whole, one = (rows.values.double() for rows in got)
            return [Part("the last row alone", one, whole[int(self.new.begin[last]) :], how="equal")]

        return Case(self.name, self.shape, "bf16" if self.quant is None else "fp8", call, parts)


# ---- the vocabulary end ------------------------------------------------------------------------------------------


def vocab_cases(kind: str, shapes: Shapes, inputs: Inputs, alone: bool, exact: bool) -> Iterator[Case]:
    """`alone`: as above; `exact`: no vendor's product makes the soft embedding, and it has the same bits too"""
    config = shapes.config
    cap, std = config.final_logit_softcapping, SHARP * config.hidden_size**-0.5
    e = Embeddings.of(inputs.randn(config.vocab_size, config.hidden_size, std=std), kind != "bf16")
    fmt = "int8, soft fp8" if e.eight else "bf16"
    for n in shapes.read:
        x = inputs.randn(n, config.hidden_size)
        free, ruled = asked(n, config.vocab_size, inputs, False), asked(n, config.vocab_size, inputs, True)
        for name, rules, coldest in (("warm", free, WARM), ("cold, pins and bans", ruled, None)):
            yield _reading(f"vocab_end {name}", fmt, x, e, rules, cap, EMBED_SCALE, coldest=coldest)
        if alone:
            yield _reading_alone("vocab_end", fmt, x, e, ruled, cap, e.eight or exact)
            table = vocab.make_table(e.plain, "fp8") if kind == "fp8" else e.table
            for rows, fixed in ((n, True), (n, False), (n - n // 3, True)):
                yield _head(x[:rows], table, free, cap, fixed)
    for n in shapes.few:
        rules, x = asked(n, config.vocab_size, inputs, False), inputs.randn(n, config.hidden_size)
        yield _reading("vocab_end few", fmt.partition(",")[0], x, e, rules, cap, None, few=True)


def asked(n: int, tokens: int, inputs: Inputs, ruled: bool) -> Asked:
    """Pins and bans where `ruled`, one ban as wide as a tile; temperatures from `WARM` on"""
    temperature, uniform = inputs.uniform(n) + WARM, inputs.uniform(n)
    if not ruled:
        return Asked(temperature, uniform, [], [])
    sets: tuple[list[int], ...] = ([0, 3, 31, 32, tokens - 1], list(range(tokens // 4, 3 * tokens // 4)), [])
    pins = {2: tokens // 3, 3: tokens - 1}
    return Asked(temperature, uniform, [sets[i % 3] for i in range(n)], [pins.get(i, -1) for i in range(n)])


def _rounded(ops: Ops, x: Tensor, e: Embeddings) -> Tensor:
    """Hidden states as the product with the embeddings takes them, float64"""
    if not e.eight:
        return x.double()
    values, scale = ops.quantize_rows(x, e.table.weight.dtype)
    return values.double() * scale.double()


def _reading(
    name: str, fmt: str, x: Tensor, e: Embeddings, rules: Asked, cap: float, scale: float | None, **options: Any
) -> Case:
    def call(ops: Ops) -> Any:
        given = rules.rules(len(e.plain))
        return ops.vocab_end(x, e.table, given, cap, scale, **options), _rounded(ops, x, e)

    def parts(got: Any) -> list[Part]:
        args = (got[0], x, got[1], e, rules, cap, scale)
        found = vocabulary.vocab_end(*args)
        return found + (named("format", vocabulary.vocab_form(*args)) if e.eight else [])

    return Case(name, f"{len(x)} x {x.shape[1]} -> {len(e.plain)}", fmt, call, parts)


def _reading_alone(name: str, fmt: str, x: Tensor, e: Embeddings, rules: Asked, cap: float, soft: bool) -> Case:
    last = len(x) - 1

    def call(ops: Ops) -> Any:
        whole = rules.rules(len(e.plain))
        one = ops.vocab_end(x[last:], e.table, whole.rows(last, last + 1), cap, EMBED_SCALE)
        return ops.vocab_end(x, e.table, whole, cap, EMBED_SCALE), one

    def parts(got: Any) -> list[Part]:
        names = ["argmax", "sample", "entropy", "logprob", "sample_logprob", *(["soft"] if soft else [])]
        pairs = ((getattr(got[1], each), getattr(got[0], each)[last:]) for each in names)
        return [Part(f"{each} of a row alone", *pair, how="equal") for each, pair in zip(names, pairs, strict=True)]

    return Case(name, f"{len(x)} x {x.shape[1]} -> {len(e.plain)}", fmt, call, parts)


def _head(x: Tensor, table: Table, asked: Asked, cap: float, fixed: bool) -> Case:
    """What is kept of every tile: where it is streamed, does the kernel in Triton give the same bits?"""
    from diffusiongemma.ops import weigh_triton

    blocks = weigh_triton.head_blocks(False, table.weight.dtype)
    rules = asked.rules(len(table.weight)).rows(0, len(x))

    def call(ops: Ops) -> list[list[Tensor]]:
        ways = [weigh_triton.weigh_fused(x, table, rules, cap, blocks, fixed, stream) for stream in (True, False)]
        return [[weights, *stats] for weights, stats, _ in ways]

    def parts(got: list[list[Tensor]]) -> list[Part]:
        names = ("weights", *weigh_triton.Stats._fields)
        return [same_bits(f"{name} as by Triton", *pair) for name, *pair in zip(names, *got, strict=True)]

    way = "streamed" if weigh_triton.streams(table, rules, blocks, x.dtype) else "not streamed"
    fmt = {torch.int8: "int8", FP8: "fp8"}.get(table.weight.dtype, "bf16")
    shape = f"{len(x)} x {x.shape[1]} -> {len(table.weight)}"
    return Case(f"head {way}{', warm' if fixed else ''}", shape, fmt, call, parts)
