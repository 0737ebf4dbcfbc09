"""What can be said of a kernel in Gluon or CUDA C++ without a card: it is compiled for Hopper, and the machine's code
is read.

Tests run in Triton's interpreter, which knows no Gluon, so `run` has another Python run a script, which compiles and
prints `facts` last. What comes from CUDA C++ is `Machine` code at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


def run(script: str, *args: object) -> dict[str, Any]:
    """-> the JSON that the script prints last; it may import from here"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compiled(source: Any, **options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def aligned(kinds: dict[str, str], *even: str) -> dict[tuple[int], list[list[Any]]]:
    """That pointers, and these numbers, are multiples of 16; kinds: of all arguments, in order"""
    which = (i for i, (name, kind) in enumerate(kinds.items()) if kind.startswith("*") or name in even)
    return {(i,): [["tt.divisibility", 16]] for i in which}


def facts(kernel: Any) -> dict[str, Any]:
    """Of a compiled kernel"""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    file = Path(tempfile.mkdtemp()) / "kernel.ptx"
    file.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(file.with_suffix(".cubin"))]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", told)
    assert spilled is not None
    return {
        "shared": kernel.metadata.shared,
        "threads": int(ptx.partition(".reqntid ")[2].split()[0]),
        "products": re.findall(r"wgmma\.mma_async\S+", ptx),
        "waits": ptx.count("griddepcontrol.wait"),
        "copies": ptx.count("cp.async.bulk.tensor"),
        "told": ptx.count("mbarrier.arrive.shared"),
        "spilled": int(spilled.group(1)),
        "serialised": "serialized" in told,
        "unguarded": _unguarded(ptx),
        "unused": _unused(kernel.asm["ttgir"]),
    }


SLIM = """
import json, sys
from triton.compiler import ASTSource
from diffusiongemma.ops import tiles
from diffusiongemma.ops.product_triton import product_kernel
from ops.hopper import aligned, compiled

kind, shared = sys.argv[1], []
fmt = "bf16" if kind == "bf16" else "fp8"
for gated, inputs, outputs, tile in ((True, 2816, 2112, tiles.SLIM_GATED), (False, 2112, 2816, tiles.SLIM)):
    types = dict(x=f"*{kind}", w=f"*{kind}", out="*bf16", rows="i32", capacity="i32")
    known = dict(order=None, share=None, table=None, beyond=None, K=inputs, O=outputs, APART=inputs, TOP_K=1,
                 FORMAT=fmt, GROUP=0, GATED=gated, ROUTED="no", T=tile.rows, BO=tile.outputs,
                 STEP=tiles.step_of(fmt, inputs), STAGES=tile.stages, EXPERTS=0, AHEAD=0, FIRST=1, MORE=0, SMALL=0,
                 STAY="", HOPPER=1)
    if fmt == "fp8":
        types |= dict(x_scale="*fp32", w_scale="*fp32")
    else:
        known |= dict(x_scale=None, w_scale=None)
    kinds = {name: types.get(name, "constexpr") for name in product_kernel.arg_names}
    source = ASTSource(product_kernel, kinds, known, aligned(kinds))
    shared.append(compiled(source, num_warps=tile.warps).metadata.shared)
print(json.dumps({"shared": max(shared)}))
"""


@cache
def slim(kind: str) -> int:
    """Bytes of shared memory that a program of the dense MLP takes beside the experts of the 26B-A4B"""
    return int(run(SLIM, kind)["shared"])


@dataclass(frozen=True)
class Machine:
    """What the card gets of one kernel"""

    registers: int  # of a thread
    local: int  # bytes of memory that it has for itself: what is spilled lies there
    shared: int  # bytes that are known beforehand, and what the system has of each program
    code: Sequence[str]  # instructions

    @classmethod
    def of(cls, cubin: bytes) -> Machine:
        used, told = _told(cubin, "--dump-resource-usage"), _told(cubin, "--dump-sass")
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", used)
        assert found is not None, used
        registers, stack, shared, local = map(int, found.groups())
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][^;]*?) ?;", told)
        assert code, told[:500]
        return cls(registers, stack + local, shared, code)

    def count(self, *names: str) -> int:
        """Instructions of these kinds"""
        return sum(line.split()[0].split(".")[0] in names for line in self.code)


def _told(cubin: bytes, what: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def _unused(ttgir: str) -> list[str]:
    """Barriers that no part knows. Triton takes their memory for something else, and the card, for which they are still
    barriers, may write them back over it."""
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*i64,", ttgir)
    assert made
    given = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    assert given, "no parts"
    return sorted(set(made) - set(re.findall(r"%\w+", ",".join(given))))


def _unguarded(ptx: str) -> list[str]:
    """Places where one thread tells, or copies, what its warps did, and they may not have done it yet"""
    behind, found = False, []
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.(warp\.)?sync", line):
            behind = False
        elif re.search(r"wgmma\.wait_group|(ld|st)\.shared|st\.global|stmatrix", line):
            behind = True
        elif behind and re.search(r"mbarrier\.arrive\.shared|atom\.\S*acq_rel|tensor\S*global\.shared", line):
            found.append(line.strip())
    return found
