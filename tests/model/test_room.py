"""Weights that are more than a machine's whole memory are refused, not begun with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diffusiongemma.bench.commands import app
from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Engine
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, ensure_room, random_network

TINY = ModelConfig.preset("tiny")
FOLDER = Path("model")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Engine.load("random:tiny"),
        lambda: Engine.load("random:tiny", quantize="int8"),
        lambda: random_network(TINY, Scheme.parse("fp8")),
        lambda: load_model(FOLDER),
        lambda: app(["step", "--preset", "tiny"], standalone_mode=False),
        lambda: app(["cpu-step", "--preset", "tiny"], standalone_mode=False),
    ],
    ids=["engine", "engine int8", "network", "checkpoint", "bench step", "bench cpu-step"],
)
def test_refused(make: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(DiffusionGemma(TINY).init_weights(0), FOLDER)
    monkeypatch.setattr("diffusiongemma.model.quantize._memory", lambda: 300_000)
    with pytest.raises(
        DeviceError, match="do not fit into this machine's 0.0 GB of memory: take a smaller model, one in int8"
    ):
        make()


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusiongemma.model.quantize._memory", lambda: None)
    ensure_room(1 << 60, "cpu")
