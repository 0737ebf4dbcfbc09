from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.checkpoint import save as save_module
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, DeviceError
from diffusiongemma.model import DiffusionGemma

Write = Callable[..., Path]


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert tensor.shape == two[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip_is_bit_exact(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype, shards: int
) -> None:
    tensors = {name: tensor.clone().to(dtype) for name, tensor in stock_tensors.items()}
    tensors["model.decoder.norm.weight"][:2] = torch.tensor([float("nan"), float("-inf")])
    source = write_checkpoint(tensors, shards=shards)
    for limit in (10**9, 1000):
        out = tmp_path / f"out-{limit}"
        save_model(load_model(source, dtype=dtype), out, max_shard_bytes=limit)
        assert_same_bits(read_all(out), tensors)
        assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    for name in out.glob("*.safetensors"):
        with safe_open(name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_one_file_in_is_the_same_file_out(write_checkpoint: Write, tmp_path: Path) -> None:
    source = write_checkpoint()
    save_model(load_model(source), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_shards_and_index(write_checkpoint: Write, tmp_path: Path) -> None:
    model = load_model(write_checkpoint())
    save_model(model, tmp_path / "out", max_shard_bytes=1500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 1500
        assert {name for name, where in index["weight_map"].items() if where == file} == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_all(tmp_path / "out").values())


def test_dtype_can_be_changed_but_vision_is_carried_over(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    save_model(load_model(write_checkpoint()), tmp_path / "out", dtype="bfloat16")
    for name, tensor in read_all(tmp_path / "out").items():
        vision = "vision" in name
        assert torch.equal(tensor, stock_tensors[name] if vision else stock_tensors[name].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(DeviceError, match="int8"):
        save_model(load_model(tmp_path / "out"), tmp_path / "no", dtype="int8")


def test_a_new_network_can_be_saved(small_config: ModelConfig, tmp_path: Path) -> None:
    model = DiffusionGemma(small_config).init_weights(seed=1)
    save_model(model, tmp_path / "deep" / "out")
    again = load_model(tmp_path / "deep" / "out")
    assert again.config == small_config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    with torch.device("meta"):
        nothing = DiffusionGemma(small_config)
    with pytest.raises(CheckpointError, match="no weights to save"):
        save_model(nothing, tmp_path / "meta")
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="other parameters than the stock layout"):
        save_model(model, tmp_path / "extra")


def test_tokenizer_files_come_along(write_checkpoint: Write, tmp_path: Path) -> None:
    source = write_checkpoint()
    side = ["chat_template.jinja", "dgemma.json", "generation_config.json", "tokenizer.json"]
    for name in (*side, "notes.txt", "pytorch_model.bin"):
        (source / name).write_text(f"this is {name}")
    save_model(load_model(source), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*side, "config.json", "model.safetensors"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "this is tokenizer.json"


def test_a_source_that_is_gone_is_a_warning(
    write_checkpoint: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_checkpoint()
    model = load_model(source)
    shutil.rmtree(source)
    save_model(model, tmp_path / "out")
    assert "2 vision tensors are not saved" in caplog.text
    assert not any("vision" in name for name in read_all(tmp_path / "out"))
    assert load_model(tmp_path / "out").config.vision_config == model.config.vision_config


def test_nothing_is_overwritten_by_accident(write_checkpoint: Write, tmp_path: Path) -> None:
    model = load_model(write_checkpoint())
    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "secret.txt").write_text("dear diary")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            save_model(model, diary, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            save_model(model, diary / "secret.txt", overwrite=overwrite)
    assert os.listdir(diary) == ["secret.txt"]
    save_model(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save_model(model, tmp_path / "out")


def test_overwriting_replaces_weights_and_keeps_other_files(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor]
) -> None:
    """Over its own source, from shards to one file: no old shard or index may be left behind."""
    source = write_checkpoint(shards=3)
    (source / "README.md").write_text("mine")
    model = load_model(source)
    with torch.no_grad():
        model.norm.weight.fill_(7)
    link = source.with_name("link")
    link.symlink_to(source)
    save_model(model, link, overwrite=True)
    assert link.is_symlink()
    assert sorted(os.listdir(source)) == ["README.md", "config.json", "model.safetensors"]
    assert_same_bits(read_all(source), stock_tensors | {"model.decoder.norm.weight": torch.full((8,), 7.0)})
    save_model(model, source, overwrite=True)  # the source has changed its files since; vision is still found
    assert read_all(source).keys() == stock_tensors.keys()
    assert sorted(os.listdir(source.parent)) == ["link", "model"]


def test_a_failure_half_way_leaves_everything_as_it_was(
    write_checkpoint: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint()
    model = load_model(source)
    before = {file.name: file.read_bytes() for file in source.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "save_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_model(model, source, overwrite=True)
        with pytest.raises(CheckpointError, match="No space left"):
            save_model(model, tmp_path / "new")
    # The last moment: the old folder is out of the way, the new one cannot take its place.
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if ".new-" in self.name:
            full()
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        save_model(model, source, overwrite=True)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert os.listdir(tmp_path) == ["model"]


def test_files_can_be_read_by_others(write_checkpoint: Write, tmp_path: Path) -> None:
    save_model(load_model(write_checkpoint()), tmp_path / "out")
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode}
