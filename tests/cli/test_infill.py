"""`dgemma infill`: files with holes, a hole between two texts, and mistakes."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffusiongemma.cli import app, main
from diffusiongemma.cli.canvas import sanitise
from diffusiongemma.cli.show import Json
from diffusiongemma.engine import Draft, Engine, Event
from diffusiongemma.errors import InputError

MODEL = ("--model", "random:tiny")
QUICK = (*MODEL, "--steps", "2", "--seed", "3", "--max-new-tokens", "6")
OPTIONS = dict(steps=2, seed=3, max_new_tokens=6)


def infill(*args: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["infill", *args], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_between_two_texts() -> None:
    with Engine.load("random:tiny") as engine:
        expected = engine.infill("one ", " two", **OPTIONS).text
    result = infill("--prefix", "one ", "--suffix", " two", *QUICK)
    assert result.stdout.removesuffix("\n") == sanitise(expected).removesuffix("\n")
    assert "seed 3" in result.stderr


def test_holes_of_a_file(tmp_path: Path) -> None:
    text = "a = [[?2]]\r\nb = [[?]]; ü\r\n"
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(text, encoding="utf-8", newline="")
    with Engine.load("random:tiny") as engine:
        expected = engine.fill(text, **OPTIONS).text
    result = infill(str(source), "--output", str(target), *QUICK)
    assert target.read_bytes().decode() == expected  # exactly, while the terminal gets nothing that it would obey
    assert result.stdout.removesuffix("\n") == sanitise(expected).removesuffix("\n")
    assert expected.startswith("a = ")
    assert expected.endswith("; ü\r\n")
    assert infill("-", *QUICK, stdin=text).stdout == result.stdout


def test_json_tells_drafts_and_the_whole_text() -> None:
    got = [json.loads(line) for line in infill("-", *QUICK, "--json", stdin="x[[?3]]y").stdout.splitlines()]
    kinds = [event["kind"] for event in got]
    assert kinds[-2:] == ["commit", "end"]
    assert "draft" in kinds
    assert got[-1]["text"].startswith("x")
    assert got[-1]["text"].endswith("y")
    assert got[-1]["metrics"]["seed"] == 3


@pytest.mark.parametrize(
    ("name", "hole", "args", "check"),
    [
        ("a.py", "[[?4]]", (), "python"),
        ("a.py", "[[?4]]", ("--check", "none"), "none"),
        ("a.py", "[[?4]]", ("--candidates", "1"), "none"),  # nothing to choose from
        ("a.py", "[[?1]]", (), "none"),
        ("a.txt", "[[?4]]", (), "none"),
        ("a.txt", "[[?4]]", ("--check", "python", "--choose", "middle"), "python"),
    ],
)
def test_python_is_checked(
    name: str, hole: str, args: tuple[str, ...], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], Engine.fill_stream

    def fill_stream(self: Engine, template: str, **options: object) -> object:
        stream = real(self, template, **options)
        asked.append((options["check"], options["choose"]))
        return stream

    monkeypatch.setattr(Engine, "fill_stream", fill_stream)
    file = tmp_path / name
    file.write_text(f"x = {hole}\n")
    infill(str(file), *QUICK, *args)
    assert asked == [(check, "middle" if "--choose" in args else "likeliest")]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give a file with holes"),
        (["some.txt", "--prefix", "a"], "give a file with holes"),
        (["no-such-file.txt"], "cannot read no-such-file.txt"),
        (["--prefix", "a", "--output", "no/such/out.txt"], "does not exist: make it first"),  # said after the work
        (["--prefix", "a", "--output", "/"], "cannot write /: it is a folder"),
        (["--prefix", "a", "--stop", "b"], "stop has no effect on holes"),
        (["--prefix", "a", "--ar"], "writes from left to right"),
        (["--prefix", "a", "--candidates", "0"], "candidates must be"),
        (["--prefix", "a", "--strategy", "guess"], "strategy must be"),
        (["--prefix", "a", "--check", "perl"], "check must be"),
        (["--prefix", "a", "--check", "python", "--candidates", "1"], "has no effect on one candidate"),
        (["--prefix", "a", "--check", "python", "--max-new-tokens", "1"], "has no effect on one candidate"),
        (["--prefix", "a", "--choose", "middle", "--candidates", "2"], "fewer than three candidates"),
    ],
)
def test_mistakes_are_one_message(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dgemma", "infill", *args, *MODEL])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert says in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_disk_that_fills_up_meanwhile_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="cannot write /dev/full: No space left on device; the text stands above"):
        app(["infill", "--prefix", "a", "--output", "/dev/full", *MODEL], standalone_mode=False)
    assert capsys.readouterr().out


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell in the background ignores it

    def take(self: Json, event: Event, new_text: str) -> None:
        if isinstance(event, Draft) and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Json, "take", take)
    options = (*MODEL, "--json", "--steps", "5000", "--no-early-stop")
    result = CliRunner().invoke(app, ["infill", "--prefix", "a", "--suffix", "b", *options])
    assert result.exit_code == 130
    assert json.loads(result.stdout)["finish_reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is before
