"""The router with blocks of any size; more of it is in `test_norm_triton.py`."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import fused, router_triton
from diffusiongemma.ops.router_triton import BLOCKS, blocks_for

EPS = 1e-6


def made(rows: int, width: int, experts: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (experts, width), (width,), (experts,))
    return tuple(torch.randn(shape, generator=g).to(dtype).to(DEVICE) for shape in shapes)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize(("rows", "width"), [(70, 320), (128, 64)])
def test_blocks_of_any_size_give_the_definition(block: int, rows: int, width: int) -> None:
    args = made(rows, width, 32)
    index, weight = router_triton.route(*args, 4, EPS, BLOCKS._replace(rows=block))
    want_index, want_weight = fused.route(*args, 4, EPS)
    assert torch.equal(index, want_index)
    torch.testing.assert_close(weight, want_weight, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter leaves the order of sums to numpy")
def test_a_row_keeps_its_bits_in_blocks_of_any_size() -> None:
    args = made(4096, 2816, 128, torch.bfloat16)
    index, weight = router_triton.route(*args, 8, EPS)
    for rows in (1, 256, 1000, 2048):
        few_index, few_weight = router_triton.route(args[0][:rows], *args[1:], 8, EPS)
        assert torch.equal(few_index, index[:rows])
        assert torch.equal(few_weight, weight[:rows])


def test_only_rows_of_a_program_depend_on_the_batch() -> None:
    """Parts and depth order the sums."""
    assert [blocks_for(rows).rows for rows in (1, 256, 512, 513, 1024, 2048, 4096, 9999)] == [
        16, 16, 16, 32, 32, 64, 128, 128,
    ]  # fmt: skip
    assert {blocks_for(rows)[1:3] for rows in (1, 1000, 3000, 9999)} == {(BLOCKS.part, BLOCKS.depth)}
