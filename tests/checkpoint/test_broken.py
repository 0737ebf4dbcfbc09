"""Hundreds of broken checkpoints and configs: each gives a named error or, where the damage is harmless, a network.

Nothing here may end in a traceback from inside torch or safetensors, in a hang, or in code that runs.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from safetensors.torch import save

from diffusiongemma.checkpoint import load_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError, DiffusionGemmaError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**24, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63)]),
    st.floats(allow_nan=True),
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
DTYPES = st.sampled_from(["F64", "F16", "BF16", "I8", "I64", "BOOL", "F8_E4M3", "F4", "", "X9"])


class Files(dict[str, bytes]):
    """File name -> content, with a short repr: a failing example prints it."""

    def __repr__(self) -> str:
        return f"Files({', '.join(self)})"


def nested(depth: int, open_: str, close: str) -> bytes:
    return (open_ * depth + "1" + close * depth).encode()


@pytest.fixture(scope="module")
def single(small_config: ModelConfig, stock_tensors: dict[str, torch.Tensor]) -> Files:
    weights = save(stock_tensors, metadata={"format": "pt"})
    return Files({"config.json": json.dumps(small_config.to_dict()).encode(), WEIGHTS: weights})


@pytest.fixture(scope="module")
def sharded(single: Files, stock_tensors: dict[str, torch.Tensor]) -> Files:
    names = sorted(stock_tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    weight_map = {name: file for file, half in halves.items() for name in half}
    files = {file: save({name: stock_tensors[name] for name in half}) for file, half in halves.items()}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
    return Files({"config.json": single["config.json"], INDEX: index, **files})


@contextmanager
def hang_is_a_failure(seconds: int = 120) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(work: Callable[[], object]) -> DiffusionGemmaError | None:
    """None or our own error; anything else passes through and fails the test."""
    error = None
    with hang_is_a_failure():
        try:
            work()
        except DiffusionGemmaError as caught:
            error = caught
    assert len(str(error)) < 100_000
    return error


def attempt(files: dict[str, bytes]) -> DiffusionGemmaError | None:
    """Load these files."""
    folder = Path(tempfile.mkdtemp(prefix="dg-broken-"))
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return outcome(lambda: load_model(folder))
    finally:
        shutil.rmtree(folder)


def split(file: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + size]), file[8 + size :]


def join(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def set_at(tree: Any, draw: Callable[[SearchStrategy[Any]], Any], value: SearchStrategy[Any]) -> Any:
    """The same JSON with one thing changed somewhere: replaced, dropped, or added."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(tree)))
        changed = dict(tree)
        match draw(st.integers(0, 4)):
            case 0:
                del changed[key]
            case 1:
                changed[draw(st.text(max_size=8))] = changed[key]
            case _:
                changed[key] = set_at(tree[key], draw, value)
        return changed
    if isinstance(tree, list) and tree and draw(st.booleans()):
        i = draw(st.integers(0, len(tree) - 1))
        return [*tree[:i], set_at(tree[i], draw, value), *tree[i + 1 :]]
    return draw(value)


def test_the_unbroken_ones_load(single: Files, sharded: Files) -> None:
    assert attempt(single) is None
    assert attempt(sharded) is None


# ---- weights -----------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(data=st.data())
def test_cut_anywhere(single: Files, data: DataObject) -> None:
    whole = single[WEIGHTS]
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    cut = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, header))
    assert isinstance(attempt(single | {WEIGHTS: whole[:cut]}), CheckpointError)


@settings(max_examples=60)
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 20_000))
def test_header_length_is_a_lie(single: Files, length: int) -> None:
    whole = single[WEIGHTS]
    if struct.unpack("<Q", whole[:8])[0] != length:
        assert isinstance(attempt(single | {WEIGHTS: struct.pack("<Q", length) + whole[8:]}), CheckpointError)


@settings(max_examples=100)
@given(data=st.data())
def test_bytes_changed(single: Files, data: DataObject) -> None:
    whole = bytearray(single[WEIGHTS])
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header) | st.integers(0, len(whole) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                whole[at] = data.draw(st.integers(0, 255))
            case 1:
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case 2:
                del whole[at : at + data.draw(st.integers(1, 9))]
    attempt(single | {WEIGHTS: bytes(whole)})


@settings(max_examples=100)
@given(data=st.data())
def test_header_changed(single: Files, data: DataObject) -> None:
    """Valid JSON of the right length that says something else: shapes, offsets, dtypes, names, or nonsense."""
    header, weights = split(single[WEIGHTS])
    header = set_at(header, data.draw, SCALARS | JSON | DTYPES | st.lists(NUMBERS, max_size=3))
    attempt(single | {WEIGHTS: join(header, weights)})


@settings(max_examples=60)
@given(data=st.data(), change=st.sampled_from(["drop", "rename", "add", "shape", "dtype"]))
def test_what_does_not_fit_is_named(
    single: Files, stock_tensors: dict[str, torch.Tensor], data: DataObject, change: str
) -> None:
    tensors = dict(stock_tensors)
    name = data.draw(st.sampled_from(sorted(name for name in tensors if "vision" not in name)))
    match change:
        case "drop":
            del tensors[name]
        case "rename":
            tensors[name + "x"] = tensors.pop(name)
        case "add":
            name = data.draw(st.text(min_size=1, max_size=20).filter(lambda text: text not in tensors))
            tensors[name] = torch.zeros(2)
        case "shape":
            tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 5), max_size=4)))
        case "dtype":
            kind = data.draw(st.sampled_from([torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]))
            tensors[name] = tensors[name].to(kind)
    error = attempt(single | {WEIGHTS: save(tensors)})
    assert isinstance(error, CheckpointError)
    assert any(name in problem for problem in error.problems)


@settings(max_examples=40)
@given(content=st.binary(max_size=200) | st.builds(pickle.dumps, JSON))
def test_other_files_under_that_name(single: Files, content: bytes) -> None:
    assert isinstance(attempt(single | {WEIGHTS: content}), CheckpointError)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, INDEX, "model-1.safetensors"])
def test_a_pickle_under_any_name_is_not_run(sharded: Files, name: str, tmp_path: Path) -> None:
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    assert isinstance(attempt(sharded | {name: bomb}), DiffusionGemmaError)
    assert not marker.exists()
    pickle.loads(bomb)  # noqa: S301 (it would have worked)
    assert marker.exists()


# ---- the index ---------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_index_changed(sharded: Files, data: DataObject) -> None:
    elsewhere = ["../x.safetensors", "/x.safetensors", "model-3.safetensors", "model-1.safetensors", "config.json"]
    index = set_at(json.loads(sharded[INDEX]), data.draw, SCALARS | JSON | st.sampled_from(elsewhere))
    attempt(sharded | {INDEX: json.dumps(index).encode()})


@settings(max_examples=40)
@given(data=st.data())
def test_index_and_config_are_not_json(sharded: Files, data: DataObject) -> None:
    name = data.draw(st.sampled_from([INDEX, "config.json"]))
    text = bytearray(sharded[name])
    at = data.draw(st.integers(0, len(text) - 1))
    match data.draw(st.integers(0, 2)):
        case 0:
            del text[at:]
        case 1:
            text[at] = data.draw(st.integers(0, 255))
        case 2:
            text[at:at] = data.draw(st.binary(min_size=1, max_size=5))
    attempt(sharded | {name: bytes(text)})


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("depth", [50, 900, 990, 100_000])
@pytest.mark.parametrize(
    ("open_", "close"), [("[", "]"), ('{"a":', "}"), ('{"weight_map":', "}"), ('{"text_config":', "}")]
)
def test_json_nested_deep(sharded: Files, name: str, depth: int, open_: str, close: str) -> None:
    assert isinstance(attempt(sharded | {name: nested(depth, open_, close)}), DiffusionGemmaError)


@pytest.mark.parametrize("depth", [800, 960, 985])
def test_a_config_field_nested_deep(single: Files, depth: int) -> None:
    """Just shallow enough to be read as JSON: comparing or printing it may then be too deep."""
    stock = json.loads(single["config.json"])
    for where, key in [("text_config", key) for key in stock["text_config"]] + [("", key) for key in stock]:
        config = json.loads(single["config.json"])
        (config[where] if where else config)[key] = "here"
        text = json.dumps(config).encode()
        for open_, close in (("[", "]"), ('{"head_dim":', "}")):
            attempt(single | {"config.json": text.replace(b'"here"', nested(depth, open_, close))})


def test_a_header_nested_deep(single: Files) -> None:
    for depth in (120, 100_000):
        text = nested(depth, '{"a":', "}")
        file = struct.pack("<Q", len(text)) + text
        assert isinstance(attempt(single | {WEIGHTS: file}), CheckpointError)


# ---- the config --------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_config_changed(single: Files, data: DataObject) -> None:
    config = json.loads(single["config.json"])
    for _ in range(data.draw(st.integers(1, 3))):
        config = set_at(config, data.draw, SCALARS | JSON)
    attempt(single | {"config.json": json.dumps(config).encode()})


@settings(max_examples=500)
@given(data=st.data())
def test_from_dict_takes_anything(small_config: ModelConfig, data: DataObject) -> None:
    """Whatever is accepted is a config that can be written, read again, and built without asking for the moon."""
    stock = small_config.to_dict()
    for _ in range(data.draw(st.integers(1, 4))):
        stock = set_at(stock, data.draw, SCALARS | JSON)
    if outcome(lambda: ModelConfig.from_dict(stock)) is None:
        config = ModelConfig.from_dict(stock)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert len(config.layer_types) == config.num_hidden_layers <= 1024


@settings(max_examples=150)
@given(
    top=st.dictionaries(st.sampled_from(["text_config", "vision_config", "canvas_length", "eos_token_id", "x"]), JSON),
    text=st.dictionaries(
        st.sampled_from(
            ["num_hidden_layers", "layer_types", "per_layer_config", "rope_parameters", "eos_token_id", "hidden_size"]
        ),
        JSON,
    ),
)
def test_from_dict_takes_anything_from_nothing(top: dict[str, Any], text: dict[str, Any]) -> None:
    for stock in (top, {"model_type": "diffusion_gemma", "text_config": text} | top):
        outcome(lambda stock=stock: ModelConfig.from_dict(stock))


EXTREMES = [10**5000, 10**400, -(10**400), 1e308, float("inf"), float("nan"), "9" * 10**6, [[]] * 1000, {}, True]


@pytest.mark.parametrize("which", range(len(EXTREMES)))
def test_from_dict_in_every_field(small_config: ModelConfig, which: int) -> None:
    value = EXTREMES[which]
    for name in small_config.to_dict()["text_config"]:
        stock = small_config.to_dict()
        stock["text_config"][name] = value
        outcome(lambda stock=stock: ModelConfig.from_dict(stock))
    for name in small_config.to_dict():
        outcome(lambda name=name: ModelConfig.from_dict(small_config.to_dict() | {name: value}))


@settings(max_examples=100)
@given(data=st.data())
def test_the_constructor_checks_itself(small_config: ModelConfig, data: DataObject) -> None:
    """Also without a file: a field of any type is a ConfigError, not a traceback."""
    name = data.draw(st.sampled_from(sorted(small_config.__dataclass_fields__)))
    value = data.draw(SCALARS | JSON | st.lists(st.text(max_size=4)).map(tuple))
    error = outcome(lambda: small_config.replace(**{name: value}))
    assert error is None or (isinstance(error, ConfigError) and error.problems)
