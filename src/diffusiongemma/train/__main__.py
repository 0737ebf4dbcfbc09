"""`python -m diffusiongemma.train RECIPE.toml --out FOLDER`: what `dgemma train` runs, without its dependencies."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusiongemma.errors import ConfigError, DeviceError, DiffusionGemmaError, check_writable

if TYPE_CHECKING:
    import torch

    from diffusiongemma.train.recipe import Recipe


def train(
    recipe: Path,
    out: Path,
    device: str = "auto",
    max_minutes: float | None = None,
    benchmark: float | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> bool:
    """Train, or resume what lies in `out`; returns whether the schedule's end was reached."""
    import torch

    from diffusiongemma.train.recipe import read_recipe

    given = {key: value for key, value in overrides.items() if value is not None}
    plan = read_recipe(recipe, **given)
    if problems := _problems(plan, given, out, max_minutes, benchmark):
        raise ConfigError("this run cannot be done", problems)
    chosen = _device(device)
    torch.set_float32_matmul_precision("high")
    if benchmark is not None:
        from diffusiongemma.train.benchmark import run_benchmark

        run_benchmark(plan, out, chosen, benchmark)
        return True
    from diffusiongemma.train.loop import Trainer

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make the folder {out}: {error.strerror}") from None
    check_writable(out / "metrics.jsonl")
    return Trainer(plan, out, chosen, quiet).run(max_minutes)


def _problems(
    plan: Recipe, given: dict[str, Any], out: Path, max_minutes: float | None, benchmark: float | None
) -> list[str]:
    """What is wrong with the options, before minutes have been spent on it"""
    limits = {"--max-minutes": max_minutes, "--benchmark": benchmark}
    found = [
        f"{name} must be a number above 0, got {value}"
        for name, value in limits.items()
        if value is not None and not (math.isfinite(value) and value > 0)
    ]
    if benchmark is not None:
        written = {"max_minutes": max_minutes, **given}
        idle = [name for name in ("max_minutes", "total_minutes", "total_steps") if written.get(name) is not None]
        found += [f"--{n.replace('_', '-')} has no effect with --benchmark, which has its own time" for n in idle]
    for name in ("data", "evaluation"):
        if name in given and not _is(Path.is_dir, Path(given[name])):
            found.append(f"--{name}: there is no folder {given[name]}")
    if "data" in given and not any("source" in task.options for task in plan.tasks):
        found.append("--data has no effect: no task of the recipe has a source there")
    if "evaluation" in given and not plan.run.evaluate_every:
        found.append("--evaluation has no effect: [run] evaluate_every of the recipe is 0")
    if _is(Path.is_file, out):
        found.append(f"--out: {out} is there and is no folder")
    if _is(Path.is_dir, out / "model") and not _is(Path.is_dir, out / "checkpoints"):
        found.append(f"--out: {out / 'model'} is no run's of this command, and would be replaced: name another folder")
    return found


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except OSError:  # a name that is too long, a folder that may not be looked into
        return False


def _device(name: str) -> torch.device:
    """As `checkpoint.pick_device`, without what that package needs."""
    import torch

    try:
        there = torch.zeros(1, device=("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        there.tolist()  # which the device "meta", without numbers, cannot
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return there.device


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diffusiongemma.train", description=__doc__)
    parser.add_argument("recipe", type=Path, help="a TOML file; see recipes/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; one that is there is resumed")
    parser.add_argument("--device", default="auto", help="cuda or cpu")
    parser.add_argument("--max-minutes", type=float, help="stop this process after so long, with a checkpoint")
    parser.add_argument("--total-minutes", type=float, help="length of the whole schedule, over all resumed parts")
    parser.add_argument("--total-steps", type=int, help="the same in steps")
    parser.add_argument("--data", help="folder with token arrays")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, or `bytes`")
    parser.add_argument("--evaluation", help="folder with test sets")
    parser.add_argument("--init-from", help="a checkpoint folder to begin with")
    parser.add_argument("--workers", type=int, help="processes that make batches")
    parser.add_argument("--experts", help="auto, grouped, dense or loop")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile on a GPU")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="CUDA graphs on a GPU")
    parser.add_argument("--micro-tokens", type=int, help="tokens of one micro-batch")
    parser.add_argument("--benchmark", type=float, metavar="SECONDS", help="only measure speed, for about so long")
    try:
        train(**vars(parser.parse_args(arguments)))
    except DiffusionGemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
