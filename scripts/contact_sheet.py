"""A sheet of icons that the model draws for held-out names, one seed after another: nothing is picked by hand.

    python scripts/contact_sheet.py --out docs/nano_icons.png                      # the way that the model draws
    python scripts/contact_sheet.py --out docs/nano_icons_diffusion.png --mode diffusion
    python scripts/contact_sheet.py --out docs/nano_icons.png --answers svg.jsonl  # by `dgemma eval svg --output`

The names are the first of the built-in set, the seeds count on from --seed, each has one attempt. An answer that is not
a sound icon is shown as a failure with its first problem; of a drawable one the picture is shown too.
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image, ImageDraw, ImageFont

from diffusiongemma.engine import Engine
from diffusiongemma.errors import InputError
from diffusiongemma.tasks import svg

ICON, PAD, LABEL, HEAD = 96, 14, 30, 40  # pixels: picture, margin around it, text below it, line on top
SCALE = 2  # drawn so many times larger, for screens with fine pixels
INK, FAINT, MUTED, FAULT, FAULT_AREA, RULE = "#111111", "#e5b9b4", "#555555", "#b42318", "#fdecea", "#dddddd"
BATCH = 16
WAYS = {"diffusion": "by diffusion", "ar": "one token after another"}


@dataclass(frozen=True)
class Cell:
    """One answer on the sheet."""

    wish: str
    seed: int
    text: str
    grade: svg.SvgGrade

    @classmethod
    def of(cls, wish: str, seed: int, text: str) -> Cell:
        return cls(wish, seed, text, svg.grade(text))


def answers(engine: Engine, wishes: Sequence[str], seed: int, mode: str, steps: int | None = None) -> list[Cell]:
    """One answer a wish; wish number i gets the seed `seed` + i. The twin takes its best token each time."""
    cells: list[Cell] = []
    options: dict[str, Any] = {"mode": mode} | ({"temperature": 0.0} if mode == "ar" else {})
    options |= {} if steps is None else {"steps": steps}
    for first in range(0, len(wishes), BATCH):
        some = wishes[first : first + BATCH]
        results = engine.generate_batch([svg.prompt(engine, wish) for wish in some], seed=seed + first, **options)
        cells += [Cell.of(wish, result.metrics.seed, result.text) for wish, result in zip(some, results, strict=True)]
    return cells


def kept_answers(path: Path, count: int) -> tuple[str, list[Cell]]:
    """The first answers of a file that `dgemma eval svg --output` wrote, perhaps on a machine without a renderer, and
    how they were made.

    Where a wish was drawn several times, the first attempt.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    if len({row["mode"] for row in rows}) != 1:
        raise InputError(f"{path} must hold answers of one mode: give what one run of `dgemma eval svg --mode …` wrote")
    cells = [Cell.of(row["case"], row["seed"], (row.get("tried") or [row])[0]["text"]) for row in rows]
    return rows[0]["mode"], cells


def sheet(cells: Sequence[Cell], columns: int, title: str) -> Image.Image:
    """All cells in rows, the title above them."""
    width, height = ICON + 2 * PAD, ICON + PAD + LABEL
    rows = -(-len(cells) // columns)
    picture = Image.new("RGB", (columns * width * SCALE, (HEAD + rows * height + PAD) * SCALE), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((PAD * SCALE, HEAD // 2 * SCALE), title, MUTED, _font(13), anchor="lm")
    for i, cell in enumerate(cells):
        left, top = i % columns * width + PAD, HEAD + i // columns * height
        _draw_cell(picture, draw, cell, left * SCALE, top * SCALE)
    return picture


def _draw_cell(picture: Image.Image, draw: ImageDraw.ImageDraw, cell: Cell, left: int, top: int) -> None:
    side = ICON * SCALE
    frame = (left, top, left + side, top + side)
    if not cell.grade.ok:
        draw.rectangle(frame, FAULT_AREA, FAULT, SCALE)
    else:
        draw.rectangle(frame, None, RULE)
    if cell.grade.visible:
        with Image.open(io.BytesIO(svg.render(svg.document(cell.text), side))) as icon:
            at = left + (side - icon.width) // 2, top + (side - icon.height) // 2
            ink = INK if cell.grade.ok else FAINT
            picture.paste(Image.new("RGB", icon.size, ink), at, icon.convert("RGBA").getchannel("A"))
    if not cell.grade.ok:
        # The raw answer is text here, not markup, so nothing of it has to be trusted.
        lines = textwrap.wrap("failed: " + " ".join(cell.grade.problems[0].split())[:80], 19)
        draw.multiline_text((left + 4 * SCALE, top + 4 * SCALE), "\n".join(lines[:5]), FAULT, _font(9))
    font = _font(9)
    name = cell.wish
    while draw.textlength(name, font) > side + PAD * SCALE and len(name) > 2:
        name = name[:-2] + "…"
    draw.text((left, top + side + 2 * SCALE), name, INK, font)
    draw.text((left, top + side + 13 * SCALE), f"seed {cell.seed}", MUTED, font)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size * SCALE)


def main(
    out: Annotated[Path, typer.Option(help="The PNG to write.")],
    model: Annotated[str, typer.Option(help="As for dgemma svg.")] = "nano",
    count: Annotated[int, typer.Option(min=1, max=500)] = 64,
    columns: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the first icon.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="At most (default: what the model's settings say).")] = None,
    mode: Annotated[str | None, typer.Option(help="diffusion or ar (default: as the model draws).")] = None,
    kept: Annotated[Path | None, typer.Option("--answers", help="Run nothing: draw what this file holds.")] = None,
) -> None:
    """Draw the first held-out names, and write one picture of all of them."""
    if kept is not None:
        if mode is not None or steps is not None:
            raise InputError("--mode and --steps have no effect with --answers: they are made already")
        mode, cells = kept_answers(kept, count)
    else:
        wishes = [case.prompt for case in svg.cases()[:count]]
        with Engine.load(model) as engine:
            mode = engine.svg_mode if mode is None else mode
            cells = answers(engine, wishes, seed, mode, steps)
    good, visible = (sum(values) for values in zip(*((c.grade.ok, c.grade.visible) for c in cells), strict=True))
    seeds = f"seeds {cells[0].seed} to {cells[-1].seed}"
    title = (
        f"{model}, {WAYS[mode]} · first {len(cells)} held-out names · {seeds}, one attempt each · {good} sound icons"
    )
    picture = sheet(cells, columns, title)
    # Few shades of a few colours: a palette makes the file a third of the size and looks the same.
    picture.quantize(64, dither=Image.Dither.NONE).save(out, optimize=True)
    print(json.dumps({"file": str(out), "icons": len(cells), "ok": good, "visible": visible}))


if __name__ == "__main__":
    typer.run(main)
