"""The built-in wishes of `dgemma eval svg`: names of the icons' test split, each name once, drawn by a fixed seed.

Only names are shipped. The true drawings stay behind (their licences ask for notices); what the grader says of them is
reported, because a grader that refuses real icons would be wrong.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

from diffusiongemma.errors import DataError
from diffusiongemma.tasks.svg import grade
from diffusiongemma.train.data.icons import Icon, prompts, read_icons

COUNT, SEED = 500, 4


def choose(icons: list[Icon], count: int = COUNT, seed: int = SEED) -> list[Icon]:
    """`count` icons with different words; of the icons with the same words, one by chance."""
    rng = Random(seed)
    by_words: dict[str, list[Icon]] = {}
    for icon in sorted(icons, key=lambda icon: (icon.words, icon.set, icon.name)):
        by_words.setdefault(icon.words, []).append(icon)
    if len(by_words) < count:
        raise DataError(f"{count} names are wanted, and the test split has only {len(by_words)}")
    return [rng.choice(by_words[words]) for words in rng.sample(sorted(by_words), count)]


def build_svg_set(icons: Path, out: Path, count: int = COUNT) -> dict[str, Any]:
    """Writes the wishes as gzip JSON lines; the report counts the true drawings that pass the grader."""
    if not icons.is_file():
        raise DataError(f"{icons} is not there: build it with `python -m diffusiongemma.train.data icons`")
    chosen = choose(list(read_icons(icons)), count)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:
        for icon in chosen:
            row = {"id": f"{icon.set}:{icon.name}", "prompt": prompts(icon)[0]}
            zipped.write(json.dumps(row).encode() + b"\n")
    grades = [grade(icon.svg) for icon in chosen]
    refused = {f"{i.set}:{i.name}": g.problems for i, g in zip(chosen, grades, strict=True) if not g.ok}
    return {"wishes": len(chosen), "true_drawings_passed": len(chosen) - len(refused), "refused": refused}
