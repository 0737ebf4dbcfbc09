"""The commands `dgemma bench …` and `python -m diffusiongemma.bench …`: parse, measure, show.

A command has the options that change its figure and no others. torch is imported when one runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusiongemma.errors import InputError, check_writable

if TYPE_CHECKING:
    from diffusiongemma.bench.subject import Target

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure steps, requests, memory and peers.")


class Peer(StrEnum):
    transformers = "transformers"


def _file(path: Path | None) -> Path | None:
    return None if path is None else check_writable(path)


Preset = Annotated[
    str, typer.Option(help="A geometry by name (random weights), or a checkpoint: folder, hub id, nano.")
]
Random = Annotated[bool, typer.Option("--random-weights", help="Only the geometry of a checkpoint, not its weights.")]
Quant = Annotated[str | None, typer.Option(help="bf16, fp8, int8 or int4.  [what the device or checkpoint has]")]
Group = Annotated[int | None, typer.Option(help="int4: numbers that share a scale, 32 or 64.  [64]")]
Packed = Annotated[
    bool | None,
    typer.Option(
        "--packed/--no-packed",
        help="Experts a second time, as passes of few users read them best (Hopper cards).  [where memory is to spare]",
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda.")]
Prefix = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
Prefixes = Annotated[str, typer.Option(help="Tokens of the prompt; several with commas.")]
Users = Annotated[int, typer.Option(min=1, help="Requests at once.")]
UserList = Annotated[str, typer.Option(help="Requests at once: several numbers with commas.")]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps of a canvas.")]
Canvas = Annotated[int | None, typer.Option(min=1, help="Width of the canvas.  [the model's own]")]
Repeat = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
File = Annotated[Path | None, typer.Option("--json", callback=_file, help="Add the line of JSON to this file too.")]

GEOMETRY = "26b-a4b"


@app.command()
def step(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    packed: Packed = None,
    users: Users = 1,
    prefix: Prefixes = "512",
    steps: Annotated[int, typer.Option(min=4, help="Steps that are timed.")] = 48,
    canvas: Canvas = None,
    repeat: Repeat = 5,
    device: Device = "auto",
    json: File = None,
) -> None:
    """One denoising step, all in, against its floor and by part; with several prefixes, their ratio."""
    from diffusiongemma.bench.step import measure_step
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    prefixes = numbers("--prefix", prefix)
    subject = Subject.make(_target(preset, random_weights, quant, group, device, packed))
    show(measure_step(subject, users, prefixes, steps, canvas, repeat), json)


@app.command()
def e2e(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    packed: Packed = None,
    prefix: Prefix = 512,
    tokens: Annotated[int | None, typer.Option(min=1, help="New tokens.  [four canvases]")] = None,
    steps: Steps = 16,
    canvas: Canvas = None,
    repeat: Repeat = 5,
    device: Device = "auto",
    json: File = None,
) -> None:
    """One user end to end, prefill and commits included, and the cold start."""
    from diffusiongemma.bench.e2e import measure_e2e
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    subject = Subject.make(_target(preset, random_weights, quant, group, device, packed))
    show(measure_e2e(subject, prefix, tokens, steps, canvas, repeat), json)


@app.command()
def batch(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    packed: Packed = None,
    users: UserList = "1,2,4,8,16,32",
    prefix: Prefix = 512,
    tokens: Annotated[int | None, typer.Option(min=1, help="New tokens of each user.  [two canvases]")] = None,
    steps: Steps = 16,
    canvas: Canvas = None,
    repeat: Repeat = 2,
    device: Device = "auto",
    json: File = None,
) -> None:
    """Tokens a second in all for several users at once."""
    from diffusiongemma.bench.batch import measure_batch
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    counts = numbers("--users", users)
    subject = Subject.make(_target(preset, random_weights, quant, group, device, packed))
    show(measure_batch(subject, counts, prefix, tokens, steps, canvas, repeat), json)


@app.command()
def ar(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    users: UserList = "1,2,4,8,16,32",
    prefix: Prefix = 512,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens that are timed.")] = 64,
    canvas: Canvas = None,
    repeat: Repeat = 3,
    device: Device = "auto",
    json: File = None,
) -> None:
    """The autoregressive twin: ms a token, diffusion : AR for 12, 16, 24 and 48 steps, where AR overtakes."""
    from diffusiongemma.bench.ar import measure_ar
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    counts = numbers("--users", users)
    subject = Subject.make(_target(preset, random_weights, quant, group, device))
    show(measure_ar(subject, counts, prefix, tokens, canvas, repeat), json)


@app.command()
def prefill(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    packed: Packed = None,
    prefix: Prefixes = "512,2048,8192,32768",
    repeat: Repeat = 3,
    device: Device = "auto",
    json: File = None,
) -> None:
    """Reading a prompt: tokens a second over its length."""
    from diffusiongemma.bench.prefill import measure_prefill
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    lengths = numbers("--prefix", prefix)
    subject = Subject.make(_target(preset, random_weights, quant, group, device, packed))
    show(measure_prefill(subject, lengths, repeat), json)


@app.command()
def memory(
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    users: Users = 1,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the context.")] = 8192,
    canvas: Canvas = None,
    device: Device = "auto",
    json: File = None,
) -> None:
    """Peak memory while weights are made or loaded, and while a text with a long context is written, with experts in
    memory once."""
    from diffusiongemma.bench.memory import measure_memory
    from diffusiongemma.bench.subject import Subject
    from diffusiongemma.bench.timing import show

    subject = Subject.make(_target(preset, random_weights, quant, group, device))
    show(measure_memory(subject, users, prefix, canvas), json)


@app.command("vs-transformers")
def vs_transformers(
    preset: Annotated[str, typer.Option(help="A geometry by name; both sides get random weights.")] = GEOMETRY,
    prefix: Prefix = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of theirs that are timed; of ours four times as many.")] = 4,
    repeat: Repeat = 3,
    device: Device = "auto",
    json: File = None,
) -> None:
    """The same step in Transformers, eager, plain weights, in the same run."""
    from diffusiongemma.bench.peer import measure_vs_transformers
    from diffusiongemma.bench.timing import show

    show(measure_vs_transformers(preset, prefix, steps, repeat, device), json)


@app.command()
def suite(
    parts: Annotated[str, typer.Option(help="What to measure, in this order, with commas.")] = (
        "step,long,e2e,memory,ar,batch,prefill"
    ),
    preset: Preset = GEOMETRY,
    random_weights: Random = False,
    quant: Quant = None,
    group: Group = None,
    packed: Packed = None,
    users: Annotated[str, typer.Option(help="Of batch and ar: several numbers with commas.")] = "1,2,4,8,16,32",
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, of all parts but memory.")] = 512,
    long: Annotated[int, typer.Option(min=1, help="The prefix that `long` compares with --prefix.")] = 32_768,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the context, of memory.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of a canvas, of e2e and batch.")] = 16,
    repeat: Repeat = 3,
    seconds: Annotated[float | None, typer.Option(min=1, help="Begin no part after so long.")] = None,
    device: Device = "auto",
    json: File = None,
) -> None:
    """Several of these over one set of weights; a part that fails does not end the others."""
    from diffusiongemma.bench.suite import Plan, run_suite

    plan = Plan(numbers("--users", users), prefix, long, context, steps, repeat)
    target = _target(preset, random_weights, quant, group, device, packed)
    if run_suite(target, tuple(part.strip() for part in parts.split(",")), plan, seconds, json):
        raise typer.Exit(1)


@app.command("cpu-step")
def cpu_step(
    preset: Annotated[str, typer.Option(help="nano, or a geometry by name: random weights in float32.")] = "100m",
    prefix: Prefix = 512,
    repeat: Annotated[int, typer.Option("--repeat", "--rounds", min=1, help="Timed rounds, alternating.")] = 9,
    peer: Annotated[Peer | None, typer.Option(help="Whom to measure beside us.")] = None,
    json: File = None,
) -> None:
    """The network's step alone on a CPU, beside a peer on the same weights."""
    from diffusiongemma.bench.cpu_step import measure_cpu_step
    from diffusiongemma.bench.timing import show

    show(measure_cpu_step(preset, prefix, repeat, None if peer is None else peer.value), json)


@app.command("engine")
def engine(
    preset: Annotated[str, typer.Option(help="A geometry by name; random weights.")] = "100m",
    repeat: Annotated[int, typer.Option("--repeat", "--rounds", min=1, help="Timed rounds, alternating.")] = 3,
    json: File = None,
) -> None:
    """What the engine costs and saves on a CPU: overhead, batches, second turns, short answers."""
    from diffusiongemma.bench.engine import measure_engine
    from diffusiongemma.bench.timing import show

    show(measure_engine(preset, repeat), json)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """'1,8,16' -> (1, 8, 16)"""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise InputError(f"{option} takes different whole numbers above 0 with commas between them, got {text!r}")
    return found


def _target(
    preset: str, random_weights: bool, quant: str | None, group: int | None, device: str, packed: bool | None = None
) -> Target:
    from diffusiongemma.bench.subject import Target

    return Target(preset, random_weights, quant, group, device, packed)
