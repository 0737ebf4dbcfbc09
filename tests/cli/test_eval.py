"""`dgemma eval`: figures as tables, JSON, plots and files; flags that have no effect are refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffusiongemma.cli import app, figures, main
from diffusiongemma.cli.evaluation import EvalOptions
from diffusiongemma.cli.figures import CaseSet, early_stop_costs
from diffusiongemma.engine import Engine
from diffusiongemma.errors import ConfigError, DataError, DiffusionGemmaError, InputError
from diffusiongemma.tasks import icons
from diffusiongemma.tasks.evaluation import Graded, Report, Variant
from diffusiongemma.tasks.sudoku import Sudoku
from engine.holes import tokenizer
from tasks.oracle import Oracle

MODEL = ("--model", "random:tiny")
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def run(*args: str) -> Result:
    result = CliRunner().invoke(app, ["eval", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def rows(*args: str) -> list[dict]:
    return [json.loads(line) for line in run(*args, "--json").stdout.splitlines()]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> list[Oracle]:
    """Engines that solve the one puzzle above in diffusion, and never as the twin."""
    made = []

    def load(*args: object, **options: object) -> Engine:
        made.append(Oracle(lambda request: SOLUTION if request.params.mode == "diffusion" else "1" * 81))
        return made[-1]

    monkeypatch.setattr(Engine, "load", load)
    return made


@pytest.fixture
def puzzles(tmp_path: Path) -> str:
    file = tmp_path / "mine.txt"
    file.write_text(f"{PUZZLE}\n{'.' * 81}\n55{'.' * 79}\n")
    return str(file)


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_json_has_every_figure_with_its_interval(oracle: list[Oracle], puzzles: str) -> None:
    (got,) = rows("sudoku", "--file", puzzles, "--mode", "both", "--seed", "4")
    assert (got["task"], got["set"], got["seed"], got["device"]) == ("sudoku", "mine.txt", 4, "cpu")
    assert [run["variant"] for run in got["runs"]] == ["diffusion", "ar"]
    diffusion, twin = (run["figures"]["solved"] for run in got["runs"])
    assert (diffusion["value"], diffusion["count"]) == (pytest.approx(2 / 3), 3)
    assert diffusion["low"] < diffusion["value"] < diffusion["high"]
    assert twin["value"] == 0
    assert got["runs"][0]["steps"]["value"] == 3
    assert got["runs"][0]["tokens_per_forward"] == pytest.approx((51 + 81 + 79) / 9)  # givens are no work of the model
    assert [remark.split(":")[0] for remark in got["remarks"]] == [
        "line 2 has several solutions",
        "line 3 has no solution",
    ]
    assert [request.params.seed for request in oracle[0].asked[:3]] == [4, 1004, 2004]


def test_tables_stay_whole_in_80_columns(oracle: list[Oracle], puzzles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    twice = ("--mode", "both", "--all-steps", "--attempts", "3", "-o", "temperature=0.5")
    text = run("sudoku", "--file", puzzles, *twice).stdout
    assert text.splitlines()[0].endswith(", attempts 3, looks 1")  # all steps: a board is one canvas
    for word in ("solved", "solved within 3", "66.7%", "20.8–93.9", "all steps", "ar", "tokens per forward", "seconds"):
        assert word in text
    assert "…" not in text
    assert "the early stop of 'diffusion' costs +0.00 points of 'solved' (+0.00 to +0.00)" in text
    many = run("sudoku", "--file", puzzles, "--steps", "1,2,3,4,8").stdout
    assert many.count("66.7%") == 5
    assert "diffusion 8" in many


def test_remarks_are_told_beside_the_table(oracle: list[Oracle], puzzles: str) -> None:
    result = run("sudoku", "--file", puzzles)
    assert "line 3 has no solution" in result.stderr
    assert "line" not in result.stdout


def test_attempts_are_reported_beside_the_one(oracle: list[Oracle], puzzles: str) -> None:
    (got,) = rows("sudoku", "--file", puzzles, "--attempts", "2")
    found = got["runs"][0]["figures"]
    assert got["settings"] == {"attempts": 2, "looks": 4}
    assert found.keys() == {"solved", "solved within 2", "attempts", "looks"}
    assert found["attempts"]["value"] == pytest.approx(4 / 3)


def test_looks_are_what_was_asked_for_unless_the_steps_are(
    monkeypatch: pytest.MonkeyPatch, puzzles: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *a, **k: Oracle(lambda r: "1" * 81, settles=lambda r: False))
    given = ("sudoku", "--file", puzzles, "--limit", "1")
    (got,) = rows(*given)
    assert (got["settings"]["looks"], got["runs"][0]["figures"]["looks"]["value"]) == (4, 4.0)
    assert got["runs"][0]["steps"]["value"] == 4 * 3
    (got,) = rows(*given, "--looks", "2", "--mode", "both")
    assert [run["steps"]["value"] for run in got["runs"]] == [2 * 3, 3]  # the twin has one
    assert "looks" not in got["runs"][1]["figures"]
    for fixed in (("--steps", "7"), ("--all-steps",), ("--mode", "ar")):
        (got,) = rows(*given, *fixed)
        assert got["settings"]["looks"] == 1
        assert {run["steps"]["value"] for run in got["runs"]} == {3}
        with pytest.raises(InputError, match=f"--looks has no effect with {' '.join(fixed)[:11].rstrip(' 7')}"):
            run(*given, *fixed, "--looks", "1")


def test_icons_drawn_again_are_reported_beside_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    drawn = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M2 2h12v12H2z"/></svg>'
    monkeypatch.setattr(
        Engine, "load", lambda *args, **options: Oracle(lambda r: drawn if r.params.seed % 2 else "<svg")
    )
    (got,) = rows("svg", "--limit", "4", "--attempts", "2")
    found = {name: figure["value"] for name, figure in got["runs"][0]["figures"].items()}
    assert (found["visible"], found["visible within 2"], found["attempts"]) == (0.0, 1.0, 2.0)


def test_a_twin_that_draws_may_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    monkeypatch.setattr(Engine, "load", lambda *args, **options: Oracle(lambda request: "<svg"))
    (got,) = rows("svg", "--limit", "1", "--attempts", "2", "--mode", "both", "-o", "temperature=0.5")
    assert [run["figures"]["attempts"]["value"] for run in got["runs"]] == [2.0, 2.0]


def test_what_ran_is_kept_if_a_later_run_fails(oracle: list[Oracle], puzzles: str, tmp_path: Path) -> None:
    out, real = tmp_path / "cases.jsonl", Oracle.submit_group

    def fail(self: Oracle, requests: list, forward=None) -> list:
        if requests[0].params.mode == "ar":
            raise KeyboardInterrupt
        return real(self, requests, forward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Oracle, "submit_group", fail)
        args = ["eval", "sudoku", "--file", puzzles, "--output", str(out), "--mode", "both"]
        assert CliRunner().invoke(app, args).exit_code == 130
    assert [json.loads(line)["variant"] for line in out.read_text().splitlines()] == ["diffusion"] * 3


def test_cases_are_written_one_by_one(oracle: list[Oracle], puzzles: str, tmp_path: Path) -> None:
    out = tmp_path / "cases.jsonl"
    for _ in range(2):  # the second run takes the place of the first
        run("sudoku", "--file", puzzles, "--output", str(out), "--mode", "both")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["variant"], row["case"], row["scores"]["solved"]) for row in found] == [
        ("diffusion", "line 1", True),
        ("diffusion", "line 2", True),
        ("diffusion", "line 3", False),
        ("ar", "line 1", False),
        ("ar", "line 2", False),
        ("ar", "line 3", False),
    ]
    assert found[0]["text"] == SOLUTION


def test_the_plot_shows_steps_against_the_first_figure(oracle: list[Oracle], puzzles: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "steps.png"
    (got,) = rows("sudoku", "--file", puzzles, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [run["steps_limit"] for run in got["runs"]] == [1, 2, 4, 8, 16, 24, 32, 48]  # up to the model's own number
    (got,) = rows("sudoku", "--file", puzzles, "--plot", str(file), "--steps", "3,5", "--all-steps")
    assert [(run["steps_limit"], run["early_stop"]) for run in got["runs"]] == [
        (3, True), (5, True), (3, False), (5, False),
    ]  # fmt: skip
    assert got["early_stop_cost_points"].keys() == {"diffusion 3", "diffusion 5"}


def test_without_matplotlib_the_plot_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'diffusiongemma\[train\]'"):
        EvalOptions(plot=tmp_path / "a.png").check()
    with pytest.raises(InputError, match="needs matplotlib"):
        figures.import_pyplot()


def test_icons_are_graded_where_there_is_a_renderer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    drawn = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M2 2h12v12H2z"/></svg>'

    def load(*args: object, **options: object) -> Engine:
        return Oracle(lambda request: drawn if request.params.seed % 2000 else "<svg")

    monkeypatch.setattr(Engine, "load", load)
    out = tmp_path / "icons.jsonl"
    here = rows("svg", "--limit", "4", "--all-steps", "--output", str(out))
    assert here[0]["runs"][0]["figures"]["visible"]["value"] == 0.5
    monkeypatch.setattr(icons, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="keep the answers with --output"):
        run("svg", "--limit", "4")
    away = rows("svg", "--limit", "4", "--all-steps", "--output", str(out))
    assert away[0]["runs"][0]["figures"] == {}
    assert "not graded here" in run("svg", "--limit", "4", "--output", str(tmp_path / "more.jsonl")).stdout
    with pytest.raises(InputError, match="not installed here"):
        run("svg", "--answers", str(out))
    monkeypatch.undo()
    (later,) = rows("svg", "--answers", str(out))
    for name in ("figures", "steps", "tokens_per_forward", "variant", "early_stop"):
        assert [one[name] for one in later["runs"]] == [one[name] for one in here[0]["runs"]]
    assert later["early_stop_cost_points"] == here[0]["early_stop_cost_points"]
    assert "50.0%" in run("svg", "--answers", str(out)).stdout
    with pytest.raises(InputError, match="only --json has an effect"):
        run("svg", "--answers", str(out), "--limit", "3")
    for wrong, says in (('{"task": "svg"}', "a JSON object with the texts"), ("", "holds no answers")):
        out.write_text(wrong)
        with pytest.raises(DataError, match=says):
            run("svg", "--answers", str(out))


@pytest.fixture
def holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with two holes, and engines that fill the first candidate rightly, the others not."""

    def load(*args: object, **options: object) -> Engine:
        texts = ("\n    y = x", "\n    y = (x")
        return Oracle(lambda request: texts[request.params.seed % 1000 > 0], tokenizer("fim_suffix_first"))

    monkeypatch.setattr(Engine, "load", load)
    file = tmp_path / "holes.jsonl"
    case = {"prefix": "def f(x):\n", "suffix": "\n    return y\n"}
    file.write_text("".join(json.dumps(case | {"target": text}) + "\n" for text in ("    y = x", "    y = 2")))
    return str(file)


def test_kept_fillings_are_graded_again(holes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a version that knew fewer scores, and not `far`, get all of them, their candidates too."""
    out, again = tmp_path / "kept.jsonl", tmp_path / "again.jsonl"
    (here,) = rows("infill", "--file", holes, "--candidates", "3", "--check", "python", "--output", str(out))
    whole = [json.loads(line) for line in out.read_text().splitlines()]
    old = [json.loads(line) for line in out.read_text().splitlines()]
    for row in old:
        del row["settings"]["far"]
        for one in (row, *row["tried"]):
            del one["scores"]["ratio"]
            one["scores"]["similarity"] = 0.0
    out.write_text("".join(json.dumps(row) + "\n" for row in old))
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("a model was loaded"))
    (later,) = rows("infill", "--answers", str(out), "--file", holes, "--output", str(again))
    assert later["settings"] == here["settings"]
    assert here["runs"][0]["meanings"].keys() == {"similarity", "ratio"}
    assert here["runs"][0]["figures"]["ratio"]["value"] == pytest.approx((1 + 16 / 18) / 2)
    for name in ("figures", "steps", "tokens_per_forward", "variant", "early_stop"):
        assert later["runs"][0][name] == here["runs"][0][name]
    assert [json.loads(line) for line in again.read_text().splitlines()] == whole
    shown = run("infill", "--answers", str(again), "--file", holes, "--output", str(again)).stdout  # in place
    assert [json.loads(line) for line in again.read_text().splitlines()] == whole
    assert "candidates 3" in shown
    assert "ratio" in shown


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"set": "mine"}, "line 1 is of the set 'mine', whose cases .* does not hold"),
        ({"case": "line 9"}, "there is no case 'line 9' in the set 'holes.jsonl'"),
        ({"task": "svg"}, "line 1 is no answer of one run"),
        ({"settings": {}}, "line 1 is no answer of one run"),
        ({"scores": None}, "line 1 is no answer of one run"),
        ({"tried": [3]}, "line 1 is no answer of one run"),
        ({"steps": "3"}, "line 1 is no answer of one run"),
    ],
)
def test_answers_that_no_run_wrote_are_refused(
    holes: str, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    out = tmp_path / "kept.jsonl"
    run("infill", "--file", holes, "--output", str(out))
    first = json.loads(out.read_text().splitlines()[0])
    out.write_text(json.dumps(first | change))
    with pytest.raises(DataError, match=says):
        run("infill", "--answers", str(out), "--file", holes)
    other = first | {"settings": first["settings"] | {"canvas": 32}}
    out.write_text(f"{json.dumps(first)}\n{json.dumps(other)}")
    with pytest.raises(DataError, match="line 2 is no answer of one run"):
        run("infill", "--answers", str(out), "--file", holes)
    out.write_text("")
    with pytest.raises(DataError, match="holds no answers"):
        run("infill", "--answers", str(out))


def test_the_cost_of_the_early_stop_is_what_all_steps_gain() -> None:
    def report(early: bool, hits: list[bool]) -> Report:
        graded = [Graded(str(i), "", i, "", {"solved": hit}, 1, 1) for i, hit in enumerate(hits)]
        return Report(Variant("diffusion", None, early), graded, 1.0)

    reports = [report(True, [True, False, False, True]), report(False, [True, True, False, True])]
    (cost,) = early_stop_costs(Sudoku(), reports).values()
    assert cost.value == pytest.approx(25.0)  # stopping early loses one case of four
    assert early_stop_costs(Sudoku(), reports[:1]) == {}


# ---- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "mode"),
    [("sudoku", "diffusion"), ("infill", "diffusion"), ("arithmetic", "both"), ("svg", "diffusion"), ("sudoku", "ar")],
)
def test_every_task_runs_on_a_model_and_twice_the_same(task: str, mode: str) -> None:
    args = (*MODEL, "--limit", "2", "--mode", mode, *(("--steps", "2") if mode != "ar" else ()))
    sets = {"sudoku": ("--set", "own_36_46"), "infill": ("--set", "line")}
    first, again = (rows(task, *args, *sets.get(task, ())) for _ in range(2))
    for report in (*first, *again):
        for one in report["runs"]:
            del one["seconds"], one["seconds_per_case"]
    assert first == again
    assert first[0]["runs"][0]["cases"] == 2


def test_all_built_in_sets_are_run_unless_some_are_named() -> None:
    quick = (*MODEL, "--limit", "1", "--steps", "1")
    one = (*quick, "--candidates", "1")
    assert [row["set"] for row in rows("infill", *one)] == ["line", "lines", "inside"]
    assert [row["set"] for row in rows("infill", *one, "--set", "inside", "--set", "line")] == ["inside", "line"]
    assert len(rows("sudoku", *quick)) == 4


def test_a_report_says_what_was_seen_of_the_file(holes: str, tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    shown = run("infill", "--file", holes, "--context", "64", "--far", "0", "--output", str(out)).stdout
    assert shown.splitlines()[0].endswith("context 64, far 0")
    assert json.loads(out.read_text().splitlines()[0])["settings"]["far"] == 0
    (later,) = rows("infill", "--answers", str(out), "--file", holes)
    assert (later["settings"]["context"], later["settings"]["far"]) == (64, 0)
    with pytest.raises(InputError, match="far must be 0 or an integer of at least 24 tokens, got 5"):
        run("infill", "--file", holes, "--far", "5")


def test_a_report_says_how_candidates_were_chosen(tmp_path: Path) -> None:
    chosen = ("--candidates", "3", "--check", "python", "--choose", "middle")
    (got,) = rows("infill", *MODEL, "--limit", "1", "--steps", "1", "--set", "inside", *chosen)
    assert got["settings"] == {
        "candidates": 3, "context": None, "far": None, "canvas": None,
        "choice": {"check": "python", "choose": "middle"},
    }  # fmt: skip
    out = tmp_path / "cases.jsonl"
    args = ("infill", *MODEL, "--limit", "1", "--steps", "1", "--set", "inside", "--output", str(out))
    heading, *_ = run(*args, *chosen).stdout.splitlines()
    assert heading.endswith("candidates 3, check python, choose middle")
    assert json.loads(out.read_text())["settings"] == got["settings"]
    heading, *_ = run(*args, "--candidates", "3").stdout.splitlines()
    assert heading.endswith("candidates 3")  # what is as always is not told


def test_options_reach_the_sampler() -> None:
    args = ("arithmetic", *MODEL, "--limit", "2", "--steps", "5")
    (got,) = rows(*args, "-o", "stability=0", "-o", "confidence=100", "--mode", "both", "-o", "temperature=0.5")
    diffusion, twin = got["runs"]
    assert diffusion["steps"]["value"] == 1
    assert (diffusion["options"], twin["options"]) == ({"stability": 0, "confidence": 100}, {"temperature": 0.5})


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["sudoku", "--mode", "magic"], "--mode must be one of"),
        (["sudoku", "--mode", "ar", "--steps", "4"], "--steps has no effect with --mode ar"),
        (["sudoku", "--mode", "ar", "--all-steps"], "--all-steps has no effect"),
        (["sudoku", "--steps", "4,x"], "--steps must be numbers"),
        (["sudoku", "--steps", "0"], "--steps must be numbers"),
        (["sudoku", "--set", "easy"], "there is no set 'easy'; there are: gymnasium_sudoku"),
        (["sudoku", "--set", "own_36_46", "--file", "x.txt"], "exclude each other"),
        (["sudoku", "--file", "no-such-file.txt"], "cannot read no-such-file.txt"),
        (["infill", "--set", "word"], "there is no set 'word'"),
        (["infill", "--check", "perl"], "check must be 'none' or 'python'"),
        (["infill", "--check", "python", "--candidates", "1"], "check 'python' has no effect on one candidate"),
        (["infill", "--choose", "middle", "--candidates", "2"], "choose 'middle' has no effect on fewer than three"),
        (["infill", "--candidates", "8", "--mode", "both"], "--candidates 8 has no effect in mode 'ar': it writes one"),
        (["infill", "--candidates", "2", "--mode", "ar"], "--candidates 2 has no effect in mode 'ar': it writes one"),
        (["infill", "--check", "python", "--mode", "both"], "check 'python' has no effect in mode 'ar': it writes one"),
        (["infill", "--choose", "middle", "--mode", "ar"], "choose 'middle' has no effect in mode 'ar': it writes one"),
        (["svg", "--answers", "a.jsonl", "--attempts", "2"], "only --json has an effect"),
        (["infill", "--answers", "a.jsonl", "--far", "0"], "only --file, --output and --json have an effect"),
        (["infill", "--answers", "a.jsonl", "--canvas", "32"], "only --file, --output and --json have an effect"),
        (["infill", "--answers", "a.jsonl", "--set", "line"], "only --file, --output and --json have an effect"),
        (["infill", "--answers", "a.jsonl", "--limit", "3"], "only --file, --output and --json have an effect"),
        (["svg", "--mode", "ar", "--attempts", "6"], "--attempts 6 has no effect in mode 'ar'"),
        (
            ["svg", "--mode", "both", "--attempts", "6", "-o", "temperature=0"],
            "--attempts 6 has no effect in mode 'ar'",
        ),
        (["sudoku", "--mode", "both", "--attempts", "2"], "--attempts 2 has no effect in mode 'ar'"),
        (["sudoku", "--plot", "a.txt"], "--plot must name a .png"),
        (["sudoku", "--output", "no/such/folder/a.jsonl"], "does not exist"),
        (["sudoku", "--output", "."], "cannot write"),
        (["sudoku", "-o", "canvas=12"], "that the task does not set"),
        (["sudoku", "-o", "entropy_bound"], "--option takes NAME=NUMBER"),
        (["sudoku", "-o", "entropy_bound=low"], "is not a number"),
        (["sudoku", "-o", "temperature=1"], "temperature has no effect in mode 'diffusion'"),
        (["sudoku", "-o", "colour=1"], "colour: there is no such option"),
        (["sudoku", "-o", "t_max=-1"], "t_max must be"),
    ],
)
def test_mistakes_are_one_message(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("a model was loaded for nothing"))
    monkeypatch.setattr("sys.argv", ["dgemma", "eval", *args, *MODEL])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert says in err


def test_what_a_file_holds_stays_if_the_model_cannot_be_loaded(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("mine")
    with pytest.raises(DiffusionGemmaError, match="nowhere"):
        app(["eval", "sudoku", "--limit", "1", "--model", "nowhere", "--output", str(kept)], standalone_mode=False)
    assert kept.read_text() == "mine"


def test_temperatures_below_the_released_ones_are_no_mistake() -> None:
    """Each was judged beside the other's default, not beside what is written or what the model has."""
    given = EvalOptions(option=["t_max=0.2", "t_min=0.05"]).sampling()
    assert given == {"diffusion": {"t_max": 0.2, "t_min": 0.05}}
    with pytest.raises(ConfigError, match="t_max must be a number above 0"):
        EvalOptions(option=["t_max=0"]).sampling()
    with pytest.raises(ConfigError, match="t_max 0.2 is below t_min 0.8"):  # before a model is loaded, a file emptied
        EvalOptions(option=["t_min=0.8", "t_max=0.2"]).check()


def test_case_sets_and_options_have_plain_defaults() -> None:
    assert CaseSet("a", [1]).remarks == ()
    assert EvalOptions().sampling() == {"diffusion": {}}
    with pytest.raises(ConfigError, match="no such option"):
        EvalOptions(option=["colour=1"]).sampling()
