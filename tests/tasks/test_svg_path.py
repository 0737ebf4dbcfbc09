"""The grammar of path data and transforms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.tasks.svg_path import POINTS, TRANSFORM, path_problem


@pytest.mark.parametrize(
    "data",
    [
        "",
        "  \n",
        "M1 2",
        "m1,2",
        "M1-2",
        "M.5.5",
        "M1.5.5-3-4",
        "M 1 2 3 4 5 6z",
        "M1e3 2E-4",
        "M1 2h3v4H5V6z m1 1 Z",
        "M1 2h3 4 5",
        "M0 0c1 2 3 4 5 6 7 8 9 10 11 12s1 2 3 4q1 2 3 4t5 6",
        "M0 0a1 1 0 0 1 5 6",
        "M0 0a1 1 0 015 6",
        "M0 0a1 1 0 01.5.6",
        "M0 0a1,1,0,1,1,5,6a1 1 0 10-5-6",
        "M0 0zz",
        "M2 13.25c0-4.6 3.7-8.3 8.3-8.3s8.3 3.7 8.3 8.3a8.3 8.3 0 0 1-16.6 0M1 1l+2 .3",
    ],
)
def test_right(data: str) -> None:
    assert path_problem(data) is None


@pytest.mark.parametrize(
    "data",
    [
        "1 2",
        "L1 2",
        "z",
        "M",
        "M1",
        "M12",  # one number, not two
        "M1 2 3",
        "M1 2 3 4 5",
        "M1 2,",
        "M1 2, L3 4",
        "M,1 2",
        "M1,,2",
        "M1 2h",
        "M1 2h3,",
        "M1 2c1 2 3 4 5",
        "M1 2z3",
        "M0 0a1 1 0 2 1 5 6",  # a flag is 0 or 1
        "M0 0a1 1 0 1 5 6",
        "M0 0a1 1 0 0 1 5",
        "M1 2b3",
        "M1 2 x",
        "M1. 2",  # SVG 2 wants a digit behind the point
        "M1e 2",
        "M- 2 3",
        "M1 2l--3 4",
        "M1\u00a02",
        "M١ ٢",
    ],
)
def test_wrong(data: str) -> None:
    assert path_problem(data) is not None


def test_message_points_at_the_fault() -> None:
    assert "at 4 lacks its numbers: 'hxyz'" in (path_problem("M1 2hxyz") or "")
    assert "at 6: 'xyz'" in (path_problem("M1 2h3xyz") or "")
    assert "'L'" in (path_problem("L1 2") or "")


NUMBERS = st.floats(-1000, 1000, width=16).map(lambda x: f"{x:g}")
COUNTS = {"M": 2, "L": 2, "T": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "Z": 0}


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    letters = ["M", *draw(st.lists(st.sampled_from(sorted(COUNTS)), max_size=6))]
    found = []
    for letter in letters:
        sets = draw(st.integers(1, 3)) if COUNTS[letter] else 1
        numbers = [draw(NUMBERS) for _ in range(sets * COUNTS[letter])]
        name = draw(st.sampled_from([letter, letter.lower()]))
        found.append(name + draw(st.sampled_from([" ", ",", " , "])).join(numbers))
    return found


@given(commands(), st.data())
def test_paths_made_by_the_rules(parts: list[str], data: st.DataObject) -> None:
    assert path_problem(" ".join(parts)) is None
    # One number too many or a letter that is no command, somewhere.
    at = data.draw(st.integers(0, len(parts) - 1))
    if COUNTS[parts[at][0].upper()] != 1:
        assert path_problem(" ".join([*parts[:at], parts[at] + " 7", *parts[at + 1 :]])) is not None
    assert path_problem(" ".join([*parts[:at], parts[at] + "k", *parts[at + 1 :]])) is not None


@given(st.text(alphabet="MmLlCcAaZzHhVvSsQqTt01.,-+e ", max_size=20))
def test_what_is_right_can_be_continued_and_what_is_wrong_cannot(text: str) -> None:
    if path_problem(text) is None:
        assert path_problem(f"{text}M1 1") is None
        assert path_problem(text * 50) is None
        assert path_problem(f"{text},") is not None
    elif text.strip(" ")[-1:] in ("z", "Z"):  # the last command is whole, so the fault lies before it
        assert path_problem(f"{text}M1 1") is not None


def test_a_long_path_takes_no_long_time() -> None:
    assert path_problem("M0 0l" + "1 2 " * 8_000) is None
    assert path_problem("M0 0l" + "1 2 " * 8_000 + "3") is not None
    assert path_problem("M0 0a" + "1" * 30_000) is not None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("rotate(45)", True),
        ("rotate(45 12 12)", True),
        ("rotate(45 12)", False),
        ("translate(2)", True),
        ("translate(2,-3) scale(1.5)", True),
        ("scale(-1 1)rotate(15 -109.047 -105.16)", True),
        ("matrix(1 0 0 -1 9.5 14.5)", True),
        ("matrix(1 0 0 -1 9.5)", False),
        ("skewX(3),skewY(4)", True),
        ("skewX(3),", False),
        ("url(#a)", False),
        ("rotate(a)", False),
        ("", True),
    ],
)
def test_transforms(text: str, right: bool) -> None:
    assert (TRANSFORM.fullmatch(text) is not None) is right


@pytest.mark.parametrize(
    ("text", "right"), [("", True), ("1 2", True), ("1,2 3-4", True), ("1 2 3", False), ("12", False), ("1 2,", False)]
)
def test_points(text: str, right: bool) -> None:
    assert (POINTS.fullmatch(text) is not None) is right
