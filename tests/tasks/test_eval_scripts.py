"""Scripts that read what evaluations kept: choices between candidates, steps against accuracy."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diffusiongemma.cli.figures import CaseSet, save_cases
from diffusiongemma.engine.choice import Choice
from diffusiongemma.errors import DataError
from diffusiongemma.tasks.evaluation import Variant, evaluate
from diffusiongemma.tasks.infill import Infill, InfillCase
from engine.holes import tokenizer
from tasks.oracle import Oracle

CASES = [
    InfillCase("a", "line", "def f(x):\n", "\n    return y\n", "    y = x"),
    InfillCase("b", "line", "if x:\n", "\n", "    pass"),
    InfillCase("c", "line", "a = (\n", "\n", "1"),  # the original does not parse: what does may still win
]
TEXTS = (["    y = (", "    y = x", "    y = z"], ["    pass", "  ]", "    pas"], ["1", "2)", "3"])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def answer(seed: int) -> str:
    return "\n" + TEXTS[seed // 1000][seed % 1000]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    oracle = Oracle(lambda request: answer(request.params.seed), tokenizer("fim_suffix_first"))
    report = evaluate(oracle, Infill(candidates=3), CASES, Variant("diffusion", 2))
    save_cases(tmp_path / "line.jsonl", Infill(), CaseSet("line", CASES), [report])
    return tmp_path / "line.jsonl"


def test_choices_are_compared_as_they_would_have_been_made(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("compare_choices").main(kept)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["candidates"], row.get("check"), row["choose"]): row for row in rows}
    assert {(count, choose) for count, _, choose in found} == {
        (1, "likeliest"), (2, "likeliest"), (2, "best"), (3, "likeliest"), (3, "middle"), (3, "best"),
    }  # fmt: skip
    for count, check, choose in ((3, "none", "likeliest"), (3, "python", "likeliest"), (3, "python", "middle")):
        oracle = Oracle(lambda request: answer(request.params.seed), tokenizer("fim_suffix_first"))
        task = Infill(candidates=count, choice=Choice(check, choose))
        figures = evaluate(oracle, task, CASES, Variant("diffusion", 2)).figures()
        for name in ("exact", "similarity", "parses"):
            assert found[count, check, choose][name][0] == pytest.approx(figures[name].value, abs=1e-4)
    assert found[1, "none", "likeliest"]["exact"][0] == pytest.approx(2 / 3, abs=1e-4)
    assert found[3, "python", "likeliest"]["exact"][0] == pytest.approx(2 / 3, abs=1e-4)  # a is right now, c is not
    assert found[3, None, "best"]["exact"][0] == 1.0


def test_answers_without_candidates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "line.jsonl"
    for tried in ("[]", '[{"text": "x", "scores": {}}]'):  # none, or some that do not say whether they parse
        file.write_text(f'{{"task": "infill", "set": "line", "variant": "diffusion", "tried": {tried}}}')
        with pytest.raises(DataError, match="line 1 has no candidates"):
            load("compare_choices").read(file)


def test_steps_against_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script, file, out = load("plot_steps"), tmp_path / "steps.json", tmp_path / "steps.png"

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
