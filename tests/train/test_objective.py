"""The objective: noise where it belongs, losses as plain torch computes them."""

import pytest
import torch
import torch.nn.functional as F

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train import losses
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.losses import cross_entropy, look
from diffusiongemma.train.objective import _believe, corrupt, micro_loss, sampler_step
from diffusiongemma.train.recipe import ObjectiveConfig
from diffusiongemma.train.rows import Rows


@pytest.mark.parametrize("chunk", [7, 1000])
def test_chunked_cross_entropy_is_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    torch.manual_seed(0)
    hidden, head = torch.randn(30, 8, requires_grad=True), (3 * torch.randn(11, 8)).requires_grad_()
    target, weight = torch.randint(11, (30,)), torch.rand(30)
    loss, each, right = cross_entropy(hidden, head, target, weight, 5.0)
    logits = torch.tanh(hidden @ head.t() / 5.0) * 5.0
    plain = F.cross_entropy(logits, target, reduction="none")
    expected = (plain * weight).sum() / weight.sum()
    torch.testing.assert_close(each, plain)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(right, logits.argmax(-1) == target)
    got = torch.autograd.grad(2 * loss, (hidden, head))
    torch.testing.assert_close(got, torch.autograd.grad(2 * expected, (hidden, head)), atol=1e-6, rtol=1e-4)


def test_look_reads_what_the_network_believes() -> None:
    torch.manual_seed(0)
    hidden, head, heat = torch.randn(4000, 8), torch.randn(11, 8), torch.full((4000,), 0.5)
    hidden[:] = hidden[0]
    soft, entropy, sample = look(hidden, head, heat, 5.0)
    p = (torch.tanh(hidden[0] @ head.t() / 5.0) * 5.0 / 0.5).softmax(-1)
    torch.testing.assert_close(soft[0], p @ head)
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())
    torch.testing.assert_close(sample.bincount(minlength=11) / 4000, p, atol=0.03, rtol=0)


def test_noise_respects_pins_and_covers_all_levels() -> None:
    torch.manual_seed(0)
    canvas = torch.full((2000, 40), 10_000)  # no token of the vocabulary: every change shows
    pinned = torch.zeros(2000, 40, dtype=torch.bool)
    pinned[:, :5] = True
    noisy = corrupt(canvas, pinned, 100, span=0.0)
    changed = (noisy != canvas).float()
    assert changed[:, :5].sum() == 0
    share = changed[:, 5:].mean(dim=1)
    assert abs(float(share.mean()) - 0.5) < 0.03
    assert float(share.std()) > 0.25  # uniform in t, not one level for all
    assert int(noisy[noisy < 10_000].max()) < 100


def test_span_noise_is_one_hole() -> None:
    torch.manual_seed(0)
    canvas = torch.full((500, 40), 10_000)
    noisy = corrupt(canvas, torch.zeros(500, 40, dtype=torch.bool), 100, span=1.0)
    hit = (noisy != canvas).int()
    edges = (hit.diff(dim=1) != 0).sum(dim=1)
    assert int(edges.max()) <= 2
    assert int(hit.sum(dim=1).min()) >= 1


def test_sampler_step_accepts_by_entropy() -> None:
    candidate = torch.full((1, 4), 10_000)
    entropy = torch.tensor([[0.5, 0.01, 0.02, 3.0]])
    canvas = sampler_step(candidate, entropy, torch.tensor([[0.1]]), torch.zeros(1, 4, dtype=torch.int64))
    assert (canvas == 10_000).tolist() == [[True, True, True, False]]  # sums before: 0.03, 0, 0.01, 0.53


def rows(config: ModelConfig) -> Rows:
    torch.manual_seed(1)
    canvas = torch.randint(config.vocab_size, (4, 8))
    pinned = torch.zeros(4, 8, dtype=torch.bool)
    prefix = torch.randint(config.vocab_size, (4, 12))
    return Rows("test", prefix, canvas, pinned, torch.ones(4, 8), torch.ones(4, 20))


def test_encoder_loss_is_next_token_prediction() -> None:
    config = ModelConfig.preset("tiny")
    model = DiffusionGemma(config).init_weights(0)
    batch = rows(config)
    result = micro_loss(TrainingForward(model), batch, ObjectiveConfig())
    tokens = torch.cat([batch.prefix, batch.canvas], dim=1)
    logits = model.logits(model.encode(tokens, model.new_cache(4, 20)))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(result.metrics["encoder"], expected.detach())
    torch.testing.assert_close(
        result.loss.detach(),
        result.metrics["decoder"] + expected.detach() + 0.01 * config.num_hidden_layers * result.metrics["balance"],
    )


def test_a_few_steps_learn_a_batch_by_heart() -> None:
    config = ModelConfig.preset("tiny")
    model = DiffusionGemma(config).init_weights(0)
    batch = rows(config)
    forward = TrainingForward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    seen = []
    for _ in range(40):
        result = micro_loss(forward, batch, ObjectiveConfig(), views=2)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        seen.append(float(result.metrics["decoder"]))
    assert sum(seen[-5:]) < 0.5 * sum(seen[:5])


def test_rounds_follow_the_sampler_and_all_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.preset("tiny")
    model = DiffusionGemma(config).init_weights(0)
    batch = rows(config)
    batch.pinned[:, :3] = True
    plain = ObjectiveConfig(self_conditioning=0.0)
    torch.manual_seed(0)
    one = micro_loss(TrainingForward(model), batch, plain)
    seen = []
    forward = TrainingForward(model)
    denoise = forward.denoise

    def watch(canvas: torch.Tensor, soft: torch.Tensor | None, prefix: list) -> tuple:  # type: ignore[type-arg]
        seen.append((canvas.clone(), soft))
        return denoise(canvas, soft, prefix)

    monkeypatch.setattr(forward, "denoise", watch)
    torch.manual_seed(0)
    three = micro_loss(forward, batch, plain, rounds=3)
    assert [soft is None for _, soft in seen] == [True, False, False]
    assert not seen[1][1].requires_grad
    assert all(torch.equal(canvas[batch.pinned], batch.canvas[batch.pinned]) for canvas, _ in seen)
    assert not torch.equal(seen[1][0], seen[0][0])
    torch.testing.assert_close(three.metrics["first round"], one.metrics["decoder"])  # the same noise, the same pass
    low, high = sorted(float(three.metrics[f"{which} round"]) for which in ("first", "last"))
    assert 0.9 * low < float(three.metrics["decoder"]) < 1.1 * high
    three.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("unroll", [0.0, 0.5])
def test_without_unroll_a_belief_comes_and_the_canvas_stays(unroll: float, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TrainingForward(DiffusionGemma(ModelConfig.preset("tiny")).init_weights(0))
    seen, denoise = [], forward.denoise

    def watch(canvas: torch.Tensor, soft: torch.Tensor | None, prefix: list) -> tuple:  # type: ignore[type-arg]
        seen.append((canvas.clone(), soft))
        return denoise(canvas, soft, prefix)

    monkeypatch.setattr(forward, "denoise", watch)
    micro_loss(forward, rows(forward.config), ObjectiveConfig(self_conditioning=0.5, unroll=unroll))
    (first, _), (second, belief) = seen
    assert belief is not None
    assert (belief.view(4, -1) != 0).any(dim=1).tolist() == [True, True, False, False]
    changed = (first != second[:2]).any(dim=1).tolist()
    assert changed == ([True, False] if unroll else [False, False])


def test_noise_keeps_to_the_range_of_its_task() -> None:
    torch.manual_seed(0)
    canvas = torch.full((500, 200), 10_000)
    share = (corrupt(canvas, torch.zeros(500, 200, dtype=torch.bool), 100, 0.0, (0.6, 0.8)) != canvas).float().mean(1)
    assert 0.45 < float(share.min()) < float(share.max()) < 0.95


def test_what_is_pinned_is_believed() -> None:
    """As the sampler has it: a pinned cell's belief is its token, whatever the network says there."""
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny")
    model = DiffusionGemma(config).init_weights(0)
    given = torch.full((2, 6), -1)
    given[:, 2], given[1, 5] = 7, 9
    hidden = torch.randn(12, config.hidden_size)
    soft, canvas = _believe(TrainingForward(model), hidden, given, ObjectiveConfig())
    pinned = given >= 0
    assert torch.equal(canvas[pinned], given[pinned])
    rows = soft.view(2, 6, -1)
    assert torch.allclose(rows[pinned], model.embed(given[pinned]).detach())
    assert not torch.allclose(rows[0, 0], model.embed(torch.tensor([7]))[0].detach())
