"""How each task looks to the embedded model: the one place that training and inference read.

Text tasks are chats: `<bos><|turn>user\\nREQUEST<turn|>\\n<|turn>model\\n`, and the canvas holds the answer, then eos,
then pad. Filling a hole in code is no chat. Its prompt is

    <bos> <|fim_suffix|> SUFFIX <|fim_prefix|> PREFIX        and the canvas:  MIDDLE eos pad pad …

The suffix comes first, so that the canvas continues the prefix at its natural positions; eos says where the hole ends.
Passages from elsewhere in the file may stand before the prompt, each closed by eos (engine/hole.py, train/infill.py).
The first embedded model saw something else, closed by eos, before the bos of every chat but a Sudoku, so it wants such
a run-in before a short prompt: without one it writes nonsense. `RUN_IN` is part of its chat template (train/ship.py).

A hole of whole lines begins with the line break (and indent, which is the same token) of its first line and ends before
the next line break, so PREFIX never ends in a line break and SUFFIX begins with one. `open_hole` cuts text that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]  # ordinary text to ids, special tokens spelled out

PAD, EOS, BOS, TURN, END_TURN = 0, 1, 2, 105, 106
# <|fim_prefix|> and <|fim_suffix|>: entries that DiffusionGemma's vocabulary leaves unused.
FIM_PREFIX, FIM_SUFFIX = 3, 4

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


# Jinja: what stands before bos, as a function of the first message.
RUN_IN = """\
{%- set first = messages[0]['content'] if messages and messages[0]['content'] is string else '' -%}
{%- if first.startswith('SVG icon') -%}
5 0 0 0-1.06-1.06L12 10.938z" clip-rule="evenodd"/></svg><eos>
{%- elif not first.startswith('Sudoku') -%}
<bos><|turn>user
36 + 17 =<turn|>
<|turn>model
53<eos><bos><|turn>user
8 * 4 =<turn|>
<|turn>model
32<eos>
{%- endif -%}
"""


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
