"""Schedules, Muon, master weights and the average."""

import pytest
import torch
from torch import nn

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.optim import Optimizer, is_matrix, orthogonalise, rate
from diffusiongemma.train.recipe import OptimConfig, parse_recipe


def test_rate_warms_up_and_falls_to_zero() -> None:
    config = OptimConfig(warmup=10, decay=0.5)
    assert rate(config, 0, 0.0) == pytest.approx(0.1)
    assert rate(config, 50, 0.4) == 1.0
    assert rate(config, 50, 0.75) == pytest.approx(0.5)
    assert rate(config, 50, 1.0) == 0.0


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8)])
def test_orthogonalise_evens_out_singular_values(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape) * torch.tensor([1e-3, 1.0, 50.0])[: shape[0], None, None]
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_takes_the_projections_only() -> None:
    model = DiffusionGemma(ModelConfig.preset("tiny"))
    taken = {name.split(".", 2)[-1] for name, p in model.named_parameters() if is_matrix(name, p)}
    assert {"self_attn.qkv_proj.weight", "experts.down_proj", "mlp.gate_up_proj.weight"} <= taken
    assert not [name for name in taken if "norm" in name or "embed" in name or "router" in name]


@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_regression_is_learned(muon: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    target = torch.randn(4, 6)
    x = torch.randn(64, 6)
    layer = nn.Linear(6, 4, bias=False).to(dtype)
    optimizer = Optimizer(layer, OptimConfig(matrix_lr=0.2 if muon else 0.05, muon=muon, weight_decay=0.0, ema=0.9))
    losses = []
    for step in range(150):
        # Without bfloat16 products, which some CPUs announce and cannot do.
        loss = (((layer.weight.float() @ x.t()).t() - x @ target.t()) ** 2).mean()
        loss.backward()
        optimizer.step(1.0 - step / 150)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]
    assert optimizer.masters["weight"].dtype == torch.float32
    torch.testing.assert_close(optimizer.averaged()["weight"], target, atol=0.15, rtol=0)


def test_gradients_are_clipped_and_the_norm_is_told() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    optimizer = Optimizer(layer, OptimConfig(clip=1.0, ema=0.0))
    layer.weight.grad = torch.full((2, 2), 50.0)
    assert float(optimizer.step(1.0)) == pytest.approx(100.0)
    assert float((layer.weight.detach() - before).abs().max()) < 2e-3  # AdamW's first step is the rate


def test_swap_shows_the_average_and_takes_it_back() -> None:
    layer = nn.Linear(2, 2, bias=False)
    optimizer = Optimizer(layer, OptimConfig(ema=0.5, ema_every=1))
    for _ in range(3):
        layer.weight.grad = torch.ones(2, 2)
        optimizer.step(100.0)
    trained, averaged = layer.weight.detach().clone(), optimizer.ema["weight"].clone()
    assert not torch.equal(trained, averaged)
    optimizer.swap(averaged=True)
    assert torch.equal(layer.weight, averaged)
    optimizer.swap(averaged=False)
    assert torch.equal(layer.weight, trained)


RECIPE = {
    "name": "x",
    "model": {"preset": "tiny"},
    "run": {"total_steps": 3},
    "task": [{"name": "a", "kind": "arithmetic", "weight": 1, "prefix": 32, "canvas": 8}],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"learning_rate": 1.0}}, "unknown key learning_rate"),
        ({"run": {}}, "total_steps or total_minutes"),
        ({"run": {"total_steps": "3"}}, "must be of type int"),
        ({"task": []}, r"at least one \[\[task\]\]"),
        ({"init_from": "somewhere"}, "either \\[model\\] or init_from"),
        ({"modle": {}}, "unknown key modle"),
    ],
)
def test_mistakes_in_a_recipe_are_named(change: dict[str, object], message: str) -> None:
    assert parse_recipe(RECIPE).tasks[0].weight == 1.0
    with pytest.raises(ConfigError, match=message):
        parse_recipe({**RECIPE, **change})
