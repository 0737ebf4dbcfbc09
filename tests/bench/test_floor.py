"""The floors of the 26B are the published ones, and each part of them can be counted by hand."""

from dataclasses import replace
from statistics import mean, median

import pytest
import torch

from diffusiongemma.bench.floor import (
    ATTENTION,
    CONDITIONING,
    DENSE,
    EXPERTS,
    PARTS,
    VOCABULARY,
    encode_work,
    expected_hit,
    prompt_seconds,
    request_seconds,
    step_work,
)
from diffusiongemma.bench.hardware import KNOWN, Card, card_of
from diffusiongemma.bench.routing import experts_hit, spread
from diffusiongemma.bench.step import too_fast
from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, footprint, random_network, replace_modules
from diffusiongemma.ops.cpu import fast_int8

H200 = Card("NVIDIA H200", *KNOWN["NVIDIA H200"], origin="table")


def on_meta(scheme: Scheme | None) -> DiffusionGemma:
    with torch.device("meta"):
        model = DiffusionGemma(ModelConfig.preset("26b-a4b")).to(torch.bfloat16)
        if scheme is not None:
            replace_modules(model, scheme.formats({n: tuple(t.shape) for n, t in model.state_dict().items()}))
    return model


@pytest.mark.parametrize(
    ("scheme", "milliseconds"), [(None, 11.7), (Scheme.parse("fp8"), 5.9), (Scheme.parse("int4"), 3.39)]
)
def test_floor_of_a_step_of_the_26b(scheme: Scheme | None, milliseconds: float) -> None:
    """Weights once, and 512 tokens of keys and values in 25 sliding and 5 full layers."""
    model = on_meta(scheme)
    work = step_work(model, 1, 512, 256)
    cache = 512 * 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert work.bytes.total() == footprint(model.config, scheme) + cache
    assert 1e3 * work.seconds(H200) == pytest.approx(milliseconds, rel=0.01)
    assert work.bound(H200) == "bytes"
    assert 1.95e12 < work.flops.total() < 2.6e12
    assert sum(work.part_seconds(part, H200) for part in PARTS) >= work.seconds(H200)


def test_parts_by_hand() -> None:
    config = ModelConfig.preset("tiny")
    model = DiffusionGemma(config)
    users, prefix, canvas = 3, 40, 32
    work = step_work(model, users, prefix, canvas, hit=0.5)
    tokens, hidden, layers = users * canvas, config.hidden_size, config.num_hidden_layers
    expert = 3 * hidden * config.moe_intermediate_size * layers
    assert work.bytes[EXPERTS] == 4 * expert * config.num_experts // 2
    assert work.flops[EXPERTS] == 2 * expert * config.top_k_experts * tokens
    assert work.bytes[DENSE] == 4 * 3 * hidden * config.intermediate_size * layers
    assert work.bytes[VOCABULARY] == 4 * config.vocab_size * hidden
    assert work.flops[VOCABULARY] == 2 * 2 * config.vocab_size * hidden * tokens
    more = step_work(model, users, prefix + 1, canvas, hit=0.5)
    full = sum(not config.is_sliding(layer) for layer in range(layers))
    # The window is full already, so a further token is seen by the full layers alone.
    heads, size = config.num_global_key_value_heads, config.global_head_dim
    assert more.bytes[ATTENTION] - work.bytes[ATTENTION] == full * users * 2 * heads * size * 4
    assert (
        more.flops[ATTENTION] - work.flops[ATTENTION] == full * users * canvas * 4 * config.num_attention_heads * size
    )


def test_encoding_reads_no_head_and_no_conditioning() -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny"))
    prompt, token = encode_work(model, 1, 0, 16, 1.0), encode_work(model, 4, 64, 1, 0.5, head=4)
    assert prompt.bytes[VOCABULARY] == prompt.flops[VOCABULARY] == prompt.bytes[CONDITIONING] == 0
    config = model.config
    assert token.flops[VOCABULARY] == 4 * 2 * config.vocab_size * config.hidden_size
    assert token.bytes[VOCABULARY] == 4 * config.vocab_size * config.hidden_size
    # Causal: queries 1 … 16 see as many keys.
    ones = [encode_work(model, 1, at, 1, 1.0) for at in range(16)]
    assert prompt.flops[ATTENTION] == sum(work.flops[ATTENTION] for work in ones)


def test_of_a_prompts_last_layer_only_keys_and_values_are_made() -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny"))
    prompt, drawn = encode_work(model, 1, 0, 16, 1.0), encode_work(model, 1, 0, 16, 1.0, head=1)
    last = model.layers[-1]
    spared = sum(p.nbytes for p in last.state_dict().values())
    spared -= sum(m.weight.nbytes for m in (last.self_attn.qkv_proj, last.self_attn.k_norm, last.input_layernorm))
    assert drawn.bytes.total() - prompt.bytes.total() == spared + drawn.bytes[VOCABULARY]
    layers = model.config.num_hidden_layers
    assert prompt.flops[EXPERTS] * layers == drawn.flops[EXPERTS] * (layers - 1)
    assert drawn.flops[ATTENTION] > prompt.flops[ATTENTION] > drawn.flops[ATTENTION] * (layers - 1) / layers


def test_a_request_is_its_passes() -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny"))
    whole = request_seconds(model, H200, 2, 64, 64, 3, 32, chunk=64)
    hit = expected_hit(model, 64)
    parts = encode_work(model, 1, 0, 64, hit).seconds(H200)  # that of the other user goes with the first step
    steps = [step_work(model, 2, at, 32, hit) for at in (64, 96)]
    parts += 3 * sum(step.seconds(H200) for step in steps)
    assert whole == pytest.approx(parts), "the second block's first step reads what the first one's commit needs"
    slow = replace(H200, wide=1e9)  # operations decide: those of the commit come on top
    parts = 2 * encode_work(model, 1, 0, 64, hit).seconds(slow) + 3 * sum(step.seconds(slow) for step in steps)
    parts += encode_work(model, 2, 64, 32, hit).seconds(slow)
    assert request_seconds(model, slow, 2, 64, 64, 3, 32, chunk=64) == pytest.approx(parts)
    short = prompt_seconds(model, H200, 4, 16, chunk=64)  # four share a pass
    assert request_seconds(model, H200, 4, 16, 32, 3, 32, 64) == pytest.approx(
        3 * step_work(model, 4, 16, 32, expected_hit(model, 128)).seconds(H200), rel=1e-3
    ), "one pass of all prompts, whose weights the first step reads"
    assert short == pytest.approx(encode_work(model, 4, 0, 16, hit).seconds(H200))
    cut = prompt_seconds(model, H200, 4, 48, chunk=32, room=64)  # two share a pass of 32 tokens each, then one of 16
    assert cut == pytest.approx(
        2 * sum(encode_work(model, 2, at, n, hit).seconds(H200) for at, n in ((0, 32), (32, 16)))
    )


def test_experts_hit() -> None:
    config = ModelConfig.preset("tiny")
    model = random_network(config, None, "cpu", torch.float32)
    assert experts_hit(model, 1, 20, 32) == pytest.approx([1.0] * config.num_hidden_layers, abs=0.13)
    (least, *_) = experts_hit(model, 1, 20, None)
    assert least == config.top_k_experts / config.num_experts
    assert expected_hit(model, 1) == least
    with torch.no_grad():  # all tokens the same way: no spread
        for layer in model.layers:
            layer.router.proj.weight.zero_()
    assert set(experts_hit(model, 2, 20, 32)) == {least}


def test_a_belief_that_makes_all_positions_alike_shows_in_the_experts() -> None:
    """It made a step of the 26B seem twice as fast as it is: an even belief is the same at every position."""
    config = ModelConfig.preset("tiny", canvas_length=64, num_experts=32, top_k_experts=2)
    model = random_network(config, None, "cpu", torch.float32, std=0.02)
    chance, found = torch.Generator().manual_seed(0), []
    for _ in range(7):  # one draw in thirteen makes them differ after all
        with torch.no_grad():
            model.self_conditioning.down_proj.weight.normal_(std=20.0, generator=chance)
        found.append(mean(experts_hit(model, 1, 20, 64)))
    collapsed = median(found)
    spread(model)
    assert collapsed + 0.1 < mean(experts_hit(model, 1, 20, 64))


def test_a_step_below_its_floor_is_not_believed() -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny"))
    work = step_work(model, 1, 64, 32, 1.0)
    floor = 1e3 * work.seconds(H200)
    assert too_fast({"ms": 1.1 * floor, "floor_ms": floor}, work, H200) is None
    assert "the step" in (too_fast({"ms": 0.5 * floor, "floor_ms": floor}, work, H200) or "")
    experts = {"experts": 0.5e3 * work.part_seconds("experts", H200)}
    assert "experts" in (too_fast({"ms": 2 * floor, "floor_ms": floor, "parts": experts}, work, H200) or "")
    beside = {
        "experts": 1e3 * (work.part_seconds("experts", H200) + work.part_seconds("dense MLP", H200)),
        "dense MLP": 0.0,
    }
    assert too_fast({"ms": 2 * floor, "floor_ms": floor, "parts": beside}, work, H200) is None


def test_a_card_that_nobody_knows_is_measured() -> None:
    card = card_of(torch.device("cpu"))
    assert card.origin == "measured now"
    assert 1e8 < card.read < 1e13
    assert 1e8 < card.wide < 1e15
    assert 1e8 < card.narrow < 1e15
    assert fast_int8() or card.narrow == card.wide
