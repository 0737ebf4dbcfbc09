"""`dgemma demo`, which `make run` runs."""

import subprocess
import sys

from typer.testing import CliRunner, Result

from diffusiongemma.cli import app
from diffusiongemma.errors import InputError


def demo(*args: str) -> Result:
    result = CliRunner().invoke(app, ["demo", "--max-new-tokens", "8", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_demo_says_what_it_is_and_runs_the_engine() -> None:
    result = demo("--seed", "3")
    assert "random weights" in result.stderr
    assert "8 tokens in" in result.stderr
    assert "seed 3" in result.stderr
    assert result.stdout.strip()


def test_seed_decides() -> None:
    first, again, other = (demo("--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_prompt_too_long() -> None:
    result = CliRunner().invoke(app, ["demo", "--prompt", "x" * 5000])
    assert isinstance(result.exception, InputError)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from diffusiongemma.cli import main\n"
        "sys.argv = ['dgemma', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout
