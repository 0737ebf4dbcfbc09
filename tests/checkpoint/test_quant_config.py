"""`quantization_config`: what is read, what is refused, and that no file can make the reader hang."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.checkpoint.quant_config import read_quantization, write_quantization
from diffusiongemma.errors import ConfigError
from diffusiongemma.model.quantize import Scheme
from diffusiongemma.ops.quant import Format

LINEAR = "model.decoder.layers.3.self_attn.q_proj"
DENSE = "model.decoder.layers.3.mlp.down_proj"
EXPERT = "model.decoder.layers.3.experts.12.gate_proj"
EMBEDDINGS = "model.decoder.embed_tokens"
SCHEMES = [Scheme.parse("int8"), Scheme.parse("fp8"), Scheme.parse("int4"), Scheme.parse("int4", 32)]


def config(scheme: Scheme = SCHEMES[2]) -> dict[str, Any]:
    return {"quantization_config": copy.deepcopy(write_quantization(scheme))}


@pytest.mark.parametrize("scheme", [*SCHEMES, Scheme.parse("fp8", embeddings=False)])
def test_what_is_written_is_read(scheme: Scheme) -> None:
    read = read_quantization(json.loads(json.dumps(config(scheme))))
    assert read is not None
    assert read.format_of(LINEAR) == read.format_of(DENSE) == scheme.dense
    assert read.format_of(EXPERT) == scheme.experts
    assert read.format_of(EMBEDDINGS) == scheme.embeddings


def test_a_plain_checkpoint_has_none() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


def test_targets() -> None:
    data = config()
    group = data["quantization_config"]["config_groups"]["group_0"]
    for targets, hits in [
        (["Linear"], {LINEAR, EXPERT}),
        ([LINEAR], {LINEAR}),
        ([r"re:.*self_attn\.[qk]_proj$"], {LINEAR}),
        ([r"re:.*experts.*"], {EXPERT}),
        (["re:self_attn"], set()),  # patterns begin where the name begins
        (["Embedding"], {EMBEDDINGS}),
    ]:
        group["targets"] = targets
        data["quantization_config"]["config_groups"] = {"group_0": group}
        read = read_quantization(data)
        assert read is not None
        assert {name for name in (LINEAR, EXPERT, EMBEDDINGS) if read.format_of(name)} == hits


def test_the_first_group_that_matches_counts() -> None:
    data = config()
    groups = data["quantization_config"]["config_groups"]
    groups["group_1"]["targets"] = ["Linear"]
    read = read_quantization(data)
    assert read is not None
    assert read.format_of(EXPERT) == Format("int4", 64)


def at(*path: str, value: Any) -> dict[str, Any]:
    data = config(Scheme.parse("fp8", embeddings=False))
    here = data["quantization_config"]
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return data


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"bits": 4}}, "'None'"),
        ({"quantization_config": "fp8"}, "'fp8'"),
        (at("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme"),
        (at("transform_config", value={"config_groups": {"a": 1}}), "transform_config"),
        (at("sparsity_config", value={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (at("quantization_status", value="frozen"), "compressed"),
        (at("surprise", value=1), "surprise: unknown key"),
        (at("config_groups", value={}), "1 to 16 groups"),
        (at("config_groups", value=[1]), "1 to 16 groups"),
        (at("config_groups", "group_0", value=["Linear"]), "group_0 must be an object"),
        (at("config_groups", "group_0", "targets", value="Linear"), "targets must be a list"),
        (at("config_groups", "group_0", "targets", value=["re:(a+)+$"]), "not a pattern"),
        (at("config_groups", "group_0", "targets", value=["re:.*.*.*.*.*x"]), "not a pattern"),
        (at("config_groups", "group_0", "targets", value=["re:(unclosed"]), "not a pattern"),
        (at("config_groups", "group_0", "targets", value=["re:[[a]"]), "not a pattern"),
        (at("config_groups", "group_0", "targets", value=["re:" + "a" * 300]), "not a pattern"),
        (at(*WEIGHTS, "num_bits", value=4), "type=float, num_bits=4"),
        (at(*WEIGHTS, "symmetric", value=False), "symmetric"),
        (at(*WEIGHTS, "strategy", value="block"), "strategy=block"),
        (at(*WEIGHTS, "actorder", value="group"), "what can be read"),
        (at("config_groups", "group_0", "format", value="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (at("config_groups", "group_0", "input_activations", value={"dynamic": False}), "must be dynamic"),
        (at("config_groups", "group_0", "input_activations", value=None), "one scale a token"),
        (at("config_groups", "group_0", "output_activations", value={}), "output_activations"),
    ],
)
def test_what_cannot_be_honoured_is_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_quantization(data)
    assert words in str(error.value)


@pytest.mark.parametrize("group", [0, -8, 12, True, 64.0, "64", None, 1 << 20])
def test_groups_that_make_no_sense(group: Any) -> None:
    data = config()
    data["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = group
    with pytest.raises(ConfigError, match="int4"):
        read_quantization(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_a_named_error_or_harmless(data: st.DataObject) -> None:
    """One value anywhere in the JSON is replaced by another."""
    damaged = config(data.draw(st.sampled_from(SCHEMES)))
    here: Any = damaged
    while True:
        key = data.draw(st.sampled_from(sorted(here)))
        if isinstance(here[key], dict) and here[key] and data.draw(st.booleans()):
            here = here[key]
            continue
        here[key] = data.draw(JSON)
        break
    try:
        read = read_quantization(damaged)
    except ConfigError:
        return
    if read is not None:
        read.format_of(LINEAR)


@settings(max_examples=100, deadline=None)
@given(st.text("ab.*+?()[]|{}0,1$^\\d-", max_size=40))
def test_no_pattern_makes_the_reader_hang(pattern: str) -> None:
    data = at("config_groups", "group_0", "targets", value=[f"re:{pattern}"])
    start = time.perf_counter()
    try:
        read = read_quantization(data)
    except ConfigError:
        return
    assert read is not None
    read.format_of("ab" * 40)
    assert time.perf_counter() - start < 60  # what backtracks takes ages
