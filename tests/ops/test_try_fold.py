"""`scripts/try_fold.py`, a trial that waits for a card: what it would put into the engine is as exact as what is."""

from ops.triton_cpu import DEVICE  # isort: skip

from types import ModuleType

import pytest
import torch

from scripted import load_script

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a card the script itself compares")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("try_fold")


@torch.inference_mode()
@pytest.mark.parametrize("quant", ["fp8", "bf16"])
def test_picks_and_weights_are_as_near_to_float64(script: ModuleType, quant: str) -> None:
    _, network = script.make(quant, 1, tiny=True)
    found = script.compare(network, 24)
    for other, error in found.values():
        assert other < 0.1, "a pick that is another is a tie, nearly"
        assert error < 0.1
    assert found["folded"][1] < 2 * found["direct"][1] + 1e-3


@torch.inference_mode()
def test_other_columns_would_be_seen(script: ModuleType) -> None:
    _, network = script.make("bf16", 1, tiny=True)
    weight, _ = network.wider[0].o
    weight[network.config.hidden_size :] *= -1
    assert script.compare(network, 24)["folded"][1] > 0.2
