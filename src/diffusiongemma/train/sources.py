"""What tasks draw from: token arrays on disk, and the tokenizer that made them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diffusiongemma.errors import DataError
from diffusiongemma.train.data import bpe

Tokens = npt.NDArray[np.uint16]
Ids = npt.NDArray[np.int64]


class Vocabulary:
    """Text to ids (special tokens spelled out), and which ids begin a line. `bytes` needs no file."""

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches are made in several processes already
        if folder != "bytes" and not (Path(folder) / "tokenizer.json").is_file():
            raise DataError(f"no tokenizer.json in {folder}: give the folder of a tokenizer, or `bytes`")
        self.library = bpe.train([], len(bpe.special_tokens()) + 256) if folder == "bytes" else bpe.load(Path(folder))
        self.library.encode_special_tokens = True
        self.size = self.library.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return ids

    @functools.cached_property
    def line_starts(self) -> npt.NDArray[np.bool_]:
        """[V]: tokens that are a line break and perhaps the indent after it"""
        table = np.zeros(1 << 16, bool)
        for text, id in self.library.get_vocab().items():
            # Byte-level spelling: Ċ is a line feed, č a carriage return.
            table[id] = text[0] in "Ċč" and "Ċ" in text
        return table


def check_tokenizer(data: str, tokenizer: str) -> None:
    """Refuse token arrays of another tokenizer than the recipe's: their numbers would mean other texts."""
    meta = Path(data) / "meta.json"
    if tokenizer == "bytes" or not data or not meta.is_file():
        return
    made_with = json.loads(meta.read_text(encoding="utf-8")).get("tokenizer_sha256")
    own = hashlib.sha256((Path(tokenizer) / "tokenizer.json").read_bytes()).hexdigest()
    if made_with not in (None, own):
        raise DataError(
            f"the token arrays in {data} were made with another tokenizer than {tokenizer}: make them again with "
            "`python -m diffusiongemma.train.data tokenize`"
        )


class Documents:
    """Documents one after another in one array, each closed by eos."""

    def __init__(self, tokens: Tokens, offsets: Ids) -> None:
        self.tokens, self.offsets = tokens, offsets
        self._lines: Ids | None = None

    @classmethod
    @functools.cache
    def open(cls, folder: str, name: str) -> Documents:
        path = Path(folder)
        try:
            tokens = np.load(path / f"{name}.npy", mmap_mode="r")
            return cls(tokens, np.load(path / f"{name}_offsets.npy"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"no token arrays {name} in {path} ({error}): make them with `python -m diffusiongemma.train.data`"
            ) from None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tokens:
        """One document, eos included"""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Ids:
        return np.diff(self.offsets)

    def lines(self, line_starts: npt.NDArray[np.bool_], block: int = 1 << 24) -> Ids:
        """Where lines begin; in blocks, so that no mask of the whole corpus exists, and once for all tasks."""
        if self._lines is None:
            parts = range(0, len(self.tokens), block)
            found = [np.flatnonzero(line_starts[self.tokens[i : i + block]]) + i for i in parts]
            self._lines = np.concatenate([np.empty(0, np.int64), *found])
        return self._lines

    def tail(self, rng: np.random.Generator, count: int) -> Ids:
        """The last `count` tokens up to a random document's eos: what may precede an unrelated prompt."""
        ends = self.offsets[1:]
        usable = int(np.searchsorted(ends, count))
        end = int(ends[rng.integers(min(usable, len(ends) - 1), len(ends))])
        return self.tokens[max(0, end - count) : end].astype(np.int64)
