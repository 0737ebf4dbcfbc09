"""Kernels in CUDA C++: compiled when they are first wanted (NVRTC), and launched before their turn.

For what Triton and Gluon do too slowly. NVRTC and the driver are reached through `cuda.bindings`, which comes with
torch's CUDA builds; `kernels.cpp` says whether they are there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from diffusiongemma.ops import kernels

ARCHITECTURE = "sm_90a"  # Hopper, with what is Hopper's alone
LINE = 128  # bytes of a row that a tile of `Tiles` has


def source(name: str) -> str:
    """A file beside this one"""
    return files("diffusiongemma.ops").joinpath(name).read_text(encoding="utf-8")


@cache
def compiled(text: str, names: tuple[tuple[str, int | str], ...], architecture: str = ARCHITECTURE) -> bytes:
    """CUDA C++ -> machine code; `names` are defined before it"""
    from cuda.bindings import nvrtc

    program = _done(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in names)]
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error:
            said = bytes(_done(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, said)
            raise RuntimeError(f"a kernel in CUDA C++ does not compile ({error}):\n{said.rstrip(bytes(1)).decode()}")
        code = bytes(_done(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _done(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@dataclass(frozen=True)
class Tiles:
    """A matrix that a kernel reads in tiles of so many rows and `LINE` bytes, swizzled. Beyond it there are zeros."""

    matrix: Tensor  # [R, C]: the numbers of a row lie together, its rows any multiple of 16 bytes apart
    rows: int

    def described(self) -> Any:
        from cuda.bindings import driver as d

        size, (rows, columns) = self.matrix.element_size(), self.matrix.shape
        assert self.matrix.stride(1) == 1
        word, count = d.cuuint64_t, d.cuuint32_t
        return _done(d, d.cuTensorMapEncodeTiled(
            d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, self.matrix.data_ptr(),
            [word(columns * size), word(rows)], [word(self.matrix.stride(0) * size)], [count(LINE), count(self.rows)],
            [count(1), count(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))  # fmt: skip


Argument = Tensor | Tiles | int


@dataclass
class Kernel:
    """One function, compiled for one set of constants; loaded once on each card."""

    function: str
    text: str
    names: Mapping[str, int | str]
    shared: int = 0  # bytes of dynamic shared memory
    _loaded: dict[int, Any] = field(default_factory=dict)

    def code(self) -> bytes:
        return compiled(self.text, tuple(self.names.items()))

    def run(self, programs: int, threads: int, *args: Argument) -> None:
        """Launch it on the current stream; it waits for the launch before by itself (`griddepcontrol.wait`)."""
        if kernels.compile_only():
            self.code()
            return
        from cuda.bindings import driver as d

        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared, torch.cuda.current_stream().cuda_stream
        attributes = [_early()] if kernels.early() else []
        config.attrs, config.numAttrs = attributes, len(attributes)
        held = [_argument(arg) for arg in args]  # alive until the launch has copied them
        where = (ctypes.c_void_p * len(held))(*(address for address, _ in held))
        function = self._function(torch.cuda.current_device())
        _done(d, d.cuLaunchKernelEx(config, function, ctypes.addressof(where), 0))

    def _function(self, device: int) -> Any:
        if device not in self._loaded:
            from cuda.bindings import driver as d

            module = _done(d, d.cuModuleLoadData(self.code()))
            function = _done(d, d.cuModuleGetFunction(module, self.function.encode()))
            most = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _done(d, d.cuFuncSetAttribute(function, most, self.shared))
            self._loaded[device] = function
        return self._loaded[device]


def probe(device: torch.device) -> None:
    """Compile and load a kernel that does nothing; raises an error where that cannot be."""
    held = torch.zeros(1, device=device)  # now this thread is at home on the card
    Kernel("probe", 'extern "C" __global__ void probe() {}', {})._function(held.device.index)


def _argument(arg: Argument) -> tuple[int, Any]:
    """-> where it lies, and what keeps it there"""
    if isinstance(arg, Tiles):
        described = arg.described()
        return int(described.getPtr()), described
    held = ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else ctypes.c_int(arg)
    return ctypes.addressof(held), held


def _early() -> Any:
    from cuda.bindings import driver as d

    attribute = d.CUlaunchAttribute()
    attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _done(library: Any, answer: Sequence[Any]) -> Any:
    """An answer without its error code, which must be none"""
    error, *rest = answer
    if error:
        raise RuntimeError(f"{library.__name__} answers {error!r}")
    return rest[0] if rest else None
