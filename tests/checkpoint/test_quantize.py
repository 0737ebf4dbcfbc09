"""Quantised checkpoints: written, read back in every way, and the same numbers on every way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusiongemma.checkpoint import load_model, save_model
from diffusiongemma.checkpoint.fidelity import by_part, compare, record
from diffusiongemma.checkpoint.layout import stock_layout
from diffusiongemma.checkpoint.quantize import quantize_folder
from diffusiongemma.checkpoint.samples import random_samples
from diffusiongemma.config import ModelConfig
from diffusiongemma.engine.fast import choose_runner
from diffusiongemma.engine.runner import Runner
from diffusiongemma.engine.scheduler import Limits
from diffusiongemma.errors import CheckpointError, ConfigError, DiffusionGemmaError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, count_parameters, footprint, formats_in, random_network
from diffusiongemma.model.summary import summarise
from diffusiongemma.model.support import unsupported
from diffusiongemma.ops.experts import experts_reference
from diffusiongemma.ops.product import weights
from diffusiongemma.ops.quant import Format, dequantize, quantize
from diffusiongemma.ops.quantized import QuantEmbedding, QuantExperts, QuantLinear, use_kernels

KINDS = ["int8", "fp8", "int4"]
GROUP = {"int8": None, "fp8": None, "int4": 32}  # the experts of this network have rows of 32
every_kind = pytest.mark.parametrize("kind", KINDS)
CONFIG = ModelConfig.preset("tiny", num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_model(DiffusionGemma(CONFIG).init_weights(3, 0.05), folder, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def folders(plain: Path) -> dict[str, Path]:
    """One quantised folder of each kind."""
    made = {kind: plain.parent / kind for kind in KINDS}
    for kind, folder in made.items():
        quantize_folder(plain, folder, Scheme.parse(kind, GROUP[kind]), max_shard_bytes=100_000)
    return made


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: DiffusionGemma, two: DiffusionGemma) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )


def dequantised(model: DiffusionGemma) -> dict[str, Tensor]:
    """Every parameter of a quantised network as plain numbers."""
    found = {n: t for n, t in model.state_dict().items() if n.rpartition(".")[0] not in formats_in(model)}
    for name in formats_in(model):
        module = model.get_submodule(name)
        found[name] = module.dequantize()  # type: ignore[operator]
    return found


# ---- the ways lead to the same numbers ---------------------------------------------------------------------------


@every_kind
def test_folder_loads_dequantised(kind: str, plain: Path, folders: dict[str, Path]) -> None:
    """A float32 network with, in each place, the dequantised numbers of the original."""
    model, original = load_model(folders[kind], quantize="none"), load_model(plain)
    assert not formats_in(model)
    scheme = Scheme.parse(kind, GROUP[kind])
    for name, weight in original.state_dict().items():
        fmt = scheme.format_of(name)
        expected = weight if fmt is None else dequantize(*quantize(weight, fmt))
        assert torch.equal(model.state_dict()[name], expected), name


@every_kind
def test_a_quantised_network_has_as_many_weights(kind: str, plain: Path, folders: dict[str, Path]) -> None:
    kept = load_model(folders[kind], quantize=kind, group=GROUP[kind])
    expected = sum(parameter.numel() for parameter in load_model(plain).parameters())
    assert count_parameters(kept) == count_parameters(load_model(plain)) == expected


@every_kind
def test_while_loading_equals_ahead(kind: str, plain: Path, folders: dict[str, Path]) -> None:
    """Quantised while loading, and kept from a quantised folder: the same network to the bit."""
    loading, ahead = (
        load_model(plain, quantize=kind, group=GROUP[kind]),
        load_model(folders[kind], quantize=kind, group=GROUP[kind]),
    )
    assert same(loading, ahead)
    assert {type(m) for m in ahead.modules()} >= {QuantLinear, QuantExperts, QuantEmbedding}
    assert set(formats_in(ahead)) == {
        n for n in dict(DiffusionGemma(CONFIG).named_parameters()) if Scheme.parse(kind, GROUP[kind]).format_of(n)
    }


@every_kind
def test_kept_and_dequantised_hold_the_same_numbers(kind: str, folders: dict[str, Path]) -> None:
    kept, plain = (
        load_model(folders[kind], quantize=kind, group=GROUP[kind]),
        load_model(folders[kind], quantize="none"),
    )
    assert all(torch.equal(tensor, dequantised(kept)[name]) for name, tensor in plain.state_dict().items())


def test_on_a_cpu_only_int8_is_kept_by_itself(folders: dict[str, Path]) -> None:
    """In float32, where its products are the faster ones."""
    assert {kind: bool(formats_in(load_model(folder))) for kind, folder in folders.items()} == {
        "int8": True, "fp8": False, "int4": False,
    }  # fmt: skip
    assert not formats_in(load_model(folders["int8"], dtype="float64"))


def test_logits_of_kept_and_dequantised_agree(folders: dict[str, Path]) -> None:
    """With the references that a weight-only format has: dequantise-then-multiply, whether at load or on the fly; and
    with activations that a CPU rounds to int8 as well."""
    rounded, plain = load_model(folders["int8"]), load_model(folders["int8"], quantize="none")
    kept = load_model(folders["int8"], dtype="float64", quantize="int8").float()
    agreement = compare(record(plain), record(kept))
    assert agreement.worst_cosine > 0.99999
    assert agreement.argmax == 1.0
    agreement = compare(record(plain), record(rounded))
    assert 0.99 < agreement.cosine < 0.99999
    assert agreement.argmax > 0.9
    assert agreement.kl < 0.005


def test_a_network_that_is_all_4_bit_is_kept_and_saved(plain: Path, tmp_path: Path) -> None:
    """We do not make them; others publish them."""
    four = Format("int4", 32)
    quantize_folder(plain, tmp_path / "out", Scheme(four, four, Format("int8")))
    model = load_model(tmp_path / "out", quantize="int4", group=32)
    assert set(formats_in(model).values()) == {four, Format("int8")}
    save_model(model, tmp_path / "again", dtype="bfloat16")
    assert same(load_model(tmp_path / "again"), load_model(tmp_path / "out"))


def test_saving_a_quantised_network_gives_the_folder_again(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind, folder in folders.items():
        save_model(load_model(folder, quantize=kind, group=GROUP[kind], dtype="bfloat16"), tmp_path / kind)
        ours, theirs = tensors_of(tmp_path / kind), tensors_of(folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours)
        read = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / kind)]
        assert read[0] == read[1]


def test_save_model_quantises(plain: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    save_model(load_model(plain), tmp_path / "int8", quantize="int8", dtype="bfloat16")
    assert same(load_model(tmp_path / "int8"), load_model(folders["int8"]))
    with pytest.raises(CheckpointError, match="quantised already"):
        save_model(load_model(folders["int8"], quantize="int8"), tmp_path / "twice", quantize="int8")


def test_dequantised_network_saves_as_a_plain_one(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["int8"], quantize="none")
    save_model(model, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert same(load_model(tmp_path / "plain"), model)


def test_groups_of_64_need_rows_that_divide(plain: Path) -> None:
    with pytest.raises(ConfigError, match="must divide into int4 in groups of 64"):
        load_model(plain, quantize="int4")


def test_groups_of_64(tmp_path: Path) -> None:
    config = CONFIG.replace(intermediate_size=128, moe_intermediate_size=64)
    save_model(DiffusionGemma(config).init_weights(), tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "out", Scheme.parse("int4"))
    kept = load_model(tmp_path / "out", quantize="int4")
    assert formats_in(kept)["layers.0.experts.down_proj"] == Format("int4", 64)
    assert formats_in(kept)["layers.0.mlp.down_proj.weight"] == formats_in(kept)["layers.1.self_attn.qkv_proj.weight"]
    assert formats_in(kept)["layers.0.mlp.down_proj.weight"] == Format("fp8")
    assert same(kept, load_model(tmp_path / "plain", quantize="int4", group=64))
    with pytest.raises(CheckpointError, match="quantised already"):
        load_model(tmp_path / "out", quantize="fp8")  # as only its other matrices are
    with pytest.raises(CheckpointError, match="quantised already"):
        load_model(tmp_path / "out", quantize="int4", group=32)


def test_embeddings_can_be_kept(plain: Path, tmp_path: Path) -> None:
    quantize_folder(plain, tmp_path / "out", Scheme.parse("fp8", embeddings=False))
    tensors = tensors_of(tmp_path / "out")
    assert tensors["model.decoder.embed_tokens.weight"].dtype == torch.bfloat16
    kept = load_model(tmp_path / "out", quantize="fp8")
    assert "embed_tokens.weight" not in formats_in(kept)
    assert torch.equal(kept.embed_tokens.weight, load_model(plain).embed_tokens.weight)


def test_fused_and_split_experts_of_the_source_are_the_same(
    plain: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A plain folder may keep the experts apart too."""
    tensors, layout = tensors_of(plain), stock_layout(CONFIG, split_experts=True)
    parts = {n: s for n, s in layout.items() if s.expert is not None}
    fused = {
        s.parameter: tensors.pop(f"model.decoder.{s.parameter}")
        for s in parts.values()
        if f"model.decoder.{s.parameter}" in tensors
    }
    assert len(fused) == 4
    tensors |= {n: s.of(fused[s.parameter]).clone() for n, s in parts.items()}
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, tmp_path / "split" / "model.safetensors")
    assert same(load_model(tmp_path / "split"), load_model(plain))
    quantize_folder(tmp_path / "split", tmp_path / "out", Scheme.parse("int8"))
    assert same(load_model(tmp_path / "out"), load_model(folders["int8"]))


WIDE = CONFIG.replace(hidden_size=128, intermediate_size=192, moe_intermediate_size=64, global_head_dim=128)


@pytest.mark.parametrize("scheme", [*map(Scheme.parse, KINDS), Scheme(Format("int4", 64), Format("int4", 32), None)])
def test_kernels_read_their_own_layout(scheme: Scheme, tmp_path: Path) -> None:
    """4-bit weights are laid out anew for kernels: the same numbers there, in the logits and when saved again."""
    model = random_network(WIDE, scheme, dtype=torch.float32, std=0.05)
    save_model(model, tmp_path / "before")
    logits, numbers, size = record(model), dequantised(model), sum(t.nbytes for t in model.state_dict().values())
    calls: list[str] = []

    def linear_run(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
        calls.append("linear")
        return x @ weights(q, scale).T

    def experts_run(x: Tensor, index: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        calls.append("experts")
        return experts_reference(x, index, weight, weights(*parts[:2], gated=True), weights(*parts[2:]))

    assert use_kernels(model, linear_run, experts_run) == []
    assert all(torch.equal(numbers[name], tensor) for name, tensor in dequantised(model).items())
    assert sum(t.nbytes for t in model.state_dict().values()) == size
    agreement = compare(logits, record(model))
    rounds = "fp8" in (scheme.experts.kind, scheme.dense.kind)  # these kernels keep fp8's activations as they are
    assert agreement.cosine > (0.9 if rounds else 0.9999)
    assert {"linear", "experts"} == set(calls)
    assert use_kernels(model, linear_run, experts_run) == []  # once is enough
    save_model(model, tmp_path / "after")
    before, after = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before | after)


def test_what_no_kernel_reads_keeps_its_reference(plain: Path) -> None:
    model = load_model(plain, quantize="int4", group=32)  # down has 64 rows, which make no tile
    left = use_kernels(model, *[lambda *_: pytest.fail("not this one")] * 2)
    assert [name.rpartition(":")[0] for name in left] == ["layers.0.experts", "layers.1.experts"]
    assert "need a multiple of 128 rows, got 64" in left[0]
    model.layers[0].experts(torch.randn(2, 64), torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2))


def test_a_cpu_never_lays_weights_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = random_network(WIDE, Scheme.parse("int4"), dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "Triton" in (unsupported(model) or "")
    assert type(choose_runner(model, Limits())) is Runner
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in model.state_dict().items())


# ---- files -------------------------------------------------------------------------------------------------------


def test_shards_scales_and_kept_tensors(folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        files = list(folder.glob("*.safetensors"))
        assert len(files) > 1
        assert all(file.stat().st_size < 100_000 + 40_000 for file in files)  # numbers, and a header
        tensors = tensors_of(folder)
        kept = [n for n in tensors if "norm" in n or "router" in n or "self_conditioning" in n or "scalar" in n]
        assert kept
        assert {tensors[n].dtype for n in kept} == {torch.bfloat16}
        suffix = "weight_packed" if kind == "int4" else "weight"
        q = tensors[f"model.decoder.layers.1.experts.7.up_proj.{suffix}"]
        scale = tensors["model.decoder.layers.1.experts.7.up_proj.weight_scale"]
        assert q.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.int32}[kind]
        assert tuple(scale.shape) == ((32, 2) if kind == "int4" else (32, 1))
        dense = tensors["model.decoder.layers.1.mlp.up_proj.weight"]
        assert dense.dtype == (torch.int8 if kind == "int8" else torch.float8_e4m3fn)


def test_vision_and_side_files_come_along(
    write_checkpoint: Callable[..., Path], small_config: ModelConfig, tmp_path: Path
) -> None:
    source = write_checkpoint()
    (source / "tokenizer.json").write_text("{}")
    quantize_folder(source, tmp_path / "out", Scheme.parse("int8"))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    vision = [n for n in before if "vision" in n]
    assert len(vision) == 2
    assert all(torch.equal(before[n], after[n]) for n in vision)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert load_model(tmp_path / "out").config == small_config


def test_a_folder_into_itself_or_twice(plain: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="into itself"):
        quantize_folder(plain, plain, Scheme.parse("int8"), overwrite=True)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_folder(folders["fp8"], tmp_path / "x", Scheme.parse("int8"))
    with pytest.raises(CheckpointError, match="quantising twice only loses"):
        load_model(folders["fp8"], quantize="int4", group=32)
    with pytest.raises(ConfigError, match="no effect"):
        load_model(folders["fp8"], group=32)
    with pytest.raises(ConfigError, match="no number format"):
        load_model(plain, quantize="int5")


@pytest.mark.parametrize("part", ["mlp.down_proj", "experts"])  # with int4, the one is fp8
def test_numbers_that_are_none_cannot_be_quantised(part: str, plain: Path, tmp_path: Path) -> None:
    model = load_model(plain)
    module = model.layers[1].get_submodule(part)
    (module.down_proj[2] if part == "experts" else module.weight)[3, 5] = torch.nan
    save_model(model, tmp_path / "nan")
    for kind in KINDS:
        with pytest.raises(CheckpointError, match=rf"layers\.1\.{part}.* holds infinities"):
            quantize_folder(tmp_path / "nan", tmp_path / kind, Scheme.parse(kind, GROUP[kind]))
        assert not (tmp_path / kind).exists()
        with pytest.raises(CheckpointError, match=rf"layers\.1\.{part}.* holds infinities"):
            load_model(tmp_path / "nan", quantize=kind, group=GROUP[kind])


# ---- published layout --------------------------------------------------------------------------------------------


def published(plain: Path, folder: Path, prefix: str = "model.decoder.", flat: bool = False) -> dict[str, Tensor]:
    """A folder as llm-compressor writes FP8_DYNAMIC: linears in fp8 with bf16 scales a channel, experts one by one."""
    folder.mkdir()
    tensors, layout = tensors_of(plain), stock_layout(CONFIG, split_experts=True)
    out: dict[str, Tensor] = {}
    for name, slot in layout.items():
        stock = tensors.get(name)
        weight = slot.of(tensors["model.decoder." + slot.parameter]) if stock is None else stock
        written = (
            name.replace("model.decoder.", prefix) if "self_conditioning" not in name and "scalar" not in name else name
        )
        linear = name.endswith("proj.weight") and "router" not in name and "self_conditioning" not in name
        if not linear:
            out[written] = weight.clone()
            continue
        scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
        out[written] = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        out[written + "_scale"] = scale.flatten() if flat else scale
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": {
                    "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
                    "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
                },
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                    "observer": "memoryless_minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["model.decoder.layers.0.router.proj", "model.decoder.self_conditioning.gate_proj", "lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.0",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(out, folder / "model.safetensors")
    return out


@pytest.mark.parametrize("prefix", ["model.decoder.", "model.encoder.language_model."])
@pytest.mark.parametrize("flat", [False, True])
def test_published_fp8_loads_as_it_is(plain: Path, tmp_path: Path, prefix: str, flat: bool) -> None:
    tensors = published(plain, tmp_path / "fp8", prefix, flat)
    model, kept = load_model(tmp_path / "fp8"), load_model(tmp_path / "fp8", quantize="fp8")
    for name, slot in stock_layout(CONFIG, split_experts=True).items():
        written = name.replace("model.decoder.", prefix)
        q = tensors[written if written in tensors else name].float()
        if (scale := tensors.get(written + "_scale")) is not None:
            q = q * scale.float().view(-1, 1)
        assert torch.equal(slot.of(model.state_dict()[slot.parameter]), q), name
    assert all(torch.equal(tensor, dequantised(kept)[name]) for name, tensor in model.state_dict().items())
    assert {str(f) for f in formats_in(kept).values()} == {"fp8"}
    assert kept.layers[0].self_attn.qkv_proj.weight.scale.dtype == torch.float32
    agreement = compare(record(model), record(kept))  # the second rounds its activations to fp8 as well
    assert agreement.cosine > 0.9


def test_one_scale_for_a_whole_tensor(plain: Path, tmp_path: Path) -> None:
    tensors = published(plain, tmp_path / "fp8")
    name = "model.decoder.layers.0.self_attn.o_proj.weight"
    tensors[name + "_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    for keep in ("none", "fp8"):
        model = load_model(tmp_path / "fp8", quantize=keep)
        found = dequantised(model)["layers.0.self_attn.o_proj.weight"]
        assert torch.equal(found, tensors[name].float() * 0.25)


def test_tied_copies_of_quantised_weights(plain: Path, tmp_path: Path) -> None:
    tensors = published(plain, tmp_path / "fp8")
    encoder = {
        n.replace("model.decoder.", "model.encoder.language_model."): t.clone()
        for n, t in tensors.items()
        if "layers.0.mlp" in n or "experts.3." in n
    }
    save_file(tensors | encoder, tmp_path / "fp8" / "model.safetensors")
    for keep in ("none", "fp8"):
        load_model(tmp_path / "fp8", quantize=keep)
    changed = "model.encoder.language_model.layers.0.mlp.up_proj.weight_scale"
    save_file(tensors | encoder | {changed: encoder[changed] * 2}, tmp_path / "fp8" / "model.safetensors")
    for keep in ("none", "fp8"):
        with pytest.raises(CheckpointError, match=r"encoder\.language_model\.layers\.0\.mlp\.up_proj\.weight differs"):
            load_model(tmp_path / "fp8", quantize=keep)


def test_one_plain_part_of_a_fused_weight(plain: Path, tmp_path: Path) -> None:
    """q quantised and k not: fine dequantised, impossible to keep, and said so."""
    tensors = published(plain, tmp_path / "fp8")
    name = "model.decoder.layers.0.self_attn.k_proj.weight"
    del tensors[name + "_scale"]
    tensors[name] = tensors_of(plain)[name]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "fp8").layers[0].self_attn.qkv_proj.weight[64:96], tensors[name].float())
    with pytest.raises(CheckpointError, match="quantize='none'"):
        load_model(tmp_path / "fp8", quantize="fp8")


# ---- damage ------------------------------------------------------------------------------------------------------

O = "model.decoder.layers.1.experts.2.down_proj.weight"  # [64, 32]


MORE, STATIC = "model.decoder.more.weight_scale", O.replace("weight", "input_scale")


def _one_expert_more(tensors: dict[str, Tensor]) -> None:
    found = [name for name in tensors if "1.experts.7" in name]
    tensors |= {name.replace("experts.7", "experts.9"): tensors[name].clone() for name in found}


def broken(kind: str) -> list[tuple[str, Callable[[dict[str, Tensor]], Any]]]:
    q = O + "_packed" if kind == "int4" else O
    cases: list[tuple[str, Callable[[dict[str, Tensor]], Any]]] = [
        (f"missing: {O}_scale", lambda t: t.pop(O + "_scale")),
        (f"{O}_scale has shape", lambda t: t.update({O + "_scale": t[O + "_scale"][:-1].clone()})),
        (f"{O}_scale has dtype I32", lambda t: t.update({O + "_scale": t[O + "_scale"].to(torch.int32)})),
        (f"{O}_scale holds infinities", lambda t: t.update({O + "_scale": t[O + "_scale"] * torch.inf})),
        (f"{q} has dtype I16", lambda t: t.update({q: t[q].view(torch.int8).to(torch.int16)})),
        (f"{q} has shape", lambda t: t.update({q: t[q][:-1].clone()})),
        (f"missing: {O}", lambda t: t.pop(q)),
        (f"unexpected: {O}_scale", lambda t: t.pop(q)),
        (f"unexpected: {MORE}", lambda t: t.update({MORE: t[O + "_scale"].clone()})),
        (f"unexpected: {O}_zero_point", lambda t: t.update({O + "_zero_point": torch.zeros(64, 1)})),
        (f"unexpected: {STATIC}", lambda t: t.update({STATIC: torch.ones(1)})),
        ("experts.9.up_proj", _one_expert_more),
    ]  # fmt: skip
    if kind == "int4":
        cases += [
            (f"{O}_shape must be there", lambda t: t.pop(O + "_shape")),
            (f"{O}_shape says", lambda t: t.update({O + "_shape": torch.tensor([32, 64])})),
        ]
    return cases


@pytest.mark.parametrize(("kind", "case"), [(k, i) for k in KINDS for i in range(len(broken(k)))])
def test_broken_tensors_are_named(kind: str, case: int, folders: dict[str, Path], tmp_path: Path) -> None:
    words, damage = broken(kind)[case]
    tensors = tensors_of(folders[kind])
    damage(tensors)
    (tmp_path / "config.json").write_text((folders[kind] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    for keep in (None, kind):
        with pytest.raises(CheckpointError) as error:
            load_model(tmp_path, quantize=keep, group=keep and GROUP[keep])
        assert words in str(error.value)


def test_without_its_config_a_quantised_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Never guessed from names or dtypes."""
    for kind, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        save_file(tensors_of(folder), tmp_path / kind / "model.safetensors")
        with pytest.raises(CheckpointError, match="unexpected"):
            load_model(tmp_path / kind)


def test_another_format_in_the_config(folders: dict[str, Path], tmp_path: Path) -> None:
    """int8 numbers under a config that says fp8, and so on: refused, with the tensor named."""
    for kind, folder in folders.items():
        for other in set(KINDS) - {kind}:
            target = tmp_path / f"{kind}-{other}"
            target.mkdir()
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = json.loads((folders[other] / "config.json").read_text())[
                "quantization_config"
            ]
            (target / "config.json").write_text(json.dumps(config))
            save_file(tensors_of(folder), target / "model.safetensors")
            with pytest.raises(CheckpointError, match=r"layers\.\d\.\w+\.\S*weight"):
                load_model(target)


def test_millions_of_experts_in_a_damaged_config_do_not_hang(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["int8"] / "config.json").read_text())
    config["text_config"]["num_experts"] = 1 << 22
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(folders["int8"]), tmp_path / "model.safetensors")
    with pytest.raises(DiffusionGemmaError):
        load_model(tmp_path)


# ---- figures -----------------------------------------------------------------------------------------------------


def test_errors_by_layer_and_part(plain: Path, tmp_path: Path) -> None:
    errors = quantize_folder(plain, tmp_path / "out", Scheme.parse("int4", 32))
    rows = {(row.layer, row.part): row for row in by_part(errors)}
    assert set(rows) == {(i, p) for i in range(2) for p in ("attention", "dense MLP", "experts")} | {
        (None, "embeddings")
    }
    original, quantised = load_model(plain).state_dict(), load_model(tmp_path / "out").state_dict()
    w, v = original["layers.1.experts.down_proj"], quantised["layers.1.experts.down_proj"]
    w2, v2 = original["layers.1.experts.gate_up_proj"], quantised["layers.1.experts.gate_up_proj"]
    exact = (((w - v).square().sum() + (w2 - v2).square().sum()) / (w.square().sum() + w2.square().sum())).sqrt()
    assert rows[1, "experts"].relative == pytest.approx(float(exact), rel=0.01)
    assert rows[1, "experts"].numbers == w.numel() + w2.numel()
    assert rows[1, "experts"].nbytes == sum(x.numel() * (1 / 2 + 2 / 32) for x in (w, w2))
    assert rows[None, "embeddings"].format == "int8"
    assert rows[None, "embeddings"].relative < 0.01 < rows[0, "attention"].relative < 0.04 < rows[0, "experts"].relative
    assert all(
        row.relative <= row.worst < 0.12 and 0.99 < row.cosine < 1 for row in rows.values() if row.part != "embeddings"
    )


def test_agreement_with_itself_and_with_noise(plain: Path) -> None:
    model = load_model(plain)
    samples = random_samples(CONFIG.vocab_size, 2)
    logits = record(model, samples)
    same_again = compare(logits, record(model, samples))
    assert (same_again.cosine, same_again.argmax, same_again.kl) == (pytest.approx(1), 1.0, pytest.approx(0))
    assert same_again.positions == 2 * 2 * 32
    assert not torch.equal(logits[0], logits[1])  # the second time with what a step before believed
    (wide,) = random_samples(CONFIG.vocab_size, 1, canvas=100)
    assert [len(found) for found in record(model, [wide])] == [64, 64]  # logits of large vocabularies are large
    other = compare(logits, [torch.randn(t.shape, generator=torch.Generator().manual_seed(0)) for t in logits])
    assert abs(other.cosine) < 0.1
    assert other.argmax < 0.2
    assert other.kl > 0.1


def test_the_26b_network_in_each_format() -> None:
    """On the meta device, with scales: 4-bit experts within 14.6 GB; `dgemma inspect` counts the same bytes."""
    config = ModelConfig.preset("26b-a4b")
    sizes = summarise(config).bytes
    assert footprint(config, None) == sizes["bf16"]
    assert footprint(config, Scheme.parse("fp8")) == footprint(config, Scheme.parse("int8")) == sizes["fp8"]
    assert footprint(config, Scheme.parse("int4")) == sizes["4-bit"]
    assert footprint(config, Scheme.parse("int4")) == pytest.approx(14.578e9, rel=1e-4)
    assert footprint(config, Scheme.parse("int4", 32)) == pytest.approx(15.292e9, rel=1e-4)
    four = Format("int4", 64)
    assert footprint(config, Scheme(four, four, Format("int8"))) == pytest.approx(13.805e9, rel=1e-4)


@every_kind
def test_random_networks_are_quantised_as_they_are_made(kind: str) -> None:
    model = random_network(CONFIG, Scheme.parse(kind, GROUP[kind]), dtype=torch.float32, seed=5, std=0.05)
    assert sum(t.nbytes for t in model.state_dict().values()) == footprint(
        CONFIG, Scheme.parse(kind, GROUP[kind]), torch.float32
    )
    assert same(model, random_network(CONFIG, Scheme.parse(kind, GROUP[kind]), dtype=torch.float32, seed=5, std=0.05))
    spread = dequantised(model)["layers.1.experts.gate_up_proj"].std()
    assert float(spread) == pytest.approx(0.05, rel=0.05)
    assert all(t.isfinite().all() for t in record(model, random_samples(CONFIG.vocab_size, 1)))
    assert torch.equal(model.norm.weight, torch.ones(64))
