"""A pass with one new token of each of a few rows, whose router is one operation, against the chain of single ones."""

from __future__ import annotations

from ops.triton_cpu import DEVICE  # isort: skip

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import Ops, torch_ops, triton_ops
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.pool import CachePool, PoolRow
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.model.support import prepare
from diffusiongemma.ops import one
from diffusiongemma.ops.attention_cached import New

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a card: check_runner.py, check_ops.py --chain")
CONFIG = ModelConfig.preset(
    "tiny", vocab_size=96, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    sliding_window=12, num_experts=16, layer_types=("sliding_attention", "full_attention"),
)  # fmt: skip
LENGTHS = (20, 3)  # a ring that went round, a short row


def network(kind: str | None) -> DiffusionGemma:
    torch.manual_seed(1)
    model = random_network(CONFIG, None if kind is None else Scheme.parse(kind), DEVICE, torch.bfloat16, std=0.2)
    for i, layer in enumerate(model.layers):
        layer.encoder_scalar.fill_(0.9 - 0.1 * i)
    return model


def chained(ops: Ops) -> Ops:
    """The same where every operation is a kernel of its own"""
    return replace(ops, route_one=one.route(ops.after_attention, ops.route))


def noted(ops: Ops, calls: list[str]) -> Ops:
    def note(name: str, op: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return op(*args, **options)

        return run

    names = ("attend", "route_one", "after_attention", "experts", "after_feed_forward")
    changed: dict[str, Any] = {name: note(name, getattr(ops, name)) for name in names}
    return replace(ops, **changed)


def batch_over(pool: CachePool, rows: list[PoolRow], counts: list[int]) -> Batch:
    at = [torch.arange(row.length, row.length + n, dtype=torch.int32) for row, n in zip(rows, counts, strict=True)]
    begin = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32, device=DEVICE)
    return Batch(pool.offsets(rows).to(DEVICE), lengths, torch.cat(at).to(DEVICE), New(begin, max(counts)), reach=64)


def drawn(model: DiffusionGemma, ops: Ops, lengths: tuple[int, ...] = LENGTHS, steps: int = 1) -> list[Tensor]:
    """Hidden states of a few tokens after prompts of these lengths, one of each a pass"""
    pool = CachePool(CONFIG, 1 << 20, torch.bfloat16, DEVICE)
    # Prompts go another way, and the same for all: nothing of it is what is compared here.
    fused = FusedNetwork(model, pool, torch_ops())
    rows = [pool.new_row(40) for _ in lengths]
    g = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 96, (sum(lengths),), generator=g).to(DEVICE)
    fused.encode(prompt, batch_over(pool, rows, list(lengths)))
    for row, n in zip(rows, lengths, strict=True):
        row.advance(n)
    fused, found = FusedNetwork(model, pool, ops), []
    for _ in range(steps):
        tokens = torch.randint(0, 96, (len(lengths),), generator=g).to(DEVICE)
        found.append(fused.encode(tokens, batch_over(pool, rows, [1] * len(lengths))))
        for row in rows:
            row.advance(1)
    assert not fused._counters.any()
    return found


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4"])
def test_it_computes_what_the_chain_does(kind: str | None) -> None:
    model, calls = network(kind), list[str]()
    assert prepare(model, torch_ops()) == []
    ops = triton_ops()
    got = drawn(model, noted(ops, calls))
    assert calls == ["attend", "route_one", "experts", "after_feed_forward"] * len(model.layers)
    # The scores of the router are summed in another order, and nothing else.
    chain = drawn(model, chained(ops))
    assert all(error(a, b) < 5e-3 for a, b in zip(got, chain, strict=True))
    assert error(got[0], chain[0].flip(0)) > 0.5  # so much is something else
    if kind in ("fp8", "int4"):  # they carry on any bit by which the twins differ: a wide step here, an expert there
        return
    assert all(error(a, b) < 5e-2 for a, b in zip(got, drawn(model, replace(torch_ops(), few=4)), strict=True))


def test_a_pass_finds_what_the_one_before_has_kept() -> None:
    model = network(None)
    got = drawn(model, triton_ops(), (11,), 2)  # a ring that is full, and one that has gone round
    want = drawn(model, replace(torch_ops(), few=4), (11,), 2)
    assert all(error(a, b) < 5e-2 for a, b in zip(got, want, strict=True))


def test_who_goes_that_way() -> None:
    """Up to `few` rows with one token each: not more rows, not prompts, and none where bits must not depend on it."""
    model, calls = network(None), list[str]()
    twins = noted(replace(torch_ops(), few=4), calls)
    drawn(model, twins, (5, 6, 7, 8))
    assert calls.count("route_one") == 2
    assert "after_attention" not in calls
    calls.clear()
    drawn(model, twins, (5, 6, 7, 8, 9))
    assert calls.count("after_attention") == 2
    assert "route_one" not in calls
    calls.clear()
    drawn(model, noted(replace(triton_ops(exact=True), attend=torch_ops().attend), calls), (5,))
    assert "after_attention" in calls
    assert "route_one" not in calls
    calls.clear()
    pool = CachePool(CONFIG, 1 << 20, torch.bfloat16, DEVICE)
    fused, rows = FusedNetwork(model, pool, twins), [pool.new_row(8)]
    fused.encode(torch.zeros(2, dtype=torch.int64, device=DEVICE), batch_over(pool, rows, [2]))
    assert "route_one" not in calls


def test_rows_without_a_token_are_left_alone() -> None:
    """As while a graph is recorded: `begin` is all zeros then."""
    model, pool = network("fp8"), CachePool(CONFIG, 1 << 20, torch.bfloat16, DEVICE)
    assert prepare(model, torch_ops()) == []
    fused, rows = FusedNetwork(model, pool, triton_ops()), [pool.new_row(8), pool.new_row(8)]
    batch = batch_over(pool, rows, [1, 1])
    none = replace(batch, new=New(torch.zeros_like(batch.new.begin), 1))
    fused.encode(torch.zeros(2, dtype=torch.int64, device=DEVICE), none)
    assert not any(t.any() for row in rows for t in (*row.keys, *row.values))
    assert not fused._counters.any()
