"""Is this text Python?"""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache


@lru_cache(maxsize=32)  # whole files: candidates for a hole are often equal, and cases often lie in one file
def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():  # an invalid escape in somebody's file is none of ours
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
