# ruff: noqa: E402
"""Do all kernels of a pass compile for a card that is not there, and fit it?

    python scripts/compile_passes.py --card 8.9 [--kind int4,fp8,bf16] [--users 1,2,8] [--out kernels.json]
    python scripts/compile_passes.py --card 9.0 --ptx --out before.json     # and after a change: the same PTX?

The engine's own passes run over tensors without numbers (the meta device), with two layers of the 26B's: prompts,
steps of canvases with and without a block before them, tokens drawn. What they would launch is compiled, each kernel
once. One line a kernel: bytes of shared memory, registers, bytes that a thread spills, and a hash of its PTX (of one in
CUDA C++, of the machine's code). The exit code is 1 if one does not compile, or wants more shared memory than the card
has. Nothing is run, so this says nothing of results or speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
import triton
from cards import CARDS
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.engine import Limits, draw, slate, steps
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.quantize import Scheme, replace_modules
from diffusiongemma.ops import kernels, nvrtc
from diffusiongemma.ops.kernels import Card

PROMPTS = (64, 512, 2048)  # tokens
REACH = 2048
SYSTEM = 1024  # bytes of shared memory that are in every program's on Hopper, and not its own


class Launch(NamedTuple):
    """What is known of a kernel before it is compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def key(self) -> str:
        return repr((self.kernel.__name__, self.signature, sorted(self.known.items()), self.attributes, self.shape))

    @property
    def known(self) -> dict[str, Any]:
        """Constants by name"""
        names = self.kernel.arg_names
        return {names[at[0]] if isinstance(at, tuple) else at: value for at, value in self.constants.items()}

    @property
    def shape(self) -> dict[str, Any]:
        return {name: self.options[name] for name in ("num_warps", "num_stages", "maxnreg")}


class InCuda(NamedTuple):
    """The same of one in CUDA C++"""

    kernel: nvrtc.Kernel

    def key(self) -> str:
        return repr((self.kernel.function, sorted(self.kernel.names.items())))

    @property
    def known(self) -> dict[str, Any]:
        return dict(self.kernel.names)

    def facts(self) -> dict[str, Any]:
        known = {name: value for name, value in self.known.items() if isinstance(value, int)}
        facts: dict[str, Any] = {"kernel": self.kernel.function, "known": known}
        try:
            code = self.kernel.code()
        except Exception as error:
            return facts | {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
        used = _used(code)
        shared = self.kernel.shared + used["shared"] - SYSTEM
        return facts | used | {"shared": shared, "code": hashlib.sha256(code).hexdigest()[:16]}


@contextmanager
def pretending(card: Card, found: dict[str, Launch | InCuda]) -> Iterator[None]:
    """Inside, Triton believes in this card, and what would be compiled is noted instead"""
    target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
    stand_in = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )

    def note(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any,
             warmup: bool) -> None:  # fmt: skip
        launch = Launch(self, signature, constants, attributes, dict(options.__dict__))
        found.setdefault(launch.key(), launch)

    def note_cuda(self: nvrtc.Kernel, *args: Any) -> None:
        found.setdefault(InCuda(self).key(), InCuda(self))

    before = driver._active
    driver.set_active(stand_in)
    token = kernels._compile_only.set(True)
    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", before)
        stack.enter_context(mock.patch.object(kernels, "card", return_value=card))
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", note))
        stack.enter_context(mock.patch.object(nvrtc.Kernel, "run", note_cuda))
        stack.enter_context(mock.patch.object(torch.Tensor, "__bool__", return_value=True))  # that scales are finite
        try:
            yield
        finally:
            kernels._compile_only.reset(token)


def network(kind: str) -> DiffusionGemma:
    """Two layers of the 26B's, without numbers"""
    config = ModelConfig.preset("26b-a4b", num_hidden_layers=2, layer_types=(SLIDING, FULL))
    with torch.device("meta"):
        model = DiffusionGemma(config).to(torch.bfloat16)
        if kind != "bf16":
            shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
            replace_modules(model, Scheme.parse(kind, 64 if kind == "int4" else None).formats(shapes))
    return model.requires_grad_(False).eval()


def launches(card: Card, kind: str, users: Sequence[int] = ()) -> list[Launch | InCuda]:
    """What all passes for so many users would launch on this card; for none: a step of one, and a token"""
    found: dict[str, Launch | InCuda] = {}
    kernels.gluon.cache_clear()
    kernels.cpp.cache_clear()
    with pretending(card, found):
        limits = Limits(max_rows=8, max_bytes=1 << 30)
        runner = FastRunner(network(kind), triton_ops(), limits, graphs=False, overlap=())
        if users:
            for ops in (runner.network.ops, runner.network.ops.roomy()):
                runner.network.ops = ops
                _passes(runner, users)
        else:
            runner.lane(runner.network.config.canvas_length).step(steps.Kind(1, REACH))
            runner.drawing.step(draw.Kind(1, REACH))
    return list(found.values())


def _passes(runner: FastRunner, users: Sequence[int]) -> None:
    width = runner.network.config.canvas_length
    for n in users:
        for warm, ruled in ((True, False), (False, False), (True, True)):
            lane = runner.lane(width, warm, ruled)
            lane.step(steps.Kind(n, REACH))
            lane.step(steps.Kind(n, REACH, slate.Kind(n, n * width, width, REACH, False)))
        runner.drawing.step(draw.Kind(n, REACH))
    for size in PROMPTS:
        runner.slate._encode(slate.Kind(1, size, size, REACH, True))
        runner.slate._encode(slate.Kind(8, size, min(size, width), REACH, False))


def compiled(launch: Launch | InCuda, card: Card, ptx_only: bool = False) -> dict[str, Any]:
    """What came of it; `ptx_only`: without the machine's code, which takes longest (of one in CUDA C++ it is quick)"""
    if isinstance(launch, InCuda):
        return launch.facts()
    facts: dict[str, Any] = {"kernel": launch.kernel.__name__, "known": {k: str(v) for k, v in launch.known.items()}}
    target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
    source = launch.kernel.ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    try:
        made = triton.compile(source, target=target, options=launch.options)
    except Exception as error:
        return facts | launch.shape | {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
    ptx = made.asm["ptx"]
    facts |= launch.shape | {"shared": made.metadata.shared, "ptx": hashlib.sha256(ptx.encode()).hexdigest()[:16]}
    if ptx_only:
        return facts
    facts["waits"] = ptx.count("griddepcontrol.wait")
    facts["narrow"] = len(re.findall(r"ld\.global\S*\.b(?:8|16)\b", ptx))  # loads of 1 or 2 bytes
    used = _used(made.asm["cubin"])
    return facts | {name: used[name] for name in ("registers", "spilled")}


def _used(cubin: bytes) -> dict[str, int]:
    """Registers, bytes of memory that a thread spills them to, and of shared memory that are known beforehand"""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", told)
    assert found is not None, told
    return dict(zip(("registers", "spilled", "shared"), map(int, found.groups()), strict=True))


def only_ptx() -> None:
    """Compiling ends there, and no line of it says where in our files it comes from"""
    from triton.backends.nvidia.compiler import CUDABackend

    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # what is compiled so is of no use to others
    CUDABackend.make_cubin = lambda *args, **options: b""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=CARDS, required=True, help="compute capability")
    parser.add_argument("--kind", default="int4,fp8,bf16", help="number formats")
    parser.add_argument("--users", default="1,2,8", help="canvases that step together")
    parser.add_argument("--ptx", action="store_true", help="only the PTX: quick, and without registers")
    parser.add_argument("--out", type=Path, help="write what was found into this file")
    args = parser.parse_args(argv)
    card, found = CARDS[args.card], list[dict[str, Any]]()
    if args.ptx:
        only_ptx()
    for kind in args.kind.split(","):
        wanted = launches(card, kind, [int(n) for n in args.users.split(",")])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for facts in pool.map(lambda launch: compiled(launch, card, args.ptx), wanted):
                found.append({"kind": kind, **facts})
                names = ("shared", "registers", "spilled", "ptx", "code", "error")
                told = (f"{name} {facts[name]}" for name in names if name in facts)
                print(f"{kind:5} {facts['kernel']:28} {', '.join(told)}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = [facts for facts in found if "error" in facts or facts["shared"] > card.shared]
    most = {name: max(facts.get(name, 0) for facts in found) for name in ("shared", "spilled")}
    print(
        f"{len(found)} kernels for {args.card}: {len(bad)} do not compile or fit; at most {most} bytes of {card.shared}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
