"""Puzzles of a wanted difficulty by seed, the same on every machine.

easy and medium have many givens; hard ones have no given that could be spared, yet need only singles (a cell with one
candidate left, or a digit with one place left in a unit); expert ones need more than that.
"""

from __future__ import annotations

from random import Random

from diffusiongemma.errors import InputError
from diffusiongemma.tasks.sudoku_solver import PEERS, UNITS, is_unique, solutions

LEVELS = {"easy": 42, "medium": 33, "hard": 0, "expert": 0}  # givens to dig down to, as far as there is one solution


def random_puzzle(level: str, seed: int) -> list[int]:
    """81 digits, 0 for empty, with one solution."""
    if level not in LEVELS:
        raise InputError(f"there is no level {level!r}; there are: {', '.join(LEVELS)}")
    rng = Random(seed)
    while True:
        puzzle = _dig(rng, LEVELS[level])
        if level in ("easy", "medium") or by_singles(puzzle) == (level == "hard"):
            return puzzle


def _dig(rng: Random, floor: int) -> list[int]:
    solution = solutions([0] * 81, 1, rng)[0]
    puzzle = list(solution)
    cells = rng.sample(range(81), 81)
    for cell in cells:
        if sum(value > 0 for value in puzzle) <= floor:
            break
        puzzle[cell] = 0
        if not is_unique(puzzle):
            puzzle[cell] = solution[cell]
    return puzzle


def by_singles(puzzle: list[int]) -> bool:
    """Whether a puzzle with one solution can be filled in without ever guessing or reasoning about pairs."""
    board = list(puzzle)
    while 0 in board:
        options = {
            cell: set(range(1, 10)) - {board[peer] for peer in PEERS[cell]} for cell in range(81) if not board[cell]
        }
        found = {cell: digits.pop() for cell, digits in options.items() if len(digits) == 1}
        if not found:
            for unit in UNITS:
                for digit in range(1, 10):
                    places = [cell for cell in unit if digit in options.get(cell, ())]
                    if len(places) == 1:
                        found[places[0]] = digit
        if not found:
            return False
        for cell, digit in found.items():
            board[cell] = digit
    return True
