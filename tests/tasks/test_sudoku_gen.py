from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from diffusiongemma.errors import DataError
from diffusiongemma.tasks import sudoku_gen
from diffusiongemma.tasks.sudoku_gen import Puzzles, generate, native, shrink, solve_all
from diffusiongemma.tasks.sudoku_solver import is_solution, is_unique, parse, render, solutions
from diffusiongemma.tasks.sudoku_symmetry import add_givens, augment, fingerprint

HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."


@pytest.fixture(scope="module")
def puzzles() -> Puzzles:
    return generate(11, np.array([0] * 12 + [30] * 6 + [40] * 6, np.uint8))


def test_solver_knows_one_two_and_no_solutions() -> None:
    board = parse(HARD)
    found = solutions(board)
    assert len(found) == 1
    assert is_solution(found[0], board)
    assert is_unique(board)
    assert len(solutions([0] * 81)) == 2
    assert solutions(parse("11" + "." * 79)) == []
    assert not is_solution([1] * 81)
    assert not is_solution(found[0], [10 - value if value != 5 else 4 for value in found[0]])


def test_parse_and_render() -> None:
    assert render(parse(HARD.replace(".", "0"))) == HARD
    for wrong in ("123", "x" * 81):
        with pytest.raises(DataError):
            parse(wrong)


def test_generated_puzzles_have_one_solution_and_the_asked_givens(puzzles: Puzzles) -> None:
    givens = (puzzles.puzzle > 0).sum(1)
    assert (givens[12:18] == 30).all()
    assert (givens[18:] == 40).all()
    assert givens[:12].max() < 32
    for puzzle, solution in zip(puzzles.puzzle.tolist(), puzzles.solution.tolist(), strict=True):
        assert solutions(puzzle) == [solution]
    for puzzle in puzzles.puzzle[:4].tolist():  # minimal: no given can go
        for cell in range(81):
            if puzzle[cell]:
                assert not is_unique([*puzzle[:cell], 0, *puzzle[cell + 1 :]])


def test_a_seed_names_the_puzzles(puzzles: Puzzles) -> None:
    again = generate(11, np.array([0] * 12 + [30] * 6 + [40] * 6, np.uint8))
    assert np.array_equal(again.puzzle, puzzles.puzzle)
    assert not np.array_equal(generate(12, np.zeros(24, np.uint8)).puzzle, puzzles.puzzle)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku_gen, "native", lambda: None)
    made = generate(3, np.array([0, 36], np.uint8))
    counts, solved = solve_all(made.puzzle)
    assert counts.tolist() == [1, 1]
    assert np.array_equal(solved.solution, made.solution)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is compiled comes here."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.skipif(native() is None, reason="no C compiler")
def test_what_was_compiled_for_another_processor_is_not_run(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (b"flags: old", b"flags: new", b"flags: new"):
        monkeypatch.setattr(sudoku_gen, "_instructions", lambda flags=flags: flags)
        assert native.__wrapped__() is not None
    assert len(list(own_folder.rglob("*.so"))) == 2


@pytest.mark.skipif(native() is None, reason="no C compiler")
@pytest.mark.usefixtures("own_folder")
def test_a_folder_that_nothing_may_be_run_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert native.__wrapped__() is None


@pytest.mark.skipif(native() is None, reason="no C compiler")
def test_native_solver_counts_as_python_does(puzzles: Puzzles) -> None:
    rng = Random(0)
    boards = puzzles.puzzle.copy()
    for board in boards[::2]:  # without one given a minimal puzzle has more solutions
        board[rng.choice(np.flatnonzero(board).tolist())] = 0
    counts, _ = solve_all(boards, limit=5)
    assert counts.tolist() == [len(solutions(board, 5)) for board in boards.tolist()]
    assert counts[:12:2].min() > 1


@pytest.mark.skipif(native() is None, reason="no C compiler")
def test_shrink_finds_unique_puzzles_with_fewer_givens(puzzles: Puzzles) -> None:
    start = puzzles.puzzle[:12][np.argmax((puzzles.puzzle[:12] > 0).sum(1))]
    found = shrink(0, start[None], room=5)
    assert len(found)
    assert ((found.puzzle > 0).sum(1) < (start > 0).sum()).all()
    assert all(is_unique(board) for board in found.puzzle.tolist())


def test_symmetry_keeps_puzzles_valid_and_unique(puzzles: Puzzles) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.from_numpy(puzzles.puzzle), torch.from_numpy(puzzles.solution)
    puzzle, solution = augment(*before, generator)
    assert puzzle.dtype == torch.uint8
    assert not torch.equal(puzzle, before[0])
    for board, full in zip(puzzle.tolist(), solution.tolist(), strict=True):
        assert is_solution(full, board)
        assert solutions(board) == [full]
    assert torch.equal((puzzle > 0).sum(1), (before[0] > 0).sum(1))


def test_fingerprint_is_the_same_for_variants_and_differs_for_others(puzzles: Puzzles) -> None:
    _, variant = augment(torch.from_numpy(puzzles.puzzle), torch.from_numpy(puzzles.solution))
    marks = fingerprint(puzzles.solution)
    assert np.array_equal(fingerprint(variant.numpy()), marks)
    assert len(np.unique(marks)) == len(marks)


def test_add_givens_takes_them_from_the_solution(puzzles: Puzzles) -> None:
    puzzle, solution = torch.from_numpy(puzzles.puzzle), torch.from_numpy(puzzles.solution)
    wanted = torch.full((len(puzzle),), 36)
    more = add_givens(puzzle, solution, wanted, torch.Generator().manual_seed(1))
    assert torch.equal((more > 0).sum(1), wanted.maximum((puzzle > 0).sum(1)))
    assert ((more == 0) | (more == solution)).all()
    assert ((puzzle == 0) | (more == puzzle)).all()
