import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.errors import InputError
from diffusiongemma.ops import int4, quant


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_unpack_undoes_pack(rows: int, blocks: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (2, rows, 64 * blocks), generator=g, dtype=torch.int8)
    words = int4.pack(q)
    assert words.dtype == torch.int16
    assert words.shape == (2, rows, 16 * blocks)
    assert torch.equal(int4.unpack(words), q)


def test_a_word_holds_weights_that_lie_16_apart() -> None:
    q = torch.arange(64).remainder(13).sub(6).to(torch.int8)
    for i, word in enumerate(int4.pack(q).tolist()):
        assert [(word >> shift & 15) - 8 for shift in (0, 4, 8, 12)] == q[i::16].tolist()


@pytest.mark.parametrize("shape", [(10, 128), (3, 10, 128), (2, 3, 10, 128)])
def test_words_are_packed_again_where_they_are(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, scale = quant.quantize(torch.randn(shape), quant.parse_format("int4", 32))
    values = quant.dequantize(q, scale)
    words, turned = int4.from_stored(q, scale)
    assert words.data_ptr() == q.data_ptr()
    assert words.shape == (*shape[:-1], 32)
    assert torch.equal(int4.dequantize(words, turned), values)


@pytest.mark.parametrize("group", [32, 64])
def test_stored_weights_keep_their_values(group: int) -> None:
    torch.manual_seed(0)
    q, scale = quant.quantize(torch.randn(3, 10, 192), quant.parse_format("int4", group))
    words, turned = int4.to_runtime(quant.unpack_int4(q), scale)
    assert turned.shape == (3, 192 // group, 10)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(int4.dequantize(words, turned), quant.dequantize(q, scale))


def test_what_kernels_cannot_read_is_refused() -> None:
    q, scale = torch.zeros(4, 96, dtype=torch.int8), torch.ones(4, 3)
    with pytest.raises(InputError, match="multiple of 64"):
        int4.to_runtime(q, scale)
    with pytest.raises(InputError, match="groups of 32 or 64"):
        int4.to_runtime(torch.zeros(4, 128, dtype=torch.int8), torch.ones(4, 1))
    with pytest.raises(InputError, match="not below 8"):
        int4.to_runtime(torch.zeros(4, 128, dtype=torch.int8), torch.full((4, 2), 8.0))
    with pytest.raises(InputError, match="not below 8"):
        int4.to_runtime(torch.zeros(4, 128, dtype=torch.int8), torch.full((4, 2), torch.nan))


@pytest.mark.parametrize(("mask", "shift", "power"), [(0x0F, 0, 125), (0xF0, 4, 121)])
def test_nibbles_are_numbers_without_conversion(mask: int, shift: int, power: int) -> None:
    """What the kernel's assembly does, bits of a small bfloat16 times a huge scale, plus an offset."""
    bits = torch.arange(256, dtype=torch.int16)
    scale = (torch.rand(50) * 7.9).to(torch.bfloat16) * torch.logspace(-20, 0, 50).to(torch.bfloat16)
    small = (bits & mask).view(torch.bfloat16).double()[:, None]
    huge, offset = scale.double() * 2.0**power, scale.double() * -(2.0**-5)
    assert torch.equal(huge.to(torch.bfloat16).double(), huge)  # the kernel holds both as bfloat16
    assert torch.equal(offset.to(torch.bfloat16).double(), offset)
    found = (small * huge + offset).to(torch.bfloat16).double() * 256  # one rounding, as fma has
    q = ((bits & mask) >> shift).double()[:, None] - 8
    assert torch.equal(found, (q * scale.double()).to(torch.bfloat16).double())
