"""The training forward is the network: same numbers as `encode` and `denoise`, gradients in every weight."""

import pytest
import torch

from diffusiongemma.config import ModelConfig
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.train.experts import PATHS, ExpertsPath
from diffusiongemma.train.forward import TrainingForward, _masked, _windowed


def network(window: int = 16, seed: int = 0) -> DiffusionGemma:
    config = ModelConfig.preset("tiny", sliding_window=window)
    model = DiffusionGemma(config).init_weights(seed, std=0.08)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms of 1 and scalars of 1 would hide a norm or a scalar in the wrong place
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale")):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            buffer.fill_(0.7 if "encoder" in name else 1.2)
    return model


@pytest.mark.parametrize("experts", ["loop", "dense", "grouped"])
@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("views", [1, 2])
def test_equals_encode_and_denoise(experts: ExpertsPath, window: int, views: int) -> None:
    torch.manual_seed(0)
    model = network(window)
    rows, prefix, length = 3, 13, 10
    tokens = torch.randint(model.config.vocab_size, (rows, prefix + length))
    canvas = torch.randint(model.config.vocab_size, (views * rows, length))
    belief = torch.randn(views * rows, length, model.config.vocab_size)

    with torch.no_grad():
        forward = TrainingForward(model, experts)
        hidden, kept, routing = forward.encode(tokens, prefix)
        soft = model.soft_embed(belief.flatten(0, 1))
        denoised, _ = forward.denoise(canvas, soft, kept)

        whole = model.encode(tokens, model.new_cache(rows, prefix + length))
        cache = model.new_cache(rows, prefix + length)
        model.encode(tokens[:, :prefix], cache)
        for view in range(views):
            part = slice(view * rows, (view + 1) * rows)
            expected = model.denoise(canvas[part], cache, belief[part])
            got = model.logits(denoised.view(views * rows, length, -1)[part])
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.view(rows, -1, model.config.hidden_size), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(routing.load.sum(dim=1), torch.ones(model.config.num_hidden_layers))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fast window needs a GPU")
def test_a_window_is_a_mask_also_in_its_gradients() -> None:
    torch.manual_seed(0)
    sizes = ((2, 300, 8, 64), (2, 300, 4, 64), (2, 300, 4, 64))
    parts = [(0.3 * torch.randn(size, device="cuda")).bfloat16().requires_grad_() for size in sizes]
    weight = torch.randn(sizes[0], device="cuda").bfloat16()
    found = []
    for way in (_windowed, _masked):
        out = way(*parts, 100)
        found.append((out, *torch.autograd.grad((out * weight).sum(), parts)))
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=3e-2, rtol=3e-2)


def test_every_weight_gets_a_gradient_and_the_prefix_too() -> None:
    model = network()
    forward = TrainingForward(model)
    tokens = torch.randint(model.config.vocab_size, (2, 20))
    _, kept, _ = forward.encode(tokens, 12)
    for keys, values in kept:
        keys.retain_grad()
        values.retain_grad()
    soft = torch.randn(16, model.config.hidden_size)
    hidden, _ = forward.denoise(torch.randint(model.config.vocab_size, (2, 8)), soft, kept)
    model.logits(hidden).square().mean().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []
    for keys, values in kept[:-1]:
        for tensor in (keys, values):
            assert tensor.grad is not None
            assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("path", ["dense", "grouped"])
def test_expert_paths_have_the_same_gradients(path: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 16, requires_grad=True)
    scores = torch.randn(50, 5, requires_grad=True)
    gate_up, down = torch.randn(5, 24, 16, requires_grad=True), torch.randn(5, 16, 12, requires_grad=True)
    outs, grads = [], []
    for name in ("loop", path):
        weight, index = scores.softmax(-1).topk(2)
        out = PATHS[name](x, index, weight, gate_up, down)
        outs.append(out)
        grads.append(torch.autograd.grad((out * out.detach().cos()).sum(), (x, scores, gate_up, down)))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


def test_an_expert_without_tokens_is_no_problem() -> None:
    x, weight = torch.randn(6, 16), torch.ones(6, 1)
    index = torch.tensor([[0], [3], [3], [0], [0], [3]])
    gate_up, down = torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    expected = PATHS["loop"](x, index, weight, gate_up, down)
    for path in PATHS.values():
        torch.testing.assert_close(path(x, index, weight, gate_up, down), expected, atol=1e-4, rtol=1e-4)
