"""`dgemma infill`: fill the holes of a text, or the one between two texts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusiongemma.cli.options import INTERRUPTED, Settings, with_settings
from diffusiongemma.cli.run import read_stdin
from diffusiongemma.errors import InputError, check_writable

if TYPE_CHECKING:
    from diffusiongemma.cli.show import Answer
    from diffusiongemma.engine import Engine, Event


@with_settings
def infill(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A text with holes: [[?]], or [[?12]] for at most 12 tokens.")
    ] = None,
    *,
    prefix: Annotated[str | None, typer.Option(help="Instead of a file: what comes before the hole.")] = None,
    suffix: Annotated[str | None, typer.Option(help="… and what comes after it.")] = None,
    candidates: Annotated[int | None, typer.Option(help="How many fillings to try; the best wins.")] = None,
    check: Annotated[
        str | None,
        typer.Option(help="python: fillings that make the text parse come first (of a .py file: on), or none."),
    ] = None,
    choose: Annotated[
        str, typer.Option(help="likeliest, or middle: the one most like all others, weighed by likelihood.")
    ] = "likeliest",
    strategy: Annotated[str, typer.Option(help="auto, fim or canvas; see docs/sampling.md.")] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the text there, exactly.")] = None,
    settings: Settings,
) -> None:
    """Fill the holes of a text, each with 64 tokens at most unless --max-new-tokens says otherwise.

    With a file ('-': stdin), the whole text is printed; with --prefix and --suffix, what belongs between them.
    """
    text = _read(file, prefix, suffix)
    if output is not None:
        check_writable(output)
    with settings.load() as engine:
        from diffusiongemma.engine.fill import parse_template

        options: dict[str, Any] = {"strategy": strategy, "candidates": candidates, "choose": choose}
        if text is None:
            answer = fill_between(engine, prefix or "", suffix or "", settings, check=check or "none", **options)
        else:
            parse_template(text)
            if check is None and Path(file or "").suffix == ".py":
                stream = _checked_if_several(engine, text, {"seed": None} | options | settings.options)
            else:
                stream = engine.fill_stream(text, check=check or "none", **{"seed": None} | options | settings.options)
            answer = _show(engine, stream, settings)
        if answer.cancelled:
            raise typer.Exit(INTERRUPTED)
        if output is not None:
            try:
                output.write_text(answer.text, encoding="utf-8", newline="")
            except OSError as error:
                raise InputError(f"cannot write {output}: {error.strerror}; the text stands above") from None


def fill_between(
    engine: Engine, prefix: str, suffix: str, settings: Settings, behind: str = "", **options: Any
) -> Answer:
    """Fill one hole and show it, and what is to stand `behind` it; `settings` win over `options`."""
    stream = engine.infill_stream(prefix, suffix, **{"seed": None} | options | settings.options)
    return _show(engine, stream, settings, behind)


def _checked_if_several(engine: Engine, text: str, options: dict[str, Any]) -> Iterator[Event]:
    """Nobody asked for the check, so it is no mistake if there is only one filling."""
    from diffusiongemma.engine.choice import NoChoice

    try:
        return engine.fill_stream(text, check="python", **options)
    except NoChoice:
        return engine.fill_stream(text, check="none", **options)


def _show(engine: Engine, stream: Iterator[Event], settings: Settings, behind: str = "") -> Answer:
    from diffusiongemma.cli.show import show

    steps = settings.options.get("steps", engine.params.steps)
    return show(engine, _until_interrupted(stream), settings, steps, is_reply=False, behind=behind)


def _read(file: str | None, prefix: str | None, suffix: str | None) -> str | None:
    """The text with holes; None: there is a prefix or a suffix instead."""
    between = prefix is not None or suffix is not None
    if between == (file is not None):
        raise InputError("give a file with holes such as [[?]], or --prefix and --suffix")
    if file is None:
        return None
    if file == "-":
        return read_stdin()
    try:
        with Path(file).open(encoding="utf-8", newline="") as source:  # line ends stay what they are
            return source.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from None


def _until_interrupted(stream: Iterator[Event]) -> Iterator[Event]:
    """Ctrl-C ends the stream behind the event that comes next; there is no end event then."""
    from diffusiongemma.cli.show import cancel_on_interrupt

    asked = []
    with cancel_on_interrupt(lambda: asked.append(True)):
        for event in stream:
            yield event
            if asked:
                break
    if isinstance(stream, Generator):
        stream.close()  # cancels what still runs
