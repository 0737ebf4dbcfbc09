"""Scripts around evaluations: many of them with one engine; choices between candidates, steps against accuracy."""

import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from diffusiongemma.cli.figures import CaseSet, save_cases
from diffusiongemma.engine import Engine, Request
from diffusiongemma.engine.choice import Choice
from diffusiongemma.errors import DataError, DiffusionGemmaError, InputError
from diffusiongemma.tasks import icons
from diffusiongemma.tasks.evaluation import Variant, evaluate
from diffusiongemma.tasks.infill import Infill, InfillCase
from diffusiongemma.tasks.sudoku import Sudoku, built_in_sets, read_puzzles
from engine.holes import tokenizer
from scripted import load_script
from tasks.oracle import Oracle, real_engine

CASES = [
    InfillCase("a", "line", "def f(x):\n", "\n    return y\n", "    y = x"),
    InfillCase("b", "line", "if x:\n", "\n", "    pass"),
    InfillCase("c", "line", "a = (\n", "\n", "1"),  # the original does not parse: what does may still win
]
TEXTS = (["    y = (", "    y = x", "    y = z"], ["    pass", "  ]", "    pas"], ["1", "2)", "3"])


def answer(seed: int) -> str:
    return "\n" + TEXTS[seed // 1000][seed % 1000]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    oracle = Oracle(lambda request: answer(request.params.seed), tokenizer("fim_suffix_first"))
    report = evaluate(oracle, Infill(candidates=3), CASES, Variant("diffusion", 2))
    save_cases(tmp_path / "line.jsonl", Infill(), CaseSet("line", CASES), [report])
    return tmp_path / "line.jsonl"


def test_choices_are_compared_as_they_would_have_been_made(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_script("compare_choices").main(kept)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["candidates"], row.get("check"), row["choose"]): row for row in rows}
    assert {(count, choose) for count, _, choose in found} == {
        (1, "likeliest"), (2, "likeliest"), (2, "best"), (3, "likeliest"), (3, "middle"), (3, "best"),
    }  # fmt: skip
    for count, check, choose in ((3, "none", "likeliest"), (3, "python", "likeliest"), (3, "python", "middle")):
        oracle = Oracle(lambda request: answer(request.params.seed), tokenizer("fim_suffix_first"))
        task = Infill(candidates=count, choice=Choice(check, choose))
        figures = evaluate(oracle, task, CASES, Variant("diffusion", 2)).figures()
        for name in ("exact", "similarity", "ratio", "parses"):
            assert found[count, check, choose][name][0] == pytest.approx(figures[name].value, abs=1e-4)
    assert found[1, "none", "likeliest"]["exact"][0] == pytest.approx(2 / 3, abs=1e-4)
    assert found[3, "python", "likeliest"]["exact"][0] == pytest.approx(2 / 3, abs=1e-4)  # a is right now, c is not
    assert found[3, None, "best"]["exact"][0] == 1.0


def test_answers_without_candidates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "line.jsonl"
    for tried in ("[]", '[{"text": "x", "scores": {}}]'):  # none, or some that do not say whether they parse
        file.write_text(f'{{"task": "infill", "set": "line", "variant": "diffusion", "tried": {tried}}}')
        with pytest.raises(DataError, match="line 1 has no candidates"):
            load_script("compare_choices").read(file)


def test_steps_against_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script, file, out = load_script("plot_steps"), tmp_path / "steps.json", tmp_path / "steps.png"

    def run(steps: int | None, value: float, early: bool = True) -> dict:
        figures = {"solved": {"value": value, "low": value - 0.1, "high": value + 0.1}, "attempts": {"value": 2}}
        return {"steps_limit": steps, "early_stop": early, "figures": figures}

    runs = [run(8, 0.5), run(2, 0.25), run(None, 0.9), run(8, 0.6, False)]
    file.write_text(json.dumps({"task": "sudoku", "set": "mine", "runs": runs}))
    lines = script.curves([file])
    assert [(steps, figure["value"]) for steps, figure in lines["sudoku, mine: solved"]] == [(2, 0.25), (8, 0.5)]
    assert len(lines["sudoku, mine: solved, all steps"]) == 1
    script.main([file], out)
    assert out.read_bytes().startswith(b"\x89PNG")
    file.write_text(json.dumps({"task": "svg", "set": "mine", "runs": [run(None, 0.5)]}))
    with pytest.raises(DataError, match="no graded run"):
        script.curves([file])


# ---- many evaluations with one engine --------------------------------------------------------------------------------

DRAWN = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M2 2h12v12H2z"/></svg>'
BOARD = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def kept_by(out: Path) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The lines of the summary, and the JSON lines of every file in the archive"""
    files = {}
    with tarfile.open(out / "evals.tar.gz") as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                files[member.name.removeprefix("evals/")] = [json.loads(line) for line in file.read().splitlines()]
    assert sorted(path.name for path in out.iterdir()) == ["evals.tar.gz", "summary.jsonl"]
    lines = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()]
    assert files["summary.jsonl"] == lines
    return lines, files


def engine_of(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Request], str]) -> list[Oracle]:
    """Engines that answer so; how many are loaded shows in the list."""
    made: list[Oracle] = []

    def load(*args: object, **options: object) -> Engine:
        made.append(Oracle(answer, tokenizer("fim_suffix_first")))
        return made[-1]

    monkeypatch.setattr(Engine, "load", load)
    return made


def test_a_real_model_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_script("evaluate").main(tmp_path / "out", "random:tiny", "cpu", 2, "arithmetic", limit=3)
    lines, files = kept_by(tmp_path / "out")
    assert [(line["name"], line["run"], line["cases"]) for line in lines] == [
        ("arithmetic", "diffusion", 3), ("arithmetic", "ar", 3),
    ]  # fmt: skip
    assert all(line["seconds"] > 0 and len(line["correct"]) == 3 for line in lines)
    assert len(files["arithmetic.jsonl"]) == 6
    assert files["arithmetic.json"][0]["model"] == "random:tiny"
    assert "== arithmetic: " in capsys.readouterr().out


def test_every_named_evaluation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("evaluate")
    engine_of(monkeypatch, lambda request: BOARD)
    script.main(tmp_path, limit=1)
    lines, files = kept_by(tmp_path)
    assert list(dict.fromkeys(line["name"] for line in lines)) == list(script.EVALUATIONS)
    assert all((line["cases"], line["of"]) == (1, 1) for line in lines)
    both = {f"{name}.{end}" for name in script.EVALUATIONS for end in ("json", "jsonl")}
    assert files.keys() == {"summary.jsonl"} | both
    assert len(files["sudoku-steps.jsonl"]) == 2 * 9
    found = {(line["name"], line.get("run")): line for line in lines}
    assert found["svg-careful", "diffusion 96"]["options"] == {"entropy_bound": 0.05}
    assert {"attempts", "visible within 6"} <= found["svg", "diffusion"].keys()
    assert "early_stop_costs_points" in found["line-all", None]


def test_one_engine_serves_all_and_the_order_is_that_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine_of(monkeypatch, lambda request: BOARD)
    load_script("evaluate").main(tmp_path, only="arithmetic, sudoku-gen,line", limit=3)
    lines, _ = kept_by(tmp_path)
    assert [line["name"] for line in lines] == ["line", "arithmetic", "arithmetic", "sudoku-gen"]
    assert len(made) == 1


@pytest.mark.parametrize("size", [3, 16])
def test_slices_give_what_all_cases_at_once_give(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("evaluate")
    cases = read_puzzles(built_in_sets()["own_36_46"])[:7]
    variants = [Variant("diffusion", 3), Variant("diffusion", 3, early_stop=False)]
    with real_engine() as engine:
        whole = [evaluate(engine, Sudoku(2), cases, variant, 5).graded for variant in variants]
        monkeypatch.setattr(engine.scheduler, "limits", replace(engine.scheduler.limits, max_rows=size))
        sliced = script.run_set(engine, Sudoku(2), cases, variants, 5, script.Clock(None))
    assert [report.graded for report in sliced] == whole
    assert [report.variant for report in sliced] == variants


def test_slices_hold_every_case_once_and_come_from_all_over() -> None:
    made = load_script("evaluate").slices(100, 16)
    assert sorted(case for part in made for case in part) == list(range(100))
    assert [len(part) for part in made] == [16] * 6 + [4]
    assert max(made[0]) - min(made[0]) > 50


def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[Oracle]]:
    """The script with a clock that only answers move: a second each"""
    script, now = load_script("evaluate"), [0.0]
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def answer(request: Request) -> str:
        now[0] += 1.0
        return BOARD

    return script, engine_of(monkeypatch, answer)


def test_when_the_time_is_up_whole_slices_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, made = timed(monkeypatch)
    script.main(tmp_path, only="sudoku-ar,svg-all,line", limit=40, budget=100.0)
    assert made[0].scheduler.limits.max_rows == 16
    lines, files = kept_by(tmp_path)
    # Lines and the first boards take 40 s each, the first slice of the others 16; the second ends behind the budget.
    assert [(line["name"], line["set"], line["cases"], line["of"]) for line in lines[:-1]] == [
        ("line", "line", 40, 40), ("sudoku-ar", "qqwing_expert", 40, 40), ("sudoku-ar", "gymnasium_sudoku", 16, 40),
    ]  # fmt: skip
    assert lines[-1] == {"not_begun": ["svg-all"]}
    assert len(files["sudoku-ar.jsonl"]) == 56


def test_variants_are_cut_at_the_same_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, _ = timed(monkeypatch)
    script.main(tmp_path, only="line-all", limit=40, budget=70.0)  # two slices of 16 both ways are 64 s
    lines, files = kept_by(tmp_path)
    assert [(line["cases"], line["of"]) for line in lines] == [(32, 40)] * 3
    assert lines[2]["early_stop_costs_points"] == {"diffusion": [0.0, 0.0, 0.0]}
    both = [[row["case"] for row in files["line-all.jsonl"][half]] for half in (slice(32), slice(32, None))]
    assert both[0] == both[1]


def test_a_set_of_which_nothing_was_done_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, _ = timed(monkeypatch)
    script.main(tmp_path, only="blocks,line-ar", limit=40, budget=10.0)
    lines, files = kept_by(tmp_path)
    nothing = [{"name": "blocks", "set": name, "cases": 0, "of": 40} for name in ("lines", "inside")]
    assert lines == [*nothing, {"not_begun": ["line-ar"]}]
    assert files.keys() == {"summary.jsonl"}


def test_icons_without_a_renderer_are_graded_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    engine_of(monkeypatch, lambda request: DRAWN if request.params.seed % 2000 else "<svg")
    monkeypatch.setattr(icons, "find_spec", lambda name: None)
    load_script("evaluate").main(tmp_path, only="svg-careful", limit=4)
    ((line,), files) = kept_by(tmp_path)
    assert line["cases"] == 4
    assert "visible" not in line
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in files["svg-careful.jsonl"]))
    ((report,),) = icons.grade_answers(answers).values()
    assert report.figures()["visible"].value == 0.5


def test_an_evaluation_that_fails_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> str:
        if request.params.mode == "ar":
            raise DiffusionGemmaError("the card is on fire")
        return BOARD

    engine_of(monkeypatch, answer)
    with pytest.raises(typer.Exit) as stopped:
        load_script("evaluate").main(tmp_path, only="line-ar,sudoku-gen", limit=2)
    assert stopped.value.exit_code == 1
    failed, fine = kept_by(tmp_path)[0]
    assert failed == {"name": "line-ar", "error": "the card is on fire"}
    assert (fine["name"], fine["cases"]) == ("sudoku-gen", 2)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no evaluation 'svgs'; there are: svg-ar, sudoku, svg, line"):
        load_script("evaluate").main(tmp_path, only="line,svgs")
