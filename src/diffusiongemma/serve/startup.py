"""A quick start: what is set before the first heavy import, and undone when the model is there.

Collecting garbage while thousands of functions and classes are made costs a tenth of the start and finds nothing.
Threads of OpenMP spin while they wait for each other; where another program holds a core they spin for its whole slice,
and loading that takes 0.2 s alone took 5 s beside one busy program. Threads that sleep do not care.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_POLICY = "OMP_WAIT_POLICY"


@contextmanager
def quick() -> Iterator[None]:
    """Begin before torch is imported: OpenMP reads its variables once. What the user has set stays. `done` ends it, or
    the end of the block does, whatever happens in it."""
    os.environ.setdefault(WAIT_POLICY, "passive")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def done() -> None:
    """What was made until now stays for good: the collector need not look at it any more."""
    gc.collect()
    gc.freeze()
    gc.enable()
