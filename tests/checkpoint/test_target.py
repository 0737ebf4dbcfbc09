from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from absent_cards import Cards
from diffusiongemma.checkpoint import pick_device
from diffusiongemma.errors import DeviceError
from diffusiongemma.train.__main__ import _device

twins = pytest.mark.parametrize("pick", [pick_device, _device])  # training has its own


@twins
@pytest.mark.parametrize(
    ("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda"), 1)]
)
def test_a_card_has_its_index(
    pick: Callable[[Any], torch.device], name: str | torch.device, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch)
    picked = pick(name)
    assert picked == torch.device("cuda", index)
    torch.cuda.set_device(picked)
    assert cards.chosen == [index]


def test_these_cards_are_as_strict_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    Cards(monkeypatch)
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))


@twins
def test_a_cpu_has_none(pick: Callable[[Any], torch.device]) -> None:
    assert pick("cpu") == torch.device("cpu")


@twins
@pytest.mark.parametrize("name", ["meta", "abacus", ""])
def test_what_is_no_device_for_numbers(pick: Callable[[Any], torch.device], name: str) -> None:
    with pytest.raises(DeviceError, match="cannot be used here"):
        pick(name)


def test_nothing_is_no_device() -> None:
    with pytest.raises(DeviceError, match="cannot be used here"):
        pick_device(None)  # type: ignore[arg-type]
