from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

from pathlib import Path

import pytest
import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.ops import tiles
from diffusiongemma.ops.routing import capacity_of, route
from diffusiongemma.ops.tiles import Shape, Tile

SHAPES = [
    Shape(fmt, k, o, experts, gated, rows)
    for fmt in ("bf16", "fp8", "int8", "pairs")
    for experts in (0, 128)
    for k, o, gated in ((2816, 704, True), (704, 2816, False), (2816, 8192, False))
    for rows in ((16, 32, 64, 80, 128, 160) if experts else (1, 16, 33, 256, 4096))
    if fmt != "pairs" or rows not in (80, 160)
]


@pytest.mark.parametrize("limit", [99 << 10, 227 << 10])
@pytest.mark.parametrize("shape", SHAPES, ids=Shape.key)
def test_the_rule_gives_a_tile_that_fits(shape: Shape, limit: int) -> None:
    tile = tiles.choose(shape, limit)
    assert tile.rows * tile.outputs * (1 + shape.gated) <= 128 * 32 * tile.warps
    if shape.experts:
        assert tile.rows + tile.more == shape.rows
        assert tile.rows.bit_count() == 1
    assert tiles.fits(shape, tile, limit)


def test_steps_do_not_depend_on_rows() -> None:
    assert tiles.step_of("fp8", 2816) == 128
    assert tiles.step_of("fp8", 704) == 64
    assert tiles.step_of("bf16", 2816) == 64


@pytest.mark.parametrize(
    ("fmt", "rows"),
    [*((fmt, rows) for fmt in ("bf16", "fp8", "pairs") for rows in (16, 32)), ("fp8", 64), ("pairs", 64)],
)
def test_the_26b_has_measured_tiles(fmt: tiles.Format, rows: int) -> None:
    config = ModelConfig.preset("26b-a4b")
    sizes = (config.hidden_size, config.moe_intermediate_size)
    for gated, (inputs, outputs) in ((True, sizes), (False, sizes[::-1])):
        shape = Shape(fmt, inputs, outputs, config.num_experts, gated, rows)
        assert tiles.choose(shape, 227 << 10) == tiles.TUNED[shape.key()]


def test_tuned_tiles_go_to_a_file_and_back(tmp_path, monkeypatch) -> None:
    shape, tile = SHAPES[0], Tile(16, 128, 8, 2)
    monkeypatch.setattr(tiles, "TUNED", {shape.key(): tile})
    tiles.save(tmp_path / "tiles.json")
    monkeypatch.setattr(tiles, "TUNED", {})
    assert tiles.choose(shape, 227 << 10) != tile
    tiles.load(tmp_path / "tiles.json")
    assert tiles.choose(shape, 227 << 10) == tile
    assert tiles.choose(shape, 1) != tile  # one that does not fit this card is passed over


@pytest.mark.parametrize(
    ("pairs", "rows"),
    [(8, 16), (128, 16), (2048, 32), (4096, 64), (8192, 128), (12288, 128), (16384, 160), (32768, 160)],
)
def test_blocks_grow_with_the_tokens_of_an_expert(pairs: int, rows: int) -> None:
    assert tiles.block_rows(pairs, 128, "fp8") == rows
    assert tiles.block_rows(pairs, 128) == min(128, rows)
    assert tiles.block_rows(pairs, 128, "pairs") == min(64, rows)


def test_experts_that_may_be_streamed_have_64_rows_for_longer() -> None:
    three_users = 3 * 256 * 8
    assert [tiles.block_rows(three_users, 128, fmt) for fmt in ("fp8", "bf16", "int8")] == [64, 64, 128]


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [(1, 2, 8, 16), (70, 3, 5, 16), (16, 4, 4, 16)])
def test_capacity_is_reached_and_never_passed(tokens: int, k: int, experts: int, block: int) -> None:
    """The worst case: every expert has one row more than whole blocks."""
    most = 0
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        skew = torch.rand(experts, generator=g) * (seed % 7)
        index = (torch.rand(tokens, experts, generator=g) + skew).topk(k).indices
        routing = route(index, experts, block)
        most = max(most, int((routing.table[0] >= 0).sum()))
    assert most <= capacity_of(tokens * k, experts, block) <= most + experts


def test_the_scripts_that_tune_know_what_a_tile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile that they try has a name, and a line to paste."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import bench_kernels
    import tune_experts

    for shape in SHAPES:
        tried = [*bench_kernels.more(shape), *(tune_experts.to_try(shape) if shape.experts else [])]
        assert tried
        for tile in tried:
            assert tune_experts.paste(tile).startswith(f"Tile({tile.rows}, {tile.outputs}, {tile.warps}, {tile.stages}")
            assert bench_kernels.brief(tile)
            assert shape.format != "pairs" or shape.inputs // 64 % tile.turns == 0
