"""Archives of the listed packages: which ones, where the index keeps them, and fetching them once.

`pip download` would run every sdist's build back end just to read its name, so the index page is read directly;
the index itself is whatever pip is configured to use.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urldefrag, urljoin

from diffusiongemma.errors import DataError

# Mid-size, diverse, and no part of any other listed package: the infill evaluation draws from these alone.
HELDOUT = frozenset(
    "arrow boltons cattrs fabric folium httpx lark luigi marshmallow "
    "optuna pendulum pika pypdf structlog tinycss2".split()
)

_PERMISSIVE = re.compile(r"\b(mit|0?bsd|apache|isc|iscl|psf|python software foundation|unlicense|cc0|zlib)\b", re.I)
_COPYLEFT = re.compile(r"\b(a?gpl|lgpl|mpl|epl|cddl|eupl|gnu|mozilla|copyleft)", re.I)


@dataclass(frozen=True)
class Package:
    """One line of packages.tsv."""

    name: str
    version: str
    licence: str
    sha256: str = ""  # of its archive, where the list pins it

    @property
    def heldout(self) -> bool:
        return self.name in HELDOUT


def is_permissive(licence: str) -> bool:
    """Whether a licence string names a permissive licence and no copyleft one."""
    return bool(_PERMISSIVE.search(licence)) and not _COPYLEFT.search(licence)


def read_packages(text: str | None = None) -> list[Package]:
    """The package list, bundled unless its text is given."""
    if text is None:
        text = resources.files(__package__).joinpath("packages.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    bad = ["\t".join(row) for row in rows if len(row) not in (3, 4) or not is_permissive(row[2])]
    if bad:
        raise DataError("packages that are not `name, version, permissive licence[, sha256]`", bad)
    return [Package(*row) for row in rows]


def normalise(name: str) -> str:
    """A project name as indexes and file names compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class _Links(HTMLParser):
    """Collects every href of a simple-index page."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") if tag == "a" else None
        if href:
            self.hrefs.append(href)


@dataclass(frozen=True)
class Archive:
    """A file the index offers for one version."""

    filename: str
    url: str
    sha256: str


def parse_index(html: str, base: str) -> list[Archive]:
    """The files named on one simple-index page."""
    links = _Links()
    links.feed(html)
    found = []
    for href in links.hrefs:
        url, fragment = urldefrag(urljoin(base, href))
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        found.append(Archive(url.rsplit("/", 1)[-1], url, sha256))
    return found


def choose(archives: Iterable[Archive], package: Package) -> Archive | None:
    """The sdist of this version (it has the docs), else a wheel, pure Python before compiled."""
    sdists, wheels = [], []
    for archive in archives:
        stem = archive.filename
        if stem.endswith((".tar.gz", ".zip", ".tar.bz2")):
            stem = re.sub(r"\.(tar\.gz|zip|tar\.bz2)$", "", stem)
            if normalise(stem) == normalise(f"{package.name}-{package.version}"):
                sdists.append(archive)
        elif stem.endswith(".whl"):
            parts = stem.split("-")
            if normalise(parts[0]) == normalise(package.name) and parts[1] == package.version:
                wheels.append(archive)
    wheels.sort(key=lambda a: (not a.filename.endswith("none-any.whl"), "manylinux" not in a.filename, a.filename))
    return next(iter(sdists + wheels), None)


def index_urls() -> list[str]:
    """The indexes pip itself would ask, in its order."""
    from pip._internal.models.index import PyPI  # pip's own default, so that no host is written down here

    urls = []
    for key, default in (("global.index-url", PyPI.simple_url), ("global.extra-index-url", "")):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", key], capture_output=True, text=True, check=False
        )
        urls += (done.stdout.strip() if done.returncode == 0 else default).split()
    return urls


def _get(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*", "Accept-Encoding": "identity"})
    with urllib.request.urlopen(request, timeout=120) as response:
        body: bytes = response.read()
    return body


def find(package: Package, indexes: Sequence[str]) -> Archive:
    """Where the first index that has this version keeps it."""
    reasons = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{normalise(package.name)}/"
        try:
            # A local index has no server to turn the folder into its page.
            html = _get(page + "index.html" if page.startswith("file:") else page).decode("utf-8")
        except (URLError, OSError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        archive = choose(parse_index(html, page), package)
        if archive is not None:
            return archive
        reasons.append("the index does not have this version")
    raise DataError(f"cannot find {package.name} {package.version}", reasons)


def fetch(archive: Archive, folder: Path, pinned: str = "") -> tuple[Path, str]:
    """The archive on disk and its sha256; a file that is already there is not fetched again."""
    path = folder / archive.filename
    if not path.exists():
        body = _get(archive.url)
        part = path.with_name(path.name + ".part")
        part.write_bytes(body)
        part.replace(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if any(stated and digest != stated for stated in (archive.sha256, pinned)):
        path.unlink()
        raise DataError(f"{archive.filename} does not have the hash that is stated for it; run the command again")
    return path, digest
