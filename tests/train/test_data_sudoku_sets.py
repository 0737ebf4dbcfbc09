from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffusiongemma.tasks.sudoku_gen import generate, native
from diffusiongemma.tasks.sudoku_solver import is_unique, render
from diffusiongemma.tasks.sudoku_symmetry import augment, fingerprint
from diffusiongemma.train.data import sudoku_sets
from diffusiongemma.train.data.sudoku_sets import build_base, read_boards, sparse_puzzles, without_grids


def test_variants_of_test_grids_leave_the_base_set() -> None:
    puzzles = generate(2, np.full(10, 30, np.uint8))
    _, variant = augment(torch.from_numpy(puzzles.puzzle[:3]), torch.from_numpy(puzzles.solution[:3]))
    kept = without_grids(puzzles, fingerprint(variant.numpy()))
    assert np.array_equal(kept.puzzle, puzzles.puzzle[3:])


@pytest.mark.skipif(native() is None, reason="no C compiler")
def test_sparse_puzzles_are_unique_and_have_fewer_givens() -> None:
    seeds = generate(1, np.zeros(3, np.uint8)).puzzle
    found = sparse_puzzles(seeds, expansions=3, room=3)
    assert len(found) > len(seeds)
    assert (found.puzzle > 0).sum(1).min() < (seeds > 0).sum(1).min()
    assert all(is_unique(board) for board in found.puzzle.tolist())


def test_build_base_covers_all_depths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku_sets, "CHUNK", 60)
    tests = tmp_path / "sudoku_test.txt"
    tests.write_text("\n".join(render(row) for row in generate(9, np.full(3, 40, np.uint8)).puzzle.tolist()))
    assert read_boards(tests).shape == (3, 81)
    report = build_base(tmp_path / "sudoku.npz", 60, [tests], expansions=0)
    with np.load(tmp_path / "sudoku.npz") as arrays:
        givens = (arrays["puzzle"] > 0).sum(1)
        assert report["puzzles"] == len(arrays["solution"]) == 60
    assert givens.min() < 26
    assert givens.max() >= 36
