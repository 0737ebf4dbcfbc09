"""Which files of a package become training text, and what of each file is kept; pure functions of path and text."""

from __future__ import annotations

import ast
import hashlib
import re
import string
import warnings
from pathlib import PurePosixPath
from typing import Literal

Kind = Literal["code", "docs"]

MAX_CHARS = 60_000  # a longer document is cut at the last line that fits
MIN_CHARS = 120  # shorter than this there is nothing to learn from

_TEST_DIRS = {"test", "tests", "_test", "_tests", "testdata", "test_data", "testsuite", "unittests", "test_suite"}
_VENDORED_DIRS = {
    "vendor", "vendored", "_vendor", "_vendored", "vendoring", "third_party", "thirdparty", "3rdparty", "extern",
    "_extern", "externals", "external", "node_modules", "site-packages", "patched", "submodules", "subprojects",
}  # fmt: skip
_GENERATED_DIRS = {"__pycache__", "_pb2", "generated", "_generated", "fixtures", "locale", "locales", "egg-info"}
_DOC_DIRS = {"doc", "docs", "documentation", "guide", "guides", "tutorial", "tutorials"}
_NOT_PROSE = re.compile(
    r"^(licen[cs]e|copying|notice|authors|contributors|maintainers|thanks|credits|change(s|log)|history|news|"
    r"release|whats.?new|requirements|sources|top_level|entry_points|cmakelists|constraints|spdx|robots|zip-safe|"
    r"v?\d+\.\d+)",
    re.I,
)
_CHANGELOG_DIRS = {"changelog", "changelogs", "changes", "whatsnew", "release", "releases", "release_notes", "news",
                   "newsfragments", "licenses", "licences", "license"}  # fmt: skip
_GENERATED = re.compile(
    r"(auto-?matically generated|auto-?generated|generated (by|from|using|with|automatically|code|file)|"
    r"do not (edit|modify)|don't edit|DO NOT EDIT)",
    re.I,
)
# Metadata says a package is permissive; a single file may still say otherwise.
_COPYLEFT = re.compile(r"GNU (Lesser |Affero |Library )?(General )?Public|\b[AL]?GPL(v?[23])?\b|Mozilla Public License")
_LICENCE_WORDS = re.compile(r"copyright|licen[cs]e|spdx|all rights reserved|warrant", re.I)
_HEADER = re.compile(r"\A(?:#[^\n]*\n|[ \t]*\n)+")


def kind_of(path: str) -> Kind | None:
    """Whether a file of this path is code, docs or to be left out."""
    pure = PurePosixPath(path)
    folders = {part.lower() for part in pure.parts[:-1]}
    name, suffix = pure.name.lower(), pure.suffix.lower()
    if folders & (_TEST_DIRS | _VENDORED_DIRS | _GENERATED_DIRS) or any(f.endswith(".egg-info") for f in folders):
        return None
    if suffix == ".py":
        stem = pure.stem.lower()
        test = stem.startswith("test_") or stem.endswith(("_test", "_tests")) or stem in {"tests", "test", "conftest"}
        generated = stem.endswith(("_pb2", "_pb2_grpc", "_version")) or stem in {"versioneer", "parsetab", "lextab"}
        return None if test or generated else "code"
    if suffix in {".md", ".rst", ".txt"}:
        if _NOT_PROSE.match(name) or folders & _CHANGELOG_DIRS:
            return None
        if suffix == ".txt" and not (folders & _DOC_DIRS or name.startswith("readme")):
            return None
        return "docs"
    return None


def decode(data: bytes) -> str | None:
    """UTF-8 text with plain newlines, or nothing when it is anything else."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def strip_licence_header(text: str) -> str:
    """Code without the licence comment on top: the same sentences a thousand times teach nothing."""
    shebang = re.match(r"\A#![^\n]*\n", text)
    rest = text[shebang.end() :] if shebang else text
    header = _HEADER.match(rest)
    if header and _LICENCE_WORDS.search(header.group()):
        return rest[header.end() :]
    return text


def rejection(text: str, kind: Kind) -> str | None:
    """Why this text is no training text, or None when it is."""
    if len(text) < MIN_CHARS:
        return "short"
    head = text[:2_000]
    if _COPYLEFT.search(head):
        return "copyleft"
    if kind == "code" and _GENERATED.search(text[:1_000]):
        return "generated"
    lines = text.splitlines()
    longest = max(map(len, lines))
    if longest > 1_000 or (len(text) / len(lines) > 120 and kind == "code"):
        return "minified"
    sample = text[:MAX_CHARS]
    plain = sample.encode("ascii", "ignore")
    if len(sample) - len(plain) > 0.03 * len(sample):
        return "not English"
    letters = len(plain) - len(plain.translate(None, string.ascii_letters.encode()))
    if letters < 0.35 * len(plain.translate(None, string.whitespace.encode())):
        return "table"  # numbers and punctuation: coefficient tables, byte strings, ASCII art
    return None


def parses(text: str) -> bool:
    """Whether today's Python reads this text: infill is graded by that, so all training code passes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def cut(text: str, limit: int = MAX_CHARS) -> str:
    """At most `limit` characters, ending with a whole line, one newline at the end."""
    if len(text) > limit:
        text = text[: text.rfind("\n", 0, limit) + 1] or text[:limit]
    return text.strip("\n") + "\n"


def clean(data: bytes, kind: Kind) -> tuple[str, str | None]:
    """A file's bytes as training text, with the reason why it is refused (then the text is empty)."""
    text = decode(data)
    if text is None:
        return "", "not UTF-8"
    # The licence is judged before its header goes.
    reason = rejection(text, kind)
    if reason is None and kind == "code":
        text = strip_licence_header(text)
        reason = "short" if len(text) < MIN_CHARS else None if parses(text) else "does not parse"
    if reason:
        return "", reason
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return cut(re.sub(r"\n{4,}", "\n\n\n", text)), None


def digest(text: str) -> bytes:
    """A short hash of the exact text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class Deduplicator:
    """Refuses a text that was seen, that differs only in case, spacing or digits, or most of whose lines were seen."""

    def __init__(self, seen_share: float = 0.8) -> None:
        self.seen_share = seen_share
        self._texts: set[bytes] = set()
        self._lines: set[bytes] = set()

    def duplicate(self, text: str) -> bool:
        """Whether `text` repeats what came before; a new text is remembered."""
        key = digest(re.sub(r"[\s\d]+", "", text).lower())
        if key in self._texts:
            return True
        self._texts.add(key)
        # Short lines (`else:`, `return None`) are in every file and say nothing about copying.
        lines = {digest(line) for line in map(str.strip, text.split("\n")) if len(line) >= 20}
        if len(lines) >= 8 and len(lines & self._lines) > self.seen_share * len(lines):
            return True
        self._lines |= lines
        return False
