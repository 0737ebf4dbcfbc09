"""Sudoku as a task: pins, grading by the rules, attempts, and files with mistakes in them."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.engine import Draft, Request
from diffusiongemma.errors import DataError, InputError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.evaluation import Variant, evaluate
from diffusiongemma.tasks.sudoku import (
    HEAT,
    LOOKS,
    MAX_LOOKS,
    STEPS,
    Sudoku,
    SudokuBoard,
    SudokuCase,
    built_in_sets,
    looks_of,
    read_puzzles,
    remarks,
    turn,
    turn_back,
)
from diffusiongemma.tasks.sudoku_levels import LEVELS, by_singles, random_puzzle
from diffusiongemma.tasks.sudoku_solver import is_solution, is_unique, parse, solutions
from diffusiongemma.text.bytes import FIRST_BYTE
from tasks.oracle import Oracle, real_engine

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
FAST = Variant("diffusion", 2)


def case(text: str = PUZZLE) -> SudokuCase:
    return SudokuCase("a", tuple(parse(text)))


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_the_request_is_what_training_showed() -> None:
    with real_engine() as engine:
        view = SudokuBoard.of(engine)
        request = view.request(engine, case().board, FAST, seed=5)
        encode = engine.tokenizer.encode
        assert list(request.prompt) == format.chat_prompt(encode, "Sudoku\n" + PUZZLE.replace(".", "0"))
        trained = format.fill_canvas([encode(c)[0] if c != "." else -1 for c in PUZZLE], 96)
        assert request.pins == {i: token for i, token in enumerate(trained) if token != -1}
        p = request.params
        assert (p.canvas, p.max_new_tokens, p.seed, p.steps) == (96, 96, 5, 2)
        assert set(request.forbidden) >= set(engine.tokenizer.special.values())
        assert not set(request.forbidden) & set(encode(string.printable))  # else the network is free in what it writes
        twin = view.request(engine, case().board, Variant("ar"), seed=5)
        assert (twin.prompt, twin.pins, twin.params.temperature) == (request.prompt, {}, 0.0)


def test_the_canvas_is_the_one_of_the_form_that_the_api_offers() -> None:
    """So a seed gives the same board; tests/serve/test_canvas.py sees that it does."""
    engine = Oracle(lambda request: SOLUTION)
    mine = SudokuBoard.of(engine).request(engine, case().board, FAST, seed=5)
    engine.form(list(mine.prompt), PUZZLE.replace(".", "[[?1]]"), seed=5, steps=2, canvas=96, **HEAT)
    (theirs,) = engine.asked
    assert theirs.pins == mine.pins
    assert theirs.params == mine.params
    assert theirs.forbidden == mine.forbidden
    assert set(engine.ends) <= set(mine.forbidden)  # that ours ends at its end makes no other difference


def test_givens_stay_in_every_draft_and_in_the_answer() -> None:
    with real_engine() as engine:
        view = SudokuBoard.of(engine)
        request = view.request(engine, case().board, FAST, seed=1, drafts=True)
        drafts = [event for event in engine.events(request) if isinstance(event, Draft)]
        assert len(drafts) == 2
        assert all(draft.tokens[at] == token for draft in drafts for at, token in request.pins.items())
        (graded,) = evaluate(engine, Sudoku(), [case()], FAST).graded
    assert all(given in (0, int(value)) for given, value in zip(case().board, graded.text, strict=True))
    assert graded.scores == {"solved": False}  # random weights
    assert graded.decided == 81 - 30


def test_a_tokenizer_without_single_digits_is_refused() -> None:
    oracle = Oracle(lambda request: "")
    oracle.tokenizer = type("Pairs", (), {"encode": staticmethod(lambda text: list(range(len(text) // 2)))})()
    with pytest.raises(InputError, match="every digit as one token"):
        SudokuBoard.of(oracle)


# ---- grading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "solved"),
    [
        (SOLUTION, True),
        (SOLUTION[:-1] + "8", False),
        (SOLUTION[:80], False),
        (SOLUTION[:40] + "x" + SOLUTION[41:], False),
        (SOLUTION.translate(str.maketrans("123456789", "234567891")), False),  # a grid, but not of these givens
        ("", False),
    ],
)
@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_the_rules_and_the_givens_decide(answer: str, solved: bool, mode: str) -> None:
    report = evaluate(Oracle(lambda request: answer), Sudoku(), [case()], Variant(mode))
    assert report.graded[0].scores == {"solved": solved} | ({"looks": 1.0} if mode == "diffusion" else {})


def test_any_solution_counts_where_there_are_several() -> None:
    empty = case("." * 81)
    assert evaluate(Oracle(lambda request: SOLUTION), Sudoku(), [empty], FAST).graded[0].scores["solved"]


def test_a_board_that_breaks_the_rules_is_tried_again_with_the_next_seed() -> None:
    def answer(request: Request) -> str:
        return SOLUTION if request.params.seed % 1000 == 2 else "1" * 81

    oracle = Oracle(answer, steps=5)
    (got,) = evaluate(oracle, Sudoku(attempts=4), [case()], FAST, seed=2000).graded
    assert got.scores == {"solved": False, "solved within 4": True, "attempts": 3.0}
    assert [request.params.seed for request in oracle.asked] == [2000, 2001, 2002]
    assert got.text == SOLUTION
    assert got.steps == 5  # of the one attempt that the first figure is about
    oracle = Oracle(answer)
    (got,) = evaluate(oracle, Sudoku(attempts=2), [case()], FAST, seed=2000).graded
    assert got.scores == {"solved": False, "solved within 2": False, "attempts": 2.0}
    (got,) = evaluate(Oracle(answer), Sudoku(attempts=4), [case()], FAST, seed=2).graded
    assert got.scores == {"solved": True, "solved within 4": True, "attempts": 1.0}


def test_the_greedy_twin_is_not_asked_twice() -> None:
    oracle = Oracle(lambda request: "1" * 81)
    (got,) = evaluate(oracle, Sudoku(attempts=4), [case()], Variant("ar")).graded
    assert (len(oracle.asked), got.scores) == (1, {"solved": False})
    oracle = Oracle(lambda request: "1" * 81)
    evaluate(oracle, Sudoku(attempts=4), [case()], Variant("ar", options={"temperature": 0.5}))
    assert len(oracle.asked) == 4
    with pytest.raises(InputError, match="attempts must be"):
        Sudoku(attempts=0)


# ---- looks -----------------------------------------------------------------------------------------------------------

looks = st.integers(0, MAX_LOOKS - 1)


@given(st.lists(st.integers(0, 9), min_size=81, max_size=81), looks)
def test_turning_back_undoes_turning(board: list[int], look: int) -> None:
    assert turn_back(turn(board, look), look) == board
    assert turn(turn_back(board, look), look) == board


@given(st.permutations("123456789"), looks)
def test_a_turned_solution_is_a_solution_of_the_turned_puzzle(names: list[str], look: int) -> None:
    renamed = str.maketrans("123456789", "".join(names))
    puzzle, solution = (parse(text.translate(renamed)) for text in (PUZZLE, SOLUTION))
    assert is_solution(turn(solution, look), turn(puzzle, look))


def test_every_look_shows_another_board() -> None:
    """Else, with the same seed, it would come to the same."""
    assert turn(PUZZLE, 0) == list(PUZZLE)
    assert len({tuple(turn(PUZZLE, look)) for look in range(MAX_LOOKS)}) == MAX_LOOKS
    assert "".join(turn(PUZZLE, 1)[:9]) == PUZZLE[8::9]  # the last column has become the first row
    assert turn(turn(PUZZLE, 1), 1) == turn(PUZZLE, 2) == list(PUZZLE[::-1])


def look_of(request: Request) -> int:
    """The look that asks this of the puzzle above."""
    seen = ["."] * 81
    for at, token in request.pins.items():
        if at < 81:
            seen[at] = chr(token - FIRST_BYTE)
    return [turn(PUZZLE, look) for look in range(MAX_LOOKS)].index(seen)


def slow_oracle(settles_at: int, right_from: int = 0) -> Oracle:
    """Settles in one of its looks, and is right from one of them on."""

    def answer(request: Request) -> str:
        return "".join(turn(SOLUTION, look_of(request))) if look_of(request) >= right_from else "1" * 81

    return Oracle(answer, steps=5, settles=lambda request: look_of(request) == settles_at)


FREE = Variant("diffusion")


@pytest.mark.parametrize(("settles_at", "asked"), [(0, 1), (1, 2), (3, 4), (7, 4)])
def test_a_board_that_does_not_settle_is_turned_and_looked_at_again(settles_at: int, asked: int) -> None:
    oracle = slow_oracle(settles_at)
    (got,) = evaluate(oracle, Sudoku(), [case()], FREE, seed=9).graded
    assert [look_of(request) for request in oracle.asked] == list(range(asked))
    assert {(r.params.seed, r.params.steps) for r in oracle.asked} == {(9, STEPS)}
    assert (got.text, got.scores) == (SOLUTION, {"solved": True, "looks": float(asked)})  # upright again
    assert (got.steps, got.decided) == (5 * asked, 51)  # of all looks, and each cell is decided once
    assert asked <= LOOKS


def test_a_board_that_settled_is_final_though_it_breaks_the_rules() -> None:
    oracle = slow_oracle(settles_at=1, right_from=2)
    (got,) = evaluate(oracle, Sudoku(), [case()], FREE).graded
    assert got.scores == {"solved": False, "looks": 2.0}


def test_an_attempt_has_all_its_looks_and_the_first_ones_are_told() -> None:
    def answer(request: Request) -> str:
        return "".join(turn(SOLUTION, look_of(request))) if request.params.seed == 8 else "1" * 81

    oracle = Oracle(answer, steps=5, settles=lambda request: look_of(request) == request.params.seed - 6)
    (got,) = evaluate(oracle, Sudoku(attempts=3), [case()], FREE, seed=7).graded
    assert [(r.params.seed, look_of(r)) for r in oracle.asked] == [(7, 0), (7, 1), (8, 0), (8, 1), (8, 2)]
    assert got.scores == {"solved": False, "solved within 3": True, "attempts": 2.0, "looks": 2.0}
    assert (got.text, got.steps) == (SOLUTION, 10)


@pytest.mark.parametrize(
    "variant",
    [
        Variant("ar"),
        Variant("diffusion", 192),
        Variant("diffusion", early_stop=False),
        Variant("diffusion", options={"steps": 192}),
        Variant("diffusion", options={"early_stop": False}),
    ],
)
def test_there_is_one_look_where_the_steps_are_given_or_nothing_says_that_it_settled(variant: Variant) -> None:
    assert looks_of(variant, 8) == 1
    oracle = Oracle(lambda request: SOLUTION, settles=lambda request: False)
    (got,) = evaluate(oracle, Sudoku(looks=8), [case()], variant).graded
    assert (len(oracle.asked), got.scores) == (1, {"solved": True})
    assert looks_of(FREE) == LOOKS


def test_as_many_looks_as_a_square_has_sides() -> None:
    oracle = Oracle(lambda request: "1" * 81, settles=lambda request: False)
    evaluate(oracle, Sudoku(looks=8), [case()], FREE)
    assert [look_of(request) for request in oracle.asked] == list(range(8))
    for wrong in (0, 9):
        with pytest.raises(InputError, match="looks must be from 1 to 8"):
            Sudoku(looks=wrong)


# ---- sets ------------------------------------------------------------------------------------------------------------


def test_built_in_sets_are_whole_and_have_one_solution_each() -> None:
    sets = built_in_sets()
    sizes = {name: len(read_puzzles(path)) for name, path in sets.items()}
    assert sizes == {"gymnasium_sudoku": 200, "npm_sudoku_gen": 200, "own_36_46": 1000, "qqwing_expert": 300}
    some = [one for path in sets.values() for one in read_puzzles(path)[:10]]
    assert remarks(some) == []
    assert {36 <= one.givens <= 46 for one in read_puzzles(sets["own_36_46"])} == {True}


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(f"{PUZZLE}\n\n{HARD.replace('.', '0')}\r\n")
    assert [(one.name, one.givens) for one in read_puzzles(file)] == [("line 1", 30), ("line 3", 21)]
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no puzzle"):
        read_puzzles(file)
    with pytest.raises(DataError, match="cannot read"):
        read_puzzles(tmp_path / "none.txt")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read"):
        read_puzzles(file)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("\n".join([PUZZLE, "123", PUZZLE, "x" * 81, PUZZLE + "1", *["."] * 20]))
    with pytest.raises(DataError) as error:
        read_puzzles(file)
    text = str(error.value)
    assert "line 2: a Sudoku is 81 characters" in text
    assert "line 4" in text
    assert "line 5" in text
    assert "line 1:" not in text
    assert "13 more" in text


def test_puzzles_without_exactly_one_solution_are_spoken_of() -> None:
    said = remarks([case(), case("55" + "." * 79), case("." * 81)])
    assert len(said) == 2
    assert "has no solution" in said[0]
    assert "has several solutions" in said[1]


# ---- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_what_they_say(level: str) -> None:
    puzzle = random_puzzle(level, 3)
    assert puzzle == random_puzzle(level, 3) != random_puzzle(level, 4)
    assert is_unique(puzzle)
    givens = sum(value > 0 for value in puzzle)
    if level in ("easy", "medium"):
        assert givens == LEVELS[level]
        return
    assert by_singles(puzzle) == (level == "hard")
    for cell in (c for c in range(81) if puzzle[c]):  # minimal: no given can be spared
        assert not is_unique([0 if c == cell else value for c, value in enumerate(puzzle)])


def test_singles() -> None:
    assert by_singles(parse(PUZZLE))
    assert not by_singles(parse(HARD))
    assert "".join(map(str, solutions(parse(PUZZLE))[0])) == SOLUTION
    with pytest.raises(InputError, match="no level 'fiendish'"):
        random_puzzle("fiendish", 0)
