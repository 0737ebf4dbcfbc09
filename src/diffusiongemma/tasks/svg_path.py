"""The grammar of SVG values: numbers, lists of them, path data, transforms (SVG 2, chapters 7 to 9).

A renderer draws a faulty path up to its first fault, so a picture does not show whether the path was right.
"""

from __future__ import annotations

import re

WS = r"[ \t\n\r\f]"
# Atomic: "12" is one number and never 1 and 2, while "1.5.5-3" is 1.5, .5 and -3.
NUMBER = r"(?>[+-]?(?:[0-9]*\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)"
UNSIGNED = r"(?>\+?(?:[0-9]*\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)"
COMMA = rf"(?:{WS}*+,?{WS}*+)"  # what may stand between two numbers, also nothing
_FLAG = "[01]"  # of an arc; two flags and a number may touch: "a1 1 0 013 4"


def repeated(count: int) -> str:
    """A pattern of exactly so many numbers."""
    return COMMA.join([NUMBER] * count)


_ARC = COMMA.join([NUMBER, NUMBER, NUMBER, _FLAG, _FLAG, NUMBER, NUMBER])
_TAKES = {
    "m": repeated(2), "l": repeated(2), "t": repeated(2), "h": NUMBER, "v": NUMBER,
    "c": repeated(6), "s": repeated(4), "q": repeated(4), "a": _ARC,
}  # fmt: skip
# Behind a letter: its arguments, as many sets of them as there are.
_ARGUMENTS = {
    letter: re.compile(rf"{WS}*+{one}(?:{COMMA}{one})*+{WS}*+") for letter, one in _TAKES.items()
} | {"z": re.compile(rf"{WS}*+")}  # fmt: skip

POINTS = re.compile(rf"{WS}*+(?:{repeated(2)}(?:{COMMA}{repeated(2)})*+)?{WS}*+")
_FUNCTIONS = {
    "matrix": (6,), "translate": (1, 2), "scale": (1, 2), "rotate": (1, 3), "skewX": (1,), "skewY": (1,),
}  # fmt: skip
_CALL = "|".join(
    rf"{name}{WS}*+\({WS}*+(?:{'|'.join(repeated(n) for n in sorted(counts, reverse=True))}){WS}*+\)"
    for name, counts in _FUNCTIONS.items()
)
TRANSFORM = re.compile(rf"{WS}*+(?:(?:{_CALL})(?:{COMMA}(?:{_CALL}))*+)?{WS}*+")


def path_problem(data: str) -> str | None:
    """What is wrong with the `d` of a path, or None. An empty path is right, and draws nothing."""
    at = len(data) - len(data.lstrip(" \t\n\r\f"))
    if at < len(data) and data[at] not in "Mm":
        return f"a path begins with M or m, not with {data[at]!r}"
    while at < len(data):
        arguments = _ARGUMENTS.get(data[at].lower())
        if arguments is None:
            return f"neither a command nor the numbers that the one before it takes at {at}: {_near(data, at)}"
        found = arguments.match(data, at + 1)
        if found is None:
            return f"the command at {at} lacks its numbers: {_near(data, at)}"
        at = found.end()
    return None


def _near(text: str, at: int) -> str:
    return repr(text[at : at + 16])
