"""The whole data set in few compressed files, for a training machine that takes only small uploads.

Token arrays under xz are a little smaller than text under xz, and need no tokenizer there. Puzzles are sent without
their solutions, four bits a cell: a solver is quicker than the wire.
"""

from __future__ import annotations

import io
import json
import lzma
import multiprocessing
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from diffusiongemma.errors import DataError
from diffusiongemma.tasks.sudoku_gen import Boards, Puzzles, concatenate, solve_all

PART_BYTES = 55 << 20
# uint16 data: the position's lowest bit tells a token's low byte from its high one.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}]
_PIECE = 32 << 20  # items of an array in one file: 64 MiB of tokens, as far as this preset looks back
_ORDER = ("sudoku", "meta", "heldout", "icons_test", "icons_train", "code", "docs")  # what training wants first


def pack_boards(boards: Boards) -> bytes:
    """Boards [N, 81] at four bits a cell."""
    padded = np.concatenate([boards, np.zeros((len(boards), 1), np.uint8)], axis=1)  # [N, 82]
    packed: Boards = (padded[:, 0::2] << 4) | padded[:, 1::2]
    return packed.tobytes()


def unpack_boards(data: bytes) -> Boards:
    """What `pack_boards` packed."""
    halves = np.frombuffer(data, np.uint8).reshape(-1, 41)
    padded = np.empty((len(halves), 82), np.uint8)
    padded[:, 0::2], padded[:, 1::2] = halves >> 4, halves & 15
    return np.ascontiguousarray(padded[:, :81])


def _array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _cut(tokens: Path, name: str, most: int) -> dict[str, int]:
    """How many items of each array of a text make the whole documents that fit into `most` tokens"""
    offsets = np.load(tokens / f"{name}_offsets.npy")
    documents = int(np.searchsorted(offsets, most, side="right")) - 1
    if documents < 1 < len(offsets):
        raise DataError(f"the first document of {name} has {offsets[1]:,} tokens, which is more than {most:,}")
    return {name: int(offsets[documents]), f"{name}_offsets": documents + 1}


def _files(tokens: Path, sudoku: Path, most: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """Names with a running number, and what each holds."""
    with np.load(sudoku) as arrays:
        yield "sudoku.boards.000", pack_boards(arrays["puzzle"])
    cut: dict[str, int] = {}
    for name, limit in most.items():
        cut |= _cut(tokens, name, limit)
    meta = (tokens / "meta.json").read_bytes()
    if cut:
        told = {name: {"documents": cut[f"{name}_offsets"] - 1, "tokens": cut[name]} for name in most}
        meta = json.dumps(json.loads(meta) | told, indent=1).encode() + b"\n"
    yield "meta.json.000", meta
    for path in sorted(tokens.glob("*.npy"), key=lambda p: (_rank(p.stem), p.stem)):
        array = np.load(path, mmap_mode="r")[: cut.get(path.stem)]
        if path.stem.endswith("_offsets"):
            array = np.diff(array, prepend=0)  # lengths are small numbers, offsets are not
        for number, start in enumerate(range(0, len(array), _PIECE)):
            yield f"{path.stem}.npy.{number:03}", _array_bytes(array[start : start + _PIECE])


def _rank(stem: str) -> int:
    return next((rank for rank, name in enumerate(_ORDER) if stem.startswith(name)), len(_ORDER))


def pack(tokens: Path, sudoku: Path, out: Path, most: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Writes token arrays and puzzles into part folders of at most PART_BYTES each.

    `most` has, by name (code, docs), how many tokens of a text are packed: whole documents, from the first on.
    """
    shutil.rmtree(out, ignore_errors=True)  # parts of an older data set must not mix with these
    parts: list[dict[str, int]] = [{}]
    for name, data in _files(tokens, sudoku, most or {}):
        packed = lzma.compress(data, format=lzma.FORMAT_XZ, filters=_FILTERS)
        if sum(parts[-1].values()) + len(packed) > PART_BYTES:
            parts.append({})
        folder = out / f"part{len(parts)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.xz").write_bytes(packed)
        parts[-1][name] = len(packed)
        print(f"{folder.name}/{name}.xz: {len(data):,} -> {len(packed):,}", flush=True)
    report = {"parts": parts, "bytes": [sum(part.values()) for part in parts]}
    (out / "parts.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _read(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


def _solve(boards: Boards) -> Puzzles:
    counts, puzzles = solve_all(boards)
    assert (counts == 1).all()
    return puzzles


def unpack(folders: list[Path], out: Path, workers: int) -> list[str]:
    """Token arrays, meta.json and sudoku.npz, from whichever part folders are there; returns the file names."""
    files: dict[str, list[Path]] = {}
    for path in sorted((p for folder in folders for p in folder.rglob("*.xz")), key=lambda p: p.name):
        files.setdefault(re.sub(r"\.\d+\.xz$", "", path.name), []).append(path)
    if not files:
        raise DataError(f"no .xz files in {', '.join(map(str, folders))}")
    out.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        running = {name: pool.map_async(_read, paths, 1) for name, paths in files.items()}
        for name, result in running.items():
            pieces = result.get()
            if name == "sudoku.boards":
                boards = np.concatenate(list(map(unpack_boards, pieces)))
                solved = concatenate(pool.map(_solve, np.array_split(boards, 8 * workers)))
                np.savez(out / "sudoku.npz", **asdict(solved))
            elif name.endswith(".npy"):
                array = np.concatenate([np.load(io.BytesIO(piece)) for piece in pieces])
                np.save(out / name, np.cumsum(array) if name.endswith("_offsets.npy") else array)
            else:
                (out / name).write_bytes(pieces[0])
    return sorted(files)
