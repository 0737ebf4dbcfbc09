"""In which order a kernel lets the next be launched and waits itself, and what it reads before that: compiled, for a
card that is not there."""

import json
import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from diffusiongemma.ops import norm_triton, router_triton

def ptx(kernel, hopper, types, **known):
    names = kernel.arg_names
    kinds = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, kinds, {"HOPPER": hopper, **known})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return made, [name for name in names if kinds[name] != "constexpr"]

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
print(json.dumps(kernels[sys.argv[1]](int(sys.argv[2]))))
"""
CONSTANTS = {"norms": {"post", "dense", "sparse"}, "scores": {"proj", "scale"}, "pick": set[str]()}


def compiled(kernel: str, hopper: int) -> tuple[str, list[str]]:
    """-> PTX, and the names of its arguments"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, kernel, str(hopper)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ptx, names = json.loads(done.stdout)
    return ptx, names


def order(ptx: str) -> list[str]:
    found = re.findall(r"griddepcontrol\.(\w+)|((?:st|atom|red)\S*\.global)", ptx)
    return [name or "write" for name, _ in found]


def read_before_waiting(ptx: str, names: list[str]) -> set[str]:
    """The arguments that addresses are made of which are read before the wait"""
    made_of, read = dict[str, set[str]](), set[str]()
    for line in ptx.split("griddepcontrol.wait")[0].splitlines():
        parts = re.fullmatch(r"\s*(?:@!?%\w+ )?([a-z]\S*)\s+({.*?}|[^,]+),\s*(.*);", line.partition("//")[0].rstrip())
        if parts is None:
            continue
        name, made, given = parts.groups()
        known = {of for register in re.findall(r"%\w+", given) for of in made_of.get(register, ())}
        known |= {names[int(n)] for n in re.findall(r"_param_(\d+)", given) if int(n) < len(names)}
        if name.startswith("ld.global"):
            read |= known
        for register in re.findall(r"%\w+", made):
            made_of[register] = made_of.get(register, set()) | known
    return read - {"width", "rows"}  # numbers, by which addresses are counted


@pytest.mark.parametrize("kernel", ["norms", "scores", "pick"])
def test_an_eager_kernel_lets_the_next_be_launched_first_and_none_writes_before_it_has_waited(kernel: str) -> None:
    (usual_ptx, names), (eager_ptx, _) = compiled(kernel, 1), compiled(kernel, 2)
    usual, eager = order(usual_ptx), order(eager_ptx)
    assert usual[:3] == ["wait", "launch_dependents", "write"]
    assert eager[:3] == ["launch_dependents", "wait", "write"]
    assert sorted(usual) == sorted(eager)
    assert usual.count("wait") == 1
    for ptx in (usual_ptx, eager_ptx):
        assert read_before_waiting(ptx, names) == CONSTANTS[kernel], "nobody but who loads weights writes these"
