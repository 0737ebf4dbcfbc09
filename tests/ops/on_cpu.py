"""Kernels in CUDA C++ without a card: their source is compiled for the CPU, behind `on_cpu.h`, and run.

What a source has under "instructions" is the card's alone, so each test brings its own in C++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from diffusiongemma.ops import nvrtc

HEADER = Path(__file__).with_suffix(".h")
COMPILER = shutil.which("g++")
END = """
static void body_of() {{ call({name}); }}

extern "C" int run(int programs, int threads, int backwards, int many, void** arguments_) {{
    if (many != arguments({name})) return 2;
    given = arguments_, body = body_of;
    for (blockIdx.x = 0; blockIdx.x < programs; ++blockIdx.x)
        if (!program(threads, backwards)) return 1;
    return 0;
}}
"""


@cache
def _library(function: str, text: str, names: tuple[tuple[str, int | str], ...], instructions: str) -> Any:
    assert COMPILER is not None
    parts = re.split(r"^// ---- (\w+) .*$", text, flags=re.M)
    assert parts[1] == "instructions"
    before, rest = parts[0], "".join(parts[4::2])
    source = f'#include "{HEADER}"\n{before}{instructions}{rest}{END.format(name=function)}'
    folder = Path(tempfile.mkdtemp())
    (folder / "kernel.cpp").write_text(source)
    # Products and sums are rounded one by one; on a card most are fused.
    command = [COMPILER, "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]
    command += [*(f"-D{name}={value}" for name, value in names), "-o", "kernel.so", "kernel.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


class Stuck(Exception):
    """Threads wait for each other in different places"""


class OnCpu:
    """In place of `nvrtc.Kernel.run`. `backwards`: the last thread and the last warp come first."""

    def __init__(self, instructions: str, changed: Mapping[str, str] | None = None) -> None:
        self.instructions, self.changed, self.backwards = instructions, dict(changed or {}), False

    def run(self, kernel: nvrtc.Kernel, programs: int, threads: int, *args: nvrtc.Argument) -> None:
        text = kernel.text
        for old, new in self.changed.items():
            assert old in text, old
            text = text.replace(old, new)
        library = _library(kernel.function, text, tuple(kernel.names.items()), self.instructions)
        held = [nvrtc._argument(arg) for arg in args]
        where = (ctypes.c_void_p * len(held))(*(address for address, _ in held))
        answer = library.run(programs, threads, int(self.backwards), len(held), where)
        if answer == 1:
            raise Stuck
        assert answer == 0, f"{len(held)} arguments are not those of the kernel"
