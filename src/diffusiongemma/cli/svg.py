"""`dgemma svg`: an icon from a few words, as an .svg and a .png file."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.cli.options import INTERRUPTED, Settings, as_typed, with_settings
from diffusiongemma.errors import InputError, check_writable

if TYPE_CHECKING:
    from rich.text import Text

    from diffusiongemma.engine import Engine
    from diffusiongemma.tasks.svg import SvgGrade

NOT_DRAWABLE = 1  # exit code
ATTEMPTS = 6  # one after another: most answers are sound at once, so a batch would mostly be wasted
REDRAW = 0.5  # temperature of the causal path's further attempts: at 0 it would say the same again
RAW = ".raw.txt"  # suffix of an answer as it came
WHITE = "#ffffff"
PREVIEW = 32  # columns of the picture in a terminal


@with_settings
def svg(
    wish: Annotated[str, typer.Argument(help="What to draw, then how, such as 'bell, outline'.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="The .svg to write (default: named after the wish, nothing overwritten).")
    ] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Write a .png beside it, on white.")] = True,
    size: Annotated[int, typer.Option(min=16, max=1_024, help="Pixels of the longer side.")] = 256,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="If the answer is not a sound icon, draw again, so often in all (6)."),
    ] = None,
    settings: Settings,
) -> None:
    """Draw an icon. What is written is sanitised: plain shapes, nothing that could run or refer to anything.

    A model draws as its own settings say, nano one token after another; --ar and --diffusion decide it. Without
    --temperature or --top-p the causal path takes its best tokens first, so for another picture give
    --temperature 0.5 and a --seed.

    An answer that is not well-formed, breaks the grammar of paths or shows nothing is drawn again with the next seed;
    the best is kept. If nothing can be drawn of the answer, it is kept beside as .raw.txt, and the exit code is 1.
    """
    check_wish(wish)
    allowed = attempts_allowed(attempts, settings)
    target = check_target(out or free_name(wish), png)
    with settings.load(either_mode=True) as engine:
        drawn = draw(engine, wish, settings, target, png=png, size=size, attempts=allowed)
    if drawn is None:
        raise typer.Exit(INTERRUPTED)
    if drawn.svg is None:
        raise typer.Exit(NOT_DRAWABLE)


def attempts_allowed(wanted: int | None, settings: Settings) -> int:
    """At temperature 0 the causal path says the same however often it is asked."""
    same = settings.options.get("temperature") == 0
    if same and wanted is not None and wanted > 1:
        raise InputError(f"--attempts {wanted} has no effect at temperature 0: every answer would be the same")
    return wanted or (1 if same else ATTEMPTS)


def drawing_options(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """The written options and how this model draws, where none of them says it."""
    from diffusiongemma.engine.params import without_effect

    if "mode" in options:
        return dict(options)
    if wrong := without_effect(engine.svg_mode, options):
        how, other = ("one token after another", "--diffusion") if engine.svg_mode == "ar" else ("on a canvas", "--ar")
        raise InputError(
            f"{as_typed(wrong, options)} would have no effect: {engine.name} draws {how} unless you add {other}"
        )
    return {**options, "mode": engine.svg_mode}


@dataclass(frozen=True)
class Attempt:
    """One answer and what it is worth. A temperature is the causal path's."""

    text: str
    seed: int
    temperature: float | None
    grade: SvgGrade

    @property
    def how(self) -> str:
        return "the best token each time" if self.temperature == 0 else f"seed {self.seed}"


@dataclass(frozen=True)
class Drawn:
    """What became of a wish. `raw` is the answer as it came, kept where the .svg is not all of it."""

    kept: Attempt
    attempts: int
    svg: Path | None = None
    png: Path | None = None
    raw: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        files = {name: None if path is None else str(path) for name, path in self._files().items()}
        mode = "diffusion" if self.kept.temperature is None else "ar"
        how = {"mode": mode, "temperature": self.kept.temperature, "seed": self.kept.seed, "attempts": self.attempts}
        return {"kind": "icon", **files, **how, "grade": self.kept.grade.to_dict()}

    def _files(self) -> dict[str, Path | None]:
        return {"svg": self.svg, "png": self.png, "raw": self.raw}


def draw(
    engine: Engine, wish: str, settings: Settings, target: Path, *, png: bool = True, size: int = 256, attempts: int = 1
) -> Drawn | None:
    """Ask, show the canvas, write the files, say what was written. None: interrupted."""
    from diffusiongemma.cli.show import follow, tell
    from diffusiongemma.tasks import svg as task

    prompt, options = task.prompt(engine, wish), drawing_options(engine, settings.options)
    causal, tried = options["mode"] == "ar", list[Attempt]()
    for _ in range(attempts):
        # The best tokens first; but top_p asks for a draw by lot.
        heat = {"temperature": REDRAW if tried or "top_p" in options else 0.0} if causal else {}
        request = engine.request(prompt, **heat | options)
        answer = follow(engine, request, settings)
        if answer.cancelled or answer.end is None:
            return None
        seed, temperature = answer.end.metrics.seed, request.params.temperature if causal else None
        tried.append(Attempt(answer.text, seed, temperature, task.grade(answer.text)))
        if tried[-1].grade.ok:
            break
        if len(tried) < attempts and not settings.as_json:
            tell(f"not sound: {_faults(tried[-1].grade)} · drawing again, attempt {len(tried) + 1} of {attempts}")
        options["seed"] = (seed + 1) % (1 << 63)
    best = max(tried, key=lambda attempt: attempt.grade.rank)  # of equals the first
    drawn = _write(best, len(tried), target, png, size)
    if settings.as_json:
        print(json.dumps(drawn.to_dict()), flush=True)
        return drawn
    if drawn.png is not None and not settings.plain and sys.stdout.isatty():
        _print_picture(best.text)
    for line in _remarks(drawn, attempts):
        tell(line)
    return drawn


def _write(best: Attempt, tried: int, target: Path, png: bool, size: int) -> Drawn:
    from diffusiongemma.tasks import svg as task

    raw = None if best.grade.ok else target.with_suffix(RAW)
    try:
        if raw is not None:
            raw.write_text(best.text, encoding="utf-8", errors="backslashreplace", newline="")
        if not best.grade.visible:
            return Drawn(best, tried, raw=raw)
        markup = task.document(best.text, size)
        target.write_text(markup, encoding="utf-8", newline="\n")
        picture = target.with_suffix(".png") if png else None
        if picture is not None:
            picture.write_bytes(task.render(markup, size, WHITE))
    except OSError as error:
        raise InputError(f"cannot write the icon: {error}; name another file with --out") from None
    return Drawn(best, tried, target, picture, raw)


def _remarks(drawn: Drawn, attempts: int) -> list[str]:
    grade, lines = drawn.kept.grade, []
    after = f"{drawn.attempts} of {attempts} attempts, {drawn.kept.how}"
    problems = _faults(grade)
    if drawn.svg is None:
        lines.append(f"no icon: {problems} · {after} · the answer is in {drawn.raw}")
        if drawn.kept.temperature == 0 and attempts == 1:  # a seed changes nothing then
            lines.append("a drawn answer may do better than the likeliest: give --temperature 0.5")
        else:
            lines.append("another seed may do better: give --seed, or more --attempts")
        return lines
    files = " and ".join(str(path) for path in (drawn.svg, drawn.png) if path is not None)
    lines.append(f"wrote {files} · ink {100 * grade.ink:.1f}% · {after}")
    if drawn.raw is not None:
        lines.append(f"not all of the answer is sound: {problems} · the whole answer is in {drawn.raw}")
    return lines


def _faults(grade: SvgGrade) -> str:
    return "; ".join(grade.problems[:3]) + ("; …" if len(grade.problems) > 3 else "")


def preview(alpha: list[list[float]]) -> Text:
    """A picture of half blocks, two rows of `alpha` (0 to 1) a line; the terminal's own colours, so always readable."""
    from rich.text import Text

    blocks = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    if len(alpha) % 2:
        alpha = [*alpha, [0.0] * len(alpha[0])]
    rows = zip(alpha[::2], alpha[1::2], strict=True)
    lines = ["".join(blocks[a > 0.4, b > 0.4] for a, b in zip(*pair, strict=True)).rstrip() for pair in rows]
    return Text("\n".join(lines))


def _print_picture(text: str) -> None:
    from rich.console import Console

    from diffusiongemma.tasks import svg as task
    from diffusiongemma.tasks.svg_render import coverage

    Console(highlight=False).print(preview(coverage(task.render(task.document(text), PREVIEW)).tolist()))


def check_wish(wish: str) -> None:
    if not wish.strip():
        raise InputError("there is nothing to draw: say what, such as 'bell, outline'")


def check_target(out: Path, png: bool = True) -> Path:
    """Refuse files that cannot be written before the model is loaded."""
    if out.suffix.lower() != ".svg":
        raise InputError(f"--out must name an .svg file, not {out}; the .png stands beside it")
    if png:
        check_writable(out.with_suffix(".png"))
    return check_writable(out)


def free_name(wish: str, folder: Path = Path()) -> Path:
    """`bell, outline` -> bell-outline.svg, or bell-outline-2.svg where one of the files is there already."""
    stem = re.sub(r"[^a-z0-9]+", "-", wish.lower()).strip("-")[:60] or "icon"
    number = 1
    while True:
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.svg"
        if not any(path.with_suffix(suffix).exists() for suffix in (".svg", ".png", RAW)):
            return path
        number += 1
