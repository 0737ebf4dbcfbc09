"""Record a real run as an animated SVG for the README: the live canvas of `dgemma run`, or a board of `dgemma sudoku`.

    python scripts/record_canvas.py "How does diffusion write?" --model nano --out canvas.svg
    python scripts/record_canvas.py expert --sudoku --seed 4 --columns 54 --out docs/canvas.svg

The pictures are those of the terminal (`cli/canvas.py`, `cli/board.py`), one a step. A line that stays the same for
several steps is stored once, with the time it is visible. The panel has its own background, so it reads on light and
on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.sax.saxutils import escape

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from diffusiongemma.cli.board import GIVEN, REPAIRED, WRONG, Board, legend
from diffusiongemma.cli.canvas import CONTROL, NOISE, SHADES, describe, render, sanitise
from diffusiongemma.cli.show import metrics_line
from diffusiongemma.cli.sudoku import read_puzzle
from diffusiongemma.engine import Commit, Draft, End, Engine, Event
from diffusiongemma.tasks.evaluation import Variant
from diffusiongemma.tasks.sudoku import SudokuBoard

MAX_BYTES = 300_000
SETTLE, HOLD = 7.0, 4.0  # seconds for all steps together, and for the finished text
FASTEST, SLOWEST = 0.12, 0.8  # a step
CELL, LINE, FONT, SMALL, MARGIN, BAR = 8.4, 20, 14, 12, 18, 36
COLOURS = {"": "#e6edf3", NOISE: "#5f6873", CONTROL: "#7d8590"} | {shade: shade for shade in SHADES}
COLOURS |= {GIVEN: "#ffffff", REPAIRED: "#f0883e", WRONG: "#f85149"}
CLASSES = dict(zip(COLOURS, "tncabdegrw", strict=True))
MUTED = "#7d8590"
DOTS = ("#ff5f57", "#febc2e", "#28c840")
FAMILY = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

Run = tuple[str, str]  # style, text
Line = tuple[Run, ...]


@dataclass(frozen=True)
class Frame:
    lines: tuple[Line, ...]
    status: str


def frames(events: Iterable[Event], engine: Engine, width: int, steps: int) -> Iterator[Frame]:
    console, text = Console(width=width), ""
    for event in events:
        if isinstance(event, Draft):
            yield Frame(wrap(render(event, engine.tokenizer, text), console, width), describe(event, steps))
        elif isinstance(event, Commit):
            text += event.text
        elif isinstance(event, End):
            yield Frame(wrap(Text(sanitise(text)), console, width), metrics_line(event.metrics, event.finish_reason))


def board_frames(engine: Engine, level: str, seed: int, width: int) -> Iterator[Frame]:
    """One look at the board of `dgemma sudoku --random LEVEL --seed SEED`."""
    givens, console = read_puzzle(None, level, seed), Console(width=width)
    view = SudokuBoard.of(engine)
    board, variant = Board(view, givens), Variant("diffusion", None, True, {})
    for event in engine.submit(view.request(engine, givens, variant, seed, drafts=True, look=0)):
        board.take(event)
        final = isinstance(event, End)
        status = f"step {board.step} · {board.settled} of 81 settled · {len(board.repaired)} taken back"
        if final:
            how = "every row, column and box holds 1 to 9" if not board.conflicts else "not solved"
            status = f"{how} · {status}"
        if final or isinstance(event, Draft):
            picture = board.render(final).append("\n\n").append_text(legend())
            yield Frame(wrap(picture, console, width), status)


def wrap(text: Text, console: Console, width: int) -> tuple[Line, ...]:
    return tuple(runs(line) for line in text.wrap(console, width, overflow="fold"))


def runs(line: Text) -> Line:
    """Neighbouring characters of one style together."""
    styles = [""] * len(line.plain)
    for span in line.spans:
        styles[span.start : span.end] = [str(span.style)] * (min(span.end, len(styles)) - span.start)
    found: list[Run] = []
    for style, character in zip(styles, line.plain, strict=True):
        if found and found[-1][0] == style:
            found[-1] = (style, found[-1][1] + character)
        else:
            found.append((style, character))
    return tuple(found)


def thin(every: list[Frame], count: int) -> list[Frame]:
    """At most `count` frames, evenly; the first and the last stay."""
    if len(every) <= count:
        return every
    return [every[round(i * (len(every) - 1) / (count - 1))] for i in range(count)]


def to_svg(shown: list[Frame], title: str, columns: int) -> str:
    """All frames in one file that loops."""
    step = min(SLOWEST, max(FASTEST, SETTLE / len(shown)))
    starts = [i * step for i in range(len(shown))]
    total = starts[-1] + HOLD
    rows = max(len(frame.lines) for frame in shown) + 2
    lines: list[list[Line]] = []
    for frame in shown:
        padding: list[Line] = [()] * (rows - 1 - len(frame.lines))
        lines.append([*frame.lines, *padding, (("status", frame.status),)])
    width, height = round(columns * CELL + 2 * MARGIN), rows * LINE + BAR + MARGIN
    body, keyframes = [], dict[tuple[float, float], str]()
    for row in range(rows):
        first = 0
        for i in range(1, len(shown) + 1):
            if i < len(shown) and lines[i][row] == lines[first][row]:
                continue
            if line := lines[first][row]:
                when = starts[first], starts[i] if i < len(shown) else total
                name = keyframes.setdefault(when, f"k{len(keyframes)}")
                last = " last" if i == len(shown) else ""
                body.append(_line(line, BAR + (row + 1) * LINE, f"{name}{last}", columns))
            first = i
    style = [
        f"text{{font:{FONT}px {FAMILY};white-space:pre}}",
        *(f".{CLASSES[key]}{{fill:{colour}}}" for key, colour in COLOURS.items()),
        f".{CLASSES[CONTROL]}{{font-style:italic}}.{CLASSES[GIVEN]}{{font-weight:bold}}.s{{fill:{MUTED};font-size:{SMALL}px}}",
        *(_keyframes(name, start, end, total) for (start, end), name in keyframes.items()),
        "@media (prefers-reduced-motion:reduce){g text{animation:none;visibility:hidden}g .last{visibility:visible}}",
    ]
    dots = "".join(f'<circle cx="{20 + 18 * i}" cy="19" r="5.5" fill="{c}"/>' for i, c in enumerate(DOTS))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
            ' role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            f"<style>{''.join(style)}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" fill="#0d1117" stroke="#3d444d"/>',
            f'{dots}<text x="{20 + 18 * len(DOTS)}" y="23" class="s">{escape(_cut(title, columns - 8))}</text>',
            "<g>",
            *body,
            "</g>",
            "</svg>\n",
        ]
    )


def _line(line: Line, y: float, classes: str, columns: int) -> str:
    if line[0][0] == "status":
        return f'<text x="{MARGIN}" y="{y}" class="s {classes}">{escape(_cut(line[0][1], columns))}</text>'
    spans = "".join(f'<tspan class="{CLASSES[style]}">{escape(text)}</tspan>' for style, text in line)
    length = round(cell_len("".join(text for _, text in line)) * CELL, 1)
    return f'<text x="{MARGIN}" y="{y}" class="{classes}" textLength="{length}">{spans}</text>'


def _cut(text: str, columns: int) -> str:
    """What has room in the small font."""
    most = int(columns * FONT / SMALL)
    return text if len(text) <= most else text[: most - 1] + "…"


def _keyframes(name: str, start: float, end: float, total: float) -> str:
    """Visible from `start` to `end` of every round."""
    hidden = "{visibility:hidden}"
    steps = "" if start == 0 else f"0%{hidden}"
    steps += f"{100 * start / total:.3g}%{{visibility:visible}}" + (
        "" if end == total else f"{100 * end / total:.3g}%{hidden}"
    )
    return f"@keyframes {name}{{{steps}}}.{name}{{animation:{name} {total:.2f}s step-end infinite}}"


def main(
    prompt: Annotated[
        str,
        typer.Argument(help="What to answer; with --holes, a text with holes such as [[?]]; with --sudoku, how hard."),
    ],
    out: Annotated[Path, typer.Option(help="The SVG to write.")],
    model: Annotated[str, typer.Option(help="As for dgemma run.")] = "nano",
    title: Annotated[str | None, typer.Option(help="What stands above; the command if nothing is said.")] = None,
    holes: Annotated[
        bool, typer.Option("--holes", help="Fill the holes of the prompt, as dgemma infill does.")
    ] = False,
    sudoku: Annotated[bool, typer.Option("--sudoku", help="Solve a random board, as dgemma sudoku does.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int, typer.Option(min=1)] = 48,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    columns: Annotated[int, typer.Option(min=20)] = 84,
    most: Annotated[int, typer.Option("--frames", min=2, help="Pictures at most.")] = 48,
) -> None:
    with Engine.load(model) as engine:
        options = dict(seed=seed, steps=steps, max_new_tokens=max_new_tokens)
        if sudoku:
            every = list(board_frames(engine, prompt, seed, columns))
        else:
            stream = engine.fill_stream(prompt, **options) if holes else engine.stream(prompt, **options)
            every = list(frames(stream, engine, columns, steps))
    command = f"dgemma {'infill' if holes else 'run'} --model {model}" + ("" if holes else f" {prompt!r}")
    if sudoku:
        command = f"dgemma sudoku --random {prompt} --seed {seed}"
    shown = thin(every, most)
    while len(svg := to_svg(shown, title or command, columns).encode()) > MAX_BYTES and len(shown) > 2:
        shown = thin(shown, len(shown) - 1)
    out.write_bytes(svg)
    print(f"{out}: {len(shown)} of {len(every)} pictures, {len(svg) / 1000:.0f} kB")


if __name__ == "__main__":
    typer.run(main)
