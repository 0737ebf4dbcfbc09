"""`dgemma sudoku`: the board while it crystallises, the verdict by the rules, and mistakes."""

import json
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from diffusiongemma.cli import app, main
from diffusiongemma.cli.board import GIVEN, REPAIRED, WRONG, Board, legend
from diffusiongemma.cli.canvas import STYLES
from diffusiongemma.cli.sudoku import Json, LiveBoard, Plain, Solved, verdict
from diffusiongemma.engine import Commit, Draft, Engine
from diffusiongemma.tasks.sudoku import MAX_LOOKS, SudokuBoard, turn
from diffusiongemma.tasks.sudoku_solver import parse

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
MODEL = ("--model", "random:tiny")
FREE = 2  # a cell that is not given
ZERO = 100  # the token of the digit 0 in these tests


def board(look: int = 0) -> Board:
    return Board(SudokuBoard(tuple(range(ZERO, ZERO + 10))), parse(PUZZLE), look)


def draft(text: str, settled: bool | list[bool] = True, entropy: float = 0.0, extra: int = 15) -> Draft:
    tokens = [ZERO + int(c) if c.isdigit() else 7 for c in text] + [1] * extra
    flags = settled if isinstance(settled, list) else [settled] * len(tokens)
    return Draft(0, 1, tokens, [entropy] * len(tokens), flags, decode=str)


def style_at(view: Board, cell: int, final: bool = False) -> str:
    text = view.render(final)
    row, column = divmod(cell, 9)
    line = text.plain.split("\n")[1 + row + row // 3]
    at = text.plain.index(line) + 2 + 2 * column + 2 * (column // 3)
    assert text.plain[at] == str(view.values[cell] or "·")
    return "".join(str(span.style) for span in text.spans if span.start <= at < span.end)


# ---- the board -------------------------------------------------------------------------------------------------------


def test_cells_look_as_sure_as_they_are() -> None:
    view = board()
    assert (view.settled, view.line()) == (30, PUZZLE)
    assert style_at(view, 0) == GIVEN
    assert style_at(view, FREE) == STYLES[-1]
    view.take(draft(SOLUTION, settled=False, entropy=0.3))
    assert style_at(view, FREE) == STYLES[2]
    assert style_at(view, 0) == GIVEN
    assert (view.step, view.settled, view.entropy) == (1, 30, pytest.approx(0.3))
    view.take(draft(SOLUTION))
    assert style_at(view, FREE) == STYLES[0] == ""
    assert view.settled == 81
    assert view.line() == SOLUTION


def test_what_was_accepted_and_then_changed_is_marked_as_repaired() -> None:
    view = board()
    wrong = SOLUTION[:FREE] + "9" + SOLUTION[FREE + 1 :]
    view.take(draft(wrong, settled=False))  # a draft that nothing rested on may change freely
    view.take(draft(SOLUTION))
    assert view.repaired == set()
    view.take(draft(wrong))
    assert view.repaired == {FREE}
    view.take(draft(SOLUTION))
    assert view.repaired == {FREE}
    assert style_at(view, FREE) == REPAIRED
    view.take(Commit(0, [ZERO + int(c) for c in SOLUTION], SOLUTION))
    assert (view.step, view.repaired) == (4, {FREE})


def test_the_end_shows_what_breaks_the_rules() -> None:
    view = board()
    view.take(draft(SOLUTION[:FREE] + "9" + SOLUTION[FREE + 1 :]))
    assert style_at(view, FREE) == ""
    assert style_at(view, FREE, final=True) == WRONG
    assert FREE in view.conflicts
    assert 40 not in view.conflicts
    view.take(draft(SOLUTION))
    assert view.conflicts == set()


def test_the_causal_twin_is_judged_by_what_it_wrote() -> None:
    view = board()
    for i, c in enumerate("9" + SOLUTION[1:]):  # not the given
        view.take(Commit(i, [ZERO + int(c)], c))
    assert view.step == 81
    assert view.values[0] == 9
    assert 0 in view.conflicts


def test_a_token_that_is_no_digit_is_an_empty_cell() -> None:
    view = board()
    view.take(draft(SOLUTION[:FREE] + "x" + SOLUTION[FREE + 1 :]))
    assert view.values[FREE] == 0
    assert "·" in view.render().plain
    assert FREE in view.conflicts


def test_a_board_may_take_several_canvases() -> None:
    view = board()
    view.take(draft(SOLUTION[:40], extra=0))
    view.take(Commit(0, [ZERO + int(c) for c in SOLUTION[:40]], ""))
    view.take(draft(SOLUTION[40:80], extra=0))
    view.take(Commit(1, [ZERO + int(c) for c in SOLUTION[40:80]], ""))
    view.take(draft(SOLUTION[80:], extra=39))
    view.take(Commit(2, [ZERO + int(c) for c in SOLUTION[80:]], ""))
    assert "".join(map(str, view.values)) == SOLUTION
    assert view.step == 3


@pytest.mark.parametrize("look", range(1, MAX_LOOKS))
def test_a_turned_board_is_drawn_upright(look: int) -> None:
    upright, turned = board(), board(look)
    unsure = [cell % 7 == 0 for cell in range(81)]
    wrong = SOLUTION[:FREE] + "9" + SOLUTION[FREE + 1 :]
    for text in (wrong, SOLUTION):
        upright.take(draft(text, [not one for one in unsure], entropy=0.3, extra=0))
        seen = "".join(turn(text, look))
        turned.take(draft(seen, [not one for one in turn(unsure, look)], entropy=0.3, extra=0))
        assert (turned.values, turned.levels, turned.repaired) == (upright.values, upright.levels, upright.repaired)
        assert turned.render().spans == upright.render().spans
    assert turned.repaired == {FREE}
    turned.take(Commit(0, [ZERO + int(c) for c in turn(SOLUTION, look)], ""))
    assert (turned.line(), turned.conflicts) == (SOLUTION, set())


def test_a_later_look_has_a_name() -> None:
    said = [board(look).told_look(8) for look in (0, 1, 3, 4)]
    assert said == [
        "",
        "look 2 of 8, the board turned, ",
        "look 4 of 8, the board turned, ",
        "look 5 of 8, the board mirrored, ",
    ]


def test_the_grid() -> None:
    lines = board().render().plain.split("\n")
    assert len(lines) == 13
    assert {len(line) for line in lines} == {25}
    assert lines[1] == "│ 5 3 · │ · 7 · │ · · · │"
    assert legend().plain == "given  settled  unsure  taken back"


def test_the_live_board_ends_as_a_board_that_stays() -> None:
    console = Console(force_terminal=True, width=80, height=30, record=True, highlight=False)
    view, display = board(), LiveBoard("seed 1", 48, console)
    with display:
        view.take(draft(SOLUTION))
        display.show(view)
    display.close(view, Solved(PUZZLE, SOLUTION, True, 1, 1, 1, 2.0, 51.0, 0, 0.1))
    text = console.export_text()
    assert "│ 5 3 4 │ 6 7 8 │ 9 1 2 │" in text
    assert "step 1/48 · 81/81 settled · entropy 0.00 · 0 taken back · seed 1" in text


def test_the_verdict() -> None:
    good = Solved(PUZZLE, SOLUTION, True, 1, 7, 12, 61.24, 4.25, 1, 0.9)
    assert verdict(good) == (
        "solved: every row, column and box holds 1 to 9 · 12 steps of 61 ms · 4.2 cells a forward"
        " · 1 cell taken back and changed · seed 7"
    )
    assert verdict(Solved(PUZZLE, SOLUTION, False, 1, 7, 1, 61.24, 4.25, 0, 0.9)).startswith("not solved")
    several = Solved(PUZZLE, SOLUTION, True, 1, 7, 120, 61.24, 4.25, 0, 0.9, looks=2)
    assert "120 steps of 61 ms in 2 looks · 4.2 cells" in verdict(several)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["sudoku", *args], input=stdin, catch_exceptions=False)


def test_without_a_terminal_there_are_plain_lines() -> None:
    result = run(PUZZLE, *MODEL, "--steps", "2", "--seed", "3")
    assert result.exit_code == 1  # random weights solve nothing
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["step", "1"]
    last = lines[-1].split()[1]
    assert len(last) == 81
    assert all(given in (".", value) for given, value in zip(PUZZLE, last, strict=True))
    assert "not solved: the board breaks the rules" in result.stderr
    assert "seed 3" in result.stderr
    assert run("-", *MODEL, "--steps", "2", "--seed", "3", stdin=PUZZLE + "\n").stdout == result.stdout


def test_json_has_every_step_and_the_result() -> None:
    result = run("--random", "medium", *MODEL, "--steps", "2", "--seed", "3", "--attempts", "2", "--json")
    got = [json.loads(line) for line in result.stdout.splitlines()]
    ends = [row for row in got if row["kind"] == "end"]
    assert [(end["seed"], end["attempts"], end["solved"]) for end in ends] == [(3, 1, False), (4, 2, False)]
    assert ends[0]["puzzle"] == ends[1]["puzzle"]
    assert ends[0]["puzzle"].count(".") == 81 - 33
    assert {"step", "board", "settled", "repaired"} <= got[0].keys()
    assert ends[0]["steps"] == sum(row["kind"] == "draft" for row in got[: got.index(ends[0])])


def test_a_board_that_does_not_settle_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are never sure, so every look is taken; the board stays upright for the reader."""
    monkeypatch.setattr("diffusiongemma.tasks.sudoku.STEPS", 2)
    never = (PUZZLE, *MODEL, "--seed", "3", "--confidence", "1e-9")
    got = [json.loads(line) for line in run(*never, "--looks", "3", "--json").stdout.splitlines()]
    *drafts, end = got
    assert [row["look"] for row in drafts] == sorted(row["look"] for row in drafts)
    assert {row["look"] for row in drafts} == {1, 2, 3}
    assert drafts[0]["step"] == next(row["step"] for row in drafts if row["look"] == 3) == 1
    assert (end["looks"], end["steps"], end["attempts"]) == (3, len(drafts), 1)
    for row in got:
        assert all(given in (".", value) for given, value in zip(PUZZLE, row["board"], strict=True))
    plain = run(*never, "--attempts", "2")
    said = [line for line in plain.stdout.splitlines() if "look" in line]
    assert said[:3] == [f"attempt 1 of 2, look {n} of 4, the board turned, seed 3" for n in (2, 3, 4)]
    assert said[3] == "attempt 2 of 2, look 2 of 4, the board turned, seed 4"
    assert plain.stdout.count("board  ") == 2  # an attempt
    assert plain.stderr.count(" in 4 looks") == 2


def test_a_board_that_settles_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusiongemma.tasks.sudoku.STEPS", 2)
    result = run(PUZZLE, *MODEL, "--seed", "3", "--confidence", "100", "--stability", "0", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["looks"] == 1


def test_the_command_and_the_evaluation_look_at_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("diffusiongemma.tasks.sudoku.STEPS", 2)
    end = json.loads(run(PUZZLE, *MODEL, "--seed", "3", "--looks", "2", "--json").stdout.splitlines()[-1])
    (tmp_path / "mine.txt").write_text(PUZZLE)
    args = ["eval", "sudoku", "--file", str(tmp_path / "mine.txt"), *MODEL, "--seed", "3", "--looks", "2"]
    out = tmp_path / "cases.jsonl"
    assert CliRunner().invoke(app, [*args, "--output", str(out)], catch_exceptions=False).exit_code == 0
    case = json.loads(out.read_text())
    assert (case["text"], case["steps"], case["scores"]["looks"]) == (end["board"], end["steps"], end["looks"])


def test_the_exit_code_is_the_verdict() -> None:
    """Where all is given, the pins make a board that obeys the rules; random weights fill no cell."""
    result = run(SOLUTION, *MODEL, "--steps", "1", "--seed", "0", "--attempts", "3")
    assert result.exit_code == 0
    assert "solved: every row, column and box holds 1 to 9" in result.stderr
    assert len(result.stdout.splitlines()) == 3 + 1  # a block a line, the board; no second attempt
    assert run(SOLUTION[:80] + ".", *MODEL, "--steps", "1", "--seed", "0").exit_code == 1


def test_the_twin_writes_a_board_too() -> None:
    result = run(PUZZLE, *MODEL, "--ar", "--seed", "1", "--json")
    assert result.exit_code == 1
    end = json.loads(result.stdout.splitlines()[-1])
    assert end["steps"] >= 1
    assert len(end["board"]) == 81


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give a puzzle of 81 characters, or --random"),
        ([PUZZLE, "--random", "hard"], "give a puzzle of 81 characters, or --random"),
        (["123"], "a Sudoku is 81 characters"),
        (["55" + "." * 79], "this puzzle has no solution"),
        (["--random", "fiendish"], "there is no level 'fiendish'"),
        (["--random", "easy", "--canvas", "96"], "canvas has no effect here"),
        (["--random", "easy", "--max-new-tokens", "9"], "max_new_tokens has no effect here"),
        (["--random", "easy", "--ar", "--attempts", "2"], "--attempts has no effect with --ar"),
        (["--random", "easy", "--ar", "--steps", "2"], "steps has no effect in mode 'ar'"),
        (["--random", "easy", "--ar", "--looks", "2"], "--looks has no effect with --ar"),
        (["--random", "easy", "--steps", "9", "--looks", "1"], "--looks has no effect with --steps"),
        (["--random", "easy", "--no-early-stop", "--looks", "2"], "--looks has no effect with --no-early-stop"),
    ],
)
def test_mistakes_are_one_message(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dgemma", "sudoku", *args, *MODEL])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert says in err


def test_several_solutions_are_spoken_of() -> None:
    result = run("." * 81, *MODEL, "--steps", "1", "--seed", "0")
    assert "has several solutions" in result.stderr


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell in the background ignores it

    def step(self: Json, board: Board) -> None:
        if board.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Json, "step", step)
    result = CliRunner().invoke(app, ["sudoku", PUZZLE, *MODEL, "--json", "--steps", "5000", "--no-early-stop"])
    assert result.exit_code == 130
    assert result.stdout == ""
    assert signal.getsignal(signal.SIGINT) is before


def test_a_display_that_breaks_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []
    load = Engine.load
    monkeypatch.setattr(Engine, "load", lambda *a, **k: engines.append(load(*a, **k)) or engines[-1])

    def broken(self: Plain, board: Board) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Plain, "step", broken)
    with pytest.raises(BrokenPipeError):
        run(PUZZLE, *MODEL, "--steps", "5000", "--no-early-stop")
    assert not engines[0].scheduler.busy
