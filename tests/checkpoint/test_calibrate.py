"""Weights fitted to samples: against a twin that takes the whole network, and what the embedded model gains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusiongemma.checkpoint import calibrate, load_model, quantize_folder, save_model
from diffusiongemma.checkpoint import quantize as quantize_module
from diffusiongemma.checkpoint import save as save_module
from diffusiongemma.checkpoint.calibrate import LayerWalk
from diffusiongemma.checkpoint.fidelity import by_part, compare, record
from diffusiongemma.checkpoint.plan import make_plan
from diffusiongemma.checkpoint.samples import Sample, random_samples, text_samples
from diffusiongemma.config import ModelConfig
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, formats_in, shapes_of
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.gptq import gram_of, quantize_fitted
from diffusiongemma.ops.quant import dequantize
from diffusiongemma.text import Tokenizer

SCHEMES = {kind: Scheme.parse(kind, 32 if kind == "int4" else None) for kind in ("int8", "fp8", "int4")}
CONFIG = ModelConfig.preset(
    "tiny", num_hidden_layers=3, layer_types=("sliding_attention", "sliding_attention", "full_attention")
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = DiffusionGemma(CONFIG).init_weights(3, 0.05)
    for i, layer in enumerate(model.layers):
        layer.encoder_scalar.fill_(0.8 + 0.1 * i)
        layer.decoder_scalar.fill_(1.2 - 0.1 * i)
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_model(model, folder, dtype="bfloat16", max_shard_bytes=100_000)
    return folder


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Of several lengths, more than go through a layer at once."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(CONFIG.vocab_size, (n,), generator=generator).tolist() for n in (900, 300, 77, 40)]
    return text_samples(texts, CONFIG.vocab_size, 19, canvas=24, prompt=40)


def whole_network(folder: Path, scheme: Scheme, samples: list[Sample]) -> DiffusionGemma:
    """The twin: for every layer, all samples go through all of the network, one by one, as the engine calls it."""
    model = load_model(folder)
    formats = scheme.formats(shapes_of(CONFIG))

    def run() -> None:
        for i, sample in enumerate(samples):
            cache = model.new_cache(1, 64)
            model.encode(sample.prompt[None], cache)
            soft = model.embed(sample.believed) if i % 2 else None
            model.denoise_packed(sample.noisy, soft, cache.rows, [len(sample.noisy)])

    def inputs_of(module: nn.Module) -> list[tuple[Tensor, ...]]:
        seen: list[tuple[Tensor, ...]] = []
        hook = module.register_forward_pre_hook(lambda _, args: seen.append(args))
        with torch.inference_mode():
            run()
        hook.remove()
        return seen

    for i, layer in enumerate(model.layers):
        new: dict[str, Tensor] = {}
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            x = torch.cat([args[0] for args in inputs_of(layer.get_submodule(name))])
            weight = layer.get_parameter(f"{name}.weight")
            new[f"{name}.weight"] = fit(weight, x, scheme, formats[f"layers.{i}.{name}.weight"])
        parts = inputs_of(layer.experts)
        x, index, share = (torch.cat([args[n] for args in parts]) for n in range(3))
        up, down = layer.experts.gate_up_proj.clone(), layer.experts.down_proj.clone()
        for e in range(len(up)):
            token, slot = (index == e).nonzero(as_tuple=True)
            up[e] = fit(up[e], x[token], scheme, scheme.experts)
            hidden = geglu(x[token] @ up[e].t()) * share[token, slot, None]
            down[e] = fit(down[e], hidden, scheme, scheme.experts)
        new |= {"experts.gate_up_proj": up, "experts.down_proj": down}
        for name, weight in new.items():
            layer.get_parameter(name).copy_(weight)
    return model


def fit(weight: Tensor, x: Tensor, scheme: Scheme, fmt: object) -> Tensor:
    assert fmt in (scheme.experts, scheme.dense)
    q, scale = quantize_fitted(weight[None], gram_of(x)[None], [len(x)], fmt)  # type: ignore[arg-type]
    return dequantize(q[0], scale[0])


@pytest.mark.parametrize("kind", SCHEMES)
def test_equals_the_whole_network(
    kind: str, plain: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "GRAMS", 3 * 4 * CONFIG.hidden_size**2)  # three experts at once, of eight
    quantize_folder(plain, tmp_path / "out", SCHEMES[kind], samples=samples, max_shard_bytes=50_000)
    ours, twin = load_model(tmp_path / "out", quantize="none"), whole_network(plain, SCHEMES[kind], samples)
    rounded = load_model(plain, quantize=kind, group=32 if kind == "int4" else None)
    for name, weight in twin.state_dict().items():
        found = ours.state_dict()[name]
        if not name.startswith("layers.") or name not in formats_in(rounded):
            expected = weight if name != "embed_tokens.weight" else rounded.get_submodule(name).dequantize()  # type: ignore[operator]
            assert torch.equal(found, expected), name
            continue
        # Sums over samples come in another order, so a weight between two numbers may round the other way, and those
        # behind it make up for that.
        same = float(((found - weight).abs() <= 1e-4 * weight.abs().max()).float().mean())
        assert same > 0.97, (name, same)
        plainly = rounded.get_submodule(name).dequantize()  # type: ignore[operator]
        assert float((found == plainly).float().mean()) < 0.95, name


def test_products_are_reported(plain: Path, samples: list[Sample], tmp_path: Path) -> None:
    errors = quantize_folder(plain, tmp_path / "out", SCHEMES["int4"], samples=samples)
    rows = {(row.layer, row.part): row for row in by_part(errors)}
    assert rows.pop((None, "embeddings")).product is None
    assert len(rows) == 9
    for (_, part), row in rows.items():
        assert row.product is not None
        assert 0 < row.product < row.relative  # what they give changes less than they do
        assert row.relative < (0.2 if part == "experts" else 0.06)
    first = next(e for e in errors if e.parameter.endswith("qkv_proj.weight"))
    whole = [e for e in errors if e.parameter == first.parameter]
    assert len({e.product for e in whole}) == len(whole) == 3  # q, k and v, each its own
    change, size = (sum(e.product[i] for e in whole if e.product) for i in (0, 1))
    mlps = [e.product for e in errors if e.product and e.parameter.startswith("layers.0.mlp.")]
    assert rows[0, "dense MLP"].product == pytest.approx((sum(a for a, _ in mlps) / sum(b for _, b in mlps)) ** 0.5)
    assert 0 < change < 0.01 * size
    assert all(row.product is None for row in by_part(quantize_folder(plain, tmp_path / "two", SCHEMES["int4"])))


def test_one_layer_is_in_memory(plain: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the layers before neither weights nor results nor what they were multiplied with, also where Python does
    not happen to look for circles."""
    walk = LayerWalk(
        CONFIG,
        make_plan(plain, CONFIG),
        SCHEMES["fp8"].formats(shapes_of(CONFIG)),
        samples,
        torch.device("cpu"),
        torch.float32,
    )
    made: list[weakref.ref[Tensor]] = []
    inner, gram = walk._through, calibrate.gram_of

    def watch(layer: nn.Module) -> object:
        assert len({n.split(".")[1] for n, p in walk.model.named_parameters() if not p.is_meta}) == 1
        assert not walk._fitted
        assert all(old() is None for old in made)
        return inner(layer)  # type: ignore[arg-type]

    def noted(x: Tensor) -> Tensor:
        made.extend(weakref.ref(t) for t in (x, gram(x)))
        found = gram(x)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(walk, "_through", watch)
    monkeypatch.setattr(calibrate, "gram_of", noted)
    gc.disable()
    try:
        for i in range(3):
            first = walk.fitted(f"layers.{i}.self_attn.qkv_proj.weight")
            assert walk.fitted(f"layers.{i}.self_attn.qkv_proj.weight") is first  # not walked again
            assert len(walk._fitted) == 6
    finally:
        gc.enable()
    assert len(made) > 50
    assert all(p.is_meta for p in walk.model.parameters())
    assert not any(module._forward_pre_hooks for module in walk.model.modules())
    with pytest.raises(AssertionError, match="in order"):
        walk.fitted("layers.0.self_attn.qkv_proj.weight")


def test_parts_of_a_fitted_weight_are_copies(plain: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Else a shard that waits for its last tensor holds whole layers."""
    found: list[Tensor] = []

    def keep(tensors: dict[str, Tensor], *args: object, **options: object) -> None:
        found.extend(tensors.values())
        save_file(tensors, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "save_file", keep)
        quantize_folder(plain, tmp_path / "out", SCHEMES["int4"], samples=samples)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found)


def test_the_walk_computes_as_the_checkpoint_does(plain: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Which on a CPU is float32, and on a GPU what the weights have."""
    asked: list[object] = []

    def note(*args: object) -> torch.dtype:
        asked.append(args[0])
        return torch.float64

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_module, "pick_dtype", note)
        patch.setattr(
            calibrate, "gram_of", lambda x: gram_of(x) if x.dtype == torch.float64 else pytest.fail("not float64")
        )
        quantize_folder(plain, tmp_path / "out", SCHEMES["fp8"], samples=samples)
    assert asked == ["auto"]


def test_weights_that_are_no_numbers(plain: Path, samples: list[Sample], tmp_path: Path) -> None:
    for name, words in (
        ("mlp.down_proj", "mlp.down_proj.weight holds infinities"),
        ("input_layernorm", "model.decoder.layers.1.input_layernorm.weight holds infinities"),
        ("pre_feedforward_layernorm", "layers.1 cannot be fitted to these samples: inputs that are no numbers"),
    ):
        model = load_model(plain)
        model.layers[1].get_submodule(name).weight.flatten()[5] = 1e30 if "feed" in name else torch.nan
        save_model(model, tmp_path / name)
        with pytest.raises(CheckpointError, match=words):
            quantize_folder(tmp_path / name, tmp_path / "out", SCHEMES["fp8"], samples=samples)
        assert not (tmp_path / "out").exists()


def test_an_expert_that_nothing_picks(plain: Path, tmp_path: Path) -> None:
    """It is rounded plainly, as if there were no samples."""
    few = random_samples(CONFIG.vocab_size, 1, prompt=1, canvas=1)
    quantize_folder(plain, tmp_path / "out", SCHEMES["int4"], samples=few)
    ours, rounded = load_model(tmp_path / "out", quantize="none"), load_model(plain, quantize="int4", group=32)
    experts = ours.layers[2].experts.gate_up_proj
    plainly = rounded.layers[2].experts.gate_up_proj.dequantize()
    same = [torch.equal(experts[e], plainly[e]) for e in range(len(experts))]
    assert sum(same) >= len(same) - 2 * CONFIG.top_k_experts
    assert not all(same)


@pytest.mark.slow
def test_the_embedded_model_loses_half(tmp_path: Path) -> None:
    """On text that it was not fitted to: this package's own sources, which nano was not trained on."""
    folder = ASSETS / "nano"
    save_model(load_model(folder, quantize="none"), tmp_path / "plain")
    tokenizer, config = Tokenizer.from_pretrained(folder), ModelConfig.from_pretrained(folder)
    sources = sorted((ASSETS.parent / "engine").glob("*.py"))
    texts = [tokenizer.encode(file.read_text(encoding="utf-8"), add_bos=True) for file in sources]
    cut: Callable[..., list[Sample]] = lambda texts, n: text_samples(  # noqa: E731
        texts, config.vocab_size, n, canvas=96, prompt=128, bos=tokenizer.special["bos"]
    )
    half = len(texts) // 2
    fitted_to, others = cut(texts[:half], 32), cut(texts[half:], 6)
    reference = record(load_model(tmp_path / "plain"), others)
    lost: dict[str, float] = {}
    for name, some in (("plain", []), ("fitted", fitted_to)):
        quantize_folder(tmp_path / "plain", tmp_path / name / "out", SCHEMES["int4"], samples=some)
        lost[name] = compare(reference, record(load_model(tmp_path / name / "out"), others)).kl
    assert lost["fitted"] < 0.6 * lost["plain"], lost
