"""Sudoku puzzles with one solution, easy to minimal: a full random grid, dug while its solution stays the only one.

`generate` uses sudoku_gen.c where a C compiler is at hand (about 2,000 minimal puzzles a second and core) and Python
where not (about 40); both are deterministic in their seed, each in its own way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from diffusiongemma.tasks.sudoku_solver import is_unique, solutions

Boards = npt.NDArray[np.uint8]  # [N, 81], 0 for empty


@dataclass(frozen=True)
class Puzzles:
    """Puzzles beside their solutions and how many guesses a solver with singles alone needs (0: none)."""

    puzzle: Boards
    solution: Boards
    guesses: npt.NDArray[np.uint16]  # [N]

    def __len__(self) -> int:
        return len(self.puzzle)

    def __getitem__(self, index: slice | npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Puzzles:
        return Puzzles(self.puzzle[index], self.solution[index], self.guesses[index])


def concatenate(parts: list[Puzzles]) -> Puzzles:
    """Several sets as one."""
    return Puzzles(
        np.concatenate([part.puzzle for part in parts]),
        np.concatenate([part.solution for part in parts]),
        np.concatenate([part.guesses for part in parts]),
    )


def _instructions() -> bytes:
    """What this processor can run. A folder may outlive a machine, and what was compiled for another dies."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_bytes().splitlines():
            if line.startswith((b"flags", b"Features")):
                return line
    return platform.machine().encode()


@functools.cache
def native() -> ctypes.CDLL | None:
    """The C library, compiled on first use into the temporary folder; None without a working compiler, or where nothing
    in that folder may be run."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = resources.files(__package__).joinpath("sudoku_gen.c").read_bytes()
    folder = Path(tempfile.gettempdir()) / f"dgemma-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        return None  # somebody else's folder may hold somebody else's code
    library = folder / f"sudoku-{hashlib.sha256(source + _instructions()).hexdigest()[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}.so")
        command = [compiler, "-x", "c", "-O3", "-shared", "-fPIC", "-o", str(part), "-"]
        tries = ([*command, "-march=native"], command)  # not every compiler knows its own machine
        if all(subprocess.run(t, input=source, capture_output=True, check=False).returncode for t in tries):
            return None
        part.replace(library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    byte_p, word_p = ctypes.c_void_p, ctypes.c_void_p
    loaded.sudoku_generate.argtypes = [ctypes.c_uint64, ctypes.c_long, byte_p, byte_p, byte_p, word_p]
    loaded.sudoku_generate.restype = None
    loaded.sudoku_solve.argtypes = [byte_p, ctypes.c_long, byte_p, word_p]
    loaded.sudoku_solve.restype = ctypes.c_long
    loaded.sudoku_shrink.argtypes = [
        ctypes.c_uint64, byte_p, ctypes.c_int, ctypes.c_long, ctypes.c_long, byte_p, byte_p
    ]  # fmt: skip
    loaded.sudoku_shrink.restype = ctypes.c_long
    return loaded


def _python_puzzle(rng: Random, floor: int) -> tuple[list[int], list[int]]:
    """One puzzle and its solution, dug down to `floor` givens or until minimal."""
    solution = solutions([0] * 81, 1, rng)[0]
    puzzle = list(solution)
    cells = list(range(81))
    rng.shuffle(cells)
    givens = 81
    for cell in cells:
        if givens <= floor:
            break
        puzzle[cell] = 0
        if is_unique(puzzle):
            givens -= 1
        else:
            puzzle[cell] = solution[cell]
    return puzzle, solution


def generate(seed: int, floors: Boards) -> Puzzles:
    """One puzzle for each entry of `floors` [N]: dug to that many givens, or until minimal where that comes first."""
    count = len(floors)
    floors = np.ascontiguousarray(floors, np.uint8)
    made = Puzzles(np.zeros((count, 81), np.uint8), np.zeros((count, 81), np.uint8), np.zeros(count, np.uint16))
    library = native()
    if library is not None:
        arrays = (floors, made.puzzle, made.solution, made.guesses)
        library.sudoku_generate(seed, count, *(array.ctypes.data for array in arrays))
        return made
    rng = Random(seed)
    for i, floor in enumerate(floors):
        made.puzzle[i], made.solution[i] = _python_puzzle(rng, int(floor))
    return made


def solve_all(puzzles: Boards, limit: int = 2) -> tuple[npt.NDArray[np.int64], Puzzles]:
    """For puzzles [N, 81]: the number of solutions of each up to `limit`, and the puzzles with their first solution."""
    puzzles = np.ascontiguousarray(puzzles, np.uint8)
    counts = np.zeros(len(puzzles), np.int64)
    made = Puzzles(puzzles, np.zeros_like(puzzles), np.zeros(len(puzzles), np.uint16))
    library = native()
    for i, board in enumerate(puzzles):
        if library is not None:
            guesses = ctypes.c_long()
            row = made.solution[i]
            counts[i] = library.sudoku_solve(board.ctypes.data, limit, row.ctypes.data, ctypes.addressof(guesses))
            made.guesses[i] = min(guesses.value, 65_535)
        else:
            found = solutions(board.tolist(), limit)
            counts[i] = len(found)
            if found:
                made.solution[i] = found[0]
    return counts, made


def shrink(seed: int, puzzles: Boards, take: int = 2, room: int = 64, limit: int = 500) -> Puzzles:
    """Minimal puzzles near the given ones [N, 81]: `take` givens (1 or 2) exchanged for one other. Needs C."""
    library = native()
    assert library is not None, "shrinking enumerates millions of boards: only with a C compiler"
    found = []
    boards, solved = np.zeros((room, 81), np.uint8), np.zeros((room, 81), np.uint8)
    for i, board in enumerate(np.ascontiguousarray(puzzles, np.uint8)):
        arrays = (boards.ctypes.data, solved.ctypes.data)
        made = library.sudoku_shrink(seed + i, board.ctypes.data, take, limit, room, *arrays)
        found.append(boards[:made].copy())
    unique = np.unique(np.concatenate([np.zeros((0, 81), np.uint8), *found]), axis=0)
    return solve_all(unique)[1]
