from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffusiongemma.checkpoint import load_config, load_model
from diffusiongemma.checkpoint.layout import stock_aliases, stock_layout
from diffusiongemma.checkpoint.load import source_of
from diffusiongemma.checkpoint.target import empty_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError, DeviceError
from diffusiongemma.ops.cpu import ISA_VARIABLE

Write = Callable[..., Path]


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_rows(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor], small_config: ModelConfig, shards: int
) -> None:
    model = load_model(write_checkpoint(shards=shards))
    state = model.state_dict()
    attention = state["layers.0.self_attn.qkv_proj.weight"]
    parts = [stock_tensors[f"model.decoder.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(attention, torch.cat(parts))
    full = [stock_tensors[f"model.decoder.layers.1.self_attn.{p}_proj.weight"] for p in "qk"]
    assert torch.equal(state["layers.1.self_attn.qkv_proj.weight"], torch.cat(full))
    mlp = [stock_tensors[f"model.decoder.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(state["layers.1.mlp.gate_up_proj.weight"], torch.cat(mlp))
    for name, slot in stock_layout(small_config).items():
        assert torch.equal(slot.of(state[slot.parameter]), stock_tensors[name]), name
    assert model.config == small_config
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "torch.float64"])
def test_dtype_is_converted_while_loading(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor], dtype: str
) -> None:
    model = load_model(write_checkpoint(), dtype=dtype)
    expected = getattr(torch, str(dtype).removeprefix("torch."))
    assert {t.dtype for t in model.state_dict().values()} == {expected}
    assert torch.equal(model.norm.weight, stock_tensors["model.decoder.norm.weight"].to(expected))


def test_auto_is_float32_on_a_cpu(write_checkpoint: Write, stock_tensors: dict[str, Tensor]) -> None:
    folder = write_checkpoint({name: tensor.bfloat16() for name, tensor in stock_tensors.items()})
    assert load_model(folder, dtype="auto").norm.weight.dtype == torch.float32


@pytest.mark.parametrize(("device", "dtype"), [("cuda:77", "float32"), ("abacus", "float32"), ("cpu", "int8")])
def test_a_device_or_dtype_that_cannot_be(write_checkpoint: Write, device: str, dtype: str) -> None:
    with pytest.raises(DeviceError, match="int8|cannot be used here"):
        load_model(write_checkpoint(), device=device, dtype=dtype)


def test_everything_wrong_is_listed_at_once(write_checkpoint: Write, stock_tensors: dict[str, Tensor]) -> None:
    tensors = dict(stock_tensors)
    tensors["model.decoder.norm.weight"] = torch.zeros(9)
    tensors["model.decoder.layers.0.router.scale"] = torch.zeros(8, dtype=torch.int64)
    tensors["model.decoder.layers.7.surprise"] = torch.zeros(1)
    del tensors["model.decoder.layers.0.mlp.up_proj.weight"], tensors["model.decoder.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError) as caught:
        load_model(write_checkpoint(tensors))
    assert set(caught.value.problems) == {
        "model.decoder.norm.weight has shape [9], expected [8]",
        "model.decoder.layers.0.router.scale has dtype I64, expected one of F32, BF16, F16, F64",
        "missing: model.decoder.layers.{0-1}.mlp.up_proj.weight",
        "unexpected: model.decoder.layers.7.surprise",
    }


def test_tied_copies_are_accepted_when_equal(
    write_checkpoint: Write, stock_tensors: dict[str, Tensor], small_config: ModelConfig
) -> None:
    copies = {alias: stock_tensors[name].clone() for alias, name in stock_aliases(small_config).items()}
    model = load_model(write_checkpoint(stock_tensors | copies, shards=2))
    assert torch.equal(model.embed_tokens.weight, stock_tensors["model.decoder.embed_tokens.weight"])


def test_tied_copies_that_differ_are_an_error(write_checkpoint: Write, stock_tensors: dict[str, Tensor]) -> None:
    name = "model.encoder.language_model.layers.0.mlp.up_proj.weight"
    other = stock_tensors["model.decoder.layers.0.mlp.up_proj.weight"].clone()
    other[-1, -1] += 1
    with pytest.raises(CheckpointError, match=f"share their weights.*\n.*{name}"):
        load_model(write_checkpoint({**stock_tensors, name: other}))


def test_a_copy_stands_in_for_the_original(write_checkpoint: Write, stock_tensors: dict[str, Tensor]) -> None:
    tensors = dict(stock_tensors)
    tensors["lm_head.weight"] = tensors.pop("model.decoder.embed_tokens.weight")
    assert torch.equal(load_model(write_checkpoint(tensors)).embed_tokens.weight, tensors["lm_head.weight"])


def test_vision_is_kept_aside_with_a_message(write_checkpoint: Write, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint()
    with caplog.at_level(logging.INFO, logger="diffusiongemma"):
        model = load_model(folder)
    assert [r.message for r in caplog.records] == [
        "2 vision tensors are kept aside: this version reads text, images come later"
    ]
    source = source_of(model)
    assert source is not None
    assert source.folder == folder
    assert len(source.vision) == 2


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate", DeviceError),
        ("CUDA error: an illegal memory access was encountered", RuntimeError),  # another size would not help
    ],
)
def test_weights_that_do_not_fit(
    said: str, heard: type[Exception], small_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def fail(*shape: object, device: object = None, **rest: object) -> Tensor:
        if device == torch.device("cpu"):
            raise RuntimeError(said)
        return empty(*shape, device=device, **rest)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(heard, match="GB of weights do not fit on cpu" if heard is DeviceError else said):
        empty_model(small_config, torch.device("cpu"), torch.float32)


def test_config_alone(write_checkpoint: Write, small_config: ModelConfig, tmp_path: Path) -> None:
    assert load_config(write_checkpoint()) == small_config
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_only_where_it_can_be_seen(
    write_checkpoint: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint()
    load_model(folder)
    assert capsys.readouterr() == ("", "")
    load_model(folder, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading" in err
    for progress in (None, False):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        load_model(folder, progress=progress)
        assert ("loading" in terminal.getvalue()) is (progress is None)


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop(ISA_VARIABLE, None)  # as a user has it
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, timeout=600, capture_output=True, text=True, env=environment)


MEASURE = """
import sys, torch
from diffusiongemma.checkpoint import load_model, save_model

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

small, large, out, shard = sys.argv[1:]
load_model(small)  # brings in every import
before = kilobytes("VmRSS:")
model = load_model(large)
print("load", kilobytes("VmHWM:") - before)
before = kilobytes("VmRSS:")
save_model(model, out, max_shard_bytes=int(shard))
print("save", kilobytes("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc")
def test_peak_memory_is_the_model_and_one_shard(write_checkpoint: Write, tmp_path: Path) -> None:
    """300 MB in shards of at most 40 MB; mapped pages of the shards count."""
    shard, slack = 40_000_000, 12_000
    large = tmp_path / "large"
    config = ModelConfig.preset("tiny", vocab_size=16_384, hidden_size=512, num_experts=64, moe_intermediate_size=112)
    make = f"""
        from diffusiongemma.checkpoint import save_model
        from diffusiongemma.config import ModelConfig
        from diffusiongemma.model import DiffusionGemma
        config = ModelConfig.from_dict({config.to_dict()!r})
        save_model(DiffusionGemma(config), {str(large)!r}, max_shard_bytes={shard})
    """
    python(make).check_returncode()
    sizes = [file.stat().st_size // 1024 for file in large.glob("*.safetensors")]
    assert len(sizes) >= 8
    assert sum(sizes) > 290_000
    result = python(MEASURE, write_checkpoint(), large, tmp_path / "out", shard)
    assert result.returncode == 0, result.stderr
    peak = {what: int(kilobytes) for what, kilobytes in map(str.split, result.stdout.splitlines())}
    assert sum(sizes) * 0.9 < peak["load"] <= sum(sizes) + max(sizes) + slack, (peak, sizes)
    assert peak["save"] <= max(sizes) + slack, (peak, sizes)


BF16 = """
import sys, torch
from diffusiongemma.checkpoint import load_model
model = load_model(sys.argv[1], dtype="bfloat16")
cache = model.new_cache()
model.encode(torch.arange(12)[None] % 16, cache)
logits = model.denoise(torch.arange(8)[None], cache)
print("finite" if logits.isfinite().all() else "not finite", end="")
"""


def test_bfloat16_runs_on_this_cpu(write_checkpoint: Write) -> None:
    """In a process of its own: where it does not work, it dies by a signal."""
    result = python(BF16, write_checkpoint())
    assert (result.returncode, result.stdout) == (0, "finite"), result.stderr
