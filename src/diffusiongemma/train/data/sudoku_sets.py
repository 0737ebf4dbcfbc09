"""Sudoku data: the base set for training, and test sets that our generator did not make.

The base set holds puzzles of every difficulty; symmetry (tasks/sudoku_symmetry.py) makes it endless while training.
No grid of a test set, nor any variant of one, is in the base set: their fingerprints are compared.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffusiongemma.errors import DataError
from diffusiongemma.tasks.sudoku_gen import Boards, Puzzles, concatenate, generate, native, shrink, solve_all
from diffusiongemma.tasks.sudoku_solver import parse, render
from diffusiongemma.tasks.sudoku_symmetry import fingerprint
from diffusiongemma.train.data.packages import Package, fetch, find, index_urls

GYMNASIUM = Package("gymnasium-sudoku", "0.3.5", "MIT License")
CHUNK = 10_000
EVAL_SEED, BASE_SEED = 7_000_000_000, 1_000_000


def run(*command: str, cwd: Path | None = None) -> str:
    """The output of a helper program, with a plain error when it is missing or fails."""
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(f"`{command[0]}` is needed for this set and did not work: {error}") from error


def gymnasium_sudoku(folder: Path) -> list[str]:
    """The boards that come with PyPI's gymnasium-sudoku."""
    archive, _ = fetch(find(GYMNASIUM, index_urls()), folder)
    tables: list[tuple[str, str]] = []
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            tables = [(n, zipped.read(n).decode()) for n in zipped.namelist() if n.endswith("_boards.csv")]
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.name.endswith("_boards.csv") else None
                if stream is not None:
                    tables.append((member.name, stream.read().decode()))
    rows = [row for _, table in sorted(tables) for row in csv.reader(io.StringIO(table)) if row]
    return [render(parse(row[0])) for row in rows if len(row[0]) == 81 and row[0].isdigit()]


def npm_sudoku_gen(count: int = 50) -> list[str]:
    """Puzzles of npm's sudoku-gen, `count` of each of its four difficulties."""
    script = (
        "const {getSudoku}=require('sudoku-gen');const s=new Set();"
        "for(const d of ['easy','medium','hard','expert']){let n=0;"
        f"while(n<{count}){{const p=getSudoku(d).puzzle;if(!s.has(p)){{s.add(p);n++}}}}}}"
        "for(const p of s)console.log(p)"
    )
    with tempfile.TemporaryDirectory() as folder:
        run("npm", "install", "--silent", "--no-save", "--ignore-scripts", "sudoku-gen@1.0.2", cwd=Path(folder))
        return [render(parse(line.replace("-", "."))) for line in run("node", "-e", script, cwd=Path(folder)).split()]


def qqwing(count: int = 300, difficulty: str = "expert") -> list[str]:
    """Puzzles that Debian's qqwing makes and rates."""
    output = run("qqwing", "--generate", str(count), "--difficulty", difficulty, "--csv")
    return [render(parse(line.rstrip(","))) for line in output.splitlines() if len(line.rstrip(",")) == 81]


def own_medium(count: int = 1_000) -> list[str]:
    """Puzzles of 36 to 46 givens, the range of published fine-tunings, from seeds of their own."""
    floors = np.random.default_rng(EVAL_SEED).integers(36, 47, count).astype(np.uint8)
    return [render(row) for row in generate(EVAL_SEED, floors).puzzle.tolist()]


def build_eval(out: Path) -> dict[str, Any]:
    """Writes the test sets that are not there yet, a puzzle a line, each checked to have one solution."""
    out.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], list[str]]] = {
        "gymnasium_sudoku": lambda: gymnasium_sudoku(out),
        "npm_sudoku_gen": npm_sudoku_gen,
        "qqwing_expert": qqwing,
        "own_36_46": own_medium,
    }
    report = {}
    for name, make in makers.items():
        path = out / f"sudoku_{name}.txt"
        if not path.exists():
            lines = list(dict.fromkeys(make()))
            counts, _ = solve_all(np.array([parse(line) for line in lines], np.uint8))
            good = [line for line, count in zip(lines, counts, strict=True) if count == 1]
            path.write_text("\n".join(good) + "\n")
        boards = read_boards(path)
        givens = (boards > 0).sum(1)
        report[name] = {"puzzles": len(boards), "givens": [int(givens.min()), int(givens.max())]}
    return report


def read_boards(path: Path) -> Boards:
    """A file of one puzzle a line as [N, 81]."""
    return np.array([parse(line) for line in path.read_text().split()], np.uint8)


def _floors(rng: np.random.Generator, count: int) -> Boards:
    """How deep to dig: 60% until minimal, 20% to 26..35 givens, 20% to 36..50."""
    draw = rng.random(count)
    floors = np.where(draw < 0.6, 0, np.where(draw < 0.8, rng.integers(26, 36, count), rng.integers(36, 51, count)))
    return floors.astype(np.uint8)


def sparse_puzzles(seeds: Boards, expansions: int, room: int = 40) -> Puzzles:
    """Puzzles with few givens (down to 17), found by exchanging givens from `seeds` on, sparsest first."""
    rng = np.random.default_rng(BASE_SEED)
    waiting: dict[int, list[bytes]] = {}  # by number of givens
    known: dict[bytes, None] = {}

    def add(boards: Boards) -> None:
        for board, givens in zip(boards, (boards > 0).sum(1), strict=True):
            key = board.tobytes()
            if key not in known:
                known[key] = None
                waiting.setdefault(int(givens), []).append(key)

    add(seeds)
    for step in range(expansions):
        levels = sorted(level for level, boards in waiting.items() if boards)
        if not levels:
            break
        # Every second step starts anywhere, so that the search does not stay in one family.
        level = levels[0] if step % 2 else int(rng.choice(levels))
        chosen = waiting[level].pop(int(rng.integers(len(waiting[level]))))
        board = np.frombuffer(chosen, np.uint8).reshape(1, 81)
        for take in (1, 2):
            add(shrink(BASE_SEED + step, board, take, room).puzzle)
    return solve_all(np.frombuffer(b"".join(known), np.uint8).reshape(-1, 81))[1]


def without_grids(base: Puzzles, forbidden: npt.NDArray[np.uint64]) -> Puzzles:
    """The puzzles, each once, whose solution is no variant of a forbidden grid."""
    _, first = np.unique(base.puzzle, axis=0, return_index=True)
    base = base[np.sort(first)]
    marks = [fingerprint(base.solution[i : i + CHUNK]) for i in range(0, len(base), CHUNK)]
    return base[~np.isin(np.concatenate(marks), forbidden)]


def build_base(out: Path, count: int, tests: list[Path], expansions: int = 4_000) -> dict[str, Any]:
    """Writes sudoku.npz: about `count` puzzles that share no grid with the test sets, and sparse ones besides."""
    forbidden = fingerprint(solve_all(np.concatenate([read_boards(path) for path in tests]))[1].solution)
    parts: list[Puzzles] = []
    for i in range(-(-count // CHUNK)):
        parts.append(generate(BASE_SEED + i, _floors(np.random.default_rng(i), CHUNK)))
        if i % 10 == 9:
            print(f"sudoku: {(i + 1) * CHUNK} puzzles", flush=True)
    base = concatenate(parts)
    if expansions and native() is not None:
        givens = (base.puzzle > 0).sum(1)
        base = concatenate([base, sparse_puzzles(base.puzzle[givens <= 21], expansions)])
    base = without_grids(base, forbidden)
    np.savez_compressed(out, puzzle=base.puzzle, solution=base.solution, guesses=base.guesses)
    return report_base(base, out.with_suffix(".json"))


def report_base(base: Puzzles, out: Path) -> dict[str, Any]:
    """What the base set holds, also written as JSON."""
    givens = np.bincount((base.puzzle > 0).sum(1), minlength=82)
    report = {
        "puzzles": len(base),
        "needs_guessing": int((base.guesses > 0).sum()),
        "givens": {str(k): int(n) for k, n in enumerate(givens) if n},
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    return report
