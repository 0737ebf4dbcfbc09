"""What the README shows is run: every Python snippet, in order and in one namespace, and every `dgemma` command.

A block under `<!-- not run by the tests: WHY -->` is only checked for its syntax.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffusiongemma.cli import app

README = Path(__file__).parents[2] / "README.md"
_SKIP = r"(?P<skip><!-- not run by the tests: [^\n]+ -->\n)?"
_BLOCK = re.compile(_SKIP + r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    runs: bool


def blocks(text: str) -> list[Block]:
    return [Block(m["kind"], m["body"], m["skip"] is None) for m in _BLOCK.finditer(text)]


def commands(text: str) -> list[str]:
    lines = [line for b in blocks(text) if b.kind == "bash" and b.runs for line in b.body.splitlines()]
    return [line for line in lines if line.startswith("dgemma ")]


def test_blocks_are_found() -> None:
    python = "x\n```python\na = 1\n```\n\n"
    skipped = "<!-- not run by the tests: big -->\n```bash\ndgemma b\n```\n"
    text = python + skipped + "```bash\ndgemma c\n```\n"
    assert blocks(text)[:2] == [Block("python", "a = 1\n", True), Block("bash", "dgemma b\n", False)]
    assert commands(text) == ["dgemma c"]


def test_python_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    snippets = [b for b in blocks(README.read_text(encoding="utf-8")) if b.kind == "python"]
    assert sum(b.runs for b in snippets) >= 2
    for number, block in enumerate(snippets):
        code = compile(block.body, f"README.md, Python block {number}", "exec")
        if block.runs:
            exec(code, names)
    # The tour says "bit for bit".
    model, again = names["model"], names["again"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(again, torch.nn.Module)
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize("command", commands(README.read_text(encoding="utf-8")))
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_shown_output_is_what_the_command_prints() -> None:
    (shown,) = [b.body for b in blocks(README.read_text(encoding="utf-8")) if b.kind == "text"]
    printed = CliRunner().invoke(app, ["inspect", "26b-a4b"]).output
    lines = {line.rstrip() for line in printed.splitlines()}
    assert [line for line in shown.splitlines() if line not in lines and line != "..."] == []
