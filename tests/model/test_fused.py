"""The fused network against the plain one: the same numbers, over rows that lie in one pool."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import torch_ops
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.pool import CachePool, PoolRow
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.model.support import prepare
from diffusiongemma.ops.attention_cached import New
from diffusiongemma.ops.quantized import QuantWeight

CONFIG = ModelConfig.preset(
    "tiny", vocab_size=96, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
    sliding_window=12, num_experts=16, layer_types=("sliding_attention", "sliding_attention", "full_attention"),
)  # fmt: skip


def network(kind: str | None = None) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind)
    model = random_network(CONFIG, scheme, dtype=torch.float32, std=0.2)
    for i, layer in enumerate(model.layers):
        layer.encoder_scalar.fill_(0.9 - 0.1 * i)
        layer.decoder_scalar.fill_(0.8 + 0.1 * i)
    return model


def batch_over(pool: CachePool, rows: list[PoolRow], counts: list[int]) -> Batch:
    at = [torch.arange(row.length, row.length + n, dtype=torch.int32) for row, n in zip(rows, counts, strict=True)]
    begin = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    return Batch(pool.offsets(rows), lengths, torch.cat(at), New(begin, max(counts)), reach=64)


def close(a: Tensor, b: Tensor, within: float) -> bool:
    return float((a - b).norm() / b.norm()) < within


@pytest.mark.parametrize("kind", [None, "int8"])
def test_it_computes_what_the_plain_network_does(kind: str | None) -> None:
    torch.manual_seed(1)
    model = network(kind)
    plain = [CacheRow(CONFIG, 60) for _ in range(3)]
    pool = CachePool(CONFIG, 1 << 20, torch.float32)
    rows = [pool.new_row(n) for n in (60, 40, 50)]
    expected = []
    passes = [[20, 3, 11], [1, 1, 1], [16, 30, 2]]  # beyond the window, one token each, uneven
    tokens = [torch.randint(0, 96, (sum(counts),)) for counts in passes]
    canvas, soft = torch.randint(0, 96, (24,)), torch.randn(24, 128)
    for packed, counts in zip(tokens, passes, strict=True):
        expected.append(model.encode_packed(packed, plain, counts))
        expected.append(model.denoise_packed(canvas, soft, plain, [8, 8, 8]))
        expected.append(model.denoise_packed(canvas, None, plain, [8, 8, 8]))
    assert prepare(model, torch_ops()) == []
    fused = FusedNetwork(model, pool, torch_ops())
    got = []
    for packed, counts in zip(tokens, passes, strict=True):
        got.append(fused.encode(packed, batch_over(pool, rows, counts)))
        for row, n in zip(rows, counts, strict=True):
            row.advance(n)
        for given_soft in (soft, torch.zeros_like(soft)):
            got.append(fused.denoise(canvas, given_soft, batch_over(pool, rows, [8, 8, 8])))
    for a, b in zip(got, expected, strict=True):
        assert close(a, b, 1e-4)
    if kind is None:
        for row, other in zip(rows, plain, strict=True):
            for layer in range(3):
                for a, b in zip(row.last(layer, 11), other.last(layer, 11), strict=True):
                    torch.testing.assert_close(torch.cat(a, dim=1), torch.cat(b, dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_remembering_fills_the_cache_as_encoding_does(kind: str | None) -> None:
    torch.manual_seed(1)
    model = network(kind)
    assert prepare(model, torch_ops()) == []
    pool = CachePool(CONFIG, 1 << 20, torch.float32)
    fused = FusedNetwork(model, pool, torch_ops())
    read, kept = ([pool.new_row(n) for n in (60, 40)] for _ in range(2))
    for counts in ([20, 3], [1, 1], [16, 30]):
        tokens = torch.randint(0, 96, (sum(counts),))
        fused.encode(tokens, batch_over(pool, read, counts))
        fused.remember(tokens, batch_over(pool, kept, counts))
        for row, n in zip([*read, *kept], [*counts, *counts], strict=True):
            row.advance(n)
    for a, b in zip(read, kept, strict=True):
        for layer in range(CONFIG.num_hidden_layers):
            for x, y in zip(a.last(layer, 60), b.last(layer, 60), strict=True):
                assert torch.equal(torch.cat(x, dim=1), torch.cat(y, dim=1))


@pytest.mark.parametrize("kind", [None, "fp8"])
@pytest.mark.parametrize("before", [[3, 2], [20, 5], [30, 14]])  # the last wrap their rings with the block
def test_a_turn_is_a_commit_and_a_step(kind: str | None, before: list[int]) -> None:
    torch.manual_seed(1)
    model = network(kind)
    assert prepare(model, torch_ops()) == []
    pool = CachePool(CONFIG, 1 << 20, torch.float32)
    fused = FusedNetwork(model, pool, torch_ops())
    apart, at_once = ([pool.new_row(60) for _ in before] for _ in range(2))
    prompt, block, canvas = (torch.randint(0, 96, (n,)) for n in (sum(before), 16, 16))
    soft, each = torch.randn(16, 128), [8, 8]
    for rows in (apart, at_once):
        fused.remember(prompt, batch_over(pool, rows, before))
        for row, n in zip(rows, before, strict=True):
            row.advance(n)
    committed = [batch_over(pool, rows, each) for rows in (apart, at_once)]
    for row in (*apart, *at_once):
        row.advance(8)
    behind = [batch_over(pool, rows, each) for rows in (apart, at_once)]
    fused.remember(block, committed[0])
    want = fused.denoise(canvas, soft, behind[0])
    got = fused.turn(block, committed[1], canvas, soft, behind[1])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for a, b in zip(apart, at_once, strict=True):
        for layer in range(CONFIG.num_hidden_layers):
            for x, y in zip(a.last(layer, 60), b.last(layer, 60), strict=True):
                torch.testing.assert_close(torch.cat(x, dim=1), torch.cat(y, dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_with_activations_in_fp8_it_is_as_close_to_the_truth(kind: str) -> None:
    """It rounds in other places than the plain network, so the two are not the same."""
    torch.manual_seed(1)
    model = network(kind)
    tokens = torch.randint(0, 96, (40,))
    exact = network()
    quantised = {name: m for name, m in model.named_modules() if isinstance(m, QuantWeight)}
    for name, parameter in exact.named_parameters():
        stored = quantised.get(name)
        parameter.data = stored.dequantize() if stored else model.get_parameter(name)
    want = exact.encode_packed(tokens, [CacheRow(CONFIG, 40)], [40])
    plain = model.encode_packed(tokens, [CacheRow(CONFIG, 40)], [40])
    pool = CachePool(CONFIG, 1 << 20, torch.float32)
    assert prepare(model, torch_ops()) == []
    row, fused = pool.new_row(40), FusedNetwork(model, pool, torch_ops())
    got = fused.encode(tokens, batch_over(pool, [row], [40]))
    plain_error, error = (float(((x - want).norm(dim=1) / want.norm(dim=1)).median()) for x in (plain, got))
    assert 0.01 < error < 1.3 * plain_error < 0.3


def test_plain_passes_go_over_the_same_rows() -> None:
    """What one has encoded the other reads."""
    torch.manual_seed(2)
    model, pool = network(), CachePool(CONFIG, 1 << 20, torch.float32)
    fused, row, plain = FusedNetwork(model, pool, torch_ops()), pool.new_row(60), CacheRow(CONFIG, 60)
    for count in (9, 17):
        tokens = torch.randint(0, 96, (count,))
        model.encode_packed(tokens, [plain], [count])
        if count == 9:
            model.encode_packed(tokens, [row], [count])
        else:
            fused.encode(tokens, batch_over(pool, [row], [count]))
            row.advance(count)
    canvas = torch.randint(0, 96, (8,))
    want = model.denoise_packed(canvas, None, [plain], [8])
    assert close(model.denoise_packed(canvas, None, [row], [8]), want, 1e-4)
    assert close(fused.denoise(canvas, torch.zeros(8, 128), batch_over(pool, [row], [8])), want, 1e-4)


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_pairs_that_are_placed_give_what_sorted_ones_do(kind: str | None) -> None:
    """Layer after layer and pass after pass; too few or too many tokens are never placed."""
    torch.manual_seed(3)
    model, pool, ops, calls = network(kind), CachePool(CONFIG, 1 << 20, torch.float32), torch_ops(), list[int]()
    assert prepare(model, ops) == []
    row, canvas, soft = pool.new_row(60), torch.randint(0, 96, (24,)), torch.randn(24, 128)

    def place(x: Tensor, *args: Any, **options: Any) -> Any:
        assert not options["counts"].any()
        assert options["counts"].data_ptr() % 16 == 0
        calls.append(len(x))
        return ops.place(x, *args, **options)

    found = {}
    for placing in (0, 16, 512):
        fused = FusedNetwork(model, pool, replace(ops, place=place, placing=placing))
        calls.clear()
        found[placing] = [fused.denoise(canvas, soft, batch_over(pool, [row], [24])) for _ in range(2)]
        assert calls == ([24] * 6 if placing == 512 else [])
        few = CONFIG.num_experts // CONFIG.top_k_experts - 1
        fused.denoise(canvas[:few], soft[:few], batch_over(pool, [row], [few]))
        assert few not in calls
    assert all(close(a, b, 1e-5) for a, b in zip(found[512], found[0], strict=True))
    assert torch.equal(found[16][0], found[0][0])


@pytest.mark.parametrize(("streamed", "placing"), [(True, 512), (True, 0), (False, 512)])
def test_beside_experts_that_are_streamed_the_mlp_is_slim_and_comes_after_the_router(
    streamed: bool, placing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a layer, and before the experts; where pairs are not placed nothing is streamed. What stands between
    attention and streamed experts lets them be launched early, and nothing else does."""
    torch.manual_seed(3)
    model, pool, ops, calls = network(), CachePool(CONFIG, 1 << 20, torch.float32), torch_ops(), list[str]()
    assert prepare(model, ops) == []
    eagerly = list[bool]()

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            if name != "norms":
                calls.append(name)
            if "eager" in options:
                eagerly.append(options["eager"])
            return call(*args, **options)

        return run

    def geglu(x: Any, weight: Any, slim: bool = False) -> Any:
        calls.append("slim" if slim else "mlp")
        return ops.geglu(x, weight)

    watched = replace(
        ops, geglu=geglu, route=noted("router", ops.route), place=noted("router", ops.place),
        experts=noted("experts", ops.experts), after_attention=noted("norms", ops.after_attention),
        streams=lambda *_: streamed, placing=placing,
    )  # fmt: skip
    row, canvas, soft = pool.new_row(60), torch.randint(0, 96, (24,)), torch.randn(24, 128)
    batch = batch_over(pool, [row], [24])
    want = FusedNetwork(model, pool, replace(ops, placing=placing)).denoise(canvas, soft, batch)
    fused = FusedNetwork(model, pool, watched, overlap=("denoise",))
    monkeypatch.setattr(fused, "_side", object())  # another stream, as on a card

    def begun(work: Any, beside: bool) -> Any:
        assert beside
        out = work()
        return lambda: out

    monkeypatch.setattr(fused, "_begun", begun)
    assert torch.equal(fused.denoise(canvas, soft, batch), want)
    layer = ["router", "slim", "experts"] if streamed and placing else ["mlp", "router", "experts"]
    assert calls[1:] == layer * CONFIG.num_hidden_layers, "after the MLP of self-conditioning"
    each = 2 if placing else 1  # norms, and where pairs are placed the router
    assert eagerly == [streamed and placing > 0] * (each * CONFIG.num_hidden_layers)


@pytest.mark.parametrize(
    ("limit", "new", "layers"), [(24, False, CONFIG.num_hidden_layers - 1), (23, False, 0), (24, True, 0)]
)
def test_what_a_layer_leaves_is_forgotten_when_the_next_begins(
    limit: int, new: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not on a card that is new to the kernels: whether it forgets the right lines, nobody has seen."""
    monkeypatch.setattr("diffusiongemma.model.fused.untried", lambda device: new)
    torch.manual_seed(1)
    model, pool, calls = network(), CachePool(CONFIG, 1 << 20, torch.float32), list[list[tuple[int, ...]]]()
    assert prepare(model, torch_ops()) == []
    monkeypatch.setattr("diffusiongemma.model.fused.CACHED", limit)
    ops = replace(torch_ops(), forget=lambda spent: calls.append([tuple(t.shape) for t in spent]))
    batch = batch_over(pool, [pool.new_row(60)], [24])
    FusedNetwork(model, pool, ops).denoise(torch.randint(0, 96, (24,)), torch.randn(24, 128), batch)
    pairs = (24 * CONFIG.top_k_experts, 128)
    assert calls == [[(24, 128), (24, 128), pairs]] * layers


@pytest.mark.parametrize(("limit", "held"), [(24, True), (23, False)])
def test_what_is_not_forgotten_is_not_held(limit: int, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts make of 4,096 tokens of the 26B is 0.2 GB, which the next layer needs."""
    model, pool, ops = network(), CachePool(CONFIG, 1 << 20, torch.float32), torch_ops()
    assert prepare(model, ops) == []
    monkeypatch.setattr("diffusiongemma.model.fused.CACHED", limit)
    made, found = list[weakref.ref[Tensor]](), list[bool]()

    def experts(*args: Any) -> Tensor:
        out = ops.experts(*args)
        made.append(weakref.ref(out))
        return out

    def attend(*args: Any, **options: Any) -> Any:
        found.extend(t() is not None for t in made[-1:])
        return ops.attend(*args, **options)

    fused = FusedNetwork(model, pool, replace(ops, experts=experts, attend=attend))
    fused.denoise(torch.randint(0, 96, (24,)), torch.randn(24, 128), batch_over(pool, [pool.new_row(60)], [24]))
    assert found == [held] * (CONFIG.num_hidden_layers - 1)


def test_what_is_forgotten_runs_beside_and_is_held_until_the_mlp_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is freed while the other stream still forgets it would take its next owner's numbers along."""
    model, pool, calls = network(), CachePool(CONFIG, 1 << 20, torch.float32), list[str]()
    assert prepare(model, torch_ops()) == []
    held = list[weakref.ref[Tensor]]()

    def forget(spent: Any) -> None:
        held[:] = [weakref.ref(t) for t in spent]

    fused = FusedNetwork(model, pool, replace(torch_ops(), forget=forget), overlap=("encode",))
    monkeypatch.setattr(fused, "_side", object())  # another stream, as on a card

    def begun(work: Any, beside: bool) -> Any:
        assert beside
        out = work()
        if out is None:
            calls.append("forget")
            return None

        def join() -> Any:
            assert all(t() is not None for t in held)
            calls.append("join")
            return out

        return join

    monkeypatch.setattr(fused, "_begun", begun)
    fused.remember(torch.randint(0, 96, (24,)), batch_over(pool, [pool.new_row(60)], [24]))
    assert calls == ["join", "forget", "join"], "the last layer only makes its keys and values"


PART, JOIN = "side waits for main", "main waits for side"


class Streams:
    """In place of `torch.cuda`: what waits for what, in order"""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def current_stream(self, device: torch.device) -> Streams:
        return self

    def stream(self, side: Streams) -> Any:
        return nullcontext()

    def wait_stream(self, other: Streams) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize(
    ("broken", "after", "beside"),
    [
        ("linear", 0, []),  # nothing has begun: a recording would be spoilt by a stream that it does not know
        ("experts", 0, [PART, JOIN]),  # behind the MLP's beginning
        ("after_feed_forward", 0, [PART, JOIN]),  # it has been joined
        ("linear", 1, [PART, JOIN, PART, "forget", JOIN]),
    ],
)
def test_a_pass_that_fails_waits_for_what_runs_beside_it(
    broken: str, after: int, beside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other stream would forget what is somebody else's by then; and a recording with a stream that is not
    joined cannot be ended. `after`: so many layers"""
    model, pool, ops = network(), CachePool(CONFIG, 1 << 20, torch.float32), torch_ops()
    assert prepare(model, ops) == []
    calls, held, layers = list[str](), list[weakref.ref[Tensor]](), list[int]()
    main, side = Streams("main", calls), Streams("side", calls)

    def forget(spent: Any) -> None:
        calls.append("forget")
        held[:] = [weakref.ref(t) for t in spent]

    def attend(*args: Any, **options: Any) -> Any:
        layers.append(1)
        return ops.attend(*args, **options)

    def fail(*args: Any, **options: Any) -> Any:
        if len(layers) > after:
            raise torch.OutOfMemoryError("none left")
        return getattr(ops, broken)(*args, **options)

    fused = FusedNetwork(model, pool, replace(ops, forget=forget, attend=attend, **{broken: fail}), ("denoise",))
    monkeypatch.setattr(fused, "_side", side)
    monkeypatch.setattr("diffusiongemma.model.fused.torch.cuda", main)
    batch = batch_over(pool, [pool.new_row(60)], [24])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fused.denoise(torch.randint(0, 96, (24,)), torch.randn(24, 128), batch)
    assert calls == beside
    assert all(t() is not None for t in held), "until the error has been dealt with"
    assert caught.value.__context__ is None
