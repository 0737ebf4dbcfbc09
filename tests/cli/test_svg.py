"""`dgemma svg`: files, exit codes and remarks. An engine that answers with given texts stands in for a trained one."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from diffusiongemma import ModelConfig
from diffusiongemma import engine as engine_module
from diffusiongemma.checkpoint import save_model
from diffusiongemma.cli import app, show
from diffusiongemma.cli.options import Settings
from diffusiongemma.cli.show import Json
from diffusiongemma.cli.svg import check_target, draw, free_name, preview
from diffusiongemma.engine import Draft, Engine, Event, Request, SamplingParams
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.engine.params import released_params
from diffusiongemma.errors import DiffusionGemmaError, InputError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.tasks.svg import document, grade
from diffusiongemma.tasks.svg_render import coverage
from diffusiongemma.text import default_chat_template
from diffusiongemma.text.bytes import byte_tokenizer
from diffusiongemma.train.ship import SVG_MODE

QUICK = ("--model", "random:tiny", "--steps", "1", "--max-new-tokens", "8")
FILLED = '<svg viewBox="0 0 24 24"><path fill="currentColor" d="M4 4h16v16H4z"/></svg>'
FLAWED = FILLED.replace("<path", '<path onclick="alert(1)"')
BROKEN = FILLED[:-9]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["svg", *args, *QUICK])


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer_with(monkeypatch: pytest.MonkeyPatch, texts: Sequence[str]) -> list[SamplingParams]:
    """The real request runs, and its text is replaced: everything but the weights is the real thing."""
    asked: list[SamplingParams] = []
    real = show.follow

    def follow(engine: Engine, request: Request, settings: Settings) -> show.Answer:
        answer = real(engine, request, settings)
        answer.text = texts[len(asked)]
        asked.append(request.params)
        return answer

    monkeypatch.setattr(show, "follow", follow)
    return asked


def test_writes_a_clean_svg_and_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [FILLED])
    result = run("Bell, outline", "--size", "64", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert Path("bell-outline.svg").read_text() == document(FILLED, 64)
    with Image.open("bell-outline.png") as image:
        assert image.size == (64, 64)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        assert image.convert("RGB").getpixel((32, 32)) == (0, 0, 0)
    assert sorted(path.name for path in Path().iterdir()) == ["bell-outline.png", "bell-outline.svg"]
    assert "wrote bell-outline.svg and bell-outline.png" in result.stderr
    assert "1 of 6 attempts, seed 3" in result.stderr


def test_nothing_is_overwritten_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [FILLED] * 3)
    Path("bell.png").write_text("mine")
    assert run("bell", "--no-png").exit_code == 0
    assert run("bell", "--no-png").exit_code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["bell-2.svg", "bell-3.svg", "bell.png"]
    Path("x.svg").write_text("old")
    assert run("bell", "--no-png", "--out", "x.svg").exit_code == 0
    assert Path("x.svg").read_text() == document(FILLED, 256)


def test_an_answer_that_cannot_be_drawn_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, [BROKEN] * 6)
    result = run("bell", "--seed", "5")
    assert [params.seed for params in asked] == [5, 6, 7, 8, 9, 10]
    assert "6 of 6 attempts, seed 5" in result.stderr  # of equals the first
    assert result.exit_code == 1
    assert [path.name for path in Path().iterdir()] == ["bell.raw.txt"]
    assert Path("bell.raw.txt").read_text() == BROKEN
    assert "no icon: not well-formed" in result.stderr
    again = [line for line in result.stderr.splitlines() if line.startswith("not sound: not well-formed")]
    assert [line.rsplit(" · ", 1)[1] for line in again] == [f"drawing again, attempt {i} of 6" for i in range(2, 7)]
    assert "seed 5" in result.stderr
    assert "bell.raw.txt" in result.stderr


def test_what_is_not_allowed_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [FLAWED])
    result = run("bell", "--attempts", "1")
    assert result.exit_code == 0
    assert Path("bell.svg").read_text() == document(FILLED, 256)
    assert Path("bell.raw.txt").read_text() == FLAWED
    assert "not allowed: onclick" in result.stderr


@pytest.mark.parametrize(
    ("texts", "attempts", "seeds", "kept"),
    [
        ([BROKEN, FLAWED, FILLED, BROKEN], 4, [7, 8, 9], FILLED),
        ([FLAWED, BROKEN], 2, [7, 8], FLAWED),  # the best of them
        ([FILLED], 4, [7], FILLED),
    ],
)
def test_attempts_take_the_next_seed(
    texts: list[str], attempts: int, seeds: list[int], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer_with(monkeypatch, texts)
    result = run("bell", "--seed", "7", "--attempts", str(attempts), "--json", "--no-png")
    assert result.exit_code == 0, result.output
    assert [params.seed for params in asked] == seeds
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["kind"] == "icon"
    assert report["attempts"] == len(seeds)
    assert report["seed"] == seeds[texts.index(kept)]
    assert report["svg"] == "bell.svg"
    assert report["png"] is None
    assert report["grade"]["ok"] is grade(kept).ok
    assert report["raw"] == (None if grade(kept).ok else "bell.raw.txt")


def test_a_fresh_seed_is_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, [BROKEN] * 3)
    assert run("bell", "--attempts", "3").exit_code == 1
    first, second, third = (params.seed for params in asked)
    assert first is None
    assert second is not None
    assert third == second + 1


def test_the_same_again_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 there is nothing to draw by lot."""
    best = ("bell", "--ar", "--temperature", "0", "--model", "random:tiny", "--max-new-tokens", "8")
    asked = answer_with(monkeypatch, [BROKEN] * 6)
    result = CliRunner().invoke(app, ["svg", *best])
    assert (result.exit_code, len(asked)) == (1, 1)
    assert "1 of 1 attempts" in result.stderr
    assert "give --temperature 0.5" in result.stderr  # another seed or attempt would say the same
    refused = CliRunner().invoke(app, ["svg", *best, "--attempts", "2"])
    assert isinstance(refused.exception, InputError)
    assert "has no effect at temperature 0" in str(refused.exception)
    assert CliRunner().invoke(app, ["svg", *best[:2], *best[4:], "--attempts", "2"]).exit_code == 1
    assert len(asked) == 3


# ---- how a model draws ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose settings say that it draws one token after another."""
    folder = tmp_path_factory.mktemp("causal") / "causal"
    save_model(DiffusionGemma(ModelConfig.preset("tiny")).init_weights(0, 0.1), folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(default_chat_template(), encoding="utf-8")
    (folder / "dgemma.json").write_text('{"svg_mode": "ar"}', encoding="utf-8")
    return str(folder)


def ask(model: str, *args: str) -> Result:
    return CliRunner().invoke(app, ["svg", "bell", "--model", model, "--max-new-tokens", "8", "--seed", "7", *args])


@pytest.mark.parametrize(
    ("args", "temperatures"),
    [
        ([], [0.0, 0.5, 0.5]),
        (["--ar"], [0.0, 0.5, 0.5]),
        (["--temperature", "0.7"], [0.7, 0.7, 0.7]),
        (["--top-p", "0.9"], [0.5, 0.5, 0.5]),  # which has no effect on the best token
    ],
)
def test_a_model_that_draws_causally(
    args: list[str], temperatures: list[float], causal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer_with(monkeypatch, [BROKEN, BROKEN, FILLED])
    result = ask(causal, "--json", *args)
    assert result.exit_code == 0, result.exception
    assert [params.mode for params in asked] == ["ar"] * 3
    assert [params.temperature for params in asked] == temperatures
    assert [params.seed for params in asked] == [7, 8, 9]
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["mode"], report["temperature"], report["seed"]) == ("ar", temperatures[2], 9)


def test_the_best_tokens_have_no_seed_to_tell(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [FILLED, BROKEN, FILLED])
    assert "1 of 6 attempts, the best token each time\n" in ask(causal).stderr
    assert "2 of 6 attempts, seed 8\n" in ask(causal).stderr


def test_a_canvas_can_be_asked_for(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, [BROKEN, FILLED])
    result = ask(causal, "--diffusion", "--steps", "1", "--json")
    assert result.exit_code == 0, result.exception
    assert [(params.mode, params.steps, params.seed) for params in asked] == [("diffusion", 1, 7), ("diffusion", 1, 8)]
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["mode"], report["temperature"]) == ("diffusion", None)


def test_without_a_habit_it_is_a_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, [FILLED])
    assert ask("random:tiny", "--steps", "1").exit_code == 0
    assert asked[0].mode == "diffusion"


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        ("causal", ["--steps", "1"], "--steps would have no effect: "),
        ("causal", ["--t-max", "0.9", "--no-early-stop"], "--t-max, --no-early-stop would have no effect: "),
        ("causal", ["--early-stop"], "--early-stop would have no effect: "),
        ("causal", ["--no-early-stop"], "draws one token after another unless you add --diffusion"),
        ("causal", ["--ar", "--no-early-stop"], "--no-early-stop has no effect in mode 'ar'"),
        ("causal", ["--ar", "--t-max", "0.9"], "--t-max has no effect in mode 'ar'"),
        ("causal", ["--diffusion", "--temperature", "1"], "--temperature has no effect in mode 'diffusion'"),
        ("causal", ["--temperature", "0", "--attempts", "2"], "has no effect at temperature 0"),
        ("random:tiny", ["--temperature", "1"], "draws on a canvas unless you add --ar"),
        ("random:tiny", ["--top-p", "2"], "top_p must be"),
    ],
)
def test_options_of_the_other_way_are_refused(model: str, args: list[str], says: str, causal: str) -> None:
    result = ask(causal if model == "causal" else model, *args)
    assert isinstance(result.exception, DiffusionGemmaError)
    assert says in str(result.exception)
    assert list(Path().iterdir()) == []


def test_the_habit_survives_quantising(causal: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", causal, "small", "--format", "int8", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    with Engine.load(tmp_path / "small", "cpu") as engine:
        assert engine.svg_mode == "ar"


def test_the_shipped_model_draws_causally() -> None:
    assert released_params(ASSETS / "nano").svg_mode == SVG_MODE == "ar"


def test_random_weights_draw_nothing_but_the_whole_command_runs() -> None:
    result = run("bell", "--seed", "1", "--json", "--attempts", "1")
    assert result.exit_code == 1
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["kind"] for event in events][-2:] == ["end", "icon"]
    assert events[-1]["svg"] is None
    assert Path(events[-1]["raw"]).read_text(encoding="utf-8") == events[-2]["text"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["bell", "--out", "bell.png"], "must name an .svg"),
        (["bell", "--out", "no/such/x.svg"], "does not exist"),
        ([" "], "nothing to draw"),
        (["bell", "--temperature", "1"], "--temperature has no effect in mode 'diffusion'"),
    ],
)
def test_mistakes_are_named_errors(args: list[str], says: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, DiffusionGemmaError)
    assert says in str(result.exception)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("args", [["bell", "--size", "3"], ["bell", "--attempts", "0"], []])
def test_ranges(args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [FILLED])
    Path("x.svg").mkdir()
    result = run("bell", "--out", "x.svg")
    assert isinstance(result.exception, InputError)
    assert "cannot write x.svg: it is a folder" in str(result.exception)
    Path("y.png").mkdir()  # beside the file that was named
    result = run("bell", "--out", "y.svg")
    assert isinstance(result.exception, InputError)
    assert "cannot write y.png: it is a folder" in str(result.exception)
    assert not Path("y.svg").exists(), "said before the work"
    assert run("bell", "--out", "y.svg", "--no-png").exit_code == 0


def test_a_folder_that_cannot_be_written_into_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *args: False)  # root may write anywhere
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("a model was loaded for nothing"))
    result = run("bell")
    assert isinstance(result.exception, InputError)
    assert "cannot write bell.png: that is not allowed" in str(result.exception)


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Json, event: Event, new_text: str) -> None:
        if isinstance(event, Draft) and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Json, "take", take)
    options = ("--model", "random:tiny", "--json", "--steps", "5000", "--no-early-stop")
    result = CliRunner().invoke(app, ["svg", "bell", *options])
    assert result.exit_code == 130
    assert list(Path().iterdir()) == []


def test_names() -> None:
    assert free_name("Bell, outline!") == Path("bell-outline.svg")
    assert free_name("../../etc/passwd") == Path("etc-passwd.svg")
    assert free_name("日本") == Path("icon.svg")
    assert len(free_name("x" * 500).name) <= 64
    assert check_target(Path("a.SVG")) == Path("a.SVG")


def test_preview_in_half_blocks() -> None:
    assert preview([[1, 0, 1], [1, 1, 0], [0, 0, 1]]).plain == "█▄▀\n  ▀"


def test_terminal_shows_the_picture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from diffusiongemma.tasks.svg import render

    answer_with(monkeypatch, [FILLED])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    settings = Settings(model="random:tiny", options=dict(steps=1, max_new_tokens=8, seed=0))
    with settings.load() as engine:
        drawn = draw(engine, "bell", settings, Path("bell.svg"))
    assert drawn is not None
    assert drawn.svg == Path("bell.svg")
    picture = preview(coverage(render(FILLED, 32)).tolist()).plain.strip("\n")
    assert picture in capsys.readouterr().out
    assert "█" * 20 in picture


@pytest.mark.parametrize(
    ("habit", "written", "prepared"),
    [
        ("diffusion", {}, True),
        ("ar", {}, False),
        ("ar", {"mode": "diffusion"}, True),
        ("diffusion", {"mode": "ar"}, False),
    ],
)
def test_on_a_card_it_is_prepared_for_how_it_will_draw(
    monkeypatch: pytest.MonkeyPatch, habit: str, written: dict[str, str], prepared: bool
) -> None:
    made = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")), svg_mode=habit)
    found = list[object]()
    monkeypatch.setattr(engine_module, "prepare", found.append)
    monkeypatch.setattr(Engine, "load", lambda *_: made)
    assert Settings(options=dict(written)).load(either_mode=True) is made
    assert found == [made] * prepared
