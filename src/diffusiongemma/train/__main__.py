"""`python -m diffusiongemma.train RECIPE.toml --out FOLDER`: what `dgemma train` runs, without its dependencies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from diffusiongemma.errors import DiffusionGemmaError


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

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    torch.set_float32_matmul_precision("high")
    plan = read_recipe(recipe, **{key: value for key, value in overrides.items() if value is not None})
    if benchmark:
        from diffusiongemma.train.benchmark import run_benchmark

        run_benchmark(plan, out, torch.device(chosen), benchmark)
        return True
    from diffusiongemma.train.loop import Trainer

    return Trainer(plan, out, torch.device(chosen), quiet).run(max_minutes)


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
