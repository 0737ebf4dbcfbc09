"""The test set for holes in code: lines, blocks and parts of lines of the held-out packages, drawn by a seed.

A document is kept once, whole, with the places of its holes, because a filling is judged by whether the whole file
still parses. The licences of the packages ask for their texts beside the copies: they are gathered in one file.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import tarfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from diffusiongemma.errors import DataError
from diffusiongemma.tasks.format import BLOCK_CANVAS, INFILL_CANVAS
from diffusiongemma.train.data import bpe
from diffusiongemma.train.data.extract import Document, read_documents
from diffusiongemma.train.data.packages import Package, fetch, find, index_urls, read_packages

COUNTS = {"line": 1_000, "lines": 500, "inside": 500}
CANVAS = {"line": INFILL_CANVAS, "lines": BLOCK_CANVAS, "inside": INFILL_CANVAS}
MAX_LINES = 8
MAX_DOCUMENT = 32_000  # characters: nine of ten files, two thirds of the text
_PIECE = re.compile(r"[ \t]*(?:\w+|[^\w\s]+)")  # a word or signs with the space before: where a cursor would stop
_LICENCE = re.compile(r"[^/]+/(licen[cs]e|copying|notice)[^/]*", re.I)

Hole = tuple[int, int]  # first and end, in characters of the document


@dataclass(frozen=True)
class Lines:
    """A document and where its lines begin."""

    document: Document
    starts: tuple[int, ...]

    @classmethod
    def of(cls, document: Document) -> Lines:
        breaks = [at + 1 for at, letter in enumerate(document.text) if letter == "\n"]
        return cls(document, (0, *breaks))

    def span(self, first: int, count: int) -> Hole | None:
        """`count` lines without the break at their end; None if there are not so many."""
        starts = (*self.starts, len(self.document.text) + 1)
        if first + count >= len(starts):
            return None
        return starts[first], starts[first + count] - 1

    def hole(self, kind: str, line: int, rng: Random) -> Hole | None:
        """A hole of this kind that begins in this line; None if chance gave none."""
        span = self.span(line, rng.randint(2, MAX_LINES) if kind == "lines" else 1)
        if span is None or kind != "inside":
            return span
        words = self.document.text[slice(*span)]
        indent = span[0] + len(words) - len(words.lstrip())
        pieces = [(max(indent, span[0] + p.start()), span[0] + p.end()) for p in _PIECE.finditer(words)]
        if len(pieces) < 3:
            return None
        first = rng.randrange(len(pieces))
        last = rng.randrange(first, len(pieces))
        whole = (first, last) == (0, len(pieces) - 1)
        return None if whole else (pieces[first][0], pieces[last][1])


def draw(documents: Sequence[Document], length: Callable[[str], int], seed: int = 0) -> dict[str, list[Any]]:
    """Holes by document index: kind, first, end. `length` counts the tokens of a filling."""
    rng = Random(seed)
    all_lines = [Lines.of(document) for document in documents]
    # The first line of a file follows no line break, so it is no hole.
    places = [(d, line) for d, lines in enumerate(all_lines) for line in range(1, len(lines.starts))]
    if not places:
        raise DataError("the held-out packages have no file that holes could be made in")
    found: dict[str, list[Any]] = {}
    for kind, count in COUNTS.items():
        chosen: dict[tuple[int, Hole], None] = {}
        for _ in range(200 * count):
            d, line = places[rng.randrange(len(places))]
            hole = all_lines[d].hole(kind, line, rng)
            if hole is None:
                continue
            target = documents[d].text[slice(*hole)]
            lead = "" if kind == "inside" else "\n"
            if target.strip() and length(lead + target) < CANVAS[kind]:
                chosen.setdefault((d, hole))
            if len(chosen) == count:
                break
        else:
            raise DataError(f"only {len(chosen)} holes of kind {kind} were found, {count} are wanted")
        found[kind] = [(d, *hole) for d, hole in chosen]
    return found


def usable(document: Document) -> bool:
    """Python of a size worth shipping that this Python can parse."""
    if document.kind != "code" or len(document.text) > MAX_DOCUMENT or "\r" in document.text:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(document.text)
    except (SyntaxError, ValueError):
        return False
    return True


def licence_texts(package: Package, folder: Path) -> str:
    """What the package's own archive says about its licence."""
    path, _ = fetch(find(package, index_urls()), folder, package.sha256)
    texts = []
    with tarfile.open(path) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            stream = tar.extractfile(member) if member.isfile() and _LICENCE.fullmatch(member.name) else None
            if stream is not None:
                texts.append(stream.read().decode().strip())
    if not texts:
        raise DataError(f"{path.name} holds no licence file")
    title = f"{package.name} {package.version}: {package.licence}"
    return "\n\n".join(["=" * 80, title, "=" * 80, *texts])


def build_infill(corpus: Path, tokenizer: Path, out: Path, seed: int = 0) -> dict[str, Any]:
    """Writes infill.jsonl.gz and infill_licences.txt; the same bytes for the same corpus."""
    documents = [document for document in read_documents(corpus / "heldout.jsonl.gz") if usable(document)]
    encoder = bpe.load(tokenizer)
    holes = draw(documents, lambda text: len(encoder.encode(text, add_special_tokens=False).ids), seed)
    by_document: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for kind, some in holes.items():
        for d, first, end in some:
            by_document[d].append({"kind": kind, "first": first, "end": end})
    packages = {package.name: package for package in read_packages() if package.heldout}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "infill.jsonl.gz").open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as zipped:
        for d in sorted(by_document):
            document = documents[d]
            package = packages[document.package]
            row = {
                "package": package.name, "version": package.version, "licence": package.licence,
                "path": document.path, "holes": sorted(by_document[d], key=lambda hole: hole["first"]),
                "text": document.text,
            }  # fmt: skip
            zipped.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    used = sorted({documents[d].package for d in by_document})
    archives = corpus / "archives"
    archives.mkdir(exist_ok=True)
    texts = [licence_texts(packages[name], archives) for name in used]
    (out / "infill_licences.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    share = Counter(documents[d].package for some in holes.values() for d, _, _ in some)
    return {"documents": len(by_document), "holes": {k: len(v) for k, v in holes.items()}, "packages": dict(share)}
