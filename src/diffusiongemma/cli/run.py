"""`dgemma run`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from diffusiongemma.cli.options import INTERRUPTED, Settings, with_settings
from diffusiongemma.errors import InputError


@with_settings
def run(
    prompt: Annotated[str | None, typer.Argument(help="'-', or nothing with a pipe: read it from stdin.")] = None,
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Think before the answer.")] = None,
    settings: Settings,
) -> None:
    """Answer a prompt, and show the canvas while it settles."""
    text = read_prompt(prompt)
    with settings.load() as engine:
        from diffusiongemma.cli.show import follow

        request = engine.request(text, raw=raw, thinking=thinking, **settings.options)
        if follow(engine, request, settings).cancelled:
            raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise InputError("there is no prompt: dgemma run 'Why is the sky blue?', or pipe one in")
    text = read_stdin().removesuffix("\n") if prompt in (None, "-") else prompt
    if not text:
        raise InputError("the prompt is empty")
    return text


def read_stdin() -> str:
    try:
        return typer.get_binary_stream("stdin").read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8 text: {error}") from None
