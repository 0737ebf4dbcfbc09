"""Rows of a pool: like any other row, never over each other, refused only when all that is free would not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CacheError
from diffusiongemma.model import CacheRow
from diffusiongemma.model.pool import CachePool, PoolRow

CONFIG = ModelConfig.preset(
    "tiny", num_hidden_layers=3, sliding_window=12,
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
)  # fmt: skip


class Twins:
    """Rows of a pool (those that are dropped are None), and beside each one outside it that holds the same."""

    def __init__(self, sizes: list[int]) -> None:
        """The pool has room for rows of these lengths, and no more."""
        self.pool = CachePool(CONFIG, sum(bytes_for(n) for n in sizes), torch.float32)
        self.rows = list[PoolRow | None]()
        self.others = list[CacheRow]()

    @property
    def living(self) -> list[PoolRow]:
        return [row for row in self.rows if row is not None]

    @property
    def starts(self) -> list[int]:
        return [row.start for row in self.living]

    @property
    def free(self) -> int:
        return self.pool.units - sum(self.pool.size_of(row.max_length) for row in self.living)

    def new(self, size: int) -> None:
        """A row of this length, filled with numbers of its own."""
        self.rows.append(self.pool.new_row(size))
        self.others.append(CacheRow(CONFIG, size))
        self.fill(len(self.rows) - 1, size)

    def fork(self, at: int, size: int) -> None:
        twin = self._row(at).fork(size)
        assert isinstance(twin, PoolRow)
        self.rows.append(twin)
        self.others.append(self.others[at].fork(size))

    def fill(self, at: int, count: int) -> None:
        value = 1000.0 * len(self.rows) + 100.0 * at
        for row in (self._row(at), self.others[at]):
            for layer in range(CONFIG.num_hidden_layers):
                heads, size = CONFIG.layer_heads(layer)
                new = value + torch.arange(row.length, row.length + count).float()[None, :, None]
                row.write(layer, new.expand(heads, -1, size), -new.expand(heads, -1, size))
            row.advance(count)

    def cut(self, at: int, length: int) -> None:
        self._row(at).truncate(length)
        self.others[at].truncate(length)

    def drop(self, *which: int) -> None:
        for at in which:
            self.rows[at] = None

    def check(self) -> None:
        """Each lies within the pool and beside all others, and holds what it should."""
        end = 0
        for row in sorted(self.living, key=lambda row: row.start):
            assert row.start >= end
            assert row.nbytes == bytes_for(row.max_length)
            end = row.start + self.pool.size_of(row.max_length)
        assert end <= self.pool.units
        for known, other in zip(self.rows, self.others, strict=True):
            assert known is None or same(known, other)

    def _row(self, at: int) -> PoolRow:
        row = self.rows[at]
        assert row is not None
        return row


def bytes_for(size: int) -> int:
    return CacheRow.bytes_for(CONFIG, size, torch.float32)


def same(row: CacheRow, other: CacheRow) -> bool:
    assert row.length == other.length
    pairs = []
    for layer in range(CONFIG.num_hidden_layers):
        count = row.ring if CONFIG.is_sliding(layer) else row.length
        pairs += zip(row.last(layer, count), other.last(layer, count), strict=True)
    return not row.length or all(torch.equal(torch.cat(a, dim=1), torch.cat(b, dim=1)) for a, b in pairs)


class Written(TorchDispatchMode):
    """Which operations change or make numbers: those that only look at memory in another way are left out"""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "view" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [5, 60])  # the second is longer than the rings: they have begun anew
def test_a_fork_copies_all_layers_at_once(length: int) -> None:
    """On a card every operation is a launch."""
    twins = Twins([60, 80])
    twins.new(60)
    if length < CONFIG.sliding_window:
        twins.cut(0, 0)
        twins.fill(0, length)
    other = twins.others[0].fork(80)
    with Written() as written:
        twin = twins.living[0].fork(80)
    assert written.names == ["aten::_foreach_copy_"]
    assert same(twin, other)


@pytest.mark.parametrize("moved", [False, True])
def test_what_was_put_aside_comes_back_where_the_row_lies_now(moved: bool) -> None:
    twins = Twins([20, 80, 20])
    for size in (20, 80, 20):
        twins.new(size)
    twins.cut(1, 0)
    twins.fill(1, 70)
    row, other = twins.living[1], twins.others[1]
    want = other.fork(80)
    for of in (row, other):
        of.put_aside(10)
    twins.fill(1, 10)
    if moved:
        before = row.start
        twins.drop(0, 2)
        twins.new(38)
        assert row.start < before
    twins.cut(1, 70)
    twins.check()
    assert same(row, want)


orders = st.tuples(st.sampled_from(["new", "new", "fork", "drop", "cut"]), st.integers(1, 70))


@given(st.lists(orders, min_size=20, max_size=60))
@settings(max_examples=60)
def test_rows_of_a_pool_are_rows_like_any_other(asked: list[tuple[str, int]]) -> None:
    twins = Twins([40] * 5)
    for order, number in asked:
        living = [at for at, row in enumerate(twins.rows) if row is not None]
        at = living[number % len(living)] if living else None
        if order == "new" or at is None:
            ask(twins, None, number)
        elif order == "fork":
            ask(twins, at, max(number, twins.others[at].length))
        elif order == "drop":
            twins.drop(at)
        elif twins.others[at].can_truncate(length := twins.others[at].length // 2):  # and other tokens follow
            twins.cut(at, length)
            twins.fill(at, min(number, twins.others[at].max_length - length))
        twins.check()


def ask(twins: Twins, at: int | None, size: int) -> None:
    """A row, empty or a copy; it must be given if all that is free together would do."""
    before, fits = twins.starts, twins.pool.size_of(size) <= twins.free
    try:
        if at is None:
            twins.new(size)
        else:
            twins.fork(at, size)
    except CacheError:
        assert not fits
        assert twins.starts == before  # nobody moves in vain
    else:
        assert fits


def test_a_gap_is_filled_before_anybody_moves() -> None:
    """First fit: the first gap that is large enough, between two rows or behind the last."""
    twins = Twins([40, 30, 60, 30, 20])
    for size in (40, 30, 60, 30):
        twins.new(size)
    before = twins.starts
    twins.drop(0, 2)
    for size in (50, 20, 20):
        twins.new(size)
    assert twins.starts == [before[1], before[3], before[2], 0, before[3] + twins.pool.size_of(30)]
    assert twins.pool.moves == 0
    twins.check()


def test_gaps_are_closed_and_offsets_follow() -> None:
    """Where no gap is large enough, rows move to the front, and no more of them than it takes."""
    twins = Twins([40, 30, 40, 30, 40])
    pool = twins.pool
    for size in (40, 30, 40, 30, 40):
        twins.new(size)
    before = pool.offsets(twins.living)
    assert before.shape == (3, 5)
    with pytest.raises(CacheError, match="does not fit: 0 bytes"):
        pool.new_row(1)
    assert pool.moves == 0
    twins.drop(0, 2)
    twins.new(60)
    assert pool.moves == 1
    after = pool.offsets(twins.living)
    assert after[0].tolist() == [0, before[0, 3], before[0, 4], pool.size_of(30)]  # the last two stayed
    assert torch.equal(after[:, 1:3], before[:, 3:])
    assert (after[:, 0] < before[:, 1]).all()
    twins.check()
