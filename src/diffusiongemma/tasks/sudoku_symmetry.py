"""The symmetries of Sudoku: endless variants of a puzzle for training, and a fingerprint that none of them changes.

A grid stays valid when digits are renamed, bands or stacks are exchanged, rows in a band or columns in a stack are
exchanged, or the board is transposed: 1.2e12 variants of one puzzle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def _line_order(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[B, 9] orders of rows: three bands in random order, three rows in random order inside each."""
    bands = torch.rand(count, 3, generator=generator, device=device).argsort(1)  # [B, 3]
    rows = torch.rand(count, 3, 3, generator=generator, device=device).argsort(2)  # [B, 3, 3]
    return (3 * bands[:, :, None] + rows).reshape(count, 9)


def augment(puzzle: Tensor, solution: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """A random variant of each puzzle [B, 81] with its solution [B, 81], on their device; empty stays 0."""
    count, device = len(puzzle), puzzle.device
    rows, columns = (_line_order(count, generator, device) for _ in range(2))
    cells = 9 * rows[:, :, None] + columns[:, None, :]  # [B, 9, 9]
    flip = torch.rand(count, generator=generator, device=device) < 0.5
    cells = torch.where(flip[:, None, None], cells.transpose(1, 2), cells).reshape(count, 81)
    digits = torch.rand(count, 9, generator=generator, device=device).argsort(1) + 1  # [B, 9]
    names = torch.nn.functional.pad(digits, (1, 0)).to(puzzle.dtype)  # [B, 10], 0 -> 0
    return (
        names.gather(1, puzzle.gather(1, cells).long()),
        names.gather(1, solution.gather(1, cells).long()),
    )


def add_givens(puzzle: Tensor, solution: Tensor, givens: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Puzzles [B, 81] with random cells of the solution added up to `givens` [B]; more givens keep one solution one."""
    missing = (givens - (puzzle > 0).sum(1)).clamp(min=0)  # [B]
    order = torch.rand(puzzle.shape, generator=generator, device=puzzle.device).masked_fill(puzzle > 0, 2.0)
    rank = order.argsort(1).argsort(1)  # [B, 81]: open cells come first, in random order
    return torch.where(rank < missing[:, None], solution, puzzle)


def _cycle_types(lines: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """[N, 36] codes, one for each pair of lines of grids [N, 9, 9]: the cycle type of 'digit above, digit below'."""
    count = len(lines)
    where = np.argsort(lines, axis=2)  # [N, 9, 9]: the place of each digit in a line
    values = lines.astype(np.int64) - 1
    codes = []
    for a in range(9):
        for b in range(a + 1, 9):
            step = np.take_along_axis(values[:, b], where[:, a], 1)  # [N, 9]: digit -> digit of b under it in a
            power, code = step, np.zeros(count, np.int64)
            for _ in range(4):  # points fixed by the powers 2..5 tell all eight cycle types apart
                power = np.take_along_axis(step, power, 1)
                code = 10 * code + (power == np.arange(9)).sum(1)
            same_band = a // 3 == b // 3
            codes.append(code + (100_000 if same_band else 0))
    return np.stack(codes, 1)


def fingerprint(solution: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """[N] hashes of full grids [N, 81] that are equal for all variants of a grid (and rarely for others)."""
    grids = solution.reshape(-1, 9, 9)
    sides = []
    for lines in (grids, grids.transpose(0, 2, 1)):
        codes = np.sort(_cycle_types(np.ascontiguousarray(lines)), axis=1).astype(np.uint64)
        total = np.zeros(len(codes), np.uint64)
        for k in range(codes.shape[1]):
            total = (total ^ codes[:, k]) * np.uint64(0x100000001B3)
            total ^= total >> np.uint64(29)
        sides.append(total)
    low, high = np.minimum(*sides), np.maximum(*sides)  # a transposed grid has the two exchanged
    combined: npt.NDArray[np.uint64] = low * np.uint64(0x9E3779B97F4A7C15) ^ high
    return combined
