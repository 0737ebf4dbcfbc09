import pytest
import torch

from diffusiongemma.errors import InputError
from diffusiongemma.ops import int4, quant

ORDER = [0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6, -7, 7, -8]  # the weights that nibbles stand for


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("shape", [(128, 128), (3, 256, 192), (2, 3, 128, 64)])
def test_stored_weights_are_packed_where_they_are(shape: tuple[int, ...], group: int, gated: bool, monkeypatch) -> None:
    """A few at a time, in their own memory, and back."""
    monkeypatch.setattr(int4, "AT_ONCE", 2 * 256 * 192)
    torch.manual_seed(0)
    words, scale = quant.quantize(torch.randn(shape), quant.parse_format("int4", group))
    assert len(quant.unpack_int4(words).unique()) == 16
    values, before = quant.dequantize(words, scale), (words.clone(), scale.clone())
    tiles, both = int4.from_stored(words, scale, gated)
    assert (tiles.data_ptr(), both.data_ptr()) == (words.data_ptr(), scale.data_ptr())
    assert (tiles.nbytes, both.nbytes) == (words.nbytes, scale.nbytes)
    assert torch.equal(int4.dequantize_pairs(tiles, both, gated), values)
    expected = int4.pack_pairs(quant.unpack_int4(before[0]), before[1], gated)
    assert all(torch.equal(a, b) for a, b in zip((tiles, both), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(int4.to_stored(tiles, both, gated), before, strict=True))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_pairs_keep_their_values(gated: bool, group: int) -> None:
    torch.manual_seed(0)
    q, scale = quant.quantize(torch.randn(3, 256, 192), quant.parse_format("int4", group))
    tiles, scales = int4.pack_pairs(quant.unpack_int4(q), scale, gated)
    assert tiles.shape == (3, 2, 192 // group, 64, group)
    assert scales.shape == (3, 2, 192 // group, 64)
    assert torch.equal(int4.dequantize_pairs(tiles, scales, gated), quant.dequantize(q, scale))


def test_a_byte_holds_what_one_program_makes_side_by_side() -> None:
    q = torch.randint(-8, 8, (256, 64), dtype=torch.int8)
    for gated, apart in ((False, 64), (True, 128)):
        tiles, _ = int4.pack_pairs(q, torch.ones(256, 1), gated)
        byte = int(tiles[1, 0, 5, 7])
        row = 69 if gated else 133
        assert [ORDER[byte & 15], ORDER[byte >> 4]] == [int(q[row, 7]), int(q[row + apart, 7])]


def test_what_pairs_cannot_hold_is_refused() -> None:
    q = torch.zeros(128, 128, dtype=torch.int8)
    with pytest.raises(InputError, match="multiple of 128 rows"):
        int4.pack_pairs(q[:64], torch.ones(64, 2), False)
    with pytest.raises(InputError, match="128 in groups of 128"):
        int4.pack_pairs(q, torch.ones(128, 1), False)
    with pytest.raises(InputError, match="multiple of 128 rows"):
        int4.from_stored(torch.zeros(64, 16, dtype=torch.int32), torch.ones(64, 2, dtype=torch.bfloat16), False)
    with pytest.raises(InputError, match="not a number"):
        int4.pack_pairs(q, torch.full((128, 2), torch.inf), False)


def test_a_nibble_is_nearly_an_fp8_number() -> None:
    """What the kernel takes for granted: nibbles, plus 0x81 where they are odd, are the weights times 2^-8."""
    numbers = torch.tensor([n + 0x81 * (n % 2) for n in range(16)], dtype=torch.uint8)
    assert (numbers.view(torch.float8_e4m3fn).double() * 2**8).tolist() == ORDER
