from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from diffusiongemma.checkpoint import load_config, load_model, resolve
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError

Write = Callable[..., Path]
INDEX = "model.safetensors.index.json"


# ---- local folders -----------------------------------------------------------------------------------------------


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="revision 'main' means nothing"):
        resolve(tmp_path, revision="main")


def test_what_is_no_folder_and_no_hub_id(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, message in {
        tmp_path / "file": "is a file",
        tmp_path / "nothing": "no folder",
        "a/b/c": "no folder",
        "nothing": "no folder",
        "../nothing": "no folder",
        "owner/two--dashes": "not a valid hub id",
        "bad\0name": "no folder",
        "x" * 5000: "no folder|not a path",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            resolve(path)


def test_a_folder_without_weights(tmp_path: Path, small_config: ModelConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config.to_dict()))
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        load_model(tmp_path)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_pickles_are_refused_and_never_opened(
    tmp_path: Path, small_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "exploded"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_config.to_dict()))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr(pickle, "load", opened)
    before = (folder / "pytorch_model.bin").stat().st_atime_ns
    with pytest.raises(CheckpointError, match=r"pickle files only \(pytorch_model.bin\)"):
        load_model(folder)
    assert (folder / "pytorch_model.bin").stat().st_atime_ns == before
    # The same bytes under a name that is opened.
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(folder)
    assert not marker.exists()


ELSEWHERE = [
    "../x.safetensors",
    "/tmp/x.safetensors",
    "a/x.safetensors",
    "a\\x.safetensors",
    "..",
    "x.bin",
    "",
    7,
    None,
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_index_may_not_point_elsewhere(write_checkpoint: Write, name: object) -> None:
    folder = write_checkpoint(shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.decoder.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="may not be opened"):
        load_model(folder)


def test_a_shard_that_is_missing_is_named(write_checkpoint: Write) -> None:
    folder = write_checkpoint(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is missing"):
        load_model(folder)


def test_an_index_that_disagrees_with_its_shards(write_checkpoint: Write) -> None:
    folder = write_checkpoint(shards=2)
    index = json.loads((folder / INDEX).read_text())
    weight_map = index["weight_map"]
    names = sorted(weight_map)
    weight_map[names[0]], dropped = set(weight_map.values()).difference([weight_map[names[0]]]).pop(), names[1]
    del weight_map[dropped]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert any(f"puts {names[0]} into" in problem for problem in caught.value.problems)
    assert any(f"holds {dropped}, which" in problem for problem in caught.value.problems)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_does_not_keep_us_waiting(write_checkpoint: Write, name: str) -> None:
    folder = write_checkpoint()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((CheckpointError, ConfigError), match=r"is missing|not a plain file"):
        load_model(folder)


# ---- the hub -----------------------------------------------------------------------------------------------------


def test_a_hub_id_in_the_cache_works_offline(
    write_checkpoint: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_config: ModelConfig
) -> None:
    cached = tmp_path / "hub" / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "v1").write_text(commit)
    (cached / "snapshots").mkdir()
    write_checkpoint().rename(cached / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in ("v1", commit):
        assert resolve("owner/name", revision=revision, offline=True) == cached / "snapshots" / commit
    assert load_config("owner/name", revision="v1", offline=True) == small_config
    assert load_model("owner/name", revision="v1", offline=True).config == small_config
    with pytest.raises(CheckpointError, match="offline mode is on"):
        resolve("owner/name", revision="v2", offline=True)


def test_offline_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="owner/name is not complete in the local cache, and offline mode is on"):
        resolve("owner/name")


def test_no_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port on which nobody listens; hub and cache of this test only."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="the hub cannot be reached|could not be downloaded"):
        resolve("owner/name", offline=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "owner/name .* is gated: accept its terms"),
        (errors.RepositoryNotFoundError, "no owner/name on the hub"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (ZeroDivisionError, "could not be downloaded: ZeroDivisionError"),
    ],
)
def test_each_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str) -> None:
    def fail(repo_id: str, **options: object) -> str:
        assert repo_id == "owner/name"
        assert options["revision"] == "v9"
        assert options["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        resolve("owner/name", revision="v9", offline=False)
