"""What training leaves behind: raw shards in bfloat16 and int8 without the checkpoint package, and the stock layout."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusiongemma.checkpoint import load_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Engine
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme
from diffusiongemma.ops.quant import dequantize, quantize
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.bytes import byte_tokenizer
from diffusiongemma.train.export import SHARD_BYTES, export, load_raw, save_raw
from diffusiongemma.train.ship import CONTEXT, FAR, RUN_IN_FILE, ship


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return DiffusionGemma(ModelConfig.preset("tiny")).init_weights(3)


def test_int8_raw_shards_come_back(model: DiffusionGemma, tmp_path: Path) -> None:
    save_raw(model, tmp_path, shard_bytes=100_000, int8=True)
    assert len(list(tmp_path.glob("raw-*.safetensors"))) > 2
    back = load_raw(tmp_path)
    assert back.config == model.config
    for name, tensor in model.state_dict().items():
        fmt = Scheme.parse("int8").format_of(name)
        expected = tensor if fmt is None else dequantize(*quantize(tensor, fmt))
        assert torch.equal(back.state_dict()[name], expected), name


def test_raw_and_then_stock_is_quantised_once(model: DiffusionGemma, tmp_path: Path) -> None:
    """int8 on the training machine, the stock layout on this one: not a bit is lost on the way."""
    save_raw(model, tmp_path / "raw", int8=True)
    export(load_raw(tmp_path / "raw"), tmp_path / "from-raw", "bytes", int8=True)
    export(model, tmp_path / "direct", "bytes", int8=True)
    one, two = (load_model(tmp_path / name).state_dict() for name in ("from-raw", "direct"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=0) for n in one)


def test_what_a_checkpoint_wants_stays_when_it_is_trained_on(model: DiffusionGemma, tmp_path: Path) -> None:
    export(model, tmp_path / "out", "bytes", init_from=str(ASSETS / "nano"))
    for name in ("generation_config.json", "dgemma.json"):
        assert (tmp_path / "out" / name).read_bytes() == (ASSETS / "nano" / name).read_bytes()


def test_a_smaller_export_replaces_a_larger_one(model: DiffusionGemma, tmp_path: Path) -> None:
    save_raw(model, tmp_path, shard_bytes=50_000)
    save_raw(model, tmp_path, shard_bytes=10**9, int8=True)
    assert [file.name for file in tmp_path.glob("raw-*")] == ["raw-00.safetensors"]
    load_raw(tmp_path)


def test_lost_shards_and_scales_are_named(model: DiffusionGemma, tmp_path: Path) -> None:
    save_raw(model, tmp_path, shard_bytes=100_000, int8=True)
    first = tmp_path / "raw-00.safetensors"
    tensors = load_file(first)
    scale = next(name for name in tensors if name.endswith(".scale") and tensors[name].shape[-1] == 1)
    save_file({n: t for n, t in tensors.items() if n != scale}, first)
    with pytest.raises(CheckpointError, match=scale.removesuffix(".scale")):
        load_raw(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        load_raw(tmp_path)


def test_nano_in_int8_is_four_shards_of_15_mib(tmp_path: Path) -> None:
    recipe = tomllib.loads((Path(__file__).parents[2] / "recipes" / "nano.toml").read_text(encoding="utf-8"))
    sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in recipe["model"].items()}
    save_raw(DiffusionGemma(ModelConfig(**sizes)).init_weights(), tmp_path, int8=True)
    files = [file.stat().st_size for file in tmp_path.glob("raw-*.safetensors")]
    assert len(files) <= 4
    assert max(files) <= 15 << 20
    assert SHARD_BYTES <= 15 << 20


def test_what_is_shipped_loads_with_its_settings(model: DiffusionGemma, tmp_path: Path) -> None:
    save_raw(model, tmp_path / "raw", int8=True)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(byte_tokenizer().to_json(), encoding="utf-8")
    size = ship(tmp_path / "raw", tmp_path / "out", tmp_path / "tokenizer")
    assert size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    with Engine.load(tmp_path / "out", "cpu") as engine:
        assert (engine.svg_mode, engine.params.t_min, engine.params.t_max) == ("ar", 0.1, 0.4)
        assert engine.template is not None
        hole = asdict(engine.hole)
    assert (hole["context"], hole["far"], hole["run_in"]) == (CONTEXT, FAR, RUN_IN_FILE.read_text(encoding="utf-8"))
    ends = {"eos_token_id": list(model.config.eos_token_ids)}
    for name, differs in (("generation_config.json", ends), ("dgemma.json", {"hole": hole})):
        written, nano = (json.loads((folder / name).read_text()) for folder in (tmp_path / "out", ASSETS / "nano"))
        assert written == nano | differs
    assert hole["run_in"].endswith(nano["hole"]["run_in"])  # nano's own may be older, and less far
    assert nano["hole"]["context"] == hole["context"]


def test_a_run_in_fills_the_longest_prompt() -> None:
    """… that may be missing: all of it but a token, and eos."""
    tokenizer = Tokenizer.from_pretrained(ASSETS / "nano")
    assert len(tokenizer.encode(RUN_IN_FILE.read_text(encoding="utf-8"))) >= CONTEXT + FAR


def test_raw_needs_nothing_but_torch_and_safetensors(tmp_path: Path) -> None:
    """As on a lent machine: the packages of the checkpoint code cannot be imported there."""
    code = (
        "import sys\n"
        "for name in 'huggingface_hub rich typer tokenizers jinja2'.split(): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from diffusiongemma.config import ModelConfig\n"
        "from diffusiongemma.model import DiffusionGemma\n"
        "from diffusiongemma.train.export import export, load_raw\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "export(DiffusionGemma(ModelConfig.preset('tiny')).init_weights(), folder, 'bytes', int8=True)\n"
        "load_raw(folder)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "raw.json").is_file()
