"""Experts a second time: which are packed and which are left, that plain and packed ones are the same numbers, and when
an engine does it. What kernels make of them: `tests/ops/test_packed.py`, and on a card `scripts/bench_stream.py`."""

from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Limits, fast
from diffusiongemma.engine.runner import PLENTY
from diffusiongemma.errors import ConfigError, DeviceError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model import packed as module
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.model.fused_weights import FusedLayer
from diffusiongemma.model.packed import drop_packed, pack_experts, packed_bytes, packed_of, packings, unpackable
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops import packed, sides
from diffusiongemma.ops.sides import Sides

STREAMING = replace(torch_ops(), streams=lambda *_: True)  # as if this were a Hopper card
CPU = torch.device("cpu")


def config(width: int = 64) -> ModelConfig:
    """Whose experts divide into tiles"""
    return ModelConfig.preset("tiny", hidden_size=128, moe_intermediate_size=width)


def network(kind: str, width: int = 64) -> DiffusionGemma:
    torch.manual_seed(0)
    scheme = None if kind == "bf16" else Scheme.parse(kind, 64 if kind == "int4" else None)
    model = random_network(config(width), scheme, CPU, torch.bfloat16, std=0.02)
    if kind == "int4":
        for layer in model.layers:
            experts: Any = layer.experts
            for weight in (experts.gate_up_proj, experts.down_proj):
                weight.to_runtime()
    return model


def numbers(model: DiffusionGemma, at: int) -> list[Tensor]:
    """The plain weights of a layer as they are multiplied"""
    layer: Any = model.layers[at]
    fused = FusedLayer.of(layer)
    return [q.float() if scale is None else q.float() * scale for q, scale in (fused.up, fused.down)]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    module._packed.clear()


@pytest.mark.parametrize(("kind", "name"), [("fp8", "fp8 in 7 bits"), ("bf16", "bfloat16 in 12 bits")])
def test_packed_and_plain_are_the_same_numbers(kind: str, name: str) -> None:
    model = network(kind)
    layers = len(model.layers)
    before = numbers(model, 1)
    assert packings(model) == []
    assert FusedLayer.of(model.layers[1], packed=True).packed is None
    room = packed_bytes(model)
    assert unpackable(model, STREAMING) is None
    assert pack_experts(model) == layers
    assert packings(model) == [name]
    after = numbers(model, 1)
    layer: Any = model.layers[1]
    held = FusedLayer.of(layer, packed=True).packed
    assert held is not None
    assert held is packed_of(layer.experts)
    assert FusedLayer.of(layer).packed is None, "nobody asked for it"
    assert held.packing is not None
    for was, plain, lying, scale, gated in zip(
        before, after, (held.up, held.down), (held.up_scale, held.down_scale), (True, False), strict=True
    ):
        assert 0 < (plain - was).norm() / was.norm() < held.packing.most or kind == "bf16"
        tiles = sides.laid_back(lying).view(len(plain), plain.shape[1] // 128, -1, 128)
        q = packed.unpack(tiles, held.packing, (plain.shape[1], plain.shape[2]), gated)
        assert torch.equal(packed.lifted(q, held.packing).float() * scale, plain)
    taken = sum(held.up.lines.nbytes + held.down.lines.nbytes for _ in range(layers))
    assert taken <= room <= taken + 2 * layers * (sides.PAGE + sides.CHUNK)
    assert pack_experts(model) == layers, "once more changes nothing"
    assert packed_of(layer.experts) is held


def test_what_is_not_wanted_any_more_is_dropped() -> None:
    model = network("fp8")
    assert pack_experts(model) == len(model.layers)
    layer: Any = model.layers[0]
    packed_experts = packed_of(layer.experts)
    assert packed_experts is not None
    lying, plain = ref(packed_experts.up.lines), numbers(model, 0)
    del packed_experts
    drop_packed(model)
    drop_packed(model)
    assert packings(model) == []
    assert lying() is None, "the memory is free"
    assert all(torch.equal(a, b) for a, b in zip(plain, numbers(model, 0), strict=True))
    assert pack_experts(model) == len(model.layers)


def test_4_bit_experts_are_laid_out_where_there_are_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("int4")
    assert (
        unpackable(model, STREAMING)
        == "4-bit experts gain nothing where the L2 cache has no sides, or they could not be found"
    )
    monkeypatch.setattr(module, "sides_of", lambda device: Sides(0x55, torch.zeros(1024, dtype=torch.int32)))
    monkeypatch.setattr(
        sides, "_pages", lambda memory, _: torch.zeros(-(-len(memory) // sides.PAGE), dtype=torch.int32)
    )
    assert unpackable(model, STREAMING) is None
    layer: Any = model.layers[0]
    weights = FusedLayer.of(layer)
    before = [t.clone() for t in (*weights.up, *weights.down)]
    assert pack_experts(model) == len(model.layers)
    assert packings(model) == ["4 bits by side"]
    held = packed_of(layer.experts)
    assert held is not None
    assert torch.equal(sides.laid_back(held.up).view(weights.up[0].shape), weights.up[0])
    assert all(torch.equal(a, b) for a, b in zip(before, (*weights.up, *weights.down), strict=True))


def test_a_layer_that_would_lose_too_much_is_left(caplog: pytest.LogCaptureFixture) -> None:
    model = network("fp8")
    for at, number in ((0, None), (1, 0x7F)):  # what is lost, and no number
        experts: Any = model.layers[at].experts
        q = experts.gate_up_proj.q
        if number is None:
            small = (q[2].float() / 64).to(q.dtype)
            small[:, 0] = 448.0
            q[2] = small
        else:
            q.view(torch.uint8)[1, 3, 5] = number
    before = numbers(model, 0)
    with caplog.at_level(logging.WARNING):
        assert pack_experts(model) == len(model.layers) - 2
    assert "packing would change experts too much, of layers 0 by" in caplog.text
    assert "1 by nan%" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(model, 0), strict=True)), "it is as it was"
    assert packed_of(model.layers[0].experts) is None
    assert packed_of(model.layers[2].experts) is not None


def test_where_memory_runs_out_the_rest_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, real, calls = network("fp8"), module.once_more, [0]

    def packing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("none left")
        return real(*args)

    monkeypatch.setattr(module, "once_more", packing)
    assert pack_experts(model) == 1
    assert "no memory to pack the experts of layer 1" in caplog.text
    monkeypatch.setattr(module, "once_more", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack_experts(model)


def test_who_cannot_be_packed() -> None:
    assert "are neither fp8 nor bfloat16" in str(unpackable(network("int8"), STREAMING))
    assert "do not divide into tiles" in str(unpackable(network("fp8", width=96), STREAMING))
    assert "Hopper" in str(unpackable(network("fp8"), torch_ops()))
    assert packed_bytes(network("int8")) == 0
    assert pack_experts(network("int8")) == 0


# ---- when an engine does it --------------------------------------------------------------------------------------


def test_where_memory_is_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("fp8")
    limits, left = Limits(max_bytes=1 << 20), [0]
    monkeypatch.setattr(fast, "bytes_left", lambda device: left[0])
    needed = limits.max_bytes + packed_bytes(model) + PLENTY
    for room, roomy, wanted in ((needed - 1, True, False), (needed, False, False), (needed, True, True)):
        left[0] = room
        assert fast._packs(model, STREAMING, limits, roomy) is wanted
        assert bool(packings(model)) is wanted
    left[0] = 0
    assert fast._packs(model, STREAMING, limits, False), "what is packed already takes no more"
    assert not fast._packs(model, STREAMING, replace(limits, packed=False), True)


def test_asking_for_what_cannot_be_had() -> None:
    model, asked = network("int8"), Limits(packed=True)
    with pytest.raises(DeviceError, match="packed=True cannot be honoured: experts are neither fp8"):
        fast._packs(model, STREAMING, asked, True)
    assert not fast._packs(model, STREAMING, Limits(), True), "nobody asked"
    with pytest.raises(DeviceError, match="packed=True cannot be honoured: .* Hopper"):
        fast.choose_runner(network("fp8"), asked, kernels=False)
    model = network("fp8")
    for layer in model.layers:
        experts: Any = layer.experts
        experts.down_proj.q.view(torch.uint8)[0, 0, 0] = 0x7F
    with pytest.raises(DeviceError, match="change them too much"):
        fast._packs(model, STREAMING, asked, True)
    with pytest.raises(ConfigError, match="packed must be True, False or None, got 1"):
        Limits(packed=1)  # type: ignore[arg-type]


def test_a_small_network_may_be_asked_for_at_any_time() -> None:
    """Whatever memory there is"""
    model = network("fp8")
    assert fast._packs(model, STREAMING, Limits(packed=True), False)
    assert packings(model) == ["fp8 in 7 bits"]
