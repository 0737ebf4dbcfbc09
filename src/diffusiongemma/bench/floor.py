"""The least that a pass can take: its bytes at the card's reading speed, its operations at the card's rate.

Bytes: every weight that the pass needs once, and the keys and values of the prefix. Activations are left out; they
stay in the card's cache or are small. Operations: two for each weight and token, and those of attention. Parts follow
one another, so each has its own floor, the larger of the two times; the floor of a whole pass asks only that all bytes
be read and all operations done, and is at most the sum of those.

Legend: T prefix, N new tokens of a row, H query heads, K key/value heads, Dh head size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from diffusiongemma.bench.hardware import Card
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.packed import packed_of
from diffusiongemma.model.quantize import formats_in, shapes_of
from diffusiongemma.ops.tiles import block_rows

EXPERTS, ATTENTION, DENSE, VOCABULARY, CONDITIONING, REST = (
    "experts", "attention", "dense MLP", "vocabulary end", "self-conditioning", "rest",
)  # fmt: skip
PARTS = (EXPERTS, ATTENTION, DENSE, VOCABULARY, CONDITIONING, REST)
_PIECES = {
    ".experts.": EXPERTS, ".self_attn.": ATTENTION, ".mlp.": DENSE, "embed_tokens.": VOCABULARY,
    "self_conditioning.": CONDITIONING,
}  # fmt: skip


def part_of(name: str) -> str:
    """Parameter of the network -> part of a step; router and norms are the rest."""
    return next((part for piece, part in _PIECES.items() if piece in name), REST)


@dataclass
class Work:
    """What a pass must read and compute, by part."""

    bits: int  # of the numbers that are multiplied
    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)

    def part_seconds(self, part: str, card: Card) -> float:
        return max(self.bytes[part] / card.read, self.flops[part] / card.rate(self.bits))

    def seconds(self, card: Card) -> float:
        return max(self.bytes.total() / card.read, self.flops.total() / card.rate(self.bits))

    def bound(self, card: Card) -> str:
        """What the floor comes from."""
        return "bytes" if self.bytes.total() / card.read >= self.flops.total() / card.rate(self.bits) else "operations"

    def to_dict(self, card: Card) -> dict[str, object]:
        return {
            "gb": self.bytes.total() / 1e9,
            "tflop": self.flops.total() / 1e12,
            "bound": self.bound(card),
            "parts": {
                part: {"gb": self.bytes[part] / 1e9, "tflop": self.flops[part] / 1e12,
                       "ms": 1e3 * self.part_seconds(part, card)}
                for part in PARTS
            },
        }  # fmt: skip


def step_work(model: DiffusionGemma, users: int, prefix: int, canvas: int, hit: float = 1.0) -> Work:
    """A denoising step. `hit`: the share of experts that its tokens reach."""
    work = _weights(model, users * canvas, hit)
    # Logits and soft embedding: the table is read once (its tiles can serve both), but multiplied with twice.
    work.flops[VOCABULARY] *= 2
    window = model.config.canvas_window
    _attend(work, model, users, prefix, canvas, window, keys=users * canvas * (prefix + canvas), in_window=None)
    return work


def encode_work(model: DiffusionGemma, users: int, prefix: int, tokens: int, hit: float, head: int = 0) -> Work:
    """`tokens` new ones a row, causal; logits for `head` of all rows' tokens: one a row for AR; 0 for a prompt, of
    which the last layer makes keys and values only."""
    layers = model.config.num_hidden_layers - (head == 0)
    work = _weights(model, users * tokens, hit, layers)
    del work.bytes[CONDITIONING], work.flops[CONDITIONING]
    if head:
        work.flops[VOCABULARY] = work.flops[VOCABULARY] // (users * tokens) * head
    else:
        del work.bytes[VOCABULARY], work.flops[VOCABULARY]
    window = model.config.sliding_window - 1
    seen = users * sum(prefix + i + 1 for i in range(tokens))
    near = users * sum(min(prefix + i, window) + 1 for i in range(tokens))
    _attend(work, model, users, prefix, tokens, window, keys=seen, in_window=near, layers=layers)
    return work


def prompt_seconds(
    model: DiffusionGemma, card: Card, users: int, prefix: int, chunk: int, room: int | None = None
) -> float:
    """Prompts of all users: they share passes of at most `room` tokens (None: `chunk`), and `chunk` cuts long ones."""
    return sum(count * work.seconds(card) for count, work in _prompt_passes(model, users, prefix, chunk, room))


def _prompt_passes(
    model: DiffusionGemma, users: int, prefix: int, chunk: int, room: int | None
) -> list[tuple[float, Work]]:
    """… and how many of each there are"""
    longest = min(prefix, chunk)
    each = min(users, max(1, (room or chunk) // longest))
    hit = expected_hit(model, each * longest)
    starts = range(0, prefix, chunk)
    return [(users / each, encode_work(model, each, at, min(chunk, prefix - at), hit)) for at in starts]


def request_seconds(
    model: DiffusionGemma,
    card: Card,
    users: int,
    prefix: int,
    tokens: int,
    steps: int,
    width: int,
    chunk: int,
    room: int | None = None,
) -> float:
    """Prompts, the steps of every block of all users together, a commit of every block but the last. What is encoded
    last before a block goes with its first step, which reads the same weights."""
    hit, total = expected_hit(model, users * width), 0.0
    *passes, before = _prompt_passes(model, users, prefix, chunk, room)
    for count, work in passes:
        total += count * work.seconds(card)
    count, encoded = before
    total += (count - 1) * encoded.seconds(card)
    for at in range(prefix, prefix + tokens, width):
        step = step_work(model, users, at, width, hit)
        if at > prefix:
            encoded = encode_work(model, users, at - width, width, hit)
        total += (steps - 1) * step.seconds(card) + _with_step(step, encoded).seconds(card)
    return total


def _with_step(step: Work, encoded: Work) -> Work:
    """One pass of both. (Experts that only one of them reaches are too few to matter.)"""
    return Work(step.bits, step.bytes | encoded.bytes, step.flops + encoded.flops)


def expected_hit(model: DiffusionGemma, tokens: int) -> float:
    """Share of the experts that so many tokens reach when each picks evenly."""
    config = model.config
    return 1.0 - (1.0 - config.top_k_experts / config.num_experts) ** tokens


def weight_bytes(model: DiffusionGemma, layers: int | None = None) -> Counter[str]:
    """Bytes of the weights with their scales by part, as they lie in memory; as `_needed` counts them."""
    found: Counter[str] = Counter()
    for name, tensor in model.state_dict().items():
        if _needed(name, layers):
            found[part_of(name)] += tensor.nbytes
    return found


def _needed(name: str, layers: int | None) -> bool:
    """Of layers beyond the first `layers` (None: of none) only keys and values are made."""
    if layers is None or not name.startswith("layers.") or int(name.split(".")[1]) < layers:
        return True
    return any(part in name for part in ("qkv_proj", "k_norm", "input_layernorm"))


def _experts_bytes(model: DiffusionGemma, tokens: int, layers: int | None) -> int:
    """Of the experts as so many tokens read them: packed, if they are few and it is packed; else as they lie there"""
    config, found = model.config, 0
    few = block_rows(tokens * config.top_k_experts, config.num_experts, "fp8") <= 64
    for layer in model.layers[:layers]:
        experts: Any = layer.experts
        packed = packed_of(experts) if few else None
        found += sum(t.nbytes for t in experts.state_dict().values()) if packed is None else packed.nbytes
    return found


def _weights(model: DiffusionGemma, tokens: int, hit: float, layers: int | None = None) -> Work:
    config = model.config
    formats = formats_in(model)
    bits = min((4 if fmt.kind == "int4" else 8 for fmt in formats.values()), default=8 * model.dtype.itemsize)
    work = Work(bits, bytes=weight_bytes(model, layers))
    work.bytes[EXPERTS] = round(_experts_bytes(model, tokens, layers) * hit)
    for name, shape in shapes_of(config).items():
        if len(shape) > 1 and _needed(name, layers):  # norms and scales are no products
            share = config.top_k_experts / config.num_experts if part_of(name) == EXPERTS else 1.0
            work.flops[part_of(name)] += round(2 * prod(shape) * share * tokens)
    return work


def _attend(
    work: Work, model: DiffusionGemma, users: int, prefix: int, new: int, window: int, keys: int, in_window: int | None,
    layers: int | None = None,
) -> None:  # fmt: skip
    """Scores and sums of the first `layers` (None: of all). `keys`: pairs of query and key in a full layer;
    `in_window`: in a sliding one (causal)."""
    config = model.config
    for layer in range(config.num_hidden_layers if layers is None else layers):
        heads, head_dim = config.layer_heads(layer)
        cached, pairs = prefix, keys
        if config.is_sliding(layer):
            cached = min(prefix, window)
            pairs = users * new * (cached + new) if in_window is None else in_window
        work.bytes[ATTENTION] += users * 2 * heads * head_dim * cached * model.dtype.itemsize
        work.flops[ATTENTION] += 4 * config.num_attention_heads * head_dim * pairs
