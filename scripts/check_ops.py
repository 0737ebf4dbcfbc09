# ruff: noqa: E402
"""Every operation of one prompt and one denoising step on this card: against its torch twin, twice, and in a chain.

    python scripts/check_ops.py [--kind bf16,fp8,int4]

For each operation of `FusedNetwork`: the largest relative error against the twin on the same inputs, and whether a
second call gives the same bits. Then the whole pass: twice, with a wait after every operation, and with kernels that
never begin early; all must be equal to the bit. `TRITON_INTERPRET=1` with --tiny checks the script itself.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops")]
if "--tiny" in sys.argv:
    import triton_cpu  # noqa: F401

from diffusiongemma.config import ModelConfig
from diffusiongemma.engine import Limits
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model.backend import Ops, torch_ops, triton_ops
from diffusiongemma.model.fused import Batch
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops import kernels
from diffusiongemma.ops.attention_cached import New, Prefix

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu" if TINY else "cuda")
CONFIG = ModelConfig.preset(
    "tiny", vocab_size=384 if TINY else 4096, hidden_size=128 if TINY else 512, intermediate_size=64 if TINY else 512,
    moe_intermediate_size=64 if TINY else 128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16 if TINY else 256, num_global_key_value_heads=1, global_head_dim=32 if TINY else 512,
    num_experts=16 if TINY else 32, top_k_experts=2 if TINY else 4, sliding_window=8 if TINY else 128,
    canvas_length=8 if TINY else 256, layer_types=("sliding_attention", "full_attention"), eos_token_ids=(1,),
)  # fmt: skip


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "values") and hasattr(value, "scale"):
        return [value.wide()]
    if hasattr(value, "soft") and hasattr(value, "argmax"):
        return [value.entropy, value.logprob] + ([] if value.soft is None else [value.soft])
    return [t for part in value or () for t in tensors(part)]


def error(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def kept(k: Tensor, v: Tensor, prefix: Prefix, new: New) -> bool:
    """Do the new tokens lie in the cache, the last that a row has room for?"""
    slots, begin = prefix.keys.shape[2], new.begin.tolist()
    for b, (row, length) in enumerate(zip(prefix.row.tolist(), prefix.length.tolist(), strict=True)):
        own = torch.arange(max(begin[b], begin[b + 1] - slots), begin[b + 1], device=k.device)
        at = (length + own - begin[b]) % slots
        for cached, made in ((prefix.keys, k), (prefix.values, v)):
            if not torch.equal(cached[row][:, at], made[own].transpose(0, 1)):
                return False
    return True


class Watched:
    """Operations that are compared with their twins, called twice, or followed by a wait."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.twins = ops, torch_ops()
        self.errors: dict[str, float] = defaultdict(float)
        self.unstable: set[str] = set()

    def all(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Ops:
        names = [f.name for f in fields(Ops) if callable(getattr(self.ops, f.name))]
        return replace(self.ops, **{name: wrap(name, getattr(self.ops, name)) for name in names})

    def judged(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            wait()
            out = op(*args, **options)
            wait()
            if name == "attend" and options.pop("keep") and not kept(*args[1:5]):
                self.unstable.add("attend: new tokens in the cache")
            again = op(*args, **options)
            wait()
            if not all(torch.equal(a, b) for a, b in zip(tensors(out), tensors(again), strict=True)):
                self.unstable.add(name)
            try:
                twin = getattr(self.twins, name)(*args, **options)
                for a, b in zip(tensors(out), tensors(twin), strict=True):
                    self.errors[name] = max(self.errors[name], error(a, b))
            except Exception as failure:
                self.errors[f"{name}: {type(failure).__name__}: {str(failure)[:150]}"] = float("nan")
            return out

        return run

    def waiting(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            out = op(*args, **options)
            wait()
            return out

        return run


@torch.inference_mode()
def passes(runner: FastRunner, ops: Ops, lengths: tuple[int, ...]) -> list[Tensor]:
    """Hidden states of prompts of these lengths together, and of a canvas over each"""
    network, width = runner.network, CONFIG.canvas_length
    network.ops = ops
    rows = [runner.new_row(n) for n in lengths]
    random = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, 260, (sum(lengths),), generator=random).to(DEVICE)
    canvas = torch.randint(3, 260, (len(lengths) * width,), generator=random).to(DEVICE)
    offsets = runner.pool.offsets(rows).to(DEVICE)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths]).int().to(DEVICE)
    zeros = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
    reach = runner.pool.reach_for(max(lengths))
    first = network.encode(prompt, Batch(offsets, zeros, positions, New(starts, max(lengths)), reach))
    held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    begin = torch.arange(0, len(lengths) * width + 1, width, dtype=torch.int32, device=DEVICE)
    at = (held[:, None] + torch.arange(width, device=DEVICE)).flatten().int()
    soft = torch.randn(len(canvas), CONFIG.hidden_size, generator=random).to(DEVICE, network.dtype)
    second = network.denoise(canvas, soft, Batch(offsets, held, at, New(begin, width), reach))
    wait()
    return [first.clone(), second.clone()]


def check(kind: str) -> None:
    scheme = None if kind == "bf16" else Scheme.parse(kind, 64 if kind == "int4" else None)
    model = random_network(CONFIG, scheme, DEVICE, torch.bfloat16, std=0.02)
    limits = Limits(max_bytes=1 << (20 if TINY else 28), max_rows=4, chunk=16 if TINY else 512)
    runner = FastRunner(model, triton_ops(exact=True), limits, graphs=False)
    lengths = (5, 11) if TINY else (40, 300, 700)
    plain = runner.network.ops
    watched = Watched(plain)
    kernels.EARLY = True
    chain = passes(runner, plain, lengths)
    verdicts = {"again": passes(runner, plain, lengths)}
    verdicts["waiting after every operation"] = passes(runner, watched.all(watched.waiting), lengths)
    kernels.EARLY = False
    verdicts["none begins early"] = passes(runner, plain, lengths)
    kernels.EARLY = True
    for name, other in verdicts.items():
        same = [bool(torch.equal(a, b)) for a, b in zip(chain, other, strict=True)]
        far = [f"{error(a, b):.1e}" for a, b in zip(chain, other, strict=True)]
        print(f"{kind}: {name}: prompt and canvas the same bits {same}, apart by {far}", flush=True)
    alone = passes(runner, plain, lengths[:1])
    print(f"{kind}: first prompt alone, apart by {error(alone[0], chain[0][: lengths[0]]):.1e}", flush=True)
    passes(runner, watched.all(watched.judged), lengths)
    for name in sorted(watched.unstable - set(watched.errors)):
        print(f"{kind}: {name}: WRONG", flush=True)
    for name, worst in sorted(watched.errors.items()):
        print(
            f"{kind}: {name:20} {worst:.1e}{'  NOT the same bits twice' if name in watched.unstable else ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="bf16,fp8,int4")
    parser.add_argument("--tiny", action="store_true")
    for kind in parser.parse_args().kind.split(","):
        check(kind)


if __name__ == "__main__":
    main()
