from __future__ import annotations

from random import Random

import pytest

from diffusiongemma.tasks.arithmetic_gen import KINDS, held_out, problem, problems


def test_answers_of_formulas_are_right() -> None:
    for made in problems(1, 600):
        if made.kind in {"add", "subtract", "multiply", "chain", "divide"}:
            formula = made.question.removesuffix(" =")
            value = eval(formula, {"__builtins__": {}})  # noqa: S307 - our own digits and signs
            expected = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert made.answer == expected
        elif made.kind == "compare":
            a, b = map(int, made.question.split(" ? "))
            assert made.answer == ("<" if a < b else ">" if a > b else "=")
        elif made.kind == "sort":
            assert made.answer == "".join(sorted(made.question.split()[1]))


@pytest.mark.parametrize("kind", list(KINDS))
def test_training_and_evaluation_never_share_a_question(kind: str) -> None:
    rng = Random(0)
    assert not any(held_out(problem(rng, kind).question) for _ in range(50))
    assert all(held_out(problem(rng, kind, test=True).question) for _ in range(20))


def test_problems_are_different_and_repeatable() -> None:
    made = problems(3, 200)
    assert made == problems(3, 200)
    assert len({p.question for p in made}) == 200
    assert {p.kind for p in made} == set(KINDS)
