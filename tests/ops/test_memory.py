"""Errors that say that there is no memory, and those that do not."""

from __future__ import annotations

import pytest
import torch

from diffusiongemma.ops.memory import is_out_of_memory

NONE_LEFT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to …"),
    MemoryError(),
]
OTHERS = [
    None,
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    RuntimeError("out of resource: shared memory, Required: 278528, Hardware limit: 232448"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    ValueError("out of memory"),  # what a request says is no sign
]


@pytest.mark.parametrize("error", NONE_LEFT, ids=str)
def test_no_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_something_else(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("first", [NONE_LEFT[0], OTHERS[1]], ids=str)
def test_a_recording_that_could_not_be_ended(first: BaseException) -> None:
    """What is heard is that its end failed; why, is said by the error before it."""
    for words, follows in (("capturing stream has unjoined work", True), ("an illegal instruction", False)):
        with pytest.raises(RuntimeError) as heard:
            _then(first, words)
        assert is_out_of_memory(heard.value) == (follows and first is NONE_LEFT[0])


def _then(first: BaseException, words: str) -> None:
    try:
        raise first
    finally:
        raise RuntimeError(f"CUDA error: {words}")
