"""Sudoku: a board that crystallises, judged by the rules, with what was repaired marked."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from diffusiongemma.tasks.sudoku import HEAT, LOOKS, STEPS, turn
from diffusiongemma.tasks.sudoku_levels import by_singles
from diffusiongemma.tasks.sudoku_solver import is_solution, is_unique, parse
from studio.stage import (
    SHIPPED,
    Seen,
    Served,
    answer_with,
    draft,
    heard,
    keep_busy,
    listen,
    set_option,
    usage,
    wait_done,
)

PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def board(page: Page) -> str:
    return "".join(page.locator("#board input").evaluate_all("(cells) => cells.map((cell) => cell.value || '0')"))


def load(page: Page, puzzle: str = PUZZLE) -> None:
    page.click("#tab-sudoku")
    page.fill("#sudoku-text", puzzle)
    assert board(page) == puzzle.replace(".", "0")


@pytest.mark.skipif(not SHIPPED, reason="the embedded model is not in this build")
def test_the_embedded_model_solves_a_board(studio: Seen) -> None:
    page = studio.page
    load(page)
    set_option(page, "sudoku", seed=1, attempts=5)
    listen(page)
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku")
    asked, _ = heard(page)
    assert asked["diffusion"] == {"canvas": 96, "steps": STEPS, **HEAT}, (
        "as `dgemma sudoku` asks: the same seed, the same board"
    )
    expect(page.locator("#sudoku-verdict")).to_have_text("Solved: every row, column and box holds 1 to 9.")
    assert is_solution(parse(board(page)), parse(PUZZLE))
    assert page.locator("#board .given").count() == 30
    assert page.locator("#board .wrong").count() == 0

    slider = page.locator("#sudoku-timeline input[type=range]")
    if slider.is_enabled():  # more than one step
        slider.focus()
        page.keyboard.press("Home")
        assert page.locator("#board [class^=lv]:not(.lv0)").count() > 0, "the first step is not sure of everything"
        page.keyboard.press("End")
        assert board(page) == SOLVED
    page.click("#sudoku-reset")
    assert board(page) == PUZZLE


def steps_to(*boards: str, unsure: tuple[set[int], ...]) -> list[dict[str, object]]:
    made = []
    for step, (text, open_cells) in enumerate(zip(boards, unsure, strict=True), 1):
        nats = [1.0 if cell in open_cells else 0.0 for cell in range(81)]
        made.append(draft(step, list(text), nats, [cell not in open_cells for cell in range(81)]))
    return made


def answer_board(page: Page, drafts: list[dict[str, object]], text: str) -> None:
    whole = {"object": "canvas.infill", "text": text, "holes": [], "score": -0.1, "candidates": []}
    answer_with(
        page, "/v1/canvas/infill", [*drafts, {**whole, "finish_reason": "stop", "usage": usage(len(drafts), 51)}]
    )


def test_repaired_cells_are_marked(studio: Seen) -> None:
    """Cell 2 is accepted as 9 and taken back for 4; cell 3 changes before it was ever accepted."""
    page = studio.page
    load(page)
    first = SOLVED[:2] + "91" + SOLVED[4:]
    drafts = steps_to(first, SOLVED, SOLVED, unsure=({3}, {2, 3}, set()))
    answer_board(page, drafts, SOLVED)
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku")
    cells = page.locator("#board input")
    expect(cells.nth(2)).to_have_class("repaired")
    expect(cells.nth(3)).to_have_class("lv0")
    expect(cells.nth(0)).to_have_class("given")
    expect(page.locator("#panel-sudoku [data-note]")).to_contain_text("1 cell repaired")
    page.locator("#sudoku-timeline input[type=range]").focus()
    page.keyboard.press("Home")
    expect(cells.nth(2)).to_have_value("9")
    expect(cells.nth(2)).to_have_class("lv0")
    expect(cells.nth(3)).to_have_class("lv3")


def answer_looks(page: Page, settles_at: int, asked: list[dict[str, Any]]) -> None:
    """Each request gets a draft of a wrong board and one of the solution, turned as it has the puzzle."""

    def fulfil(route: Route) -> None:
        asked.append(route.request.post_data_json)
        look = len(asked) - 1
        wrong = SOLVED[:2] + "9" + SOLVED[3:]
        first, last = ("".join(turn(text, look)) for text in (wrong, SOLVED))
        unsure = {turn(list(range(81)), look).index(3)}  # the place that holds cell 3
        whole = {"object": "canvas.infill", "text": last, "holes": [], "score": -0.1, "candidates": []}
        figures = usage(2, 51, blocks_settled=int(look == settles_at), seed=5)
        end = {**whole, "finish_reason": "stop", "usage": figures}
        events = [*steps_to(first, last, unsure=(unsure, {*unsure})), end]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body=body)

    page.route("**/v1/canvas/infill", fulfil)


@pytest.mark.parametrize("settles_at", [0, 2, 9])
def test_a_board_that_does_not_settle_is_turned_and_looked_at_again(studio: Seen, settles_at: int) -> None:
    page = studio.page
    load(page)
    asked: list[dict[str, Any]] = []
    answer_looks(page, settles_at, asked)
    set_option(page, "sudoku", attempts=1)
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku")
    looks = min(settles_at + 1, LOOKS)
    turned = ["".join(turn(PUZZLE, look)) for look in range(looks)]
    assert [body["messages"][0]["content"] for body in asked] == [f"Sudoku\n{puzzle}" for puzzle in turned]
    assert [body["template"] for body in asked] == [puzzle.replace("0", "[[?1]]") for puzzle in turned]
    assert [body.get("seed") for body in asked] == [None, *[5] * (looks - 1)], "one seed for all looks of an attempt"
    expect(page.locator("#sudoku-verdict")).to_have_text("Solved: every row, column and box holds 1 to 9.")
    assert board(page) == SOLVED
    note = page.locator("#panel-sudoku [data-note]")
    expect(note).to_contain_text(f"{2 * looks} steps")
    expect(note).to_contain_text(f"{51 / (2 * looks):.1f} cells a step")
    if looks > 1:
        expect(note).to_contain_text(f"{looks} looks")
    cells = page.locator("#board input")
    expect(cells.nth(2)).to_have_class("repaired")
    page.locator("#sudoku-timeline input[type=range]").focus()
    page.keyboard.press("Home")
    expect(cells.nth(2)).to_have_value("9")
    expect(cells.nth(3)).to_have_class("lv3")
    expect(page.locator("#sudoku-timeline output")).to_contain_text("50 of 51 settled")


def test_where_the_steps_are_given_there_is_one_look(studio: Seen) -> None:
    page = studio.page
    load(page)
    asked: list[dict[str, Any]] = []
    answer_looks(page, 9, asked)
    set_option(page, "sudoku", steps=7)
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku")
    assert [body["diffusion"]["steps"] for body in asked] == [7]


def test_a_board_that_breaks_the_rules_is_not_called_solved(studio: Seen) -> None:
    page = studio.page
    load(page)
    wrong = SOLVED[:2] + "3" + SOLVED[3:]
    answer_board(page, steps_to(wrong, unsure=(set(),)), wrong)
    set_option(page, "sudoku", attempts=1)
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku")
    expect(page.locator("#sudoku-verdict")).to_contain_text("Not solved: 2 cells break the rules")
    expect(page.locator("#board input").nth(2)).to_have_class("wrong")


def test_own_entry_by_keyboard(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-sudoku")
    page.click("#sudoku-clear")
    assert board(page) == "0" * 81
    expect(page.locator("#board input").first).to_be_focused()
    for key in ("5", "ArrowRight", "3", "ArrowDown", "8", "ArrowDown", "8"):
        page.keyboard.press(key)
    assert board(page) == "53" + "0" * 8 + "8" + "0" * 8 + "8" + "0" * 61
    assert page.locator("#board .wrong").count() == 2, "two eights in one column"
    page.click("#panel-sudoku [data-go]")
    expect(page.locator("#sudoku-verdict")).to_have_text("These givens contradict each other.")
    page.locator("#board input").nth(19).press("Delete")
    assert page.locator("#board .wrong").count() == 0
    assert page.input_value("#sudoku-text").startswith("53........8")
    page.fill("#sudoku-text", "12345678." + "........." * 7 + "........9"[:9])
    page.click("#panel-sudoku [data-go]")
    expect(page.locator("#sudoku-verdict")).to_contain_text("has no solution")


@pytest.mark.skipif(not SHIPPED, reason="the stand-in has no chat template: it cannot be asked for a board")
def test_another_puzzle_while_one_is_solved(studio: Seen, served: Served) -> None:
    page = studio.page
    load(page)
    keep_busy(page, "/v1/canvas/infill")
    set_option(page, "sudoku", steps=1000)
    before = served.left()
    page.click("#panel-sudoku [data-go]")
    page.wait_for_selector("#sudoku-timeline .timeline:not([hidden])")
    page.click("#sudoku-clear")
    wait_done(page, "sudoku")
    served.wait_left(before + 1)
    assert board(page) == "0" * 81
    expect(page.locator("#sudoku-verdict")).to_be_empty()
    expect(page.locator("#sudoku-timeline .timeline")).to_be_hidden()


def test_puzzles_have_one_solution_and_their_difficulty(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-sudoku")
    for level in ("easy", "medium", "hard", "expert"):
        page.locator(f"#sudoku-level label:has-text('{level}')").click()
        puzzle = parse(board(page))
        givens = sum(value > 0 for value in puzzle)
        assert is_unique(puzzle)
        assert givens == {"easy": 42, "medium": 33}.get(level, givens)
        if level in ("hard", "expert"):
            assert by_singles(puzzle) == (level == "hard")
    before = board(page)
    page.click("#sudoku-new")
    assert board(page) != before
