"""The `dgemma` command: parse, call, print. One file a command; heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
from inspect import cleandoc
from io import TextIOWrapper
from typing import Annotated

import typer

from diffusiongemma import __version__
from diffusiongemma.cli import bench, chat, demo, eval, infill, inspect, quantize, run, serve, sudoku, svg, train
from diffusiongemma.errors import DiffusionGemmaError

app = typer.Typer(
    name="dgemma",
    help="DiffusionGemma: text by diffusion. Write, talk, fill in, measure, and look into checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback of ours is a bug report: keep it plain and whole
)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("infill")(infill.infill)
app.command("sudoku")(sudoku.sudoku)
app.command("svg")(svg.svg)
app.add_typer(eval.app, name="eval")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.run)
app.command("serve")(serve.run)
app.command("inspect")(inspect.run)
app.command("quantize")(quantize.run)
app.command("train")(train.run)

for _command in app.registered_commands:  # Typer would break lines where the source does, whatever the terminal's width
    _paragraphs = cleandoc(getattr(_command.callback, "__doc__", None) or "").split("\n\n")
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dgemma {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. A user's mistake is a message and exit code 2; anything else keeps its traceback."""
    # Before torch is there, for it is read once: threads of OpenMP that wait sleep. Spinning they take the cores from
    # whom they wait for, and beside other programs a text of `random:tiny` took ten times as long.
    if sys.argv[1:2] != ["bench"]:  # where a peer may stand beside us, which is to have what torch has by itself
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a character shows its code, and nothing fails
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except DiffusionGemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
