# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Work that many programs share and one ends: the last to arrive does what another kernel would be launched for.

Each stores its part and counts itself; who finds that all others have come reads their parts and puts them together, in
the parts' own order, so that no bit depends on who it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(counter, count):
    """Is this the last of `count` programs that come here? What the others have stored is then visible to it, if it is
    read with ".cg": beside the multiprocessor's own cache, which may hold older numbers. The counter must be 0 before
    the first and is 0 after the last, so that a recorded graph can be replayed."""
    tl.debug_barrier()  # one thread counts, for what all have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)
    return last
