"""`dgemma demo`, which `make run` runs: the embedded model at its three tasks."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffusiongemma.cli import app
from diffusiongemma.cli.demo import SEED
from diffusiongemma.errors import InputError
from diffusiongemma.tasks.sudoku_levels import random_puzzle
from diffusiongemma.tasks.sudoku_solver import is_solution


@pytest.mark.slow
def test_demo_solves_fills_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "icon.svg"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    boards = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("board ")]
    assert is_solution([int(cell) for cell in boards[-1]], random_puzzle("hard", SEED))
    assert "solved: every row, column and box holds 1 to 9" in result.stderr
    assert "item):\n        self.items.append(item)\n\n    def pop(self):" in result.stdout
    # As a terminal shows both: the figures do not stand amid the code.
    assert result.output.index("def __len__") < result.output.index("tokens per forward")
    assert [result.stderr.count(how) for how in ("tokens per forward", " · one after another · ")] == [1, 1]
    assert "an icon: clock, outline, one token after another" in result.stderr
    assert "1 of 3 attempts, the best token each time" in result.stderr
    assert out.read_text().startswith("<svg")
    assert not out.with_suffix(".raw.txt").exists()  # sound as it came
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "nowhere" / "icon.svg")])
    assert isinstance(result.exception, InputError)
    result = CliRunner().invoke(app, ["demo", "--level", "impossible"])
    assert isinstance(result.exception, InputError)
    result = CliRunner().invoke(app, ["demo", "--wish", " "])
    assert isinstance(result.exception, InputError)
    assert result.output == ""  # the Sudoku and the hole came first


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from diffusiongemma.cli import main\n"
        "sys.argv = ['dgemma', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout
