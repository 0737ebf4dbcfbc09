"""Cases from files: the built-in sets, a user's own lines, and a part of them by seed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import DataError, InputError

BUILT_IN = ASSETS / "eval"
T = TypeVar("T")


def take(cases: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """All cases, or `limit` of them drawn by the seed, in their order."""
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    if limit is None or limit >= len(cases):
        return list(cases)
    return [cases[i] for i in sorted(Random(seed).sample(range(len(cases)), limit))]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank with their numbers; `.gz` is unpacked."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def read_json_lines(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects with at least these fields, all texts."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in fields):
            raise DataError(f"{path}, line {number}: a JSON object with the texts {', '.join(fields)} is needed")
        yield number, row
