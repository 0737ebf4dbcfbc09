from __future__ import annotations

import pytest
import torch

from absent_cards import Cards
from diffusiongemma.bench import subject as subject_module
from diffusiongemma.bench.subject import Subject, Target


class Enough(Exception):
    """What follows needs a card."""


@pytest.mark.parametrize(("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0)])
def test_the_card_is_the_current_one_before_anything_is_made(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards, seen = Cards(monkeypatch), list[torch.device]()

    def stop(device: torch.device) -> None:
        seen.append(device)
        raise Enough

    monkeypatch.setattr(subject_module, "reset_peak", stop)
    with pytest.raises(Enough):
        Subject.make(Target("tiny", device=name))
    assert cards.chosen == [index]
    assert seen == [torch.device("cuda", index)]
