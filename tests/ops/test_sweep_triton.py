"""What is forgotten, and what is not: the interpreter makes whole lines NaN where a card discards them."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import fused, sweep_triton
from ops import hopper

SCRIPT = """
import json
from triton.compiler import ASTSource

from ops.hopper import compiled
from diffusiongemma.ops.sweep_triton import _sweep_kernel

kinds = dict(a="*u8", b="*u8", c="*u8", one="i32", two="i32", three="i32", BLOCK="constexpr", HOPPER="constexpr")
source = ASTSource(fn=_sweep_kernel, signature=kinds, constexprs={"BLOCK": 512, "HOPPER": True})
ptx = compiled(source, num_warps=4).asm["ptx"]
print(json.dumps({"discards": ptx.count("discard.global.L2 "), "stores": ptx.count("st.global")}))
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card leaves undefined numbers, not NaN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [0, 3])  # on a line, and in the middle of one
def test_whole_lines_are_forgotten_and_nothing_else(dtype: torch.dtype, first: int) -> None:
    pool = torch.zeros(64 << 10, dtype=torch.uint8)
    pool = pool[-pool.data_ptr() % 128 :].view(dtype)[: 4 * 64 * 60]  # begins with a line
    each, line = 64 * 50 + 7, 128 // dtype.itemsize
    tensors = [pool[64 * 60 * n + first :][:each] for n in range(3)]
    sweep_triton.forget(tensors)
    gone = torch.zeros_like(pool, dtype=torch.bool)
    for n in range(3):
        begin = 64 * 60 * n + first
        gone[-(-begin // line) * line : (begin + each) // line * line] = True
    assert gone.sum() > 3 * 64 * 48
    assert torch.equal(pool.isnan(), gone)


def test_fewer_tensors_than_there_may_be() -> None:
    one, other = torch.ones(16, 128), torch.ones(16, 128)
    sweep_triton.forget([one])
    assert one.isnan().sum() >= 15 * 128
    assert not other.isnan().any()
    with pytest.raises(AssertionError, match="4 tensors"):
        sweep_triton.forget([other] * 4)


def test_the_definition_leaves_nothing_that_means_something() -> None:
    t = torch.ones(3, 5)
    fused.forget([t])
    assert t.isnan().all()


def test_a_card_discards_and_writes_nothing() -> None:
    assert hopper.run(SCRIPT) == {"discards": 4, "stores": 0}, "512 lines, 128 threads"
