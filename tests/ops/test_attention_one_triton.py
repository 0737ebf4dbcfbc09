"""Attention of one new token a row in one kernel, against the chain of torch functions and against that of kernels."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import attention_cached, attention_one_triton, attention_triton, fused, heads_triton, one
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.attention_one_triton import Split

FP32, BF16, EPS = torch.float32, torch.bfloat16, 1e-6
DEFINITION = one.attend(fused.split_heads, attention_cached.attend_rows)
KERNELS = one.attend(heads_triton.split_heads, attention_triton.attend_rows)
LENGTHS = [40, 0, 3, 15]  # a ring that went round, an empty row, a short one, a ring that is just full
SPLIT = Split(keys=16, parts=4, alone=2, warps=4, stages=2)


def make(lengths, heads=4, kv_heads=2, size=32, slots=15, shared=False, dtype=FP32, seed=0):
    """What was never written holds NaN: reading it would show."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    rows = len(lengths)
    arenas = torch.full((2, rows + 1, slots, kv_heads, size), torch.nan, device=DEVICE, dtype=dtype)
    keys, values = arenas.transpose(2, 3)
    row = torch.randperm(rows + 1, generator=g)[:rows].to(DEVICE, torch.int32)
    for at, length in zip(row.tolist(), lengths, strict=True):
        held = min(length, slots)
        where = torch.arange(length - held, length, device=DEVICE) % slots
        keys[at][:, where], values[at][:, where] = randn(kv_heads, held, size), randn(kv_heads, held, size)
    length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    qkv = randn(rows, (heads + kv_heads * (1 if shared else 2)) * size)
    rope = tuple(t.to(dtype) for t in fused.rope_at(length, fused.rope_frequency(size, 1e4, 1.0, DEVICE), dtype))
    weights = (1 + 0.3 * randn(size), 1 + 0.3 * randn(size))
    new = New(torch.arange(rows + 1, dtype=torch.int32, device=DEVICE), 1)
    return (qkv, *weights, rope, heads, kv_heads, EPS), Prefix(keys, values, row, length), new


def copied(prefix):
    return Prefix(prefix.keys.clone(), prefix.values.clone(), prefix.row, prefix.length)


def zeros(count):
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("split", [None, SPLIT, SPLIT._replace(parts=1), SPLIT._replace(keys=32, parts=16)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "slots", "window", "shared"),
    [
        (4, 2, 32, 15, 16, False),  # a ring as large as the window
        (4, 2, 16, 24, 16, False),  # a ring that keeps more than is seen
        (8, 1, 64, 160, None, True),
        (4, 4, 32, 70, None, False),
    ],
)
def test_equals_both_chains(heads, kv_heads, size, slots, window, shared, split, dtype) -> None:
    lengths = LENGTHS if window else [150 if slots > 150 else 60, 0, 3, 64]
    args, prefix, new = make(lengths, heads, kv_heads, size, slots, shared, dtype)
    want_prefix, chain_prefix, counters = copied(prefix), copied(prefix), zeros(4 * kv_heads + 3)
    got = attention_one_triton.attend(*args, prefix, new, window, counters, split)
    want = DEFINITION(*args, want_prefix, new, window, counters)
    chain = KERNELS(*args, chain_prefix, new, window, counters)
    assert got.shape == (4, heads * size)
    assert got.dtype == dtype
    # Each head that has one key only must be that key's value: one wrong row would hide in the norm of all.
    for a, b, c in zip(got, want, chain, strict=True):
        assert error(a, b) < (1e-5 if dtype == FP32 else 2e-2)
        assert error(a, c) < (1e-5 if dtype == FP32 else 4e-3)
    tight = dict(atol=1e-6, rtol=1e-5) if dtype == FP32 else dict(atol=1e-3, rtol=8e-3)
    for ours, theirs in ((prefix.keys, chain_prefix.keys), (prefix.values, chain_prefix.values)):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tight)  # and nothing else was touched
    assert not counters.any()


def test_again_and_a_token_later() -> None:
    """Counters are as they were: the same call gives the same bits, and the next sees what was kept."""
    args, prefix, new = make(LENGTHS)
    counters, first, second = zeros(8), copied(prefix), copied(prefix)
    once = attention_one_triton.attend(*args, first, new, 16, counters, SPLIT)
    again = attention_one_triton.attend(*args, second, new, 16, counters, SPLIT)
    assert torch.equal(once, again)
    later, _, _ = make(LENGTHS, seed=1)
    DEFINITION(*args, prefix, new, 16, counters)
    longer = [Prefix(p.keys, p.values, p.row, p.length + 1) for p in (first, prefix)]
    got = attention_one_triton.attend(*later, longer[0], new, 16, counters, SPLIT)
    assert error(got, DEFINITION(*later, longer[1], new, 16, counters)) < 1e-5


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    args, prefix, new = make(LENGTHS)
    whole = attention_one_triton.attend(*args, copied(prefix), new, 16, zeros(8), SPLIT)
    for b in range(4):
        rope = tuple(t[b : b + 1] for t in args[3])
        own = Prefix(prefix.keys.clone(), prefix.values.clone(), prefix.row[b : b + 1], prefix.length[b : b + 1])
        alone = (args[0][b : b + 1], *args[1:3], rope, *args[4:], own, New(new.begin[:2], 1), 16, zeros(2), SPLIT)
        assert torch.equal(attention_one_triton.attend(*alone)[0], whole[b])


@pytest.mark.parametrize("begin", [[0, 0, 0, 0, 0], [0, 1, 1, 1, 2]])
def test_rows_without_a_new_token_are_left_alone(begin) -> None:
    """A graph is recorded over none; and then a row's token is not where its number says."""
    args, prefix, _ = make(LENGTHS)
    counters, before = zeros(8), copied(prefix)
    new = New(torch.tensor(begin, dtype=torch.int32, device=DEVICE), 1)
    got = attention_one_triton.attend(*args, prefix, new, 16, counters, SPLIT)
    assert not counters.any()
    for row in range(4):
        at = int(prefix.row[row])
        same = torch.equal(prefix.keys[at].nan_to_num(7.0), before.keys[at].nan_to_num(7.0))
        assert same == (begin[row] == begin[row + 1])
    want = DEFINITION(*args, before, new, 16, counters)
    assert all(error(got[i], want[i]) < 1e-5 for i in range(begin[-1]))


def test_counters_must_suffice() -> None:
    args, prefix, new = make(LENGTHS)
    with pytest.raises(AssertionError, match="4 x 2 counters"):
        attention_one_triton.attend(*args, prefix, new, 16, zeros(7))
