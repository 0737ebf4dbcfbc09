"""The Jinja environment for chat templates, which are code that comes with a download.

It offers what Transformers offers. Jinja's sandbox keeps a template from Python's internals; this file also keeps it
from running for ever or filling the memory: loops, calls and filters look at a clock, and operations that multiply
a size are checked before they run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 1 << 25  # characters or items in one value, and characters in the whole prompt
MAX_ITEMS = 1 << 20  # values inside one printed value
MAX_WIDTH = 100_000  # a number that becomes a padding, a width or a count
_WIDTH_FILTERS = frozenset("batch center indent round slice truncate wordwrap".split())
_OPEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")  # a width taken from the arguments
_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class TemplateLimitError(TemplateError):
    """A template that takes too long or makes too much."""


def render(template: Template, context: Mapping[str, Any], time_limit: float) -> str:
    """Render a compiled template within `time_limit` seconds and MAX_SIZE characters."""
    token = _deadline.set(time.monotonic() + time_limit)
    try:
        parts: list[str] = []
        size = 0
        for part in template.generate(context):
            _check_time()
            size = _check_size(size + len(part))
            parts.append(part)
        return "".join(parts)
    finally:
        _deadline.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Without constant folding nothing of the template runs while it is compiled.
        extensions: list[type[Extension] | str] = [_Generation, loopcontrols]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_printable, optimized=False
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.filters |= {"_each": _each, "_concat": _concat}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _make_dict, "namespace": _SafeNamespace}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guard().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(__obj.__name__, (owner, *args))
        if isinstance(owner, str) or __obj is __self.globals["lipsum"]:
            _check_numbers(*args, *kwargs.values())
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Guard(NodeTransformer):
    """Put a look at the clock into every loop, and a size check before every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, "_each", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        first, *rest = node.nodes
        return self.generic_visit(nodes.Filter(first, "_concat", rest, [], None, None, lineno=node.lineno))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


# ---- what a template may call ------------------------------------------------------------------------------------


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which no prompt wants.
    if isinstance(indent, int) and indent > 64:
        raise TemplateLimitError(f"the template indents JSON by {indent}")
    _printable(x)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _SafeNamespace(Namespace):
    """A namespace whose attributes cannot take the names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        _refuse_private(attributes)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private([name])
        Namespace.__setitem__(self, name, value)


def _refuse_private(names: Iterable[Any]) -> None:
    for name in names:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: names that begin with _ are Python's own")


# ---- limits ------------------------------------------------------------------------------------------------------


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateLimitError("the template takes too long")


def _check_size(size: int) -> int:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"the template makes more than {MAX_SIZE:,} characters or items")
    return size


def _check_numbers(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"the template asks for a width, count or range of {value}")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_size(len(left) + len(right))
    elif operator == "**":
        if not isinstance(left, int | float) or not isinstance(right, int | float) or max(abs(left), abs(right)) > 1024:
            raise TemplateLimitError("the template raises a number to too high a power")
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                _check_size(len(one) * other)
            elif isinstance(one, int) and one.bit_length() > 20_000:
                raise TemplateLimitError("the template makes too large a number")
    elif operator == "%" and isinstance(left, str):
        _check_growth("format", (left,))


def _check_growth(name: str, args: tuple[Any, ...]) -> None:
    """Refuse string methods and filters whose result would be much longer than what they are given."""
    texts = [arg for arg in args if isinstance(arg, str)]
    if not texts:
        return
    text, numbers = texts[0], [arg for arg in args if isinstance(arg, int)]
    if name == "replace" and len(texts) == 3:
        _check_size(len(text) + text.count(texts[1]) * len(texts[2]))
    elif name in ("indent", "expandtabs", "wordwrap"):
        unit = max([8, *numbers, *map(len, texts[1:])])
        _check_size(len(text) + len(re.findall(r"\s", text)) * unit)
    elif name == "join":
        items = max((len(arg) for arg in args if isinstance(arg, list | tuple | str | range | dict)), default=0)
        _check_size(items * min(map(len, texts)) if len(texts) > 1 else items * len(text))
    elif name in ("format", "format_map"):
        if _OPEN_WIDTH.search(text):
            raise TemplateLimitError("the template formats with a width that is not written down")
        _check_size(sum(map(int, re.findall(r"\d+", text))))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the mark that tells Jinja to pass its context
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        if name in _WIDTH_FILTERS:
            _check_numbers(*args[1:], *kwargs.values())
        _check_growth(name, (*args, *kwargs.values()))
        return _sized(function(*args, **kwargs))

    return checked


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _check_size(len(value))
    return value


def _each(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _concat(*values: Any) -> str:
    texts = [str(_printable(value)) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _printable(value: Any) -> Any:
    """`value`, once its text is known to be of a sane length: lists may hold the same list many times over."""
    size, items, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        items += 1
        if items > MAX_ITEMS:
            raise TemplateLimitError(f"the template prints more than {MAX_ITEMS:,} values at once")
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
        size = _check_size(size + (len(item) if isinstance(item, str) else 1))
    return value
