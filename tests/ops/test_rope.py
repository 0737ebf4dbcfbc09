import math

import torch

from diffusiongemma.ops.rope import apply_rope, rope_tables


def test_scores_depend_on_distance_only() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 16, generator=g), torch.randn(1, 1, 16, generator=g)

    def score(at_q: int, at_k: int, factor: float) -> float:
        turn = [rope_tables(torch.tensor([p]), 16, 100.0, factor, torch.float32) for p in (at_q, at_k)]
        return float((apply_rope(q, turn[0]) * apply_rope(k, turn[1])).sum())

    for factor in (1.0, 0.25):
        assert math.isclose(score(7, 3, factor), score(104, 100, factor), abs_tol=1e-4)
        assert not math.isclose(score(7, 3, factor), score(7, 4, factor), abs_tol=1e-3)


def test_proportional_turns_only_the_first_quarter() -> None:
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1))
    turned = apply_rope(x, rope_tables(torch.tensor([5, 6, 7]), 32, 1e6, 0.25, torch.float32))
    moved = (turned != x).any(dim=(0, 1))
    assert moved.nonzero().flatten().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 1, 8)
    assert torch.equal(apply_rope(x, rope_tables(torch.tensor([0]), 8, 1e4, 1.0, torch.float32)), x)
