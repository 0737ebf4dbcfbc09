"""Icons with their names as prompts: permissive sets of npm's @iconify/json, drawn in one colour, short.

A name such as `bell-off-outline` becomes the words `bell off` and the style `outline`. Icons are split by the words,
because most of them are style variants of others: a test name is new in every style and in every set.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from diffusiongemma.errors import DataError

ICONIFY = "@iconify/json@2.2.535"
TAG_SOURCES = ("@tabler/icons@3.51.0", "lucide-static@1.62.0", "@phosphor-icons/core@2.1.1")
LICENCES = frozenset({"MIT", "Apache-2.0", "ISC", "CC0-1.0", "Unlicense", "BSD-3-Clause", "BSD-2-Clause"})
BRAND_CATEGORIES = frozenset({"Logos", "Programming"})  # trademarks, whatever the licence of the drawing
MAX_BODY = 1_024
TEST_SHARE = 2  # per cent of the names

# Words of a name that say how the icon is drawn, and how a prompt says it.
STYLES = {
    "outline": "outline", "outlined": "outline", "line": "outline", "linear": "outline", "stroke": "outline",
    "filled": "filled", "fill": "filled", "solid": "filled", "sharp": "sharp", "rounded": "rounded", "round": "rounded",
    "thin": "thin", "light": "light", "bold": "bold", "duotone": "duotone", "twotone": "duotone", "regular": "regular",
    "broken": "broken", "bulk": "duotone", "baseline": "filled",
}  # fmt: skip
_SETS = {"icon-park-outline": "outline", "icon-park-solid": "filled", "icon-park-twotone": "duotone",
         "heroicons-outline": "outline", "heroicons-solid": "filled", "bxs": "filled", "uis": "filled", "uit": "thin",
         "material-symbols-light": "light"}  # fmt: skip
_PIXELS = frozenset("10 12 14 15 16 18 20 24 28 32 48".split())
_SHAPES = frozenset({"path", "g", "circle", "ellipse", "rect", "line", "polyline", "polygon"})
_TAG = re.compile(r"</?([A-Za-z][\w:-]*)")
_PAINT = re.compile(r'\b(?:fill|stroke|color)="([^"]*)"')
_FORBIDDEN = re.compile(r'\b(?:id|style|class|href|mask|clip-path|filter|xlink:href)="|url\(|&|<!')


@dataclass(frozen=True)
class Icon:
    """One drawing: `words` is what it shows, `styles` how; `tags` are other words for it."""

    set: str
    name: str
    words: str
    styles: tuple[str, ...]
    tags: tuple[str, ...]
    svg: str


def monochrome(body: str) -> bool:
    """Whether a body is plain shapes painted in the current colour alone."""
    if len(body.encode()) > MAX_BODY or _FORBIDDEN.search(body) or not body.isascii():
        return False
    if not set(_TAG.findall(body)) <= _SHAPES:
        return False
    return set(_PAINT.findall(body)) <= {"currentColor", "none"} and "currentColor" in body


def canonical(body: str, left: float, top: float, width: float, height: float) -> str:
    """The short form that is learned: a viewBox and the body, without the namespace (a file gets it when written)."""
    box = " ".join(f"{value:g}" for value in (left, top, width, height))
    return f'<svg viewBox="{box}">{" ".join(body.split())}</svg>'


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """The words and the styles of a kebab name; a pixel size (`-24-`) is dropped."""
    parts = [part for part in re.split(r"[-_]+", name.lower()) if part]
    styles: list[str] = []
    while len(parts) > 1:
        if parts[-1] in STYLES:
            styles.insert(0, STYLES[parts.pop()])
        elif parts[-1] in _PIXELS:
            parts.pop()
        elif parts[0] in {"outline", "baseline", "round", "sharp", "twotone", "solid"}:
            styles.append(STYLES[parts.pop(0)])
        else:
            break
    return " ".join(parts), tuple(dict.fromkeys(styles))


def drawn_style(set_name: str, body: str, siblings: set[str]) -> tuple[str, ...]:
    """The style when the name does not say it: the set's, or what its sibling is not, or an outline when stroked."""
    if set_name in _SETS:
        return (_SETS[set_name],)
    for other, own in (("outline", "filled"), ("filled", "outline")):
        if other in siblings:
            return (own,)
    return ("outline",) if 'stroke="currentColor"' in body and 'fill="currentColor"' not in body else ()


def in_test(words: str) -> bool:
    """Whether a name belongs to the test split: decided by its words, whatever their order, number or plural."""
    stem = " ".join(sorted(word.rstrip("s") for word in words.split() if not word.isdigit())) or words
    return int.from_bytes(hashlib.blake2b(stem.encode(), digest_size=4).digest(), "little") % 100 < TEST_SHARE


def prompts(icon: Icon) -> list[str]:
    """What a user might type for an icon, the canonical form (words, styles) first."""
    canonical_prompt = ", ".join([icon.words, *icon.styles])
    variants = [canonical_prompt, icon.words]
    if icon.tags:
        rng = Random(icon.set + icon.name)
        chosen = rng.sample(icon.tags, min(2, len(icon.tags)))
        variants += [", ".join([icon.words, *chosen, *icon.styles]), ", ".join([chosen[0], *icon.styles])]
    return list(dict.fromkeys(variants))


def read_set(data: dict[str, Any], tags: dict[str, tuple[str, ...]]) -> Iterator[Icon]:
    """The usable icons of one set's JSON."""
    prefix = data["prefix"]
    other_names: dict[str, list[str]] = {}
    for alias, target in data.get("aliases", {}).items():
        if set(target) == {"parent"}:  # no flip or turn: the same drawing under another name
            other_names.setdefault(target["parent"], []).append(split_name(alias)[0])
    siblings: dict[str, set[str]] = {}
    for name in data["icons"]:
        words, styles = split_name(name)
        siblings.setdefault(words, set()).update(styles)
    for name, icon in sorted(data["icons"].items()):
        body = icon["body"]
        words, styles = split_name(name)
        if icon.get("hidden") or not monochrome(body) or re.match(r"(brand|logos?)\b", words):
            continue
        size = [icon.get(key, data.get(key, default)) for key, default in
                (("left", 0), ("top", 0), ("width", 16), ("height", 16))]  # fmt: skip
        extra = [*tags.get(words, ()), *(other for other in other_names.get(name, ()) if not other.startswith(prefix))]
        # A tag that is a test name would show its drawing to the training.
        usable = tuple(dict.fromkeys(tag for tag in extra if tag != words and in_test(tag) == in_test(words)))
        shown = styles or drawn_style(prefix, body, siblings[words])
        yield Icon(prefix, name, words, shown, usable, canonical(body, *size))


def npm_pack(spec: str, folder: Path) -> Path:
    """A package's tarball from the npm registry, fetched once."""
    stem, _, version = spec.rpartition("@")
    path = folder / f"{stem.lstrip('@').replace('/', '-')}-{version}.tgz"
    if not path.exists():
        try:
            subprocess.run(["npm", "pack", "--silent", spec], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(f"`npm pack {spec}` did not work; npm is needed for the icons: {error}") from error
    return path


def read_tags(folder: Path) -> dict[str, tuple[str, ...]]:
    """Words to tags, from the three sets that publish tags."""
    found: dict[str, list[str]] = {}
    for spec in TAG_SOURCES:
        with tarfile.open(npm_pack(spec, folder)) as tar:
            for member in ("package/icons.json", "package/tags.json", "package/dist/index.mjs"):
                try:
                    stream = tar.extractfile(member)
                except KeyError:
                    continue
                assert stream is not None
                for name, tags in _parse_tags(stream.read().decode()):
                    clean = [str(tag).lower().replace("-", " ").strip() for tag in tags]
                    found.setdefault(split_name(name)[0], []).extend(tag for tag in clean if re.match(r"[a-z]", tag))
    return {words: tuple(dict.fromkeys(tags)) for words, tags in found.items()}


def _parse_tags(text: str) -> Iterator[tuple[str, list[Any]]]:
    """Name and tags from Tabler's and Lucide's JSON or from Phosphor's module."""
    if text.startswith("{"):
        for name, value in json.loads(text).items():
            yield name, value if isinstance(value, list) else value.get("tags", [])
        return
    for name, tags in re.findall(r'name:\s*"([a-z0-9-]+)".*?tags:\s*\[(.*?)\]', text, re.S):
        yield name, re.findall(r'"([^"]+)"', tags)


def build_icons(out: Path) -> dict[str, Any]:
    """Writes icons_train.jsonl.gz, icons_test.jsonl.gz and the manifest of their sets."""
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    tags = read_tags(raw)
    archive = npm_pack(ICONIFY, raw)
    icons: list[Icon] = []
    sets: dict[str, Any] = {}
    left_out: Counter[str] = Counter()
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if re.match(r"package/json/.*\.json$", member.name) else None
            if stream is None:
                continue
            data = json.load(stream)
            info = data["info"]
            licence = info["license"].get("spdx", "")
            if licence not in LICENCES or info.get("palette") or info.get("category") in BRAND_CATEGORIES:
                left_out[licence if licence not in LICENCES else "colour or brands"] += 1
                continue
            kept = list(read_set(data, tags))
            icons += kept
            sets[data["prefix"]] = {"name": info["name"], "licence": licence, "version": info.get("version", ""),
                                    "author": info.get("author", {}).get("name", ""), "icons": len(kept)}  # fmt: skip
    # Test icons first, so that of two names for one drawing the training loses its copy.
    icons.sort(key=lambda icon: (not in_test(icon.words), icon.set, icon.name))
    seen: set[str] = set()
    splits: dict[str, list[Icon]] = {"train": [], "test": []}
    for icon in icons:
        if icon.svg not in seen:
            seen.add(icon.svg)
            splits["test" if in_test(icon.words) else "train"].append(icon)
    for name, rows in splits.items():
        with (out / f"icons_{name}.jsonl.gz").open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as zipped:
            zipped.writelines(json.dumps(asdict(icon)).encode() + b"\n" for icon in rows)
    report = {
        "source": ICONIFY,
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "tags": list(TAG_SOURCES),
        "icons": {name: len(rows) for name, rows in splits.items()},
        "names": {name: len({icon.words for icon in rows}) for name, rows in splits.items()},
        "bytes": sum(len(icon.svg) for rows in splits.values() for icon in rows),
        "left_out_sets": dict(left_out),
        "sets": dict(sorted(sets.items())),
    }
    (out / "manifest.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def parse_icon(line: str) -> Icon:
    """An icon from its line of JSON."""
    row = json.loads(line)
    return Icon(**{**row, "styles": tuple(row["styles"]), "tags": tuple(row["tags"])})


def read_icons(path: Path) -> Iterator[Icon]:
    """What `build_icons` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(parse_icon, lines)
