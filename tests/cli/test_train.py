"""`dgemma train`: a run of one step, and mistakes, which are told before anything is trained."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffusiongemma.cli import app
from diffusiongemma.engine import Engine
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.train.report import per_second

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"


def train(*args: str) -> Result:
    return CliRunner().invoke(app, ["train", str(RECIPE), *args])


def test_one_step(tmp_path: Path) -> None:
    result = train("--out", str(tmp_path / "run"), "--total-steps", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "step 1, 100.0%" in result.stdout
    model = str(tmp_path / "run" / "model")
    with Engine.load(model) as engine:  # its tokenizer was missing
        assert engine.tokenizer.decode(engine.tokenizer.encode("12 + 30 =")) == "12 + 30 ="
        assert engine.generate("12 + 30 =", max_new_tokens=4, steps=1, seed=1).metrics.new_tokens <= 4


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "tpu"], "device 'tpu' cannot be used here"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--max-minutes", "nan"], "--max-minutes must be a number above 0"),
        (["--max-minutes", "-1"], "--max-minutes must be a number above 0"),
        (["--benchmark", "0"], "--benchmark must be a number above 0"),  # it trained
        (["--benchmark", "1", "--max-minutes", "1"], "--max-minutes has no effect with --benchmark"),
        (["--benchmark", "1", "--total-steps", "3"], "--total-steps has no effect with --benchmark"),
        (["--data", "nowhere"], "there is no folder nowhere"),
        (["--data", "x" * 300], "there is no folder xxx"),
        (["--data", "."], "--data has no effect"),
        (["--evaluation", "."], "--evaluation has no effect"),
    ],
)
def test_mistakes_are_named_errors(args: list[str], says: str, tmp_path: Path) -> None:
    result = train("--out", str(tmp_path / "run"), *args)
    assert isinstance(result.exception, DiffusionGemmaError)
    assert says in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    result = train("--out", str(tmp_path / "run"))
    assert isinstance(result.exception, DiffusionGemmaError)
    assert "is no folder" in str(result.exception)


@pytest.mark.parametrize("name", ["a file/run", "x" * 300])
def test_a_folder_that_cannot_be_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("mine")
    result = train("--out", str(tmp_path / name), "--device", "cpu")
    assert isinstance(result.exception, DiffusionGemmaError)
    assert "--out: cannot make the folder" in str(result.exception)


def test_a_model_that_no_run_made_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    result = train("--out", str(tmp_path), "--total-steps", "1", "--device", "cpu")
    assert isinstance(result.exception, DiffusionGemmaError)
    assert "would be replaced: name another folder" in str(result.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]


def test_slow_is_not_nothing() -> None:
    assert [per_second(speed) for speed in (431.2, 9_999, 846_000)] == ["431 tok/s", "9999 tok/s", "846k tok/s"]
