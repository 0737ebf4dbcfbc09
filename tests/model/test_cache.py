"""The cache: rings keep the window, full layers grow, forks are independent, truncation forgets exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CacheError
from diffusiongemma.model import CacheRow, DiffusionGemma, KVCache

CONFIG = ModelConfig.preset("tiny", vocab_size=64, hidden_size=32, num_hidden_layers=2, sliding_window=6).replace(
    layer_types=("sliding_attention", "full_attention")
)
MODEL = DiffusionGemma(CONFIG).init_weights(seed=1, std=0.2).requires_grad_(False)
CANVAS = torch.arange(8)[None]


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(count: int, max_length: int = 600, rollback: int = 0) -> KVCache:
    cache = MODEL.new_cache(1, max_length, rollback)
    if count:
        MODEL.encode(tokens(600)[:, :count], cache)
    return cache


def same(a: KVCache, b: KVCache) -> None:
    torch.testing.assert_close(MODEL.denoise(CANVAS, a), MODEL.denoise(CANVAS, b), atol=2e-5, rtol=1e-4)


def test_sliding_layers_keep_their_window_and_full_layers_grow() -> None:
    cache = filled(550)
    ring, grown = (cache.rows[0].keys[i].shape[1] for i in (0, 1))
    assert ring == CONFIG.sliding_window - 1
    assert 550 <= grown <= 600
    assert filled(10).rows[0].keys[1].shape[1] == 256


def test_bytes() -> None:
    row = filled(3).rows[0]
    heads, size = CONFIG.num_key_value_heads, CONFIG.head_dim
    sliding = heads * (CONFIG.sliding_window - 1) * size
    full = CONFIG.num_global_key_value_heads * 256 * CONFIG.global_head_dim
    assert row.nbytes == 2 * 4 * (sliding + full)
    assert KVCache([row, row.fork()]).nbytes == 2 * row.nbytes


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_truncate_forgets_exactly_or_refuses(start: int, dropped: int, rollback: int, more: int) -> None:
    cache = filled(start, rollback=rollback)
    length = max(0, start - dropped)
    ring = CONFIG.sliding_window - 1 + rollback
    if start > ring and start - length > rollback and length > 0:
        assert not cache.rows[0].can_truncate(length)
        with pytest.raises(CacheError, match="rollback"):
            cache.truncate(length)
        assert cache.lengths == [start]
        return
    cache.truncate(length)
    assert cache.lengths == [length]
    twin = filled(length)
    same(cache, twin)
    if more:  # and what comes after goes on from there
        extra = tokens(more, seed=9)
        MODEL.encode(extra, cache)
        MODEL.encode(extra, twin)
        same(cache, twin)


@given(st.integers(1, 40), st.integers(1, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_was_put_aside_comes_back(start: int, more: int, all_of_it: bool) -> None:
    """Whatever the window: tokens that came behind are forgotten, and what they overwrote is there again."""
    cache = filled(start)
    row = cache.rows[0]
    row.put_aside(more)
    MODEL.encode(tokens(more if all_of_it else 1, seed=7), cache)
    row.truncate(start)
    assert cache.lengths == [start]
    same(cache, filled(start))
    assert row.can_truncate(max(0, start - 1)) == (start == 1 or filled(start).rows[0].can_truncate(start - 1))
    MODEL.encode(tokens(9, seed=8), cache)  # and what comes after goes on from there
    twin = filled(start)
    MODEL.encode(tokens(9, seed=8), twin)
    same(cache, twin)


def test_what_was_put_aside_is_for_that_length_alone() -> None:
    cache = filled(20)
    row = cache.rows[0]
    row.put_aside(4)
    MODEL.encode(tokens(4, seed=7), cache)
    assert not row.can_truncate(20), "a fork would find what is there now"
    with pytest.raises(CacheError, match="rollback"):
        row.truncate(21)
    row.put_aside(4)
    MODEL.encode(tokens(4, seed=7), cache)
    row.drop_aside()
    with pytest.raises(CacheError, match="rollback"):
        row.truncate(24)
    row.put_aside(2)
    MODEL.encode(tokens(4, seed=7), cache)  # more than was put aside for
    with pytest.raises(CacheError, match="rollback"):
        row.truncate(28)


@given(st.integers(0, 30), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_fork_is_independent(start: int, more: int) -> None:
    origin = filled(start, max_length=40)
    fork = origin.fork(max_length=80)
    before = MODEL.denoise(CANVAS, origin)
    MODEL.encode(tokens(more, seed=5), fork)
    assert torch.equal(MODEL.denoise(CANVAS, origin), before)
    twin = filled(start, max_length=80)
    MODEL.encode(tokens(more, seed=5), twin)
    same(fork, twin)


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 12), st.integers(0, 30))
@example(start=8, rollback=2, cut=2, room=0)  # a fork whose ring is cut short holds less than its rollback promises
@settings(max_examples=60, deadline=None)
def test_a_fork_of_a_truncated_row_knows_what_it_no_longer_holds(
    start: int, rollback: int, cut: int, room: int
) -> None:
    origin = filled(start, rollback=rollback)
    if not origin.rows[0].can_truncate(start - cut):
        return
    origin.truncate(start - cut)
    fork = origin.fork(max(1, start - cut + room))
    same(fork, origin)
    for length in range(start - cut, -1, -1):  # it may truncate exactly as far as its window allows
        row = fork.rows[0]
        if not row.can_truncate(length):
            break
        row.truncate(length)
        same(fork, filled(length))


def test_bytes_for_is_what_a_full_row_takes() -> None:
    for count in (3, 300, 600):
        row = filled(count, max_length=count).rows[0]
        assert CacheRow.bytes_for(CONFIG, count, torch.float32) == row.nbytes


def test_a_fork_of_a_small_cache_can_outgrow_the_window() -> None:
    small = filled(3, max_length=4)  # its ring is cut to 4 slots
    fork = small.fork(max_length=50)
    MODEL.encode(tokens(30, seed=2), fork)
    twin = filled(3)
    MODEL.encode(tokens(30, seed=2), twin)
    same(fork, twin)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CacheRow(CONFIG, 0), "max_length"),
        (lambda: CacheRow(CONFIG, 10**6), "max_length"),
        (lambda: CacheRow(CONFIG, 5, rollback=-1), "rollback"),
        (lambda: KVCache([]), "at least one row"),
        (lambda: filled(5).truncate(6), "truncate"),
        (lambda: filled(5).truncate(-1), "truncate"),
        (lambda: filled(5, max_length=9).fork(4), "cannot hold"),
    ],
)
def test_misuse(call, words) -> None:
    with pytest.raises(CacheError, match=words):
        call()
