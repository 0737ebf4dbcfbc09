"""Words, limits and checks of values that a configuration is made of."""

from __future__ import annotations

import math
import reprlib
from typing import Any, Literal

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

# Files come from strangers: what is larger than this is damaged or hostile, and must not make us hang.
MAX_JSON_BYTES = 64 << 20
MAX_LAYERS = 1 << 10
MAX_SIZE = 1 << 24  # of one dimension
MAX_TENSOR = 1 << 40  # numbers in one parameter
MAX_INTEGER = (1 << 31) - 1  # of any other integer


def is_positive(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    except OverflowError:  # an integer beyond what a float can hold
        return False


def is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def show(value: Any) -> str:
    """A value for a message: never long, however long or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer too long to be written
        return f"a huge {type(value).__name__}"
