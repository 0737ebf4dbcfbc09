# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What nobody reads any more leaves the L2 cache without being written to memory. Twin of `fused.forget`.

A layer's intermediate results lie in the L2 cache until the weights of the experts push them out. Then they are written
to memory, though nobody will read them there: a fiftieth of all that goes through the memory in one user's step, while
the experts are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, uint8

from diffusiongemma.ops.kernels import interpreted, launch

MOST = 3  # tensors
LINE = tl.constexpr(128)  # bytes
BLOCK = 512  # lines of a program

_DISCARD = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.u32 some, $2, 0;
    @some discard.global.L2 [$1], 128;
    mov.u32 $0, 0;
    }"""
)


@triton.jit(do_not_specialize=["one", "two", "three"])
def _sweep_kernel(a, b, c, one, two, three, BLOCK: tl.constexpr, HOPPER: tl.constexpr):
    """So many lines from each of these bytes on. (The interpreter makes them NaN: a reader would show.)"""
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    at = tl.where(i < one, a + i * LINE, b + (i - one) * LINE)
    at = tl.where(i < one + two, at, c + (i - one - two) * LINE)
    live = i < one + two + three
    if HOPPER:
        some = live.to(tl.int32)
        tl.inline_asm_elementwise(_DISCARD, "=r,l,r", [at.to(tl.int64), some], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(at[:, None] + tl.arange(0, LINE)[None, :], 255, mask=live[:, None])


def forget(tensors: Sequence[Tensor]) -> None:
    """The numbers of these mean nothing from here on; whole lines only. No other kernel may be reading them."""
    given, lines = list[Tensor](), list[int]()
    for t in tensors:
        into = -t.data_ptr() % LINE.value  # its first line begins there
        given.append(t.view(-1).view(uint8)[into:])
        lines.append(given[-1].numel() // LINE.value)
    assert 0 < len(given) <= MOST, f"{len(given)} tensors at once"
    spare = MOST - len(given)
    launch(
        _sweep_kernel, triton.cdiv(sum(lines), BLOCK), *given, *given[:1] * spare, *lines, *(0,) * spare, BLOCK=BLOCK,
        HOPPER=not interpreted(), num_warps=4,
    )  # fmt: skip
