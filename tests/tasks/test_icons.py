"""Icons as an evaluation: attempts beside the one, and answers that are graded on another machine."""

from pathlib import Path

import pytest

from diffusiongemma.cli.figures import CaseSet, save_cases
from diffusiongemma.engine import Request
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import svg
from diffusiongemma.tasks.evaluation import Report, Variant, evaluate
from diffusiongemma.tasks.icons import Icons, grade_answers
from tasks.oracle import Oracle

FILLED = '<svg viewBox="0 0 24 24"><path fill="currentColor" d="M4 4h16v16H4z"/></svg>'
EMPTY, BROKEN = '<svg viewBox="0 0 24 24"></svg>', "<svg"
FLAWED = FILLED.replace("<path", '<path onclick="alert(1)"')


def test_the_best_answer_shows_something_and_has_the_fewest_faults() -> None:
    ranks = [svg.grade(text).rank for text in (BROKEN, EMPTY, FLAWED, FILLED)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 4
    assert [svg.grade(text, drawn=False).readable for text in (BROKEN, EMPTY, FLAWED, FILLED)] == [
        False, True, False, True,
    ]  # fmt: skip


def ask(answers: dict[str, list[str]], attempts: int, graded: bool = True, variant: Variant | None = None) -> Report:
    """Each wish gets its answers one after another."""
    left = {wish: iter(texts) for wish, texts in answers.items()}

    def answer(request: Request) -> str:
        asked = oracle.tokenizer.decode(request.prompt)
        return next(next(left[wish] for wish in left if wish in asked))

    oracle = Oracle(answer)
    wishes = [svg.SvgCase(wish, wish) for wish in answers]
    return evaluate(oracle, Icons(attempts, graded), wishes, variant or Variant("diffusion", 3), seed=5)


ANSWERS = {
    "cat": [FILLED],
    "dog": [BROKEN, FLAWED, EMPTY],
    "fox": [BROKEN, FILLED],
    "owl": [EMPTY, BROKEN, BROKEN],
}


def test_attempts_stand_beside_the_one() -> None:
    report = ask(ANSWERS, 3)
    figures = {name: figure.value for name, figure in report.figures().items()}
    assert figures == {
        "visible": 0.25, "well-formed": 0.5, "paths valid": 0.5, "all sound": 0.25,
        "visible within 3": 0.75, "all sound within 3": 0.5, "attempts": 9 / 4,
    }  # fmt: skip
    assert [one.text for one in report.graded] == [FILLED, FLAWED, FILLED, EMPTY]
    assert [[each["seed"] for each in one.tried] for one in report.graded] == [
        [], [1005, 1006, 1007], [2005, 2006], [3005, 3006, 3007],
    ]  # fmt: skip
    assert [one.steps for one in report.graded] == [3] * 4  # of the first attempt
    rows = [one.to_dict() for one in report.graded]
    assert [(row["seed"], row["text_seed"]) for row in rows] == [(5, 5), (1005, 1006), (2005, 2006), (3005, 3005)]
    once = ask(ANSWERS, 1)
    assert {name: figure.value for name, figure in once.figures().items()} == dict(list(figures.items())[:4])


def test_the_twin_is_asked_once() -> None:
    report = ask(ANSWERS, 3, variant=Variant("ar"))
    assert "attempts" not in report.figures()
    assert not any(one.tried for one in report.graded)


def test_attempts_without_a_renderer_are_graded_later(tmp_path: Path) -> None:
    """What can be read ends the attempts there, also if it shows nothing: never to the figures' advantage."""
    report, file = ask(ANSWERS, 3, graded=False), tmp_path / "icons.jsonl"
    assert report.figures() == {}
    assert [len(one.tried) for one in report.graded] == [0, 3, 2, 0]
    save_cases(file, Icons(3, False), CaseSet("names", report.graded), [report])
    ((later,),) = grade_answers(file).values()
    figures = {name: figure.value for name, figure in later.figures().items()}
    assert (figures["visible"], figures["visible within 3"], figures["all sound within 3"]) == (0.25, 0.75, 0.5)
    assert later.graded[1].text == FLAWED
    kept = file.read_text()
    for right, wrong in (
        ('"steps": 3', '"steps": "3"'),
        ('"tried": []', '"tried": 1'),
        ('"tried": []', '"tried": {}'),
        ('"allowed": 3', '"allowed": 0'),
        ('"allowed": 3', '"allowed": "3"'),
    ):
        file.write_text(kept.replace(right, wrong))
        with pytest.raises(DataError, match="line 1 is no answer"):
            grade_answers(file)


def test_attempts_that_were_allowed_name_the_figures_and_not_those_that_were_taken(tmp_path: Path) -> None:
    variants, file = [Variant("diffusion", 3), Variant("diffusion", 4)], tmp_path / "icons.jsonl"
    reports = [ask({"fox": [BROKEN] * n + [FILLED]}, 4, False, variant) for n, variant in enumerate(variants)]
    save_cases(file, Icons(4, False), CaseSet("names", reports[0].graded), reports)
    (later,) = grade_answers(file).values()
    assert [one.figures()["visible within 4"].value for one in later] == [1.0, 1.0]
    assert [one.figures()["attempts"].value for one in later] == [1.0, 2.0]
    file.write_text(file.read_text().replace('"allowed": 4', '"other": 4'))  # as older files are: what was taken counts
    assert "visible within 2" in grade_answers(file)["names"][1].figures()


@pytest.mark.parametrize("attempts", [0, 101])
def test_attempts_have_limits(attempts: int) -> None:
    with pytest.raises(InputError, match="attempts must be"):
        Icons(attempts)
