"""Where weights go: the device, the number format, and a network with room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from diffusiongemma.checkpoint.files import TensorInfo
from diffusiongemma.checkpoint.plan import FILE_DTYPES
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import ensure_room, replace_modules
from diffusiongemma.ops.cpu import ensure_cpu_bf16
from diffusiongemma.ops.memory import is_out_of_memory
from diffusiongemma.ops.quant import Format

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FILE_DTYPES.values()}


def pick_device(device: str | torch.device) -> torch.device:
    """A device that works here; "auto" is the GPU where there is one. A GPU has its index, as a tensor there says it:
    "cuda" alone is not equal to "cuda:0", and `torch.cuda.set_device` refuses it."""
    try:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        there = torch.zeros(1, device=torch.device(device))
        there.tolist()  # which the device "meta", without numbers, cannot
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise DeviceError(f"device {str(device)!r} cannot be used here: {_first_line(error)}") from None
    return there.device


def pick_dtype(dtype: str | torch.dtype, device: torch.device, tensors: Iterable[TensorInfo]) -> torch.dtype:
    """A number format that works on the device.

    "auto" is float32 on a CPU, else what most of `tensors` have, else bfloat16.
    """
    if dtype == "auto":
        picked = torch.float32 if device.type == "cpu" else majority_dtype(tensors)
    else:
        picked = parse_dtype(dtype)
    if device.type == "cpu" and picked == torch.bfloat16:
        ensure_cpu_bf16()
    return picked


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    picked = DTYPES.get(str(dtype).removeprefix("torch."))
    if picked is None:
        raise DeviceError(f"dtype {str(dtype)!r} is not one of {', '.join(DTYPES)}")
    return picked


def empty_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, formats: Mapping[str, Format] | None = None
) -> DiffusionGemma:
    """The network with memory of the right size and format, and nothing in it; `formats`: what is quantised in it."""
    with torch.device("meta"):
        model = replace_modules(DiffusionGemma(config).to(dtype), formats or {})
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    ensure_room(size, device)
    try:
        # As `to_empty`, whose `empty_like` of a meta tensor imports sympy: 0.3 s of every start.
        filled: DiffusionGemma = model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))  # type: ignore[no-untyped-call]
        return filled
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"{size / 1e9:.1f} GB of weights do not fit on {device} ({_first_line(error)}): "
            "quantise it (quantize='int4'), or use a smaller dtype or another device"
        ) from None


def majority_dtype(tensors: Iterable[TensorInfo]) -> torch.dtype:
    """What most numbers of these tensors have, quantised ones aside; bfloat16 if there are none."""
    count: Counter[str] = Counter()
    for info in (info for info in tensors if info.dtype in FILE_DTYPES):
        count[info.dtype] += torch.Size(info.shape).numel()
    return FILE_DTYPES[count.most_common(1)[0][0]] if count else torch.bfloat16


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
