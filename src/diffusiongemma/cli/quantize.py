"""`dgemma quantize`: a checkpoint in a smaller number format, and what that cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffusiongemma.checkpoint.fidelity import Agreement, PartError
    from diffusiongemma.checkpoint.samples import Sample

SAMPLES, FEWEST = 256, 8


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A plain checkpoint: a folder or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    kind: Annotated[str, typer.Option("--format", help="int8, fp8 (e4m3) or int4 (the experts).")],
    group: Annotated[int | None, typer.Option(help="int4: numbers that share a scale, 32 or 64.  [64]")] = None,
    keep_embeddings: Annotated[
        bool, typer.Option("--keep-embeddings", help="Leave the embeddings as they are; vLLM needs that.")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="A text, or JSON lines with text or messages: round by what the weights are multiplied with."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=FEWEST, help=f"Samples of that text to calibrate on, of a prompt and a canvas.  [{SAMPLES}]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")] = "auto",
    check: Annotated[
        int,
        typer.Option(min=0, help="Compare the logits on so many random prompts, or parts of the text kept for that."),
    ] = 0,
    shard_mb: Annotated[int, typer.Option(min=1, help="Largest file, in MB.")] = 5000,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Quantise a checkpoint into a folder that loads in seconds.

    Attention, dense MLP and experts get the format, but of int4 only the experts: the others are fp8 then. Embeddings
    are int8; router, norms and self-conditioning stay. The folder is of the compressed-tensors kind. Prints the error
    of every layer. With --calibrate the network loses half as much or less (docs/quantisation.md).
    """
    from diffusiongemma.checkpoint.fidelity import by_part
    from diffusiongemma.checkpoint.quantize import quantize_folder
    from diffusiongemma.model.quantize import Scheme

    scheme = Scheme.parse(kind, group, embeddings=not keep_embeddings)
    fitted_to, kept = _samples(model, revision, calibrate, samples, check)
    errors = quantize_folder(
        model,
        out,
        scheme,
        samples=fitted_to,
        device=device,
        revision=revision,
        max_shard_bytes=shard_mb * 1_000_000,
        overwrite=overwrite,
    )
    rows = by_part(errors)
    agreement = _compare(model, revision, out, kind, group, device, kept) if check else None
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if as_json:
        facts = {"format": kind, "out": str(out), "bytes_on_disk": size, "parts": [asdict(row) for row in rows]}
        facts |= {"samples": len(fitted_to), "agreement": asdict(agreement) if agreement else None}
        typer.echo(json.dumps(facts, indent=2))
        return
    _show(out, size, rows, len(fitted_to), agreement)


def _samples(
    model: str, revision: str | None, file: Path | None, count: int | None, check: int
) -> tuple[list[Sample], list[Sample]]:
    """What to calibrate on, and what to compare on."""
    from diffusiongemma.checkpoint import load_config, resolve
    from diffusiongemma.checkpoint.samples import prompt_for, random_samples, text_samples
    from diffusiongemma.errors import InputError
    from diffusiongemma.text import ChatTemplate, Tokenizer
    from diffusiongemma.text.corpus import read_corpus

    if file is None:
        if count is not None:
            raise InputError(f"--samples {count} has no effect without --calibrate FILE: leave it out, or give a text")
        return [], random_samples(load_config(model, revision=revision).vocab_size, check) if check else []
    folder = resolve(model, revision)
    config, tokenizer = load_config(folder), Tokenizer.from_pretrained(folder)
    texts = read_corpus(file, tokenizer, ChatTemplate.find(folder))
    wanted = (SAMPLES if count is None else count) + check
    length, bos = prompt_for(config), tokenizer.special.get("bos")
    found = text_samples(texts, config.vocab_size, wanted, config.canvas_length, length, bos)
    if len(found) < (FEWEST + check if count is None else wanted):
        needed = f"{FEWEST if count is None else count} to calibrate on" + (f" and {check} to compare on" * bool(check))
        raise InputError(f"{file} holds {len(found)} samples, {needed} are needed: give a longer text")
    return found[check:], found[:check]


def _compare(
    model: str, revision: str | None, out: Path, kind: str, group: int | None, device: str, samples: list[Sample]
) -> Agreement:
    from diffusiongemma.checkpoint import load_model
    from diffusiongemma.checkpoint.fidelity import compare, record

    reference = record(load_model(model, device, "auto", revision=revision), samples)
    # As it will run: with the quantised products, not with dequantised weights.
    return compare(reference, record(load_model(out, device, "auto", quantize=kind, group=group), samples))


def _show(out: Path, size: int, rows: list[PartError], samples: int, agreement: Agreement | None) -> None:
    from rich.console import Console

    from diffusiongemma.checkpoint.fidelity import PARTS
    from diffusiongemma.cli.tables import human_bytes, make_table

    console = Console(highlight=False)
    layers = list(dict.fromkeys(row.layer for row in rows))
    found = {(row.layer, row.part): row for row in rows}

    def table(title: str, field: str) -> None:
        columns = [part for part in PARTS if any(r.part == part and getattr(r, field) is not None for r in rows)]
        cells = [
            ("embeddings" if layer is None else f"layer {layer}",
             *(f"{getattr(found[layer, part], field):.2%}" if (layer, part) in found else "" for part in columns))
            for layer in layers if any((layer, part) in found for part in columns)
        ]  # fmt: skip
        console.print(make_table(title, ("", *columns), cells))

    table("Relative error of the weights", "relative")
    worst = max(rows, key=lambda row: row.worst)
    where = "embeddings" if worst.layer is None else f"layer {worst.layer}, {worst.part}"
    console.print(f"\nworst tensor: {worst.worst:.2%} ({where}); lowest cosine {min(r.cosine for r in rows):.5f}")
    if samples:
        console.print()
        table("Relative error of what they give", "product")
        console.print(f"\non the {samples} samples that they were fitted to")
    if agreement is not None:
        console.print(
            f"logits over {agreement.positions} positions: cosine {agreement.cosine:.5f} "
            f"(lowest {agreement.worst_cosine:.5f}), same best token {agreement.argmax:.1%}, KL {agreement.kl:.2g} nats"
        )
    console.print(f"{human_bytes(size)} written to {out}", soft_wrap=True)
