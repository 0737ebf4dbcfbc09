"""The chat template of a checkpoint: a conversation becomes one prompt, as Transformers' `apply_chat_template` has it.

`render` gives the prompt as a string. `encode` gives token ids, and there a control token that somebody wrote into a
message stays ordinary text: such strings carry private marks through the template and are spelled out afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from diffusiongemma.errors import InputError, TokenizerError
from diffusiongemma.text import sandbox
from diffusiongemma.text.files import TokenNames, read_optional, read_text
from diffusiongemma.text.messages import Message, check_messages, check_tools, plain
from diffusiongemma.text.tokenizer import Tokenizer

_MAX_SOURCE = 1 << 20


class ChatTemplate:
    """One template, or several by name: "default", and "tool_use" for conversations with tools."""

    time_limit = 10.0  # seconds a template may take; real ones take milliseconds

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str] | None = None) -> None:
        """`tokens` are the named special tokens that the template may print, such as bos_token."""
        self.tokens = dict(tokens or {})
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._compiled = {name: _compile(text, name) for name, text in self.sources.items()}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ChatTemplate:
        """chat_template.jinja (and chat_templates/NAME.jinja) or else `chat_template` in tokenizer_config.json."""
        folder = Path(folder)
        files = {path.stem: path for path in sorted((folder / "chat_templates").glob("*.jinja"))}
        if (main := folder / "chat_template.jinja").exists():
            files["default"] = main
        tokens = TokenNames.from_pretrained(folder).named
        if files:
            return cls({name: read_text(path) for name, path in files.items()}, tokens)
        return cls(_from_config(read_optional(folder / "tokenizer_config.json").get("chat_template")), tokens)

    @classmethod
    def find(cls, folder: str | Path) -> ChatTemplate | None:
        """As `from_pretrained`, but None where a checkpoint has no template at all (a damaged one is an error)."""
        folder = Path(folder)
        files = [folder / "chat_template.jinja", *(folder / "chat_templates").glob("*.jinja")]
        declared = read_optional(folder / "tokenizer_config.json").get("chat_template")
        if declared is None and not any(file.exists() for file in files):
            return None
        return cls.from_pretrained(folder)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt of a conversation. `extra` reaches the template by name."""
        checked, declared = check_messages(messages), check_tools(tools)
        return self._render(checked, declared, thinking, add_generation_prompt, plain(extra, "template options"))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """The prompt in token ids. Only the template's own control tokens become special ids."""
        given = check_messages(messages), check_tools(tools), plain(extra, "template options")
        marks = _Marks(tokenizer, json.dumps([*given, self.sources], ensure_ascii=False))
        checked, declared, options = (marks.put(value) for value in given)
        return marks.encode(self._render(checked, declared, thinking, add_generation_prompt, options))

    def _render(self, messages: Any, tools: Any, thinking: bool, add_generation_prompt: bool, extra: Any) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        if (template := self._compiled.get(name)) is None:
            raise TokenizerError(
                f"the chat template has no default, only {', '.join(sorted(self._compiled)) or 'nothing'}"
            )
        context = {"documents": None, **self.tokens, "enable_thinking": thinking, **extra, "messages": messages}
        context |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return sandbox.render(template, context, self.time_limit)
        except Exception as error:  # the template is foreign code: whatever it raises is its refusal
            raise TokenizerError(
                f"the chat template refuses this conversation: {str(error) or type(error).__name__}"
            ) from error


@cache
def default_chat_template() -> str:
    """The source of this package's own template, in DiffusionGemma's format."""
    return resources.files("diffusiongemma.text").joinpath("gemma_chat.jinja").read_text(encoding="utf-8")


def _compile(source: object, name: str) -> Any:
    if not isinstance(source, str):
        raise TokenizerError(f"the chat template {name!r} must be a string")
    if len(source) > _MAX_SOURCE:
        raise TokenizerError(f"the chat template {name!r} is longer than {_MAX_SOURCE:,} characters")
    try:
        return sandbox.TemplateEnvironment().from_string(source)
    except Exception as error:  # a syntax error, or nesting too deep for Python's own compiler
        raise TokenizerError(f"the chat template {name!r} cannot be compiled: {error}") from error


def _from_config(entry: object) -> str | dict[str, str]:
    """`chat_template` of tokenizer_config.json: a string, or a list of {"name": …, "template": …}."""
    if entry is None:
        raise TokenizerError("there is no chat template: no chat_template.jinja, and none in tokenizer_config.json")
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entry):
        return {e["name"]: e.get("template") for e in entry}
    raise TokenizerError("chat_template in tokenizer_config.json must be a string or a list of named templates")


class _Marks:
    """Tells the control tokens that a template writes from the same strings in what it was given."""

    def __init__(self, tokenizer: Tokenizer, used: str) -> None:
        """`used` holds everything that goes into the prompt: the marks are two private characters that it lacks."""
        self.tokenizer = tokenizer
        private = (chr(code) for code in range(0xF0000, 0x110000))
        try:
            self._open, self._close = islice(filter(lambda c: c not in used, private), 2)
        except ValueError:
            raise InputError("the conversation uses every private character of Unicode; remove some") from None
        texts = sorted(tokenizer.special_texts, key=len, reverse=True)
        special = "|".join(map(re.escape, texts)) or "(?!)"
        self._special = re.compile(special)
        self._beginnings = tuple({text[:n] for text in texts for n in range(1, len(text))})
        self._rendered = re.compile(
            f"{self._open}({special}){self._close}|[{self._open}{self._close}]|(?P<own>{special})"
        )

    def put(self, value: Any) -> Any:
        if isinstance(value, str):
            value = self._special.sub(lambda match: f"{self._open}{match[0]}{self._close}", value)
            # The beginning of a token could be completed by the string that comes next: a mark keeps them apart.
            body = value.rstrip()
            return f"{body}{self._open}{value[len(body) :]}" if body.endswith(self._beginnings) else value
        if isinstance(value, list):
            return [self.put(item) for item in value]
        if isinstance(value, dict):
            for key in value:  # templates look keys up, so they cannot be marked
                if self._special.search(key):
                    raise InputError(f"the name {key!r} contains a control token; rename it")
            return {key: self.put(item) for key, item in value.items()}
        return value

    def encode(self, prompt: str) -> list[int]:
        if self._open not in prompt and self._close not in prompt:
            return self.tokenizer.encode(prompt, allow_special=True)
        ids: list[int] = []
        words, end = "", 0
        for match in self._rendered.finditer(prompt):
            words += prompt[end : match.start()] + (match[1] or "")
            end = match.end()
            if own := match["own"]:
                ids += [*self.tokenizer.encode(words), self.tokenizer.special[own]]
                words = ""
        return ids + self.tokenizer.encode(words + prompt[end:])
