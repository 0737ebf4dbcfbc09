"""Attention of a batch in Triton against its torch definition, and that against the attention of single rows."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.errors import InputError
from diffusiongemma.ops import (
    attention_cached,
    attention_join_triton,
    attention_triton,
    attention_wide_triton,
    early_triton,
)
from diffusiongemma.ops.attention import attend_canvas, attend_causal
from diffusiongemma.ops.attention_cached import New, Prefix
from diffusiongemma.ops.attention_triton import Blocks
from diffusiongemma.ops.attention_wide_triton import WideBlocks
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.rows_triton import quantize_rows

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = Blocks(queries=16, keys=16, parts=1, warps=4, stages=2)
SPLIT = Blocks(queries=16, keys=16, parts=4, warps=4, stages=2)
TURNS = SPLIT._replace(whole=True)  # one program has all parts
HELD = Blocks(queries=64, keys=16, parts=2, warps=4, stages=2)  # queries in registers
WIDE = WideBlocks(queries=16, keys=32, width=16, parts=2, depth=16, score_warps=4, score_stages=2, warps=4, stages=2)
WHOLE = WIDE._replace(keys=16, parts=1)
# lengths of the prefixes, new tokens of each row: empty, short, full rings, wrapped rings, a lone token
MIXED = [(0, 12), (7, 2), (15, 9), (40, 1)]


def make(rows, heads=4, kv_heads=2, size=16, slots=15, dtype=FP32, seed=0):
    """Rows of (length, new tokens). What no token has been written to holds NaN: reading it would show."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    keys, values = torch.full((2, len(rows) + 1, kv_heads, slots, size), torch.nan, device=DEVICE, dtype=dtype)
    row = torch.randperm(len(rows) + 1, generator=g)[: len(rows)].to(DEVICE, torch.int32)
    for at, (length, _) in zip(row.tolist(), rows, strict=True):
        held = min(length, slots)
        where = torch.arange(length - held, length, device=DEVICE) % slots
        keys[at][:, where], values[at][:, where] = randn(kv_heads, held, size), randn(kv_heads, held, size)
    begin = torch.tensor([0, *(n for _, n in rows)]).cumsum(0).to(DEVICE, torch.int32)
    total, most = int(begin[-1]), max(n for _, n in rows)
    length = torch.tensor([n for n, _ in rows], dtype=torch.int32, device=DEVICE)
    q, k, v = randn(total, heads, size), randn(total, kv_heads, size), randn(total, kv_heads, size)
    return q, k, v, Prefix(keys, values, row, length), New(begin, most)


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        (SMALL, FP32),
        (SPLIT, FP32),
        (TURNS, FP32),
        (HELD, FP32),
        (HELD._replace(whole=True), BF16),
        (None, BF16),
        (WIDE, FP32),
        (WIDE, BF16),
        (WHOLE, FP32),
    ],
)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size", "slots", "causal", "window"),
    [
        (MIXED, 4, 2, 16, 15, False, 15),  # a ring as large as the window of the canvas
        (MIXED, 4, 2, 16, 15, True, 16),
        (MIXED, 2, 1, 16, 24, False, 15),  # a ring that keeps more than is seen
        (MIXED, 2, 1, 16, 24, True, 16),
        (MIXED, 4, 1, 32, 64, False, None),
        (MIXED, 4, 1, 32, 64, True, None),
        ([(70, 40)], 2, 1, 16, 20, True, 16),  # more new tokens than the window
        ([(40, 1), (0, 1), (3, 1)], 4, 2, 16, 15, True, 16),  # one token each, as in the autoregressive twin
        ([(40, 1), (0, 1), (3, 1)], 8, 1, 32, 64, True, None),
    ],
)
def test_equals_the_definition(rows, heads, kv_heads, size, slots, causal, window, blocks, dtype) -> None:
    if isinstance(blocks, WideBlocks) and window is not None:
        window, slots = None, 64 if rows is MIXED else 80
    q, k, v, prefix, new = make(rows, heads, kv_heads, size, slots, dtype)
    assert attention_triton.supported(q, prefix) is None
    got = attention_triton.attend(q, k, v, prefix, new, causal, window, blocks)
    wide = Prefix(prefix.keys.double(), prefix.values.double(), prefix.row, prefix.length)
    want = attention_cached.attend(q.double(), k.double(), v.double(), wide, new, causal, window)
    assert got.dtype == dtype
    error = (got.double() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == FP32 else 5e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots", [15, 64])
def test_the_definition_is_that_of_single_rows(causal, slots) -> None:
    window = None if slots == 64 else 16 if causal else 15
    q, k, v, prefix, new = make(MIXED, slots=slots)
    whole = attention_cached.attend(q, k, v, prefix, new, causal, window)
    for row, (length, _), begin, end in zip(prefix.row.tolist(), MIXED, new.begin[:-1], new.begin[1:], strict=True):
        at = torch.arange(max(0, length - slots), length, device=DEVICE) % slots
        own = slice(int(begin), int(end))
        keys = torch.cat([prefix.keys[row][:, at], k[own].transpose(0, 1)], dim=1)
        values = torch.cat([prefix.values[row][:, at], v[own].transpose(0, 1)], dim=1)
        alone = attend_causal(q[own], keys, values, length, window) if causal else attend_canvas(q[own], keys, values)
        torch.testing.assert_close(whole[own], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("causal", "blocks"), [(False, None), (True, SPLIT), (True, TURNS), (False, WIDE), (True, WIDE)]
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(causal, blocks) -> None:
    window, slots = (None, 64) if blocks is WIDE else (15, 15)
    q, k, v, prefix, new = make(MIXED, slots=slots)
    whole = attention_triton.attend(q, k, v, prefix, new, causal, window, blocks)
    for b in range(len(MIXED)):
        own = slice(int(new.begin[b]), int(new.begin[b + 1]))
        one = Prefix(prefix.keys, prefix.values, prefix.row[b : b + 1], prefix.length[b : b + 1])
        begin = torch.tensor([0, own.stop - own.start], dtype=torch.int32, device=DEVICE)
        alone = attention_triton.attend(q[own], k[own], v[own], one, New(begin, new.most), causal, window, blocks)
        assert torch.equal(alone, whole[own])


@pytest.mark.parametrize("split", [SPLIT, HELD, SPLIT._replace(parts=8, keys=32)])
@pytest.mark.parametrize("rows", [MIXED, [(70, 40), (0, 1)], [(3, 9), (0, 0), (20, 17)]])
@pytest.mark.parametrize(("causal", "window", "slots"), [(False, 15, 15), (True, 16, 15), (True, None, 80)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_all_parts_in_one_program_give_the_bits_of_split_keys(dtype, causal, window, slots, rows, split) -> None:
    """Also where some parts are empty: more parts than tiles, tiles that a causal query does not see."""
    q, k, v, prefix, new = make(rows, size=64, slots=slots, dtype=dtype)
    want = attention_triton.attend(q, k, v, prefix, new, causal, window, split)
    got = attention_triton.attend(q, k, v, prefix, new, causal, window, split._replace(whole=True))
    assert torch.equal(got, want)


@pytest.mark.parametrize("quant", [None, FP8])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_are_split_where_the_card_is_not_full(causal, quant, monkeypatch) -> None:
    """Alone and in a batch a canvas goes other ways, and has the same bits. Keys of prompts are always split."""
    rows = [(40, 33), (7, 70), (0, 40), (15, 64)]
    q, k, v, prefix, new = make(rows, dtype=BF16)
    launched = []

    def run(kernel, programs, *args, **options):
        launched.append((programs, options["WHOLE"]))
        early_triton.run(kernel, programs, *args, **options)

    monkeypatch.setattr(attention_triton, "run", run)
    monkeypatch.setattr(attention_triton, "multiprocessors", lambda device: 5)  # 20 programs fill it twice, 6 do not
    whole = attention_triton.attend_rows(q, k, v, prefix, New(new.begin, 70), causal, 15, quant)
    blocks = 10 * 2  # of 32 tokens, at most; K/V heads
    assert launched.pop() == ((blocks * 4, False) if causal else (blocks, True))
    for b, (_, count) in enumerate(rows):
        own = slice(int(new.begin[b]), int(new.begin[b + 1]))
        one = Prefix(prefix.keys, prefix.values, prefix.row[b : b + 1], prefix.length[b : b + 1])
        begin = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        alone = attention_triton.attend_rows(q[own], k[own], v[own], one, New(begin, count), causal, 15, quant)
        assert launched.pop() == (-(-count // 32) * 2 * 4, False)
        assert torch.equal(alone.wide(), whole.wide()[own])


@pytest.mark.parametrize("rows", [MIXED, [(3, 9), (0, 0), (20, 17), (0, 0)], [(0, 1), (5, 1)], [(0, 8), (5, 8)]])
def test_rows_that_share_the_tokens_of_a_pass(rows, monkeypatch) -> None:
    """Each could have all of them; programs are launched for as many as there are, and the bits are the same."""
    q, k, v, prefix, new = make(rows)
    launched = []

    def run(kernel, programs, *args, **options):
        launched.append(programs)
        early_triton.run(kernel, programs, *args, **options)

    monkeypatch.setattr(attention_triton, "run", run)
    got = attention_triton.attend(q, k, v, prefix, New(new.begin, len(q)), True, 16, SPLIT)
    tokens, others = SPLIT.queries // 2, 2 * SPLIT.parts  # two heads a group; two K/V heads
    needed = sum(-(-count // tokens) for _, count in rows) * others
    assert needed <= launched[0] <= min(needed + len(rows) * others, len(rows) * -(-len(q) // tokens) * others)
    for b, (_, count) in enumerate(rows):
        if count:
            own = slice(int(new.begin[b]), int(new.begin[b + 1]))
            one = Prefix(prefix.keys, prefix.values, prefix.row[b : b + 1], prefix.length[b : b + 1])
            begin = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
            alone = attention_triton.attend(q[own], k[own], v[own], one, New(begin, count), True, 16, SPLIT)
            assert torch.equal(alone, got[own])


@pytest.mark.parametrize("blocks", [SPLIT, WHOLE, WIDE])
def test_what_a_row_may_have_at_most_does_not_show(blocks) -> None:
    q, k, v, prefix, new = make(MIXED, slots=64)
    args = (q, k, v, prefix)
    got = [attention_triton.attend(*args, New(new.begin, most), True, None, blocks) for most in (12, 16, 24, 96)]
    assert all(torch.equal(one, got[0]) for one in got[1:])


def test_wide_heads_take_turns_where_room_is_short(monkeypatch) -> None:
    q, k, v, prefix, new = make(MIXED, slots=64)
    whole = attention_triton.attend(q, k, v, prefix, new, True, None, WIDE)
    lines = len(MIXED) * 2 * WIDE.queries  # of one block of queries each
    monkeypatch.setattr(attention_wide_triton, "ROOM", lines * 96 * 4)
    torch.testing.assert_close(attention_triton.attend(q, k, v, prefix, new, True, None, WIDE), whole, atol=0, rtol=0)


@pytest.mark.parametrize("blocks", [SPLIT, TURNS, WIDE])
def test_room_that_is_not_used(blocks) -> None:
    """A graph is recorded for the most there may be: more tokens than the rows have, more slots than are filled."""
    q, k, v, prefix, new = make(MIXED, slots=64)
    want = attention_cached.attend(q, k, v, prefix, new, False)
    wide = [torch.cat([t, torch.full_like(t[:9], torch.nan)]) for t in (q, k, v)]
    got = attention_triton.attend(*wide, prefix, New(new.begin, 40), False, None, blocks)
    torch.testing.assert_close(got[: len(q)], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("blocks", [SMALL, SPLIT, TURNS, WIDE, WHOLE, SPLIT._replace(parts=8)])
def test_rows_for_the_next_product(blocks) -> None:
    """The bits of attention followed by the rounding to fp8, whether the join does it or not."""
    slots, window = (64, None) if isinstance(blocks, WideBlocks) else (15, 16)
    for heads, kv_heads in ((4, 2), (6, 3)):
        q, k, v, prefix, new = make(MIXED, heads, kv_heads, slots=slots, dtype=BF16)
        q[3] = v[3] = 0  # a token whose scale is near none
        args = (q, k, v, prefix, new, True, window)
        want = quantize_rows(attention_triton.attend(*args, blocks).flatten(1))
        got = attention_triton.attend_rows(*args, FP8, blocks=blocks)
        assert got.values.dtype == FP8
        assert torch.equal(got.values.float(), want.values.float())
        assert torch.equal(got.scale, want.scale)
        twin = attention_cached.attend_rows(*args, FP8)
        assert float((got.wide() - twin.wide()).norm() / twin.wide().norm()) < 0.03


@pytest.mark.parametrize("blocks", [SMALL, SPLIT, TURNS, WIDE, None])
@pytest.mark.parametrize("quant", [None, FP8])
@pytest.mark.parametrize("rows", [MIXED, [(40, 1), (15, 1), (3, 1)], [(20, 0), (3, 2)]])
def test_new_tokens_are_kept_after_they_were_seen(rows, quant, blocks) -> None:
    """A ring without a slot to spare: the slot of a new token holds one that its query still sees."""
    slots, window = (64, None) if isinstance(blocks, WideBlocks) else (15, 16)
    q, k, v, prefix, new = make(rows, slots=slots)
    want_prefix = Prefix(prefix.keys.clone(), prefix.values.clone(), prefix.row, prefix.length)
    want = attention_triton.attend_rows(q, k, v, prefix, new, True, window, quant, blocks=blocks)
    attention_cached.store(k, v, want_prefix, new)
    more = [torch.cat([t, torch.full_like(t[:2], torch.nan)]) for t in (q, k, v)]  # of no row
    got = attention_triton.attend_rows(*more, prefix, new, True, window, quant, True, blocks=blocks)
    assert torch.equal(got.wide()[: len(q)], want.wide())
    for ours, other in ((prefix.keys, want_prefix.keys), (prefix.values, want_prefix.values)):
        torch.testing.assert_close(ours, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("slots", [15, 64])
def test_store(slots) -> None:
    _, k, v, prefix, new = make(MIXED, slots=slots)
    want = Prefix(prefix.keys.clone(), prefix.values.clone(), prefix.row, prefix.length)
    attention_cached.store(k, v, want, new)
    before = prefix.keys.clone()
    attention_join_triton.store(k, v, prefix, new)
    for got, other in ((prefix.keys, want.keys), (prefix.values, want.values)):
        torch.testing.assert_close(got, other, atol=0, rtol=0, equal_nan=True)
    assert not torch.equal(prefix.keys.nan_to_num(), before.nan_to_num())
    # What was stored is what the next tokens see.
    lengths = prefix.length + new.begin.diff()
    later = Prefix(prefix.keys, prefix.values, prefix.row, lengths.to(torch.int32))
    q2, k2, v2, _, new2 = make([(0, 3)] * len(MIXED), seed=1)
    window = 16 if slots == 15 else None
    got2 = attention_triton.attend(q2, k2, v2, later, new2, True, window)
    torch.testing.assert_close(
        got2, attention_cached.attend(q2, k2, v2, later, new2, True, window), atol=1e-5, rtol=1e-4
    )


def test_reasons_and_errors() -> None:
    q, k, v, prefix, new = make(MIXED)
    assert "power of two" in str(attention_triton.supported(q[..., :12], prefix))
    assert "both be bfloat16" in str(attention_triton.supported(q.double(), prefix))
    narrow = Prefix(prefix.keys.transpose(2, 3), prefix.values, prefix.row, prefix.length)
    assert "side by side" in str(attention_triton.supported(q, narrow))
    assert "up to 16" in str(attention_triton.supported(q.repeat(1, 3, 1), prefix))
    for bad in ((q, k[:3], v), (q[:, :3], k, v), (q, k, v[..., :8])):
        with pytest.raises(InputError, match="do not fit"):
            attention_triton.attend(*bad, prefix, new, False)
    with pytest.raises(InputError, match="do not fit"):
        attention_triton.attend(q, k, v, prefix, New(new.begin[:-1], 20), False)
