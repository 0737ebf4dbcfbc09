"""Tiles by pointers, for cards without bulk copies, against tiles by descriptors: the same bits."""

from ops.triton_cpu import DEVICE  # isort: skip

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch

from diffusiongemma.ops import attention_triton, kernels, vocab_triton
from diffusiongemma.ops.attention_triton import Blocks
from diffusiongemma.ops.attention_wide_triton import WideBlocks
from diffusiongemma.ops.kernels import Card
from ops.test_attention_triton import HELD, MIXED, SPLIT, WIDE
from ops.test_attention_triton import make as make_attention
from ops.test_vocab_triton import CAP, SCALE, with_rules
from ops.test_vocab_triton import make as make_vocab

BF16, FP32 = torch.bfloat16, torch.float32


def both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As on Hopper, and on a card that has no descriptors; tiles that are not given are the same for float32"""
    described = run()
    monkeypatch.setattr(kernels, "card", lambda device: Card((8, 9), 99 << 10, 3))
    return described, run()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card is what it is")
@pytest.mark.parametrize("blocks", [SPLIT, HELD, WIDE])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(blocks: Blocks | WideBlocks, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = isinstance(blocks, WideBlocks)
    q, k, v, prefix, new = make_attention(MIXED, slots=64 if wide else 15, dtype=BF16)
    window = None if wide else 16 if causal else 15
    a, b = both(monkeypatch, lambda: attention_triton.attend(q, k, v, prefix, new, causal, window, blocks))
    assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card is what it is")
@pytest.mark.parametrize("kind", [None, "fp8"])
@pytest.mark.parametrize("width", [64, 80])  # a whole number of steps, or not
def test_the_vocabulary_end(kind: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, table, rules = make_vocab(rows=5, width=width, dtype=FP32, kind=kind, soft=kind is not None)
    rules = with_rules(rules, len(table.weight))

    def run() -> torch.Tensor:
        reading = vocab_triton.vocab_end(hidden, table, rules, CAP, SCALE)
        return torch.cat([t.double().flatten() for t in astuple(reading)])

    if kind is not None:  # tiles of 8 bits differ, and with them the order of sums
        a, b = both(monkeypatch, run)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*both(monkeypatch, run))
