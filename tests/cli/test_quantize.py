"""`dgemma quantize`: a folder that loads, what it prints, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffusiongemma import ModelConfig
from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.cli import app, main
from diffusiongemma.cli.quantize import _samples
from diffusiongemma.engine import Engine
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import formats_in
from diffusiongemma.ops.quantized import QuantLinear
from diffusiongemma.text.bytes import byte_tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "plain"
    save_model(DiffusionGemma(ModelConfig.preset("tiny")).init_weights(0, 0.05), folder, dtype="bfloat16")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    return folder


@pytest.fixture(scope="module")
def text(plain: Path) -> Path:
    file = plain.parent / "text.txt"
    file.write_text("".join(f"{i} works and no play make a dull canvas. " for i in range(119)))
    return file


def dgemma(*args: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "100"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_tables(kind: str, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / kind
    group = ("--group", 32) if kind == "int4" else ()
    shown = dgemma("quantize", plain, out, "--format", kind, *group, "--device", "cpu", "--check", 1)
    for words in (
        "attention",
        "experts",
        "layer 5",
        "embeddings",
        "worst tensor",
        "over 64 positions",
        f"written to {out}",
    ):
        assert words in shown
    assert formats_in(load_model(out, quantize=kind, group=32 if group else None))
    inspected = dgemma("inspect", out)
    assert ("int4 in groups of 32, fp8, int8" if kind == "int4" else kind) in inspected


def test_json(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    how = ("--format", "int4", "--group", 32, "--keep-embeddings", "--check", 1, "--json")
    facts = json.loads(dgemma("quantize", plain, out, *how))
    assert facts["bytes_on_disk"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert {row["part"] for row in facts["parts"]} == {"attention", "dense MLP", "experts"}
    for row in facts["parts"]:
        assert (0.05 < row["relative"] < 0.12) if row["part"] == "experts" else (0.01 < row["relative"] < 0.04)
    assert facts["agreement"]["positions"] == 64
    assert json.loads(dgemma("inspect", out, "--json"))["checkpoint"]["format"] == "int4 in groups of 32, fp8"
    assert facts["format"] == "int4"


def test_calibrated(plain: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    how = ("--format", "int4", "--group", 32, "--calibrate", text, "--check", 2)
    shown = " ".join(dgemma("quantize", plain, out, *how, "--samples", 9).split())
    for words in (
        "Relative error of the weights",
        "Relative error of what they give",
        "on the 9 samples that they were fitted to",
        f"written to {out}",
    ):
        assert words in shown
    facts = json.loads(dgemma("quantize", plain, out, *how, "--overwrite", "--json"))
    assert facts["samples"] == 17 - 2  # 4,800 bytes, 256 + 32 a sample
    assert facts["agreement"]["positions"] == 2 * 2 * 32
    for row in facts["parts"]:
        assert row["product"] is None if row["part"] == "embeddings" else 0 < row["product"] < row["relative"]


def test_what_is_compared_on_was_not_fitted_to(plain: Path, text: Path) -> None:
    fitted_to, kept = _samples(str(plain), None, text, 10, 4)
    assert (len(fitted_to), len(kept)) == (10, 4)
    tokens = {tuple(s.prompt.tolist()) for s in fitted_to}
    assert not tokens & {tuple(s.prompt.tolist()) for s in kept}
    assert all(s.prompt[0] == byte_tokenizer().special["bos"] for s in (*fitted_to, *kept))
    assert _samples(str(plain), None, None, None, 0) == ([], [])
    assert len(_samples(str(plain), None, None, None, 3)[1]) == 3


def test_mistakes_of_calibrating(plain: Path, text: Path, tmp_path: Path) -> None:
    def failing(*args: str | Path) -> str:
        out = tmp_path / "out"
        result = CliRunner().invoke(app, ["quantize", str(plain), str(out), "--format", "fp8", *map(str, args)])
        assert not out.exists()
        assert result.exit_code != 0
        return str(result.exception) + result.output

    assert "no effect without --calibrate" in failing("--samples", 9)
    assert "17 samples, 21 to calibrate on are needed" in failing("--calibrate", text, "--samples", 21)
    assert "17 samples, 15 to calibrate on and 6 to compare on are needed" in failing(
        "--calibrate", text, "--samples", 15, "--check", 6
    )
    assert "--samples" in failing("--calibrate", text, "--samples", 7)
    assert "17 samples, 8 to calibrate on and 11 to compare on" in failing("--calibrate", text, "--check", 11)
    (tmp_path / "short.txt").write_text("short")
    assert "0 samples, 8 to calibrate on are needed: give a longer text" in failing(
        "--calibrate", tmp_path / "short.txt"
    )
    assert "cannot be read as text" in failing("--calibrate", tmp_path / "none.txt")
    bare = tmp_path / "bare"
    shutil.copytree(plain, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    result = CliRunner().invoke(
        app, ["quantize", str(bare), str(tmp_path / "out"), "--format", "fp8", "--calibrate", str(text)]
    )
    assert "tokenizer.json" in str(result.exception)


def test_the_plain_checkpoint_is_inspected_as_before(plain: Path) -> None:
    assert json.loads(dgemma("inspect", plain, "--json"))["checkpoint"]["format"] == "not quantised"


def test_mistakes(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*args: str | Path) -> str:
        monkeypatch.setattr("sys.argv", ["dgemma", "quantize", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert "int8, fp8, int4" in failing(plain, tmp_path / "x", "--format", "int2")
    assert "leave it out" in failing(plain, tmp_path / "x", "--format", "fp8", "--group", 32)
    assert "must divide" in failing(plain, tmp_path / "x", "--format", "int4")
    assert "into itself" in failing(plain, plain, "--format", "int8")
    assert not (tmp_path / "x").exists()
    dgemma("quantize", plain, tmp_path / "x", "--format", "int8")
    assert "holds a checkpoint already" in failing(plain, tmp_path / "x", "--format", "int8")
    assert "quantised already" in failing(tmp_path / "x", tmp_path / "y", "--format", "fp8")
    dgemma("quantize", plain, tmp_path / "x", "--format", "fp8", "--overwrite")


def test_an_engine_with_quantised_weights() -> None:
    with Engine.load("random:tiny", quantize="int4", group=32) as engine:
        assert any(isinstance(module, QuantLinear) for module in engine.model.modules())
        assert engine.generate("a", max_new_tokens=8, steps=2, seed=1).tokens
    for mistake in ({"quantize": "int5"}, {"group": 32}, {"quantize": "fp8", "group": 32}):
        with pytest.raises(ConfigError):
            Engine.load("random:tiny", **mistake)  # type: ignore[arg-type]
