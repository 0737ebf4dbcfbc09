"""How each task looks to the embedded model: the one place that training and inference read.

Text tasks are chats: `<bos><|turn>user\\nREQUEST<turn|>\\n<|turn>model\\n`, and the canvas holds the answer, then eos,
then pad. Filling a hole in code is no chat. Its prompt is

    <bos> <|fim_suffix|> SUFFIX <|fim_prefix|> PREFIX        and the canvas:  MIDDLE eos pad pad …

The suffix comes first, so that the canvas continues the prefix at its natural positions; eos says where the hole ends.
A hole of whole lines begins with the line break (and indent, which is the same token) of its first line and ends before
the next line break, so PREFIX never ends in a line break and SUFFIX begins with one. `open_hole` cuts text that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]  # ordinary text to ids, special tokens spelled out

PAD, EOS, BOS, TURN, END_TURN = 0, 1, 2, 105, 106
# Reserved entries of the vocabulary that stand for the parts of a hole.
FIM_PREFIX, FIM_SUFFIX = 3, 4
FIM_NAMES = {"<|fim_prefix|>": "<unused0>", "<|fim_suffix|>": "<unused1>"}

SUDOKU_CANVAS, INFILL_CANVAS, BLOCK_CANVAS, SVG_CANVAS, ARITHMETIC_CANVAS = 96, 64, 128, 256, 24

_OPEN_LINE = re.compile(r"\r?\n[ \t]*\Z")


def chat_prompt(encode: Encode, request: str) -> list[int]:
    return [BOS, TURN, *encode(f"user\n{request}"), END_TURN, *encode("\n"), TURN, *encode("model\n")]


def sudoku_request(puzzle: str) -> str:
    """`puzzle` is 81 digits, 0 for empty. The answer is the 81 digits of the solution."""
    return f"Sudoku\n{puzzle}"


def svg_request(wish: str) -> str:
    """`wish`: words, then styles, such as `bell, outline`."""
    return f"SVG icon\n{wish}"  # after a line break a wish has the same tokens as alone


def arithmetic_request(question: str) -> str:
    return question


def infill_prompt(prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Ids of the text before and after the hole -> the prompt; cut both to what the context allows before."""
    return [BOS, FIM_SUFFIX, *suffix, FIM_PREFIX, *prefix]


def open_hole(prefix: str) -> tuple[str, str]:
    """Text before a hole -> what goes into the prompt, and the line break and indent that the middle must begin with.

    The lead is empty when the hole begins inside a line. Pin its tokens in the canvas, and cut it off the result.
    """
    found = _OPEN_LINE.search(prefix)
    return (prefix, "") if found is None else (prefix[: found.start()], found[0])


def fill_canvas(answer: Sequence[int], length: int) -> list[int]:
    """answer, eos, then pad up to `length`; the answer must leave room for eos."""
    assert len(answer) < length, f"{len(answer)} tokens and eos do not fit into a canvas of {length}"
    return [*answer, EOS, *[PAD] * (length - len(answer) - 1)]
