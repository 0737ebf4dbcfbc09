"""The shapes that operations are checked on, and random inputs for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from exact_products import Matrix
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, ModelConfig

Lines = tuple[tuple[int, int], ...]  # of each row: tokens that are cached, tokens that are new
LAYERS = {"num_hidden_layers": 2, "layer_types": (SLIDING, FULL)}


@dataclass(frozen=True)
class LayerShape:
    name: str
    sliding: bool
    heads: int
    kv_heads: int
    size: int  # of a head
    window: int | None  # that a token of a prompt sees
    canvas_window: int | None  # of the prefix, that a canvas sees

    @property
    def projected(self) -> int:
        """Outputs of the product that makes queries, keys and values; full layers use their keys as values"""
        return (self.heads + self.kv_heads * (2 if self.sliding else 1)) * self.size


@dataclass(frozen=True)
class Shapes:
    config: ModelConfig
    rows: tuple[int, ...]  # tokens of a pass
    sorted: tuple[int, ...]  # the same for the sort by expert, which goes another way with many pairs
    placed: tuple[int, ...]  # further ones, of which only pairs are placed: experts with other blocks of rows
    dense: tuple[int, ...]  # further ones, of which only products around attention are made: in other tiles
    canvases: tuple[Lines, ...]
    prompts: tuple[Lines, ...]
    ones: tuple[Lines, ...]
    read: tuple[int, ...]  # positions that the vocabulary end reads
    few: tuple[int, ...]  # the same where each row has one

    def layers(self) -> Iterator[LayerShape]:
        c = self.config
        for layer, name in enumerate(("sliding", "full")):
            window, canvas = (c.sliding_window, c.canvas_window) if c.is_sliding(layer) else (None, None)
            yield LayerShape(
                name, c.is_sliding(layer), c.num_attention_heads, *c.layer_heads(layer), window, canvas
            )  # fmt: skip

    def slots(self, layer: LayerShape, lines: Lines) -> int:
        """Of the cache: a ring as `CachePool` has it, or room for all"""
        ring = max(self.config.sliding_window - 1, self.config.canvas_window)
        return ring if layer.sliding else max(held + new for held, new in lines) + 5


def shapes_of(name: str) -> Shapes:
    """26b: the true geometry, one layer of each kind. A pass has one token, one a user, a canvas, or a long prompt.
    small: what Triton's interpreter can do, and odd numbers, so that the last tile of everything sticks out."""
    if name == "26b":
        return Shapes(
            ModelConfig.preset("26b-a4b", **LAYERS), rows=(1, 16, 256, 2048), sorted=(16, 256, 2048),
            placed=(512, 1024), dense=(200, 300, 500, 1000),
            canvases=(((1500, 256),), ((0, 256), (2900, 256), (700, 256), (31, 250))),
            prompts=(((0, 2048),), ((1500, 300), (0, 40))),
            ones=(((3000, 1),), ((40, 1), (0, 1), (3000, 1), (700, 1), (1100, 1))), read=(256,), few=(1, 8),
        )  # fmt: skip
    assert name == "small", f"no shapes {name}"
    config = ModelConfig.preset(
        "tiny", vocab_size=400, hidden_size=256, intermediate_size=64, moe_intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_global_key_value_heads=1, global_head_dim=512,
        num_experts=16, top_k_experts=2, sliding_window=16, canvas_length=10, eos_token_ids=(1,), **LAYERS,
    )  # fmt: skip
    return Shapes(
        config, rows=(1, 21), sorted=(21, 2100), placed=(), dense=(), canvases=(((0, 9), (40, 10)),),
        prompts=(((0, 37),), ((11, 7), (0, 3))), ones=(((40, 1), (0, 1), (3, 1), (17, 1), (9, 1)),),
        read=(9,), few=(3,),
    )  # fmt: skip


def streamed(small: Shapes) -> Shapes:
    """The same for a card, where experts are streamed: so wide, and of so many tokens, that all kernels which do that
    have their turn. An odd number of tiles is left, and half a stage."""
    config = replace(small.config, hidden_size=768, moe_intermediate_size=576)
    return replace(small, config=config, rows=(*small.rows, 130), placed=(300, 450, 850))


class Inputs:
    """Random numbers on one device, from one seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._source = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(0.0, std, generator=self._source).to(torch.bfloat16)

    def near_one(self, *shape: int) -> Tensor:
        """Weights of norms and scales: were they all one, nobody would see that a wrong one was read."""
        return (1 + self.randn(*shape, std=0.3).float()).to(torch.bfloat16)

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._source, device=self.device)

    def chosen(self, count: int, among: int, k: int) -> Tensor:
        """[count, k]: different experts of each token"""
        return torch.rand(count, among, generator=self._source, device=self.device).topk(k).indices

    def matrix(self, fmt: str, *shape: int, gated: bool = False) -> Matrix:
        return Matrix(fmt, lambda: self.randn(*shape, std=shape[-1] ** -0.5), gated)
