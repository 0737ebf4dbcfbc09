"""Which filling wins: what Python parses, what the others agree on, and what has no effect."""

import ast
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.engine import Candidate
from diffusiongemma.engine.choice import Choice
from diffusiongemma.errors import InputError
from diffusiongemma.text.similar import similarity
from engine.holes import engine

AROUND = ("x = (", ")\n")
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.just(0),
        st.just(((1,),)),
        st.one_of(st.none(), st.tuples(st.text("ab(+ ", max_size=6))),
        st.floats(-5, 0),
        st.sampled_from(["stop", "length"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


def candidate(text: str, score: float) -> Candidate:
    return Candidate(0, ((1,),), (text,), score, "stop")


def test_what_parses_comes_before_what_is_likelier() -> None:
    broken, worse, sound = candidate("1, (", -0.1), candidate("2", -3.0), candidate("1", -2.0)
    assert [one.texts for one in Choice().order([worse, broken, sound], AROUND)] == [("1, (",), ("1",), ("2",)]
    checked = Choice("python").order([worse, broken, sound], AROUND)
    assert [one.texts for one in checked] == [("1",), ("2",), ("1, (",)]
    assert [one.sound for one in checked] == [True, True, False]
    cut_off = replace(sound, finish_reason="length")
    assert Choice("python").order([broken, cut_off], AROUND)[0].texts == ("1",)
    assert Choice("python").order([broken, replace(broken, score=-1)], AROUND)[0].score == -0.1  # none parses


def test_all_holes_of_a_text_are_checked_together() -> None:
    texts = ("f(", ", ", "\n")
    one, other = Candidate(0, (), ("1", "2)"), -2.0, "stop"), Candidate(0, (), ("1)", "2)"), -1.0, "stop")
    assert Choice("python").order([other, one], texts)[0].texts == ("1", "2)")


def test_the_middle_is_what_most_agree_on() -> None:
    lone, *alike = (
        candidate("zzzz", -0.5),
        candidate("self.a", -1.0),
        candidate("self.b", -1.1),
        candidate("self", -1.2),
    )
    assert Choice().order([*alike, lone], AROUND)[0] is lone
    assert Choice(choose="middle").order([*alike, lone], AROUND)[0] is alike[0]
    sure = replace(lone, score=4.0)  # so much likelier that it outweighs all
    assert Choice(choose="middle").order([*alike, sure], AROUND)[0] is sure
    unfinished = [replace(one, finish_reason="length") for one in alike]
    assert Choice(choose="middle").order([*unfinished, lone], AROUND)[0] is lone  # only the score gives way


@given(CANDIDATES, st.sampled_from(["none", "python"]))
def test_the_middle_has_the_greatest_expected_similarity_of_its_rank(found: list[Candidate], check: str) -> None:
    likeliest = Choice(check).order(found, AROUND)
    middle = Choice(check, "middle").order(found, AROUND)
    assert sorted(map(repr, middle)) == sorted(map(repr, likeliest))  # none is lost
    assert [one.rank for one in likeliest] == sorted((one.rank for one in likeliest), reverse=True)
    assert [one.rank[:-1] for one in middle] == [one.rank[:-1] for one in likeliest]
    if check == "python":
        for one in middle:
            assert one.sound == (one.texts is not None and is_python(AROUND[0] + one.texts[0] + AROUND[1]))
    rivals = [one for one in middle if one.rank[:-1] == middle[0].rank[:-1]]

    def expected(one: Candidate) -> float:
        return sum(2.718281828459045**other.score * similarity(told(one), told(other)) for other in rivals)

    assert expected(middle[0]) == pytest.approx(max(map(expected, rivals)))


def told(one: Candidate) -> str:
    return "" if one.texts is None else one.texts[0]


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_the_engine_takes_the_choice() -> None:
    options = {"max_new_tokens": 12, "steps": 2, "seed": 3, "candidates": 8}
    for kind in ("bytes", "fim_suffix_first"):
        plain = engine(kind).infill("x = 1", "\n", **options)
        checked = engine(kind).infill("x = 1", "\n", check="python", **options)
        assert {one.texts for one in checked.candidates} == {one.texts for one in plain.candidates}
        sound = [one.texts is not None and is_python(f"x = 1{one.texts[0]}\n") for one in checked.candidates]
        assert [one.sound for one in checked.candidates] == sound == sorted(sound, reverse=True)
        middle = engine(kind).infill("x = 1", "\n", choose="middle", **options)
        assert middle.candidates == tuple(Choice(choose="middle").order(plain.candidates, ("x = 1", "\n")))
        assert middle.text == middle.candidates[0].texts[0]


def test_holes_in_turn_are_checked_when_the_text_is_whole() -> None:
    start, between, end = 'a = "', '" + ' + "1 + " * 12 + '"', '"\n'  # too long for one canvas
    result = engine("bytes").fill(f"{start}[[?4]]{between}[[?8]]{end}", steps=1, seed=0, check="python")
    first, last = ([one for one in result.candidates if (one.seed < 16) == early] for early in (True, False))
    assert all(one.sound for one in first)
    before = start + result.holes[0] + between
    sound = [one.texts is not None and is_python(before + one.texts[0] + end) for one in last]
    assert [one.sound for one in last] == sound
    assert {one.sound for one in last if one.texts is not None} == {True, False}
    together = engine("bytes").fill("a = (1[[?2]], 2[[?2]])\n", steps=1, seed=0, check="python")
    assert [one.sound for one in together.candidates] == [
        one.texts is not None and is_python(f"a = (1{one.texts[0]}, 2{one.texts[1]})\n") for one in together.candidates
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": "perl"}, "check must be"),
        ({"choose": "shortest"}, "choose must be"),
        ({"check": "python", "candidates": 1}, "check 'python' has no effect on one candidate"),
        ({"check": "python", "mode": "ar"}, "check 'python' has no effect in mode 'ar': it writes one"),
        ({"choose": "middle", "mode": "ar"}, "choose 'middle' has no effect in mode 'ar': it writes one"),
        ({"choose": "middle", "canvas": 16}, "choose 'middle' has no effect on fewer than three"),  # two seeds
        ({"choose": "middle", "candidates": 2}, "choose 'middle' has no effect on fewer than three"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, object], says: str) -> None:
    for call in (
        lambda: engine("fim").infill_stream("a", "b", **options),
        lambda: engine("fim").fill_stream("a[[?]]b", **options),
    ):
        with pytest.raises(InputError, match=says):
            call()


def test_the_candidates_that_there_will_be_count_and_not_those_asked_for() -> None:
    """A hole of one token has one length, however many candidates may be tried."""
    short, none, few = {"max_new_tokens": 1, "candidates": 8}, "no effect on one candidate", "fewer than three"
    for options, says in (({"check": "python"}, none), ({"choose": "middle"}, few)):
        with pytest.raises(InputError, match=says):
            engine("bytes").infill_stream("a", "b", **short, **options)
        with pytest.raises(InputError, match=says):  # all in one canvas
            engine("bytes").fill_stream("a[[?1]]b[[?1]]", **options)
    apart = "1 + " * 12  # too long for one canvas
    with pytest.raises(InputError, match=none):  # only the last hole is checked
        engine("bytes").fill_stream(f"a = [[?4]]{apart}[[?1]]", check="python")
    engine("bytes").fill_stream(f"a = [[?1]]{apart}[[?4]]", check="python")
    with pytest.raises(InputError, match=few):
        engine("bytes").fill_stream(f"a = [[?1]]{apart}[[?2]]", choose="middle")
    engine("bytes").fill_stream(f"a = [[?1]]{apart}[[?4]]", choose="middle")
