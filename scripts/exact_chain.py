"""One prompt pass, one denoising pass, and tokens one by one: the same bits again, whatever is waited for? For
`check_ops.py --chain`.

A kernel that is launched early and reads too soon, or a sum whose order chance decides, shows here as other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.engine import Limits
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.model.compared import names
from diffusiongemma.model.fused import Batch
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops import kernels
from diffusiongemma.ops.attention_cached import New
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.vocab import Reading

TOKENS = 4  # that each row gets one by one
# Of prompts that are read together. On a card: of so many tokens that pairs are sorted, and of so few that they are
# placed and, where that can be, experts streamed, which is launched before the kernels before it have had their turn.
LENGTHS = {True: ((40, 300, 700), (100,)), False: ((5, 11), (7,))}


def config_for(card: bool, layers: int = 2) -> ModelConfig:
    sizes: dict[str, Any] = dict(
        vocab_size=4096, hidden_size=512, intermediate_size=512, moe_intermediate_size=128, head_dim=256,
        global_head_dim=512, num_experts=32, top_k_experts=4, sliding_window=128, canvas_length=256,
    )  # fmt: skip
    if not card:
        sizes = dict(
            vocab_size=384, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, head_dim=16,
            global_head_dim=32, num_experts=16, top_k_experts=2, sliding_window=8, canvas_length=8,
        )  # fmt: skip
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1)
    kinds = dict(num_hidden_layers=layers, layer_types=(SLIDING,) * (layers - 1) + (FULL,), eos_token_ids=(1,))
    return ModelConfig.preset("tiny", **sizes, **heads, **kinds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a result"""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Placed):  # the order within a list is chance
        return [value.counts]
    if isinstance(value, Rows | Reading):
        value = [getattr(value, field.name) for field in fields(value)]
    return [t for part in value or () for t in tensors(part)]


def wrapped(ops: Ops, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Ops:
    changed: dict[str, Any] = {name: wrap(name, getattr(ops, name)) for name in names(ops)}
    return replace(ops, **changed)


def waiting(ops: Ops, device: torch.device) -> Ops:
    """Operations that are each followed by a wait"""

    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            out = op(*args, **options)
            wait(device)
            return out

        return run

    return wrapped(ops, wrap)


def twice(ops: Ops, device: torch.device, unstable: set[str]) -> Ops:
    """Operations that are each called twice; the names of those whose bits differ are noted"""

    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            # The first call keeps nothing, and counts for itself: the second would read what it wrote.
            apart: dict[str, Any] = {"keep": False} if "keep" in options else {}
            if "counts" in options:
                apart["counts"] = torch.zeros_like(options["counts"])
            own = [replace(a, marks=torch.zeros_like(a.marks)) if isinstance(a, Placed) else a for a in args]
            wait(device)  # streamed experts want their zeros before they begin
            first = op(*own, **{**options, **apart})
            wait(device)
            second = op(*args, **options)
            wait(device)
            if not all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True)):
                unstable.add(name)
            return second

        return run

    return wrapped(ops, wrap)


@torch.inference_mode()
def passes(runner: FastRunner, ops: Ops, lengths: tuple[int, ...]) -> list[Tensor]:
    """Hidden states of prompts of these lengths together, and of a canvas over each"""
    network, device = runner.network, runner.network.device
    width = network.config.canvas_length
    network.ops = ops
    rows: list[Any] = [runner.new_row(n) for n in lengths]
    random = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, 260, (sum(lengths),), generator=random).to(device)
    canvas = torch.randint(3, 260, (len(lengths) * width,), generator=random).to(device)
    offsets = runner.pool.offsets(rows).to(device)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).int().to(device)
    zeros = torch.zeros(len(lengths), dtype=torch.int32, device=device)
    reach = runner.pool.reach_for(max(lengths))
    first = network.encode(prompt, Batch(offsets, zeros, positions, New(starts, max(lengths)), reach))
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    begin = torch.arange(0, len(lengths) * width + 1, width, dtype=torch.int32, device=device)
    at = (held[:, None] + torch.arange(width, device=device)).flatten().int()
    soft = torch.randn(len(canvas), network.config.hidden_size, generator=random).to(device, network.dtype)
    second = network.denoise(canvas, soft, Batch(offsets, held, at, New(begin, width), reach))
    wait(device)
    return [first.clone(), second.clone()]


@torch.inference_mode()
def ones(runner: FastRunner, ops: Ops, encode: Ops, lengths: tuple[int, ...]) -> list[Tensor]:
    """Hidden states of tokens one by one, `TOKENS` of each row, after prompts of these lengths, read with `encode`"""
    network, device = runner.network, runner.network.device
    rows: list[Any] = [runner.new_row(n + TOKENS) for n in lengths]
    random = torch.Generator().manual_seed(8)
    prompt = torch.randint(3, 260, (sum(lengths),), generator=random).to(device)
    offsets, reach = runner.pool.offsets(rows).to(device), runner.pool.reach_for(max(lengths) + TOKENS)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).int().to(device)
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    network.ops = encode
    network.encode(prompt, Batch(offsets, torch.zeros_like(held), positions, New(starts, max(lengths)), reach))
    network.ops, found = ops, []
    begin = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    for step in range(TOKENS):
        tokens = torch.randint(3, 260, (len(lengths),), generator=random).to(device)
        found.append(network.encode(tokens, Batch(offsets, held + step, held + step, New(begin, 1), reach)).clone())
    wait(device)
    return found


def check(kind: str, device: torch.device, say: Callable[[str], None]) -> bool:
    """-> whether all bits are the same"""
    card = device.type == "cuda"
    scheme = None if kind == "bf16" else Scheme.parse(kind, 64 if kind == "int4" else None)
    model = random_network(config_for(card), scheme, device, torch.bfloat16, std=0.02)
    limits = Limits(max_bytes=1 << (28 if card else 20), max_rows=4, chunk=512 if card else 16)
    runner = FastRunner(model, triton_ops(exact=False), limits, graphs=False)
    few, plain = runner.network.ops, triton_ops(exact=True)
    same = True
    for lengths in LENGTHS[card]:
        for name, good in verdicts(runner, few, plain, lengths, device):
            say(f"{kind}, {sum(lengths)} tokens: the same bits {name}: {'yes' if good else 'NO'}")
            same &= good
    return same


def ahead(device: torch.device, work: Callable[[], object]) -> None:
    """Compile the kernels of this, all at once; one after another they take minutes"""
    if device.type == "cuda":
        with kernels.compiling():
            work()
        wait(device)


def verdicts(
    runner: FastRunner, few: Ops, plain: Ops, lengths: tuple[int, ...], device: torch.device
) -> Iterator[tuple[str, bool]]:
    """What was done differently, and whether bits are the same, as soon as it is known; prompts of these lengths
    together"""
    unstable, sorting = set[str](), replace(plain, placing=0)

    def run(ops: Ops) -> list[Tensor]:
        return passes(runner, ops, lengths)

    def draw(ops: Ops) -> list[Tensor]:
        return ones(runner, ops, plain, lengths)

    ahead(device, lambda: (run(plain), run(sorting), draw(few)))
    chain, tokens = run(plain), draw(few)

    def told(name: str, ops: Ops) -> tuple[str, bool]:
        return name, all(map(torch.equal, chain, run(ops)))

    def told_one_by_one(name: str, ops: Ops) -> tuple[str, bool]:
        return f"of tokens one by one {name}", all(map(torch.equal, tokens, draw(ops)))

    yield told("again", plain)
    yield told("with a wait after every operation", waiting(plain, device))
    yield told("with every operation called twice", twice(plain, device, unstable))
    yield from ((f"of {name} when called twice", False) for name in sorted(unstable))
    yield told("with pairs that are sorted, not placed", sorting)
    yield told_one_by_one("again", few)
    yield told_one_by_one("with a wait after every operation", waiting(few, device))
    kernels.EARLY = False
    try:
        ahead(device, lambda: (run(plain), draw(few)))
        yield told("with no kernel that begins early", plain)
        yield told_one_by_one("with no kernel that begins early", few)
    finally:
        kernels.EARLY = True
    if device.type == "cuda" and len(lengths) > 1:  # an interpreter leaves the order of sums to NumPy
        alone = passes(runner, plain, lengths[:1])[0]
        yield "of the first prompt alone", torch.equal(alone, chain[0][: lengths[0]])
