# ruff: noqa: E402
"""What lies between two kernels of a layer's chain, and what a barrier in one kernel would cost instead.

    python3 scripts/bench_boundaries.py [--launches 64] [--rounds 15]

One Hopper card. Kernels that do nothing but wait for the one before, read what it wrote and write it again, one program
of 256 threads a multiprocessor, each a launch of a CUDA graph: launched late (after the one before has ended), early
(while it runs), eagerly (before it waits itself), with so much shared memory that one or two of them fit on a
multiprocessor at once. Beside them one kernel of as many programs that does the same between barriers over the whole
card. Microseconds a launch, or a barrier; medians. What a chain of nine kernels would save as one follows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

import torch
from bench_stream import microseconds

from diffusiongemma.ops import kernels
from diffusiongemma.ops.nvrtc import Kernel

THREADS = 256
BOTH = """
typedef unsigned int u32;

__device__ __forceinline__ void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What another multiprocessor wrote, one number more
__device__ __forceinline__ void pass_on(u32* numbers, int turn) {
    const int many = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
    u32 found;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found)
                 : "l"(numbers + (turn & 1) * many + (at + blockDim.x) % many) : "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(numbers + (~turn & 1) * many + at), "r"(found + 1)
                 : "memory");
}
"""
LINK = """
extern "C" __global__ void __launch_bounds__(256) link(u32* numbers, int turn) {
    if (EAGER) let_next();
    wait_before();
    if (!EAGER) let_next();
    pass_on(numbers, turn);
}
"""
CHAIN = """
// Of all programs, which run at once: `arrived` counts them, turn after turn, and is zero when this begins.
extern "C" __global__ void __launch_bounds__(256) chain(u32* numbers, u32* arrived, int turns) {
    wait_before();
    for (int turn = 0; turn < turns; ++turn) {
        pass_on(numbers, turn);
        __syncthreads();
        if (threadIdx.x == 0) {
            const u32 all = (turn + 1) * gridDim.x;
            u32 seen;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(seen) : "l"(arrived) : "memory");
            for (++seen; seen < all;)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
        }
        __syncthreads();
    }
}
"""
SHARED = (0, 100 << 10, 200 << 10)


def link_of(eager: bool, shared: int) -> Kernel:
    return Kernel("link", BOTH + LINK, {"EAGER": int(eager)}, shared=shared)


def chain_of() -> Kernel:
    return Kernel("chain", BOTH + CHAIN, {})


def check(numbers: torch.Tensor, turns: int) -> None:
    """`turns` times from zero"""
    last = numbers[turns % 2]
    if not bool((last == turns).all()):
        raise SystemExit(
            f"a number was read before it was there: {last.min().item()} to {last.max().item()}, not {turns}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or (reason := kernels.cpp_unavailable(device)):
        parser.error("there is no GPU" if not torch.cuda.is_available() else str(reason))
    programs = kernels.card(device).processors
    numbers = torch.zeros(2, programs * THREADS, dtype=torch.int32, device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {programs} programs of {THREADS} threads")

    def record(kernel: Kernel, early: bool) -> torch.cuda.CUDAGraph:
        kernel._function(0)
        graph = torch.cuda.CUDAGraph()
        with mock.patch.object(kernels, "EARLY", early), torch.cuda.graph(graph):
            numbers.zero_()
            arrived.zero_()
            if kernel.function == "chain":
                kernel.run(programs, THREADS, numbers, arrived, args.launches)
            else:
                for turn in range(args.launches):
                    kernel.run(programs, THREADS, numbers, turn)
        graph.replay()
        torch.cuda.synchronize()
        check(numbers, args.launches)
        return graph

    ways = {"one kernel, a barrier": (chain_of(), True)}
    for shared in SHARED:
        for name, eager, early in (("late", False, False), ("early", False, True), ("eager", True, True)):
            ways[f"launched {name}, {shared >> 10} KB"] = (link_of(eager, shared), early)
    graphs = [record(*way) for way in ways.values()]
    times = [us / args.launches for us in microseconds([graph.replay for graph in graphs], args.rounds)]
    for name, us in zip(ways, times, strict=True):
        print(
            f"{name:<28}{us:6.2f} us, nine of them {9 * us:6.1f}, as one kernel {9 * (times[0] - us):+6.1f}", flush=True
        )


if __name__ == "__main__":
    main()
