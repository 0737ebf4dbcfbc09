"""Cards that nobody here has: all kernels of a step and of a drawn token are compiled for them, and must fit."""

from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

from pathlib import Path
from typing import Any

import pytest
import torch

from diffusiongemma.ops import kernels
from diffusiongemma.ops.kernels import Card
from ops import hopper

SHARED = 101_376  # bytes that one program may have on an RTX 4090 and on a 5090
SPILLED = 320  # bytes a thread: what norms and products of many sums may do without harm
PRODUCTS = {"product_kernel", "_attend_kernel", "_scores_kernel", "_values_kernel", "_head_kernel", "_soft_kernel"}
COMPILE = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, sys.argv[2])
from compile_passes import CARDS, compiled, launches
card = CARDS[sys.argv[1]]
# But for the kernel that joins 64 parts of a token: loads and sums in a loop so long that it takes half a minute.
found = [launch for launch in launches(card, "int4") if launch.known.get("PARTS", 0) < 64
         or launch.kernel.__name__ != "_join_kernel"]
with ThreadPoolExecutor(2) as pool:
    print(json.dumps({"kernels": list(pool.map(lambda launch: compiled(launch, card), found))}))
"""


@pytest.mark.parametrize("card", ["8.9", "12.0"])
def test_all_kernels_compile_and_fit(card: str) -> None:
    found: list[dict[str, Any]] = hopper.run(COMPILE, card, Path(__file__).parents[2] / "scripts")["kernels"]
    assert {kernel["kernel"] for kernel in found} >= PRODUCTS | {"few_kernel", "route_one_kernel", "_decide_kernel"}
    for kernel in found:
        assert "error" not in kernel, kernel
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["spilled"] <= SPILLED, kernel
        early = card != "8.9" and kernel["kernel"] != "_sweep_kernel"  # that one waits for all before it as it is
        assert kernel["waits"] == early, "cards before Hopper know no early launches"
        if kernel["kernel"] in PRODUCTS:
            assert kernel["narrow"] == 0, "a row's numbers are read 16 bytes at a time"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((8, 6), "need compute capability 8.9 or more, this card has 8.6"), ((8, 9), None), ((12, 0), None)],
)
def test_which_cards_can_run_the_kernels(
    capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "card", lambda device: Card(capability, SHARED, 128))
    told = kernels.unavailable("cuda")
    assert told is None if reason is None else reason in str(told)


def test_what_cards_can_do() -> None:
    ada, hopper_card, blackwell = Card((8, 9), SHARED, 128), Card((9, 0), 227 << 10, 132), Card((12, 0), SHARED, 170)
    assert [card.early for card in (ada, hopper_card, blackwell)] == [False, True, True]
    assert [card.small for card in (ada, hopper_card, blackwell)] == [True, False, True]
    assert kernels.card(torch.device("cpu")) == kernels.NO_CARD
