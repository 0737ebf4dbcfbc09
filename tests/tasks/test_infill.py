"""Holes as a task: the grader, the built-in cases, and that the model is asked as training asked it."""

import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.engine.choice import Choice
from diffusiongemma.engine.params import HoleSettings
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format
from diffusiongemma.tasks import infill as task
from diffusiongemma.tasks.evaluation import Graded, Variant, evaluate
from diffusiongemma.tasks.infill import (
    Infill,
    InfillCase,
    built_in,
    grade,
    read_cases,
)
from diffusiongemma.text.python import parses
from diffusiongemma.text.similar import common_length, edit_distance, ratio, similarity
from engine.holes import tokenizer
from tasks.oracle import Oracle, real_engine

WORDS = st.text("abcß東 \n", max_size=12)
LINE = InfillCase("a", "line", "def f(x):\n", "\n    return y\n", "    y = x + 1")
FAST = Variant("diffusion", 2)


# ---- grading ---------------------------------------------------------------------------------------------------------


def slow_distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    rest = slow_distance(a[1:], b[1:]) + (a[0] != b[0])
    return rest if a[0] == b[0] else min(rest, slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1)


@given(st.text("ab東", max_size=6), st.text("ab東", max_size=6))
def test_the_edit_distance_is_levenshteins(a: str, b: str) -> None:
    assert edit_distance(a, b) == slow_distance(a, b)


@given(WORDS, WORDS, WORDS)
def test_the_edit_distance_is_a_distance(a: str, b: str, c: str) -> None:
    assert edit_distance(a, a) == 0
    assert edit_distance(a, b) == edit_distance(b, a) <= max(len(a), len(b))
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert 0 <= similarity(a, b) <= 1
    assert (similarity(a, b) == 1) == (a == b)


@pytest.mark.parametrize(
    ("a", "b", "d"), [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("é", "e", 1)]
)
def test_known_distances(a: str, b: str, d: int) -> None:
    assert edit_distance(a, b) == d


def slow_common(a: str, b: str) -> int:
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + slow_common(a[1:], b[1:])
    return max(slow_common(a[1:], b), slow_common(a, b[1:]))


@given(st.text("ab東", max_size=7), st.text("ab東", max_size=7))
def test_the_common_length_is_that_of_the_longest_common_subsequence(a: str, b: str) -> None:
    assert common_length(a, b) == slow_common(a, b)


@given(WORDS, WORDS)
def test_the_ratio_is_the_lenient_one(a: str, b: str) -> None:
    assert similarity(a, b) <= ratio(a, b) == ratio(b, a) <= 1
    assert (ratio(a, b) == 1) == (a == b)
    assert (ratio(a, b) == 0) == (bool(a + b) and not set(a) & set(b))
    # What blocks of difflib have in common is common, though not always the most.
    assert ratio(a, b) >= SequenceMatcher(None, a, b, autojunk=False).ratio() - 1e-12


@pytest.mark.parametrize(
    ("a", "b", "percent"),  # what `fuzz.ratio` gives, as rapidfuzz's documentation and issues of fuzzywuzzy tell it
    [
        ("this is a test", "this is a test!", 96.55172413793103),
        ("ababab", "aaaaab", 67),
        ("tide", "diet", 50),
        ("abc", "cadb", 57),
        ("A L I E N S", "A S A L", 44),
        ("Barcelona", "real", 46),
        ("", "a", 0),
        ("", "", 100),
    ],
)
def test_known_ratios(a: str, b: str, percent: float) -> None:
    assert 100 * ratio(a, b) == pytest.approx(percent, abs=1e-9 if isinstance(percent, float) else 0.5)


def test_lone_surrogates_are_no_reason_to_fail() -> None:
    assert edit_distance("\ud800", "a") == 1
    assert ratio("\ud800", "a") == 0
    assert not parses("x = '\ud800'")


@pytest.mark.parametrize(
    ("text", "exact", "parsed"),
    [
        ("    y = x + 1", True, True),
        ("    y = x + 1  ", True, True),  # white space at the end is no difference
        ("y = x + 1", False, False),  # white space at the beginning is: it is Python
        ("    y = (x + 1", False, False),
        ("    y = x\n    y += 1", False, True),
        ("", False, True),
        ("    y = '\0'", False, False),
    ],
)
def test_grades(text: str, exact: bool, parsed: bool) -> None:
    scores = grade(LINE, text)
    assert (scores["exact"], scores["parses"]) == (exact, parsed)
    assert (scores["similarity"] == 1.0) == (scores["ratio"] == 1.0) == exact


def test_two_measures_of_nearness() -> None:
    """What is replaced weighs twice in the ratio, where both lengths count; indents count in both."""
    scores = grade(InfillCase("a", "line", "if x:\n", "\n", "    y = 1"), "    z = 2 ")
    assert scores["similarity"] == pytest.approx(1 - 2 / 9)
    assert scores["ratio"] == pytest.approx(2 * 7 / 18)
    scores = grade(InfillCase("a", "line", "if x:\n", "\n", "    return y"), "    pass")
    assert scores["similarity"] == pytest.approx(1 - 8 / 12)
    assert scores["ratio"] == pytest.approx(2 * 4 / 20)


def test_parsing_is_not_asked_where_the_original_does_not_parse() -> None:
    assert "parses" not in grade(InfillCase("a", "line", "def f(:\n", "\n", "    pass"), "    pass")
    assert not parses("(" * 5_000)  # deeper than Python goes: an answer, not a crash


# ---- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "width"), [("line", 64), ("inside", 64), ("lines", 128)])
def test_prompts_are_those_of_training(kind: str, width: int) -> None:
    with real_engine(holes=True) as engine:
        encode = engine.tokenizer.encode
        before, after = "a = 1\n" * 200, "\nb = 2" * 100
        (one,) = Infill().plan(engine, InfillCase("a", kind, before, after, "x"), FAST, seed=3)
        room, wish = 384 - 3, int(0.4 * 384)
        body = before.removesuffix("\n")  # the hole begins with the line break, as whole lines do
        expected = format.infill_prompt(encode(body)[-(room - wish) :], encode(after)[:wish])
        assert list(one.request.prompt) == [
            {format.FIM_PREFIX: engine.tokenizer.special["<|fim_prefix|>"],
             format.FIM_SUFFIX: engine.tokenizer.special["<|fim_suffix|>"]}.get(token, token)
            for token in expected
        ]  # fmt: skip
        assert len(one.request.prompt) == 384
        assert one.request.params.canvas == width
        assert one.request.params.max_new_tokens < width  # eos has room
        (narrow,) = Infill(context=100, canvas=32).plan(engine, InfillCase("a", kind, before, after, "x"), FAST, 3)
        assert (len(narrow.request.prompt), narrow.request.params.canvas) == (100, 32)


def test_the_line_break_before_the_hole_is_no_part_of_the_answer() -> None:
    for variant in (FAST, Variant("ar")):
        oracle = Oracle(lambda request: "\n" + LINE.target, tokenizer("fim_suffix_first"))
        (got,) = evaluate(oracle, Infill(), [LINE], variant).graded
        assert got.text == LINE.target
        assert got.scores == {"exact": True, "similarity": 1.0, "ratio": 1.0, "parses": True, "finished": True}
        assert oracle.tokenizer.decode(oracle.asked[0].prompt) == LINE.suffix + LINE.prefix.removesuffix("\n")


def test_inside_a_line_nothing_is_moved() -> None:
    case = InfillCase("a", "inside", "if x:\n    ", " = 1\n", "y")
    oracle = Oracle(lambda request: "y", tokenizer("fim_suffix_first"))
    (got,) = evaluate(oracle, Infill(), [case], FAST).graded
    assert got.scores["exact"]
    assert oracle.tokenizer.decode(oracle.asked[0].prompt) == case.suffix + case.prefix
    assert oracle.asked[0].pins == {}


@pytest.mark.parametrize("prefix", [LINE.prefix, "x = "])
def test_the_likeliest_candidate_counts_as_it_does_for_everybody(prefix: str) -> None:
    """Also where all of them break a character, and are asked again without parts of characters."""
    case = InfillCase("a", "line", prefix, LINE.suffix, "1")
    with real_engine(holes=True) as engine:
        (one,) = evaluate(engine, Infill(candidates=3), [case], FAST).graded
        options = {"candidates": 3, "steps": 2, "seed": 0, "canvas": 64, "max_new_tokens": 62}
        result = engine.infill(prefix, LINE.suffix, **options)
    assert one.text == result.text
    assert one.steps == result.metrics.steps  # 6, or 12 if they were asked again


def test_one_candidate_needs_no_score() -> None:
    with real_engine(holes=True) as engine:
        (one,) = Infill().plan(engine, LINE, FAST, 0)
        assert not one.request.score
        assert all(one.request.score for one in Infill(candidates=2).plan(engine, LINE, FAST, 0))
        (graded,) = evaluate(engine, Infill(), [LINE], FAST).graded
        result = engine.infill(LINE.prefix, LINE.suffix, candidates=1, steps=2, seed=0, canvas=64, max_new_tokens=62)
    assert graded.text == result.text
    assert graded.tried == []
    assert result.score is not None  # who asks for one filling is still told how likely it is


def test_all_candidates_are_told_and_the_choice_decides() -> None:
    texts = ["    y = (", "    y = x + 1", "    y = x + 2"]

    def fill(choice: Choice) -> Graded:
        oracle = Oracle(lambda request: "\n" + texts[request.params.seed % 1000], tokenizer("fim_suffix_first"))
        (one,) = evaluate(oracle, Infill(candidates=3, choice=choice), [LINE], FAST).graded
        return one

    likeliest, checked = fill(Choice()), fill(Choice("python"))  # nothing has a score here: of equals the first
    assert (likeliest.text, checked.text) == (texts[0], texts[1])
    assert fill(Choice(choose="middle")).text == texts[1]
    assert checked.scores["parses"]
    assert likeliest.tried == checked.tried
    assert [one["text"] for one in checked.tried] == texts
    assert [one["seed"] for one in checked.tried] == [0, 1, 2]
    assert [one["scores"]["exact"] for one in checked.tried] == [False, True, False]
    assert [one["scores"]["parses"] for one in checked.tried] == [False, True, True]
    with pytest.raises(InputError, match="has no effect on one candidate"):
        evaluate(
            Oracle(lambda request: "", tokenizer("fim_suffix_first")), Infill(choice=Choice("python")), [LINE], FAST
        )


def test_a_model_without_hole_tokens_gets_the_suffix_in_its_canvas() -> None:
    with real_engine() as engine:
        report = evaluate(engine, Infill(), [LINE], FAST)
        assert report.graded[0].scores.keys() == {"exact", "similarity", "ratio", "parses", "finished"}
        tries = Infill(candidates=4).plan(engine, LINE, FAST, 0)
        assert len(tries) == 4
        assert all(one.request.pins for one in tries)
        with pytest.raises(InputError, match="context has no effect"):
            Infill(context=64).plan(engine, LINE, FAST, 0)
        with pytest.raises(InputError, match="far has no effect"):
            Infill(far=0).plan(engine, LINE, FAST, 0)


def test_passages_from_elsewhere_are_asked_for_or_left_out() -> None:
    case = InfillCase("a", "line", "x = f(1)\ny = g(x)\n" * 60, "\ny = g(x)\n", "x = f(1)")
    with real_engine(holes=True) as engine:
        prompts = []
        for hole in (HoleSettings(128), HoleSettings(128, 96)):
            engine.hole = hole
            for far in (None, 0, 48, 96):
                (one,) = Infill(far=far).plan(engine, case, FAST, 0)
                prompts.append(one.request.prompt)
    none, own, some, more = prompts[0], prompts[4], prompts[2], prompts[3]
    assert prompts == [none, none, some, more, own, none, some, more]
    assert own == more
    assert len(none) == 128 < len(some) <= 128 + 48 < len(more) <= 128 + 96


# ---- sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("line", 1000), ("lines", 500), ("inside", 500)])
def test_built_in_cases(kind: str, count: int) -> None:
    cases = built_in(kind)
    assert len(cases) == len({(case.name, case.target, case.prefix) for case in cases}) == count
    assert all(case.target.strip() for case in cases)
    assert all(parses(case.whole) for case in cases[:: count // 20])
    breaks = {case.target.count("\n") for case in cases}
    if kind == "inside":
        assert breaks == {0}
        assert all(case.prefix[-1] != "\n" or case.suffix[0] != "\n" for case in cases)
    else:
        assert breaks <= ({0} if kind == "line" else set(range(1, 8)))
        assert all(case.prefix.endswith("\n") for case in cases)
        assert all(case.suffix[:1] in ("\n", "") for case in cases)
    assert cases[0].name.count("/") >= 1  # package, path and line
    assert cases[0].name.rsplit(":", 1)[1].isdecimal()


def test_what_is_shipped_says_whose_it_is() -> None:
    rows = [row for _, row in task.read_json_lines(task.FILE, ("package", "version", "licence", "path", "text"))]
    notices = (task.FILE.parent / "infill_licences.txt").read_text(encoding="utf-8")
    for row in rows:
        assert f"{row['package']} {row['version']}: {row['licence']}" in notices
    assert task.FILE.stat().st_size < 1_500_000


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [
        {"prefix": "a = ", "suffix": "\n", "target": "1"},
        {"prefix": "", "suffix": "", "target": "x", "kind": "lines"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [(case.name, case.kind, case.target) for case in read_cases(file)] == [
        ("line 1", "line", "1"),
        ("line 2", "lines", "x"),
    ]
    for wrong, says in (
        ("{", "line 1 is not JSON"),
        ('{"prefix": "a", "suffix": "b"}', "line 1: a JSON object with the texts prefix, suffix, target"),
        ('["a"]', "line 1: a JSON object"),
        ('{"prefix": "a", "suffix": "b", "target": 3}', "line 1: a JSON object"),
        ('{"prefix": "a", "suffix": "b", "target": "c", "kind": "word"}', "kind must be one of"),
        ("", "holds no case"),
    ):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(DataError, match=says):
            read_cases(file)
    with pytest.raises(InputError, match="no infill set 'words'"):
        built_in("words")
