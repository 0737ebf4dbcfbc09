# ruff: noqa: E402
"""Microseconds a layer of the 26B-A4B, with experts in one launch or two, packed or plain, and with kernels in CUDA C++
or without them: the same bits? How fast?

    python3 scripts/bench_layers.py [--quant fp8|bf16|int4] [--users 1,2] [--prompt 512] [--layers 4] [--rounds 9]
                                    [--again 100]

Canvases of so many users over 512 tokens, and a prompt, through a few layers of random weights: a CUDA graph each,
replayed by turns, medians. Pairs are placed as on a card with memory to spare. (Weights that are not streamed take the
same way twice.) `--again`: each is replayed so often, and must leave the same bits each time. The exit code is 1 if a
bit differs. Without a GPU, --tiny checks the script itself, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops")]
CUDA = torch.cuda.is_available()
if not CUDA:
    import triton_cpu  # noqa: F401  # turns Triton's interpreter on, before Triton is imported

from bench_stream import microseconds
from exact_chain import ahead, config_for

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.engine import Limits
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.fused import Batch
from diffusiongemma.model.packed import pack_experts, packed_of, packings
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops.attention_cached import New

DEVICE = torch.device("cuda" if CUDA else "cpu")
AT_ONCE = 12
WAYS: dict[str, tuple[dict[str, bool], bool]] = {  # options of the operations, and are packed experts read?
    "two kernels": ({"stream": False, "cpp": False}, False),
    "streamed": ({"cpp": False}, False),
    "and in C++": ({}, False),
    "and packed": ({}, True),
}
MANY = ("two", "three", "four", "five", "six", "seven", "eight")
NAMES = {1: "one user's canvas"} | {n: f"{word} users' canvases" for n, word in enumerate(MANY, 2)}


def config_of(layers: int, tiny: bool) -> ModelConfig:
    if tiny:
        return config_for(False, layers)
    kinds = (SLIDING,) * (layers - 1) + (FULL,)
    return ModelConfig.preset("26b-a4b", num_hidden_layers=layers, layer_types=kinds, vocab_size=4096)


def recorded(recorder: Recorder, work: Callable[[], Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
    """-> what runs it again, and where its result lies then"""
    out = list[Tensor]()

    def run() -> None:
        out[:] = [work()]

    return recorder.record("a pass", run), out


def differing(replay: Callable[[], None], out: list[Tensor], want: Tensor, again: int) -> int:
    """How many of so many replays leave something else"""
    found = torch.zeros((), dtype=torch.int64, device=want.device)
    for _ in range(again):
        out[0].fill_(float("nan"))
        replay()
        found += (out[0] != want).any()
    return int(found)


def users_of(text: str) -> list[int]:
    """1,2 -> [1, 2]"""
    users = [int(part) for part in text.split(",")]
    if not NAMES.keys() >= set(users):
        raise argparse.ArgumentTypeError(f"one to {MANY[-1]} users, not {text}")
    return users


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("fp8", "bf16", "int4"), default="fp8")
    parser.add_argument("--users", type=users_of, default=[1, 2], help="users at once, of each canvas pass")
    parser.add_argument("--prompt", type=int, help="its tokens (512)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--again", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not (CUDA or args.tiny):
        parser.error("there is no GPU: --tiny checks the script itself")
    return args


@torch.inference_mode()
def main() -> None:
    args = parse()
    config = config_of(args.layers, args.tiny)
    scheme = None if args.quant == "bf16" else Scheme.parse(args.quant, 64 if args.quant == "int4" else None)
    torch.manual_seed(0)
    model = random_network(config, scheme, DEVICE, torch.bfloat16, std=0.02)
    most = max(args.users)
    limits = Limits(most, 1 << 22 if args.tiny else 1 << 31, 16 if args.tiny else 2048, packed=False)
    runner = FastRunner(model, triton_ops(), limits, graphs=CUDA)
    if CUDA:
        pack_experts(model)
    network, (width, prefix) = runner.network, (8, 16) if args.tiny else (256, 512)
    prompt = args.prompt or prefix
    rows = [runner.new_row(max(prefix + width, prompt)) for _ in range(most)]
    x = torch.randn(max(most * prefix, prompt), config.hidden_size).to(DEVICE, model.dtype)

    def batch_of(users: int, each: int, held: int) -> Batch:
        numbers, reach = {"dtype": torch.int32, "device": DEVICE}, max(prefix + width, held + each)
        return Batch(
            runner.pool.offsets(rows[:users]).to(DEVICE), torch.full((users,), held, **numbers),
            torch.arange(held, held + each, **numbers).repeat(users),
            New(torch.arange(users + 1, **numbers) * each, each), runner.pool.reach_for(reach),
        )  # fmt: skip

    def pass_of(mode: Literal["encode", "denoise"], users: int, each: int, held: int) -> Callable[[], Tensor]:
        batch = batch_of(users, each, held)
        return lambda: network._run(x[: users * each].clone(), (mode, batch))  # what a layer has read is forgotten

    told = f"{args.quant}, {args.layers} layers, {torch.cuda.get_device_name() if CUDA else 'no card'}"
    print(", ".join([told, *packings(model)]))
    filled = pass_of("encode", most, prefix, 0)
    ahead(DEVICE, filled)
    filled()
    layers = {
        False: network.layers,
        True: [replace(layer, packed=packed_of(layer.module.experts)) for layer in network.layers],
    }
    ways = {name: (triton_ops(**options).roomy(), layers[less]) for name, (options, less) in WAYS.items()}
    unequal = 0
    cases = {NAMES[n]: pass_of("denoise", n, width, prefix) for n in args.users}
    cases[f"a prompt of {prompt}"] = pass_of("encode", 1, prompt, 0)
    for name, work in cases.items():
        replays, bits, kept = [], [], []
        for network.ops, network.layers in ways.values():
            replay, out = recorded(runner.recorder, work)
            replay()
            replays.append(replay)
            kept.append(out)
            bits.append(out[0].clone())
        off = [differing(replay, out, bits[0], args.again) for replay, out in zip(replays, kept, strict=True)]
        same = all(torch.equal(bits[0], other) for other in bits[1:]) and not any(off)
        unequal += not same
        times = microseconds(replays, args.rounds, AT_ONCE) if CUDA else []
        told = "".join(f"{way} {us / args.layers:.1f} us a layer, " for way, us in zip(ways, times, strict=CUDA))
        print(f"{name:<22}{told}bits {'equal' if same else f'DIFFER, of {args.again} replays {off}'}", flush=True)
    sys.exit(1 if unequal else 0)


if __name__ == "__main__":
    main()
