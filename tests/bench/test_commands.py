"""The commands: each ends in a line of JSON, has the options that change its figure, and refuses the others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffusiongemma.bench.commands import app as bench_app
from diffusiongemma.bench.commands import numbers
from diffusiongemma.bench.hardware import Card
from diffusiongemma.bench.peer import measure_vs_transformers
from diffusiongemma.cli import app, main
from diffusiongemma.errors import DiffusionGemmaError, InputError


def bench(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    line: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return line


def test_step_and_its_file(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    options = ["--preset", "tiny", "--random-weights", "--quant", "fp8", "--users", "2", "--prefix", "16,48"]
    line = bench("step", *options, "--steps", "4", "--canvas", "16", "--repeat", "1", "--json", str(file))
    assert (line["weights"], line["users"], line["canvas"]) == ("fp8", 2, 16)
    assert json.loads(file.read_text()) == line


def test_the_others_begin_with_their_options() -> None:
    tiny = ["--preset", "tiny", "--repeat", "1"]
    line = bench("e2e", *tiny, "--prefix", "16", "--tokens", "20", "--steps", "1", "--canvas", "16")
    assert (line["tokens"], line["canvas"], line["steps"]) == (20, 16, 1)
    line = bench("batch", *tiny, "--users", "1,2", "--prefix", "16", "--tokens", "16", "--steps", "1")
    assert [case["users"] for case in line["cases"]] == [1, 2]
    line = bench("ar", *tiny, "--users", "1", "--prefix", "16", "--tokens", "4")
    assert line["bench"] == "ar"
    line = bench("prefill", *tiny, "--prefix", "16,40")
    assert line["prefix"] == [16, 40]
    line = bench("memory", "--preset", "tiny", "--prefix", "40", "--users", "2")
    assert (line["bench"], line["users"]) == ("memory", 2)


def test_suite_exit_code() -> None:
    options = ["--preset", "tiny", "--prefix", "16", "--context", "40", "--repeat", "1", "--steps", "1"]
    assert bench("suite", "--parts", "memory", *options)["missing"] == {}
    failed = CliRunner().invoke(app, ["bench", "suite", "--parts", "long", *options, "--long", "5000"])
    assert failed.exit_code == 1
    assert "5032 tokens are more than" in json.loads(failed.stdout.splitlines()[-1])["missing"]["long"]


def test_cpu_step_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    line = bench("cpu-step", "--preset", "tiny", "--prefix", "16", "--repeat", "1")
    assert line["milliseconds"]["diffusiongemma"] > line["floor_ms"]["diffusiongemma"] > 0
    slow = Card("slow", read=1e12, wide=1e11, narrow=4e11, origin="made up")  # so the floor is that of the products
    monkeypatch.setattr("diffusiongemma.bench.cpu_step.card_of", lambda device: slow)
    line = bench("cpu-step", "--preset", "nano", "--prefix", "16", "--repeat", "1")
    assert line["milliseconds"].keys() == {"diffusiongemma", "float32"}
    assert line["float32_ratio"] > 0
    assert line["floor_ms"]["float32"] == pytest.approx(4 * line["floor_ms"]["diffusiongemma"], rel=1e-4)
    assert bench("engine", "--preset", "tiny", "--repeat", "1")["batch_ratio"] > 0


@pytest.mark.parametrize(
    ("command", "option"),
    [("memory", "--steps"), ("memory", "--repeat"), ("prefill", "--users"), ("prefill", "--canvas"), ("e2e", "--users"),
     ("ar", "--steps"), ("step", "--tokens"), ("vs-transformers", "--quant"), ("vs-transformers", "--users")],
)  # fmt: skip
def test_options_without_effect_do_not_exist(command: str, option: str) -> None:
    result = CliRunner().invoke(bench_app, [command, option, "1"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["dgemma", "bench", "step", "--preset", "tiny", "--prefix", "1,x"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "--prefix takes different whole numbers" in capsys.readouterr().err
    nowhere = CliRunner().invoke(app, ["bench", "step", "--preset", "tiny", "--json", "no/such/file"])
    assert "does not exist: make it first" in str(nowhere.exception)  # and nothing was measured for it
    assert nowhere.output == ""
    assert numbers("--users", "1, 8") == (1, 8)
    for text in ("", "0", "1,1", "-2", "2.5"):
        with pytest.raises(InputError):
            numbers("--users", text)


def test_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "diffusiongemma.bench", "step", "--preset", "tiny", "--group", "32"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr == "error: --group 32 has no effect without --quant int4: leave it out\n"


def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DiffusionGemmaError, match="pip install 'transformers"):
        measure_vs_transformers("tiny", device="cpu")


@pytest.mark.peer
def test_vs_transformers() -> None:
    line = bench("vs-transformers", "--preset", "tiny", "--prefix", "16", "--steps", "1", "--repeat", "1")
    assert line["speedup"] == pytest.approx(line["transformers_ms"] / line["ms"], rel=1e-4)
    assert line["transformers"]
