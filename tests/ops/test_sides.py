"""Sides of the L2 cache: that they are found from how long answers take, on a card that is made up here, that tiles lie
on the sides that kernels look for, and what the kernel that asks is compiled to. What a real card answers:
`docs/log.md`; whether kernels find the same numbers: `scripts/bench_stream.py`."""

from ops.triton_cpu import DEVICE  # isort: skip

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusiongemma.ops import kernels, nvrtc, sides
from diffusiongemma.ops.sides import CHUNK, LINE, PAGE, PAIRS, PROCESSORS, Sides, laid_back, lay_out, sides_of
from ops.hopper import Machine

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="of a card that is made up")

CPU = torch.device("cpu")


class Card:
    """Memory whose sides are told by some bits of an address and one bit of its page, and multiprocessors on both"""

    def __init__(self, mask: int, seed: int = 0, wrong: float = 0.0, processors: int = 132) -> None:
        self.mask, self.wrong, self.choose = mask, wrong, random.Random(seed)
        self.pages: dict[int, int] = {}
        self.processors = [self.choose.randrange(2) for _ in range(processors)]

    def side(self, address: int) -> int:
        page = self.pages.setdefault(address // PAGE, len(self.pages) % 2)
        return (address % PAGE & self.mask).bit_count() % 2 ^ page

    def run(self, kernel: nvrtc.Kernel, programs: int, threads: int, *args: Any) -> None:
        base, offsets, many, nearer, processors = args
        assert kernel.function == "sides_cuda_kernel"
        assert kernel.names["APART"] == CHUNK
        assert programs <= len(self.processors)
        for i, offset in enumerate(offsets[:many].tolist()):
            assert 0 <= offset <= base.nbytes - 4
            who = i % programs
            far, beside = (self.side(base.data_ptr() + at) ^ self.processors[who] for at in (offset, offset ^ CHUNK))
            found = 200 * (beside - far)
            nearer[i] = -found if self.choose.random() < self.wrong else found + self.choose.randrange(-60, 60)
            processors[i] = who


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Card], None]]:
    def use(card: Card) -> None:
        monkeypatch.setattr(kernels, "cpp", lambda device: True)
        monkeypatch.setattr(kernels, "card", lambda device: kernels.Card((9, 0), 227 << 10, len(card.processors)))
        monkeypatch.setattr(nvrtc.Kernel, "run", lambda kernel, *args: card.run(kernel, *args))
        sides_of.cache_clear()

    yield use
    sides_of.cache_clear()


@pytest.mark.parametrize("mask", [0xAB000, 0xB3000, 0x1EF000, 0x1000])
def test_sides_are_found(on: Any, mask: int) -> None:
    card = Card(mask, wrong=0.05)
    on(card)
    found = sides_of(CPU)
    if mask == 0x1000:
        assert not found.both, "pairs whose first chunks all are of one side tell nothing that a mask could"
        return
    assert found.mask == mask >> 13
    turned = int(found.processors[0]) ^ card.processors[0]
    assert found.processors[:132].tolist() == [side ^ turned for side in card.processors]
    assert sides_of(CPU) is found, "it is asked once"


@pytest.mark.parametrize("size", [2 * CHUNK, 2 * CHUNK - 2048, 77 * CHUNK, 19 * CHUNK + 2048])
def test_every_chunk_lies_on_its_tiles_side(on: Any, size: int) -> None:
    card = Card(0xAB000, seed=size)
    on(card)
    found, count = sides_of(CPU), 2 * max(3, 3 * PAGE // (2 * size))
    tiles = torch.randint(256, (count, size), dtype=torch.uint8)
    sided = lay_out(tiles, found)
    assert torch.equal(laid_back(sided), tiles)
    assert len(sided.pages.unique()) == 2, "both kinds of pages"
    assert (sided.tiles, sided.size, sided.nbytes) == (count, size, tiles.nbytes)
    assert sided.lines.data_ptr() % PAGE == 0
    real = set[int]()
    for tile in range(count):
        for chunk in range(sided.chunks):
            line = line_of(sided, tile, chunk)
            lying = sided.lines[line : line + CHUNK // LINE].flatten()
            assert torch.equal(lying[: size - chunk * CHUNK], tiles[tile, chunk * CHUNK : (chunk + 1) * CHUNK])
            real.add(card.side(sided.lines[line].data_ptr()) ^ tile % 2 ^ int(found.processors[0]))
    assert real == {card.processors[0]}, "who is of a tile's side is near all of it"


def line_of(sided: sides.Sided, tile: int, chunk: int) -> int:
    """As `sides_gluon` finds it"""
    first = tile // 2 * sided.chunks
    one, two = (int(sided.pages[at // PAIRS]) for at in (first, first + sided.chunks - 1))
    pair = first + chunk
    bits = pair & sided.sides.mask
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    side = bits ^ (one if pair // PAIRS == first // PAIRS else two)
    return (2 * pair + ((side ^ tile) & 1)) * (CHUNK // LINE)


@pytest.mark.parametrize("wrong", [0.5, 0.35])
def test_who_answers_by_chance_has_no_sides(on: Any, wrong: float) -> None:
    on(Card(0xAB000, wrong=wrong))
    assert not sides_of(CPU).both


def test_who_cannot_ask_does_without(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(Card(0xAB000))
    monkeypatch.setattr(nvrtc.Kernel, "run", lambda *_: 1 / 0)
    assert not sides_of(CPU).both
    assert "could not be asked for: division by zero" in caplog.text


def test_a_card_all_on_one_side_has_none(on: Any) -> None:
    card = Card(0xAB000)
    card.processors = [1] * 132
    on(card)
    assert not sides_of(CPU).both


def test_without_sides_tiles_lie_in_pairs_all_the_same() -> None:
    sides_of.cache_clear()
    found = sides_of(CPU)
    assert not found.both
    assert len(found.processors) == PROCESSORS
    assert not found.processors.any()
    tiles = torch.randint(256, (4, 3 * CHUNK - 7), dtype=torch.uint8)
    sided = lay_out(tiles, found)
    assert torch.equal(laid_back(sided), tiles)
    assert torch.equal(sided.lines[32:64].flatten(), tiles[1, :CHUNK]), "chunks of two tiles take turns"
    with pytest.raises(AssertionError, match="3 tiles of"):
        lay_out(tiles[:3], found)
    with pytest.raises(AssertionError, match=f"2 tiles of {PAGE} bytes"):
        lay_out(torch.zeros(2, PAGE, dtype=torch.uint8), found)


def test_first_sides_are_parities() -> None:
    pages = torch.tensor([0, 1, 0], dtype=torch.int32)
    for mask in (0x55, 0xFF, 0x81, 0):
        found = sides.first_sides(3 * PAIRS, pages, Sides(mask, pages))
        want = [(n % PAIRS & mask).bit_count() % 2 ^ int(pages[n // PAIRS]) for n in range(3 * PAIRS)]
        assert found.tolist() == want


def test_the_kernel_that_asks() -> None:
    made = Machine.of(sides.kernel_of().code())
    assert made.local == 0
    assert made.count("ATOMG") == 12, "four places, three times"
    assert not [line for line in made.code if line.startswith(("ATOMG", "RED")) and " RZ" not in line], "adds nothing"
    depends = [line for line in made.code if line.startswith("ISETP") and "0x5a5a5a5b" in line]
    assert len(depends) >= 12, "an addition does not wait for the one before"


def test_memory_begins_at_a_page() -> None:
    for size in (1, CHUNK, PAGE, PAGE + 1):
        memory: Tensor = sides.aligned(size, CPU)
        assert memory.data_ptr() % PAGE == 0
        assert memory.numel() == size
