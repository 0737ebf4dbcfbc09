"""The test set of holes: the same every time, holes of the right shape, licences beside the copies."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from random import Random

import pytest

from diffusiongemma.errors import DataError
from diffusiongemma.train.data import infill_sets
from diffusiongemma.train.data.extract import Document, write_documents
from diffusiongemma.train.data.infill_sets import Lines, build_infill, draw, licence_texts, usable
from diffusiongemma.train.data.packages import Archive, Package

CODE = "import os\n\n\ndef f(a, b):\n    # add\n    total = a + b\n    return total\n\n\nprint(f(1, 2), os.sep)\n"


def document(text: str = CODE, kind: str = "code", path: str = "m.py") -> Document:
    return Document("arrow", path, kind, text)


def test_lines_of_a_document() -> None:
    lines = Lines.of(document())
    spans = [lines.span(i, 1) for i in range(len(lines.starts))]
    assert [CODE[slice(*span)] for span in spans if span] == CODE.split("\n")
    assert CODE[slice(*lines.span(3, 2))] == "def f(a, b):\n    # add"
    assert lines.span(len(lines.starts) - 1, 2) is None


def test_holes_inside_a_line_are_never_all_of_it() -> None:
    lines, rng, found = Lines.of(document()), Random(0), set()
    for _ in range(300):
        hole = lines.hole("inside", 5, rng)
        if hole is not None:
            found.add(CODE[slice(*hole)])
    assert "total = a + b" not in found
    assert {"total", " = a + b", "total = a", " b"} <= found  # the space belongs to the word behind it
    assert all(lines.hole("inside", 1, rng) is None for _ in range(9))  # a blank line


def test_the_draw_is_by_seed_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill_sets, "COUNTS", {"line": 5, "lines": 6, "inside": 7})
    documents = [document(), document(CODE.replace("total", "sum_of_both"), path="n.py")]
    found = draw(documents, len, seed=1)
    assert found == draw(documents, len, seed=1) != draw(documents, len, seed=2)
    assert {kind: len(set(holes)) for kind, holes in found.items()} == infill_sets.COUNTS
    for kind, holes in found.items():
        for d, first, end in holes:
            text = documents[d].text
            assert text[first:end].strip()
            assert len(text[first:end]) < infill_sets.CANVAS[kind]
            assert first > 0
            if kind != "inside":
                assert text[first - 1] == "\n"
                assert text[end : end + 1] in ("\n", "")
    with pytest.raises(DataError, match="only 0 holes"):
        draw(documents, lambda text: 999)


def test_what_is_usable() -> None:
    assert usable(document())
    assert not usable(document(kind="docs"))
    assert not usable(document("print 'python 2'\n"))
    assert not usable(document("x = 1\r\n"))
    assert not usable(document("x = 1\n" * 10_000))


def make_archive(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "arrow-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_build_writes_the_same_bytes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("arrow", "1", "MIT License")
    (tmp_path / "corpus" / "archives").mkdir(parents=True)
    archive = make_archive(tmp_path, {"arrow-1/LICENSE": "Copyright somebody", "arrow-1/docs/LICENSE": "not this"})
    monkeypatch.setattr(infill_sets, "find", lambda package, urls: Archive(archive.name, "", ""))
    monkeypatch.setattr(infill_sets, "fetch", lambda found, folder, pinned: (archive, ""))
    monkeypatch.setattr(infill_sets, "index_urls", list)
    monkeypatch.setattr(infill_sets, "read_packages", lambda: [package])
    monkeypatch.setattr(infill_sets, "COUNTS", {"line": 4, "lines": 2, "inside": 3})

    class Encoder:
        def encode(self, text: str, add_special_tokens: bool):
            return type("Encoding", (), {"ids": list(text)})()

    monkeypatch.setattr(infill_sets.bpe, "load", lambda folder: Encoder())
    write_documents(tmp_path / "corpus" / "heldout.jsonl.gz", [document(), document("words", "docs", "r.md")])
    report = build_infill(tmp_path / "corpus", tmp_path, tmp_path / "a")
    build_infill(tmp_path / "corpus", tmp_path, tmp_path / "b")
    for name in ("infill.jsonl.gz", "infill_licences.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert report == {"documents": 1, "holes": {"line": 4, "lines": 2, "inside": 3}, "packages": {"arrow": 9}}
    row = json.loads(gzip.decompress((tmp_path / "a" / "infill.jsonl.gz").read_bytes()))
    assert (row["package"], row["version"], row["licence"], row["text"]) == ("arrow", "1", "MIT License", CODE)
    assert len(row["holes"]) == 9
    notice = (tmp_path / "a" / "infill_licences.txt").read_text()
    assert "arrow 1: MIT License" in notice
    assert "Copyright somebody" in notice
    assert "not this" not in notice
    make_archive(tmp_path, {"arrow-1/README": "nothing"})
    with pytest.raises(DataError, match="no licence file"):
        licence_texts(package, tmp_path)
