"""Templates: every fixed part stays, every hole keeps to its bounds, in one canvas or hole after hole."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.engine import Commit, Draft, Hole, SamplingParams, collect
from diffusiongemma.engine.fill import combinations, parse_template, plan_together
from diffusiongemma.errors import ConfigError, InputError
from diffusiongemma.text.exact import exact_text
from engine.holes import FIM, PLAIN, engine, tokenizer

WIDE = 32
PARTS = st.lists(st.one_of(st.text(max_size=6), st.builds(Hole, st.integers(1, 5) | st.none())), max_size=6)


@pytest.mark.parametrize("kind", [*PLAIN, "fim"])
@settings(max_examples=8)
@given(parts=PARTS.filter(lambda parts: any(isinstance(part, Hole) for part in parts)), seed=st.integers(0, 99))
@example(parts=["é", Hole(2), "\u2581", Hole(3), ""], seed=0)
@example(parts=[Hole(), Hole(1), "x" * 40, Hole()], seed=1)
def test_fixed_parts_stay_and_holes_keep_their_bounds(kind: str, parts: list[str | Hole], seed: int) -> None:
    result = engine(kind).fill(parts, max_new_tokens=6, seed=seed, steps=1, candidates=2)
    texts, holes = parse_template(parts)
    assert len(result.holes) == len(holes)
    assert result.text == texts[0] + "".join(a + b for a, b in zip(result.holes, texts[1:], strict=True))
    assert exact_text(tokenizer(kind), result.tokens) == result.text == tokenizer(kind).decode(result.tokens)
    assert result.metrics.new_tokens <= sum(6 if hole.max_tokens is None else hole.max_tokens for hole in holes)


def test_a_template_may_be_one_text() -> None:
    assert parse_template("a[[?]]b[[?12]]") == (["a", "b", ""], [Hole(), Hole(12)])
    assert parse_template(["[[?]]", Hole(3, 2), "x", "y"]) == (["[[?]]", "xy"], [Hole(3, 2)])
    result = engine().fill("x = [[?3]], y = [[?2]];", steps=2)
    assert result.text == f"x = {result.holes[0]}, y = {result.holes[1]};"
    assert len(result.candidates) >= 4


def test_one_canvas_holds_all_if_it_fits() -> None:
    params = SamplingParams(steps=2, seed=0, max_new_tokens=20)
    texts = ["ab", "cd", "e" * 50]

    def plan(*holes: Hole) -> list[list[int]] | None:
        tries = plan_together(engine(), texts, list(holes), params, 16, drafts=True)
        if tries is None:
            return None
        for one in tries:
            pins = one.request.pins
            width = one.request.params.max_new_tokens
            assert width == WIDE
            assert len(pins) + sum(hole.stop - hole.start for hole in one.holes) == width
            assert tokenizer("bytes").decode(pins[at] for at in sorted(pins)) == "cd" + "e" * (len(pins) - 2)
            assert len(pins) - 2 >= 16
            assert one.request.prompt == tries[0].request.prompt
        return [[hole.stop - hole.start for hole in one.holes] for one in tries]

    lengths = plan(Hole(6), Hole(8, 4))
    assert lengths is not None
    assert {a for a, _ in lengths} == {1, 2, 4, 6}
    assert {b for _, b in lengths} == {4, 8}
    assert plan(Hole(10), Hole(8)) is None  # 14 positions are left
    assert plan(Hole(), Hole()) is None  # 7 each is less than a fair share
    assert plan(Hole(6), Hole()) is not None  # the other can have 8
    assert plan(Hole(6), Hole(None, 9)) is None


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=9), st.integers(1, 16))
def test_combinations_are_few_different_and_within_bounds(bounds: list[tuple[int, int]], limit: int) -> None:
    least, most = [low for low, _ in bounds], [low + more for low, more in bounds]
    found = combinations(least, most, limit)
    assert 1 <= len(found) == len(set(found)) <= limit
    assert all(low <= n <= high for lengths in found for low, n, high in zip(least, lengths, most, strict=True))
    assert tuple(most) in found


@pytest.mark.parametrize("template", ["a [[?4]] b [[?4]] c", "a [[?16]] b [[?16]] c", "a [[?4]] c"])
def test_the_stream_adds_up_to_the_result(template: str) -> None:
    events = list(engine().fill_stream(template, steps=2, seed=4, candidates=2))
    result = engine().fill(template, steps=2, seed=4, candidates=2)
    added = collect(events)
    assert (added.text, added.tokens) == (result.text, result.tokens)
    commits = [event for event in events if isinstance(event, Commit)]
    assert len(commits) == (2 if "16" in template else 1)
    drafts = [event for event in events if isinstance(event, Draft)]
    assert all(draft.text.startswith("a ") for draft in drafts if draft.block == 0)
    assert all(draft.tokens[: len(" b ")] == commits[1].tokens[: len(" b ")] for draft in drafts if draft.block == 1)
    assert [event.kind for event in events].count("end") == 1


def test_metrics_add_up_over_holes() -> None:
    result = engine().fill("a [[?16]] b [[?16]] c", steps=2, candidates=1, seed=0)
    ran = len(result.candidates)
    assert result.metrics.blocks == ran >= 2
    assert result.metrics.steps == 2 * ran
    assert result.metrics.decoder_forwards == 3 * ran  # and one pass each for the score
    assert result.metrics.new_tokens == 32


def test_holes_of_a_model_that_ends_them_itself() -> None:
    result = engine(FIM[0]).fill("a [[?3]] b [[?3]] c", steps=1, strategy="fim", candidates=1)
    assert len(result.candidates) >= 2
    assert result.text == f"a {result.holes[0]} b {result.holes[1]} c"
    least = engine(FIM[0]).fill(["a", Hole(5, 5), "b"], steps=1, candidates=1)  # only a canvas can promise a length
    assert len(least.tokens) == 7


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("no hole", {}, "has no hole"),
        ("[[?0]]", {}, "got 1 to 0"),
        (["a", 3], {}, "texts and holes, not int"),
        (["a", Hole(None, 9)], {"max_new_tokens": 8}, "at least 9"),
        ("[[?]]", {"candidates": 99}, "candidates must be"),
        ("[[?2]] [[?2]]", {"candidates": 99}, "candidates must be"),
        ("[[?2]] [[?2]]", {"canvas": 16}, "canvas has no effect"),
        ("[[?2]] [[?2]]", {"mode": "ar"}, "left to right"),
        ("[[?2]] [[?2]]", {"stop": "."}, "stop has no effect"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(template: object, options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        engine().fill_stream(template, **options)
    with pytest.raises(InputError):
        Hole(2, 3)
