"""Engines that differ in how they tokenize, on one small random model."""

import dataclasses
import json
from functools import cache

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Engine, Limits
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.bytes import byte_tokenizer
from diffusiongemma.text.fim import MIDDLE, PREFIX, SUFFIX
from text.fixtures import make_tokenizer

PLAIN = ("bytes", "byte_level", "gemma_like")
FIM = ("fim", "fim_suffix_first")


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "bytes":
        return byte_tokenizer()
    if kind in PLAIN:
        return make_tokenizer(kind)
    names = {"<unused3>": PREFIX, "<unused4>": SUFFIX}
    if kind == "fim":
        names["<unused5>"] = MIDDLE
    raw = byte_tokenizer()._full.to_str()
    for unused, name in names.items():
        raw = raw.replace(json.dumps(unused), json.dumps(name))
    return Tokenizer(raw)


@cache
def model() -> DiffusionGemma:
    config = dataclasses.replace(ModelConfig.preset("tiny"), vocab_size=768, num_hidden_layers=2, layer_types=())
    return DiffusionGemma(config).init_weights(0, 0.1).eval().requires_grad_(False)


def new_engine(kind: str = "bytes", **limits: int) -> Engine:
    return Engine(model(), tokenizer(kind), limits=Limits(**limits))


@cache
def engine(kind: str = "bytes") -> Engine:
    """Shared by all tests that do not care what ran before."""
    return new_engine(kind)
