"""`python -m diffusiongemma.train.ship SOURCE OUT --tokenizer FOLDER`: a trained network as the embedded model.

Matrices in int8, the rest in float32, in the stock layout; with the tokenizer, DiffusionGemma's chat format after a
run-in (tasks/format.py) and sampler settings. SOURCE is the folder of a run (its averaged weights are taken) or of raw
shards.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from diffusiongemma.engine.params import HoleSettings, Mode, SamplingParams
from diffusiongemma.errors import DiffusionGemmaError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.tasks.format import RUN_IN
from diffusiongemma.train.checkpoint import averaged
from diffusiongemma.train.export import export, load_raw

# Cooler than the released 0.4 to 0.8: measured on held-out lines, a third of the steps for the same figures.
T_MIN, T_MAX = 0.1, 0.4
# One token after another: on a canvas the end of the text is decided first, so the shortest icon wins (docs/nano.md).
SVG_MODE: Mode = "ar"
# Holes had prompts of CONTEXT tokens in training, or of CONTEXT + FAR: a shorter one is strange to the network
# (docs/log.md).
CONTEXT, FAR, RUN_IN_FILE = 384, 256, Path(__file__).parent / "run_in.txt"
# Tokens of a hole are accepted with more care: more lines right, more files that parse, more steps (docs/log.md).
HOLE_BOUND = 0.003
BOS = "{{- bos_token -}}"
NO_THOUGHT = "    {%- if not enable_thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}\n"
TEMPLATE = Path(__file__).parent.parent / "text" / "gemma_chat.jinja"


def ship(source: Path, out: Path, tokenizer: Path) -> int:
    """Write the folder; returns its size in bytes."""
    model: DiffusionGemma = load_raw(source) if (source / "raw.json").is_file() else averaged(source)
    export(model, out, str(tokenizer), shard_bytes=1 << 40, int8=True)
    (out / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
    released = SamplingParams(t_min=T_MIN, t_max=T_MAX)
    config = {
        "eos_token_id": list(model.config.eos_token_ids),
        "max_denoising_steps": released.steps,
        "t_min": released.t_min,
        "t_max": released.t_max,
        "stability_threshold": released.stability,
        "confidence_threshold": released.confidence,
        # Transformers looks its class up by that name, and fails without it.
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": released.entropy_bound},
    }
    hole = HoleSettings(CONTEXT, FAR, RUN_IN_FILE.read_text(encoding="utf-8"), HOLE_BOUND)
    own = {"svg_mode": SVG_MODE, "hole": asdict(hole)}
    for name, data in (("generation_config.json", config), ("dgemma.json", own)):
        (out / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in out.iterdir())


def chat_template() -> str:
    """DiffusionGemma's, after the run-in, and without the empty thought that the embedded model never saw."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for old, new in ((BOS, RUN_IN + BOS), (NO_THOUGHT, "")):
        assert text.count(old) == 1, f"gemma_chat.jinja should hold {old} once"
        text = text.replace(old, new)
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diffusiongemma.train.ship", description=__doc__)
    parser.add_argument("source", type=Path, help="a run, or raw shards")
    parser.add_argument("out", type=Path, help="the folder to write; a checkpoint that is there is replaced")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the folder with tokenizer.json")
    try:
        size = ship(**vars(parser.parse_args(arguments)))
    except DiffusionGemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
