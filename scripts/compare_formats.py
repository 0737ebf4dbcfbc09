"""What each number format costs a model, rounded plainly and fitted to a text, on another text.

    python scripts/compare_formats.py                                  # nano; takes some minutes on a CPU
    python scripts/compare_formats.py MODEL --fit text.jsonl --compare other.jsonl --out FOLDER

Without texts of your own, models are fitted to the standard library of this Python and compared on this package's
sources. `weights` compares with dequantised weights, `as it runs` with the products of the format, which round
activations, too (fp8 by token; int8 by token on a CPU). The folders stay in --out, so that `dgemma eval --model` can
take them. A model that is stored in int8, as nano is, is dequantised first.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch import Tensor

from diffusiongemma.checkpoint import load_config, load_model, quantize_folder, resolve, save_model
from diffusiongemma.checkpoint.fidelity import Agreement, compare, record
from diffusiongemma.checkpoint.load import load_quantization
from diffusiongemma.checkpoint.samples import Sample, prompt_for, text_samples
from diffusiongemma.cli.tables import make_table
from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.errors import InputError
from diffusiongemma.model.quantize import Scheme
from diffusiongemma.text import ChatTemplate, Tokenizer
from diffusiongemma.text.corpus import read_corpus

FORMATS = ("int8", "fp8", "int4")


def texts_of(source: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[list[int]]:
    """Of a file, or of all Python files right in a folder."""
    files = sorted(source.glob("*.py")) if source.is_dir() else [source]
    return [text for file in files for text in read_corpus(file, tokenizer, template)]


def plain_folder(model: str, work: Path) -> Path:
    folder = ASSETS / model if model == "nano" else resolve(model)
    if load_quantization(folder) is None:
        return folder
    save_model(load_model(folder, quantize="none"), work / "plain", overwrite=True)
    return work / "plain"


def main(
    model: Annotated[str, typer.Argument(help="nano, a checkpoint folder or a hub id.")] = "nano",
    fit: Annotated[Path | None, typer.Option(help="The text to fit to: as `dgemma quantize --calibrate`.")] = None,
    others: Annotated[Path | None, typer.Option("--compare", help="The text to compare on.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to fit to.")] = 256,
    kept: Annotated[int, typer.Option(min=1, help="Samples to compare on.")] = 16,
    group: Annotated[int, typer.Option(help="int4: numbers that share a scale.")] = 32,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Keep the folders there.")] = None,
) -> None:
    schemes = {kind: Scheme.parse(kind, group if kind == "int4" else None) for kind in FORMATS}
    with tempfile.TemporaryDirectory() as temporary:
        work = out or Path(temporary)
        source = plain_folder(model, work)
        config, tokenizer, template = load_config(source), Tokenizer.from_pretrained(source), ChatTemplate.find(source)
        bos = tokenizer.special.get("bos")

        def cut(text: Path, count: int) -> list[Sample]:
            texts = texts_of(text, tokenizer, template)
            found = text_samples(texts, config.vocab_size, count, config.canvas_length, prompt_for(config), bos)
            if not found:
                raise InputError(f"{text} holds no sample: give a longer text")
            return found

        fitted_to = cut(fit or Path(sysconfig.get_paths()["stdlib"]), samples)
        compared_on = cut(others or ASSETS.parent / "engine", kept)
        reference = record(load_model(source, device, "auto"), compared_on)
        rows: list[tuple[str, ...]] = []
        for kind, scheme in schemes.items():
            width = scheme.experts.group or None
            for name, some in ((kind, []), (f"{kind} fitted", fitted_to)):
                folder = work / name.replace(" ", "-")
                quantize_folder(source, folder, scheme, samples=some, device=device, overwrite=out is not None)
                weights = measured(folder, device, "none", None, reference, compared_on)
                runs = measured(folder, device, kind, width, reference, compared_on)
                rows.append((name, *(f"{n:.4f}" for n in (weights.kl, runs.kl)), f"{runs.argmax:.1%}"))
                Console(stderr=True).print(f"{name}: KL {weights.kl:.5f}, as it runs {runs.kl:.5f}")
        title = f"{model}: fitted to {len(fitted_to)} samples, compared over {weights.positions} positions"
        columns = ("format", "KL, weights", "KL, as it runs", "same best token")
        Console().print(make_table(title, columns, rows))


def measured(
    folder: Path, device: str, quantize: str, group: int | None, reference: list[Tensor], samples: list[Sample]
) -> Agreement:
    return compare(reference, record(load_model(folder, device, "auto", quantize=quantize, group=group), samples))


if __name__ == "__main__":
    typer.run(main)
