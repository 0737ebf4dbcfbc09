"""Every example of docs/api.md is run as it stands, on a live server with the model's name in place of nano."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffusiongemma.serve.schema import ChatRequest, CompletionRequest, Diffusion, EditRequest, InfillRequest
from diffusiongemma.tasks.format import SUDOKU_CANVAS
from diffusiongemma.tasks.sudoku import HEAT, STEPS
from serve.live import Live

DOC = Path(__file__).parents[2] / "docs" / "api.md"
TEXT = DOC.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)


def examples(language: str) -> list[str]:
    found = [code for name, code in BLOCKS if name == language]
    assert found, f"no example in {language}"
    return found


def here(code: str, live: Live) -> str:
    assert "127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", live.url)
    if live.model != "nano":  # a small random model takes every step, on a canvas of 32
        code = code.replace('"nano"', json.dumps(live.model)).replace('"canvas": 96', '"canvas": 32')
        code = re.sub(r'puzzle = ".*"', 'puzzle = "530070"', code)
    return code


def run(command: list[str], source: str | None = None) -> str:
    result = subprocess.run(command, input=source, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("number", range(len(examples("bash"))))
def test_curl(embedded: Live, number: int) -> None:
    code = here(examples("bash")[number], embedded)
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    answer = json.loads(run(["bash", "-c", code]))
    assert "error" not in answer, answer
    assert answer["model"] == embedded.model


@pytest.mark.parametrize("number", range(len(examples("python"))))
def test_python(embedded: Live, number: int) -> None:
    assert run([sys.executable, "-"], here(examples("python")[number], embedded)).strip()


def test_fetch(embedded: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = examples("js")
    monkeypatch.setattr("diffusiongemma.serve.work.BEAT", 0.02)  # comments between the events must not trip it
    if shutil.which("node") is None:
        pytest.skip("no node here")
    code = here(code, embedded).replace('model: "nano"', f"model: {json.dumps(embedded.model)}")
    printed = run(["node", "--input-type=module", "-"], code)
    assert "step 1:" in printed


def test_the_form_of_a_sudoku_is_asked_for_as_the_command_does() -> None:
    assert f'"diffusion": {json.dumps({"canvas": SUDOKU_CANVAS, "steps": STEPS, **HEAT})}' in TEXT


def test_every_field_is_named() -> None:
    """A field that exists and is not in the document would be found by nobody."""
    for model in (ChatRequest, CompletionRequest, InfillRequest, EditRequest, Diffusion):
        missing = [name for name in model.model_fields if f"`{name}" not in TEXT and f".{name}" not in TEXT]
        assert missing == [], model.__name__


def test_every_path_is_named(embedded: Live) -> None:
    with embedded.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    for path in paths:
        assert path.replace("{model_id}", "{id}") in TEXT, path
