"""Sudoku solving in plain Python: nine-bit candidate masks, singles, and a guess on the cell with the fewest left.

Slow enough to be read, fast enough to grade: a hard puzzle takes some milliseconds. A board is a sequence of 81
integers, row by row, 0 for empty; as text it is 81 characters with `.` or `0` for empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from diffusiongemma.errors import DataError

ALL = 0x1FF


def _units() -> list[list[int]]:
    rows = [[9 * i + k for k in range(9)] for i in range(9)]
    columns = [[9 * k + i for k in range(9)] for i in range(9)]
    boxes = [[27 * (i // 3) + 3 * (i % 3) + 9 * (k // 3) + k % 3 for k in range(9)] for i in range(9)]
    return rows + columns + boxes


UNITS = _units()
PEERS = [sorted({p for unit in UNITS if cell in unit for p in unit} - {cell}) for cell in range(81)]


def parse(text: str) -> list[int]:
    """A board from its 81 characters; other characters are a mistake, spaces and line breaks are not."""
    board = [0 if ch in ".0" else ord(ch) - ord("0") for ch in "".join(text.split())]
    if len(board) != 81 or any(not 0 <= value <= 9 for value in board):
        raise DataError(f"a Sudoku is 81 characters, digits or `.`; this has {len(board)}: {text[:90]!r}")
    return board


def render(board: Sequence[int]) -> str:
    """A board as 81 characters, `.` for empty."""
    return "".join(str(int(value)) if value else "." for value in board)


def is_solution(board: Sequence[int], givens: Sequence[int] | None = None) -> bool:
    """Whether every unit holds all nine digits and, when asked, the givens are where they were."""
    if any({board[cell] for cell in unit} != set(range(1, 10)) for unit in UNITS):
        return False
    return givens is None or all(given in (0, value) for given, value in zip(givens, board, strict=True))


def _assign(masks: list[int], cell: int, bit: int) -> bool:
    """Writes one digit and follows the cells it leaves with a single candidate; False on a contradiction."""
    if not masks[cell] & bit:
        return False
    masks[cell] = bit
    queue = [cell]
    while queue:
        at = queue.pop()
        bit = masks[at]
        for peer in PEERS[at]:
            mask = masks[peer]
            if mask & bit:
                mask ^= bit
                if not mask:
                    return False
                masks[peer] = mask
                if not mask & (mask - 1):
                    queue.append(peer)
    return True


def _hidden_singles(masks: list[int]) -> bool:
    """Fills digits that fit one place of a unit until nothing changes; False on a contradiction."""
    changed = True
    while changed:
        changed = False
        for unit in UNITS:
            once = twice = 0
            for cell in unit:
                twice |= once & masks[cell]
                once |= masks[cell]
            if once != ALL:
                return False
            single = once & ~twice
            for cell in unit:
                bit = masks[cell] & single
                if bit and masks[cell] != bit:
                    if bit & (bit - 1) or not _assign(masks, cell, bit):
                        return False
                    changed = True
    return True


def solutions(board: Sequence[int], limit: int = 2, rng: Random | None = None) -> list[list[int]]:
    """Up to `limit` solutions; with `rng` the search takes digits in random order."""
    masks = [ALL] * 81
    for cell, value in enumerate(board):
        if value and not _assign(masks, cell, 1 << (int(value) - 1)):
            return []
    found: list[list[int]] = []

    def search(masks: list[int]) -> None:
        if not _hidden_singles(masks):
            return
        open_cells = [cell for cell in range(81) if masks[cell] & (masks[cell] - 1)]
        if not open_cells:
            found.append([mask.bit_length() for mask in masks])
            return
        if rng:
            rng.shuffle(open_cells)
        cell = min(open_cells, key=lambda c: masks[c].bit_count())
        bits = [1 << d for d in range(9) if masks[cell] >> d & 1]
        if rng:
            rng.shuffle(bits)
        for bit in bits:
            copy = list(masks)
            if len(found) < limit and _assign(copy, cell, bit):
                search(copy)

    search(masks)
    return found[:limit]


def is_unique(board: Sequence[int]) -> bool:
    """Whether a puzzle has exactly one solution."""
    return len(solutions(board, 2)) == 1
