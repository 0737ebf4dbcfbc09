"""In which order a kernel lets the next be launched and waits itself: compiled, for a card that is not there."""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from diffusiongemma.ops import norm_triton, router_triton

def ptx(kernel, hopper, types, **known):
    names = kernel.arg_names
    kinds = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, kinds, {"HOPPER": hopper, **known})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

half, wide, whole = "*bf16", "*fp32", "*i32"
numbers = {"rows": "i32", "width": "i32", "eps": "fp32"}
kernels = {
    "norms": lambda hopper: ptx(
        norm_triton._after_attention_kernel, hopper,
        numbers | dict.fromkeys(("x", "branch", "post", "dense", "sparse", "x_out"), half)
        | dict.fromkeys(("dense_out", "sparse_out"), half), dense_scale=None, sparse_scale=None, LIMIT=0.0, KEEP=True,
        PIECE=64),
    "scores": lambda hopper: ptx(
        router_triton._scores_kernel, hopper,
        numbers | dict.fromkeys(("x", "proj", "scale"), half) | dict.fromkeys(("part", "square"), wide),
        E=16, PART=64, ROWS=16, BLOCK=64),
    "pick": lambda hopper: ptx(
        router_triton._pick_kernel, hopper,
        numbers | dict.fromkeys(("part", "square", "weight", "share"), wide) | {"per_expert": half, "index": "*i64"}
        | dict.fromkeys(("lists", "place", "counts", "beyond"), whole), E=16, TOP=2, SLOTS=2, PARTS=1, PLACE=16),
}
found = kernels[sys.argv[1]](int(sys.argv[2]))
order = re.findall(r"griddepcontrol\\.(\\w+)|((?:st|atom|red)\\S*\\.global)", found)
print(json.dumps([name or "write" for name, _ in order]))
"""


@pytest.mark.parametrize("kernel", ["norms", "scores", "pick"])
def test_an_eager_kernel_lets_the_next_be_launched_first_and_none_writes_before_it_has_waited(kernel: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def order(hopper: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, kernel, str(hopper)], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    usual, eager = order(1), order(2)
    assert usual[:3] == ["wait", "launch_dependents", "write"]
    assert eager[:3] == ["launch_dependents", "wait", "write"]
    assert sorted(usual) == sorted(eager)
    assert usual.count("wait") == 1
