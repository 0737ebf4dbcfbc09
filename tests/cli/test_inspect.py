"""`dgemma inspect`: the published sizes, the memory arithmetic, checkpoints, and mistakes."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from diffusiongemma import ModelConfig, __version__
from diffusiongemma.checkpoint import save_model
from diffusiongemma.cli import app, main
from diffusiongemma.cli.tables import human_bytes, human_count
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.cache import CacheRow
from diffusiongemma.model.summary import summarise


def dgemma(*args: str, columns: int = 100) -> str:
    result = CliRunner().invoke(app, args, env={"COLUMNS": str(columns)}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    monkeypatch.setattr("sys.argv", ["dgemma", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(DiffusionGemma(ModelConfig.preset("tiny")).init_weights(), folder)
    return folder


def test_26b_has_the_published_size() -> None:
    """The published 25.2 B and 3.8 B, and the parts that the reference names."""
    assert "25.2 B parameters, 3.8 B active" in dgemma("inspect", "26b-a4b")
    parts = {p.name: p.parameters for p in summarise(ModelConfig.preset("26b-a4b")).parts}
    billions = {name: round(count / 1e9, 2) for name, count in parts.items()}
    assert billions["experts"] == 22.84
    assert billions["attention"] == 1.11
    assert billions["dense MLP"] == 0.54
    assert billions["embeddings"] == 0.74


@pytest.mark.parametrize("preset", ["tiny", "100m"])
def test_every_tensor_is_counted_once(preset: str) -> None:
    config = ModelConfig.preset(preset)
    with torch.device("meta"):
        tensors = DiffusionGemma(config).state_dict()
    summary = summarise(config)
    assert summary.parameters == sum(t.numel() for t in tensors.values())
    assert summary.bytes["bf16"] == 2 * summary.parameters
    experts = next(p for p in summary.parts if p.name == "experts")
    assert summary.parameters - summary.active == experts.parameters - experts.active
    assert experts.active * config.num_experts == experts.parameters * config.top_k_experts


def test_quantised_bytes_by_hand() -> None:
    """Worked out on paper: the dense MLP of `tiny`, [192, 64] and [64, 96], and 8 experts, [128, 64] and [64, 64]."""
    parts = {p.name: p.bytes for p in summarise(ModelConfig.preset("tiny", moe_intermediate_size=64)).parts}
    assert parts["dense MLP"]["fp8"] == 6 * (192 * 64 + 4 * 192 + 64 * 96 + 4 * 64)
    assert parts["dense MLP"]["4-bit"] == parts["dense MLP"]["fp8"]
    assert parts["experts"]["4-bit"] == 6 * 8 * (128 + 64) * (32 + 2)


@pytest.mark.parametrize("tokens", [1, 15, 16, 40])
@pytest.mark.parametrize("full_window", [False, True])
def test_cache_bytes_are_those_of_a_real_cache(tokens: int, full_window: bool) -> None:
    config = ModelConfig.preset("tiny", canvas_sees_full_window=full_window)
    row = CacheRow(config, max_length=tokens, dtype=torch.bfloat16)
    assert summarise(config).cache.bytes_at(tokens) == row.nbytes


def test_json_agrees_with_the_tables() -> None:
    facts = json.loads(dgemma("inspect", "tiny", "--json"))
    summary = summarise(ModelConfig.preset("tiny"))
    assert facts["parameters"] == summary.parameters == sum(p["parameters"] for p in facts["parts"])
    assert facts["weight_bytes"] == summary.bytes
    assert facts["kv_cache"]["bytes_per_token_window_full"] == summary.cache.full_bytes_per_token
    assert ModelConfig.from_dict(facts["config"]) == ModelConfig.preset("tiny")
    assert facts["checkpoint"] is None
    assert f"{summary.parameters:,}" in dgemma("inspect", "tiny")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_tables_fit_the_terminal(columns: int) -> None:
    lines = dgemma("inspect", "26b-a4b", columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    shown = "25,250,986,812" if columns >= 60 else "25.2 B"
    assert any("total" in line and shown in line for line in lines)  # no figure is cut


def test_checkpoint_headers(checkpoint: Path) -> None:
    facts = json.loads(dgemma("inspect", str(checkpoint), "--json"))
    (file,) = checkpoint.glob("*.safetensors")
    weights = facts["checkpoint"]
    assert weights["bytes_on_disk"] == file.stat().st_size
    assert weights["parameters_by_dtype"] == {"F32": facts["parameters"]}
    assert weights["vision_tensors"] == 0
    assert "Checkpoint" in dgemma("inspect", str(checkpoint))


def test_vision_tensors_are_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_dict()))
    save_file({"model.encoder.vision_tower.patch.weight": torch.zeros(2, 3).bfloat16()}, tmp_path / "model.safetensors")
    output = dgemma("inspect", str(tmp_path))
    assert "1 tensors, kept aside" in output
    assert "BF16" in output


def test_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_dict()))
    assert "weights are not on this machine" in dgemma("inspect", str(tmp_path))
    assert json.loads(dgemma("inspect", str(tmp_path), "--json"))["checkpoint"] is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["no-such-thing"], "presets: 26b-a4b"),
        (["owner/not-downloaded"], "HF_HUB_OFFLINE"),
        (["tiny", "--revision", "main"], "is a preset"),
        (["nano", "--revision", "main"], "is the embedded model"),
    ],
)
def test_mistakes_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    error = failing(monkeypatch, capsys, "inspect", *args)
    assert error.startswith("error: ")
    assert says in error
    assert "Traceback" not in error


def test_the_embedded_model_has_a_name_here_too() -> None:
    result = CliRunner().invoke(app, ["inspect", "nano"], catch_exceptions=False)
    assert "nano: 49.5 M parameters, 25.6 M active" in result.stdout
    assert "int8" in result.stdout


def test_help_is_broken_by_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = [line.strip() for line in CliRunner().invoke(app, ["inspect", "--help"]).stdout.splitlines()]
    assert "config is" not in lines  # the end of a line of the source
    assert any(line.startswith("config is downloaded.") for line in lines)


def test_waiting_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `dgemma serve` do: beside a busy program, spinning ones made a short text ten times as slow."""
    seen = []
    monkeypatch.setattr("diffusiongemma.cli.app", lambda: seen.append(os.environ["OMP_WAIT_POLICY"]))
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    main()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    main()
    assert seen == ["active", "passive"]  # a user's own word counts
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("diffusiongemma.cli.app", lambda: seen.append(os.environ.get("OMP_WAIT_POLICY", "torch's own")))
    monkeypatch.setattr("sys.argv", ["dgemma", "bench", "cpu-step", "--peer", "transformers"])
    main()
    assert seen[2:] == ["torch's own"]


def test_damaged_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -1 if file.suffix == ".safetensors" else None])
    assert "damaged" in failing(monkeypatch, capsys, "inspect", str(tmp_path))


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: ModelConfig) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("diffusiongemma.model.summary.summarise", broken)
    monkeypatch.setattr("sys.argv", ["dgemma", "inspect", "tiny"])
    with pytest.raises(RuntimeError, match="a bug"):
        main()


def test_version() -> None:
    assert dgemma("--version") == f"dgemma {__version__}\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 k"),
        (999_960, "1.0 M"),
        (49_490_138, "49.5 M"),
        (25_299_999_999, "25.2 B"),
        (3_840_375_612, "3.8 B"),
    ],
)
def test_human_count(count: int, text: str) -> None:
    assert human_count(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (768, "768 B"), (225_280, "225.3 kB"), (5 * 10**12, "5.0 TB")])
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
