"""Arithmetic as a task: exact answers, held-out questions, and one's own."""

import json
from pathlib import Path

import pytest

from diffusiongemma.engine import Request
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.arithmetic import COUNT, Arithmetic, cases
from diffusiongemma.tasks.arithmetic_gen import Problem, held_out
from diffusiongemma.tasks.evaluation import Variant, evaluate
from diffusiongemma.tasks.sets import take
from tasks.oracle import Oracle


@pytest.mark.parametrize(
    ("answer", "correct"), [("12", True), (" 12\n", True), ("13", False), ("12.", False), ("", False)]
)
def test_only_the_exact_answer_counts(answer: str, correct: bool) -> None:
    oracle = Oracle(lambda request: answer)
    report = evaluate(oracle, Arithmetic(), [Problem("add", "5 + 7 =", "12")], Variant())
    assert report.graded[0].scores == {"correct": correct}
    (request,) = oracle.asked
    assert list(request.prompt) == format.chat_prompt(oracle.tokenizer.encode, "5 + 7 =")
    assert (request.params.canvas, request.params.max_new_tokens) == (24, 24)


def test_questions_are_held_out_and_made_by_the_seed() -> None:
    found = cases(None, 50, 3)
    assert found == cases(None, 50, 3) != cases(None, 50, 4)
    assert len(found) == 50
    assert all(held_out(problem.question) for problem in found)
    assert len(cases(None, None, 0)) == COUNT


def test_a_knowing_model_scores_full_marks() -> None:
    found = cases(None, 40, 0)
    answers = {format.arithmetic_request(p.question): p.answer for p in found}

    def answer(request: Request) -> str:
        text = oracle.tokenizer.decode(request.prompt)
        return answers[text.removeprefix("user\n").removesuffix("\nmodel\n")]

    oracle = Oracle(answer)
    report = evaluate(oracle, Arithmetic(), found, Variant())
    assert report.figures()["correct"].value == 1.0
    assert len(report.kinds) > 5


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "1 + 1 =", "answer": "2"}) + "\n")
    assert cases(file, None, 0) == [Problem("own", "1 + 1 =", "2")]
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no problem"):
        cases(file, None, 0)


def test_a_part_is_drawn_by_the_seed_and_keeps_its_order() -> None:
    assert take("abcdef", None, 0) == take("abcdef", 9, 0) == list("abcdef")
    some = take(range(100), 10, 1)
    assert some == sorted(some) == take(range(100), 10, 1) != take(range(100), 10, 2)
    with pytest.raises(InputError, match="limit must be at least 1"):
        take("abc", 0, 0)
