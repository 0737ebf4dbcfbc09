"""From an archive to clean documents, read in memory: nothing of a package is unpacked to disk or run."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusiongemma.train.data.filters import Kind, clean, kind_of

_MAX_FILE = 4 << 20  # a bigger source file is a table, whatever its name


@dataclass(frozen=True)
class Document:
    """One cleaned file of one package."""

    package: str
    path: str
    kind: Kind
    text: str


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Path without the top folder of an sdist, and bytes, of every file that may be code or docs."""
    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                path = info.filename if archive.suffix == ".whl" else info.filename.partition("/")[2]
                if not info.is_dir() and info.file_size <= _MAX_FILE and kind_of(path):
                    yield path, zipped.read(info)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.removeprefix("./").partition("/")[2]
            if member.isfile() and member.size <= _MAX_FILE and kind_of(path):
                stream = tar.extractfile(member)
                assert stream is not None
                yield path, stream.read()


def extract(archive: Path, package: str, counts: Counter[str]) -> list[Document]:
    """The documents of an archive in path order; `counts` gets the reasons of those left out."""
    documents = []
    for path, data in sorted(members(archive)):
        kind = kind_of(path)
        assert kind is not None
        text, reason = clean(data, kind)
        if reason:
            counts[reason] += 1
        else:
            documents.append(Document(package, path, kind, text))
    return documents


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Gzipped JSON lines, written whole or not at all, the same bytes for the same documents."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as raw, gzip.GzipFile("", "wb", 5, raw, mtime=0) as out:
        for document in documents:
            out.write(json.dumps(asdict(document), ensure_ascii=False).encode() + b"\n")
    part.replace(path)


def read_documents(path: Path) -> Iterator[Document]:
    """What `write_documents` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))
