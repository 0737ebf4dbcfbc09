"""Token arrays for training: flat uint16 with offsets, memory-mapped by the trainer.

NAME.npy holds the tokens [T] of all documents, each closed by eos; NAME_offsets.npy [D + 1] says where each begins.
Icons are two such pairs (icon bodies and prompts) and NAME_prompt_of.npy [P], the icon that each prompt asks for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffusiongemma.train.data import bpe
from diffusiongemma.train.data.extract import read_documents
from diffusiongemma.train.data.icons import Icon, prompts, read_icons

EOS = 1
_BATCH = 200  # documents a worker takes at a time

_tokenizer: Any = None  # one for each worker process


def _start(folder: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = bpe.load(folder)


def _encode(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint16], list[int]]:
    """Tokens of some texts, each closed by eos, and their lengths."""
    rows = [[*encoding.ids, EOS] for encoding in _tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.array(list(itertools.chain.from_iterable(rows)), np.uint16), [len(row) for row in rows]


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of a size worth sending to another process."""
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


class Encoder:
    """Encodes streams of texts with `workers` processes (1: in this one)."""

    def __init__(self, tokenizer: Path, workers: int = 1) -> None:
        self.tokenizer, self.workers = tokenizer, workers

    def write(self, texts: Iterable[str], out: Path, name: str) -> dict[str, int]:
        """Writes NAME.npy and NAME_offsets.npy; returns the counts."""
        if self.workers == 1:
            _start(self.tokenizer)
            tokens, lengths = self._gather(map(_encode, batches(texts)))
        else:
            # spawn, because the parent may hold threads of torch or tokenizers
            context = multiprocessing.get_context("spawn")
            with context.Pool(self.workers, _start, (self.tokenizer,)) as pool:
                tokens, lengths = self._gather(pool.imap(_encode, batches(texts)))
        np.save(out / f"{name}.npy", tokens)
        np.save(out / f"{name}_offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        return {"documents": len(lengths), "tokens": len(tokens)}

    @staticmethod
    def _gather(parts: Iterable[tuple[npt.NDArray[np.uint16], list[int]]]) -> tuple[npt.NDArray[np.uint16], list[int]]:
        arrays, lengths = [np.empty(0, np.uint16)], []
        for array, some in parts:
            arrays.append(array)
            lengths += some
        return np.concatenate(arrays), lengths


def write_icons(encoder: Encoder, icons: Sequence[Icon], out: Path, name: str) -> dict[str, int]:
    """Bodies, prompts and whose prompt each is."""
    counts = encoder.write((icon.svg for icon in icons), out, name)
    asked = [(prompt, i) for i, icon in enumerate(icons) for prompt in prompts(icon)]
    counts["prompts"] = encoder.write((prompt for prompt, _ in asked), out, f"{name}_prompts")["documents"]
    np.save(out / f"{name}_prompt_of.npy", np.array([i for _, i in asked], np.int64))
    return counts


def corpus_texts(corpus: Path) -> dict[str, Iterator[str]]:
    """The streams of a corpus folder by name."""

    def stream(split: str, kind: str) -> Iterator[str]:
        return (d.text for d in read_documents(corpus / f"{split}.jsonl.gz") if d.kind == kind)

    return {
        "code": stream("code", "code"),
        "docs": stream("docs", "docs"),
        "heldout": stream("heldout", "code"),
        "heldout_docs": stream("heldout", "docs"),
    }


def tokenize(corpus: Path, icons: Path, tokenizer: Path, out: Path, workers: int = 1) -> dict[str, Any]:
    """All streams of the corpus and the icons as arrays under `out`, with the counts in meta.json."""
    out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer, workers)
    report: dict[str, Any] = {name: encoder.write(texts, out, name) for name, texts in corpus_texts(corpus).items()}
    for split in ("train", "test"):
        rows = list(read_icons(icons / f"icons_{split}.jsonl.gz"))
        report[f"icons_{split}"] = write_icons(encoder, rows, out, f"icons_{split}")
    # A trainer refuses arrays of another tokenizer than its own.
    report["tokenizer_sha256"] = hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    (out / "meta.json").write_text(json.dumps(report, indent=1) + "\n")
    return report
