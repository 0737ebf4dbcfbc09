"""`dgemma run` as a user meets it: flags, pipes, JSON, Ctrl-C, mistakes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from diffusiongemma.cli import app, main
from diffusiongemma.cli.canvas import sanitise
from diffusiongemma.cli.options import FLAGS, Settings, with_settings
from diffusiongemma.cli.show import metrics_line
from diffusiongemma.engine import Commit, Draft, End, Engine, Metrics, SamplingParams
from diffusiongemma.errors import ConfigError

MODEL = ("--model", "random:tiny")
QUICK = ("--steps", "3", "--max-new-tokens", "40", "--seed", "5")
ESCAPE = "\x1b"


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, ["run", *MODEL, *args], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def events(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_every_sampling_option_has_its_flag() -> None:
    defaults = {f.name: f.default for f in fields(SamplingParams)}
    assert MISSING not in defaults.values()
    assert {flag.name: flag.default for flag in FLAGS} == defaults
    for flag in FLAGS:
        if isinstance(flag.default, int | float) and not isinstance(flag.default, bool):
            assert "DEFAULT" in flag.help


def test_flags_arrive_under_the_names_of_the_options() -> None:
    got = []
    small = typer.Typer()

    @small.command()
    @with_settings
    def command(*, settings: Settings) -> None:
        got.append(settings)

    line = "--max-new-tokens 9 --seed 0 --stop a --stop b --stop-token 7 --logprobs 0 --steps 4 --t-min 0.1 --t-max 0.2"
    line += " --entropy-bound 0.3 --threshold 0.9 --stability 0 --confidence 0.01 --no-early-stop --canvas 16 --redo 2"
    line += " --forget 3"
    line += " --ar --temperature 0 --top-p 0.5 --device cpu --dtype float32 --json -m x"
    options = dict(
        max_new_tokens=9, seed=0, stop=["a", "b"], stop_tokens=[7], logprobs=0, steps=4, t_min=0.1, t_max=0.2,
        entropy_bound=0.3, threshold=0.9, stability=0, confidence=0.01, early_stop=False, canvas=16, redo=2, forget=3,
        mode="ar", temperature=0.0, top_p=0.5,
    )  # fmt: skip
    assert set(options) == {flag.name for flag in FLAGS}
    assert CliRunner().invoke(small, line.split()).exit_code == 0
    assert CliRunner().invoke(small, ["--canvas", "adaptive"]).exit_code == 0
    assert CliRunner().invoke(small, []).exit_code == 0
    assert CliRunner().invoke(small, ["--diffusion"]).exit_code == 0
    assert got[0] == Settings("x", "cpu", "float32", as_json=True, options=options)
    assert got[1].options == {"canvas": "adaptive"}
    assert got[2] == Settings()
    assert got[3].options == {"mode": "diffusion"}


# ---- output ----------------------------------------------------------------------------------------------------------


def test_text_alone_in_a_pipe() -> None:
    with Engine.load("random:tiny") as engine:
        expected = engine.generate("hello", steps=3, max_new_tokens=40, seed=5)
    result = run("hello", *QUICK)
    assert result.stdout.rstrip("\n") == sanitise(expected.text).rstrip("\n")
    assert ESCAPE not in result.output
    assert run(*QUICK, "--plain", stdin="hello\n").stdout == result.stdout
    assert run("-", *QUICK, stdin="hello").stdout == result.stdout
    figures = result.stderr.splitlines()
    assert len(figures) == 1
    for part in ("length", "40 tokens", "6 steps", "tokens per forward", "tok/s", "first draft", "seed 5"):
        assert part in figures[0]
    assert "0 blocks redone" in figures[0]
    assert "0 tokens reused" in figures[0]
    seconds = expected.metrics.total_seconds
    assert f"40 tokens in {seconds:.2f} s" in metrics_line(expected.metrics, "length")


def test_json_is_one_event_a_line() -> None:
    got = events(run("hello", *QUICK, "--json", "--logprobs", "2"))
    assert [e["kind"] for e in got] == ["draft"] * 3 + ["commit"] + ["draft"] * 3 + ["commit", "end"]
    first, commits, end = got[0], [e for e in got if e["kind"] == "commit"], got[-1]
    assert (first["block"], first["step"]) == (0, 1)
    assert len(first["tokens"]) == len(first["entropy"]) == len(first["accepted"]) == 32
    assert sum(len(e["tokens"]) for e in commits) == 40
    assert all(len(p["top"]) == 2 for e in commits for p in e["logprobs"])
    assert end["text"] == "".join(e["text"] for e in commits)
    assert end["finish_reason"] == "length"
    assert end["metrics"]["seed"] == 5
    assert end["metrics"]["tokens_per_forward"] == pytest.approx(40 / 6)


def test_autoregressive_twin() -> None:
    got = events(run("hello", "--ar", "--max-new-tokens", "6", "--temperature", "0", "--json"))
    assert "draft" not in {e["kind"] for e in got}
    assert got[-1]["metrics"]["decoder_forwards"] == 0
    assert got[-1]["metrics"]["steps"] == 6
    figures = run("hello", "--ar", "--max-new-tokens", "6", "--temperature", "0").stderr
    assert "one after another" in figures
    assert "first token" in figures
    for of_a_canvas in ("step", "forward", "draft", "redone"):
        assert of_a_canvas not in figures


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["x", *MODEL, "--ar", "--steps", "3"], "--steps has no effect in mode 'ar'"),
        (["x", *MODEL, "--ar", "--no-early-stop"], "--no-early-stop has no effect in mode 'ar'"),
        (["x", *MODEL, "--top-p", "0.5"], "--top-p has no effect in mode 'diffusion'"),
        (["x", *MODEL, "--no-early-stop", "--stability", "3"], "--stability has no effect with --no-early-stop"),
        (["x", *MODEL, "--stop-token", "512"], "stop token 512 never comes: token ids are from 0 to 511"),
        (["x", *MODEL, "--threshold", "0.9", "--entropy-bound", "1"], "give one of the two"),
        (["x", *MODEL, "--canvas", "wide"], "canvas must be a width"),
        (["x", *MODEL, "--steps", "0"], "steps must be an integer from 1"),
        (["x", *MODEL, "--plain", "--json"], "exclude each other"),
        (["x", *MODEL, "--logprobs", "1"], "--logprobs has no effect without --json"),
        (["x", *MODEL, "--thinking"], "thinking"),
        (["x" * 5000, *MODEL], "more than the model's"),
        (["", *MODEL], "the prompt is empty"),
        (["x", "--model", "random:nothing"], "no preset 'nothing'"),
    ],
)
def test_mistakes_are_one_message(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dgemma", "run", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err


def test_input_that_is_not_text() -> None:
    result = CliRunner().invoke(app, ["run", *MODEL], input=b"\xff\xfe")
    assert "not UTF-8" in str(result.exception)
    result = CliRunner().invoke(app, ["run", *MODEL, "\udcff"])  # as Python has such a byte of an argument
    assert "UTF-8" in str(result.exception)


# ---- real processes --------------------------------------------------------------------------------------------------

LONG = ("--max-new-tokens", "4000", "--no-early-stop")


def start(*args: str, stdout: int, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diffusiongemma", "run", "hello", *MODEL, *args]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=os.environ | environment
    )


def read_until(descriptor: int, mark: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 300
    while mark not in seen and time.monotonic() < deadline:
        seen += os.read(descriptor, 4096)
    return seen


def test_interrupt_on_a_narrow_terminal() -> None:
    """The live canvas on a real (pseudo) terminal of 24 columns, ended by Ctrl-C in the middle of a block."""
    ours, theirs = pty.openpty()
    process = start(*LONG, "--steps", "1000", stdout=theirs, TERM="xterm-256color", COLUMNS="24", LINES="10")
    os.close(theirs)
    seen = read_until(ours, b"step 2")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    rest = b""
    while process.poll() is None:  # a full terminal would make it wait for us
        try:
            rest += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    errors = process.stderr.read().decode()
    assert process.wait(timeout=300) == 130
    assert b"step 2" in seen
    assert "cancelled · 0 tokens" in errors
    assert "Traceback" not in errors
    screen = (seen + rest).decode(errors="replace")
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") == 1  # the cursor was hidden, and is back
    obeyed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert not [c for c in obeyed if ord(c) < 0x20 and c not in "\r\n"]


def test_interrupt_in_a_pipe() -> None:
    process = start(*LONG, "--steps", "2", stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen = os.read(process.stdout.fileno(), 1)  # the first block is final
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert (seen + out).endswith(b"\n")
    assert b"\x1b" not in seen + out
    assert b"cancelled" in errors
    assert b"Traceback" not in errors


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start(*LONG, "--steps", "2", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""


# ---- docs/sampling.md ------------------------------------------------------------------------------------------------

SAMPLING = Path(__file__).parents[2] / "docs" / "sampling.md"


def rows_under(heading: str) -> dict[str, list[str]]:
    """The table below a heading: first cell -> the others."""
    section = SAMPLING.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_documented_options_are_the_options() -> None:
    documented = {name: cells[0].strip("`") for name, cells in rows_under("Options").items()}
    assert documented == {f.name: repr(f.default).replace("'", '"') for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", ["max_new_tokens", "steps", "stability", "redo", "logprobs", "temperature"])
def test_documented_ranges_are_the_ranges(name: str) -> None:
    low, high = (int(n.replace(",", "")) for n in rows_under("Options")[name][1].split(" to "))
    mode = "ar" if name == "temperature" else "diffusion"
    for value in (low, high):
        assert getattr(SamplingParams.build(mode=mode, **{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            SamplingParams.build(mode=mode, **{name: value})


def test_documented_metrics_and_events_are_the_real_ones() -> None:
    assert list(rows_under("Metrics")) == list(Metrics().to_dict())
    for kind, event in (("draft", Draft), ("commit", Commit), ("end", End)):
        cell = rows_under("Events")[kind][0]
        assert not [f.name for f in fields(event) if f.name != "decode" and f"`{f.name}`" not in cell]


def test_the_documented_way_to_the_logits_exists() -> None:
    text = (SAMPLING.parent / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| (\d) \| `([\w.]+)` \| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert [number for number, *_ in steps] == list("12345678")
    package = SAMPLING.parents[1] / "src" / "diffusiongemma"
    for _, call, file in steps:
        source = (package / file).read_text(encoding="utf-8")
        owner, _, name = call.rpartition(".")
        assert re.search(rf"^ *def {name}\(", source, re.MULTILINE)
        assert not owner or re.search(rf"^class {owner}\b", source, re.MULTILINE)
