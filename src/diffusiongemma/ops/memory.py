"""Does an error mean that there is no memory left? Torch, the driver and cuBLAS each say it in their own words."""

from __future__ import annotations

import torch

SAID = ("out of memory", "alloc_failed", "allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """torch's own error, or another whose words say it: of the driver ("CUDA error: out of memory"), of cuBLAS
    ("CUBLAS_STATUS_ALLOC_FAILED"), of Triton's launcher, of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    words = str(error).lower()
    if any(said in words for said in SAID):
        return True
    # What fails while a graph is recorded makes the end of the recording fail, too, and that is the error one gets.
    return "captur" in words and is_out_of_memory(error.__context__)
