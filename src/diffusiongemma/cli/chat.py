"""`dgemma chat`: a conversation. What was said before is encoded once and reused by the next turn."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from diffusiongemma.cli.options import Settings, with_settings
from diffusiongemma.errors import DiffusionGemmaError, InputError

if TYPE_CHECKING:
    from diffusiongemma.engine import Engine
    from diffusiongemma.engine.prompt import Prompt

COMMAND = re.compile(r"/[a-z]*")
HELP = "/reset forgets the conversation · /think switches thinking · /quit, Ctrl-D or Ctrl-C leaves"


@dataclass
class Conversation:
    """The turns so far: messages for a model with a chat template, one growing text for one without."""

    engine: Engine
    system: str | None = None
    thinking: bool | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        if self.engine.template is None and (self.system is not None or self.thinking is not None):
            raise InputError(
                f"{self.engine.name} has no chat template: a system prompt and thinking would have no effect"
            )
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.text = ""

    def prompt(self, said: str) -> Prompt:
        if self.engine.template is None:
            return f"{self.text}{said}\n"
        return [*self.messages, {"role": "user", "content": said}]

    def add(self, said: str, answered: str) -> None:
        self.text += f"{said}\n{answered}\n"
        self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]


@with_settings
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Think before an answer.")] = None,
    settings: Settings,
) -> None:
    """Talk with the model, turn by turn. Without a terminal, every line of stdin is a turn."""
    with settings.load() as engine:
        from diffusiongemma.cli.show import tell

        talk = Conversation(engine, system, thinking)
        if engine.template is None:
            tell(f"{engine.name} has no chat template: it continues the text of the conversation as it stands")
        tell(HELP)
        while (said := ask()) is not None:
            if COMMAND.fullmatch(said):
                if not obey(said, talk):
                    return
            elif said:
                answer(said, talk, settings)


def ask() -> str | None:
    """The next turn; None at the end of the input."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):  # gives input() its line editing and history where there is one
        import readline  # noqa: F401
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def obey(command: str, talk: Conversation) -> bool:
    """-> does the conversation go on?"""
    from diffusiongemma.cli.show import tell

    if command == "/quit":
        return False
    if command == "/reset":
        talk.reset()
        tell("the conversation is forgotten")
    elif command == "/think" and talk.engine.template is None:
        tell(f"{talk.engine.name} has no chat template, so it cannot be told to think")
    elif command == "/think":
        talk.thinking = not talk.thinking
        tell(f"thinking is {'on' if talk.thinking else 'off'}")
    else:
        tell(HELP)
    return True


def answer(said: str, talk: Conversation, settings: Settings) -> None:
    """One turn. What Ctrl-C leaves of an answer stays in the conversation; a turn that failed does not."""
    from diffusiongemma.cli.show import follow, tell

    try:
        request = talk.engine.request(talk.prompt(said), thinking=talk.thinking, **settings.options)
        got = follow(talk.engine, request, settings)
    except DiffusionGemmaError as error:
        tell(f"error: {error}")
        return
    if got.text:
        talk.add(said, got.text)
