"""Import this before any kernel: without a GPU it turns on Triton's interpreter and mends what it gets wrong.

Triton 3.9's interpreter multiplies the raw bits of bfloat16 in `tl.dot`, takes integers for the bits of bfloat16,
truncates when it should round to bfloat16, and loses the carry when it rounds to fp8. A card does none of this, so the
mending is here and not in the kernels; and so are products of int8, which `_convert_float` could not take.
"""

import os
import sys

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton was imported too early"
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def _convert_float(data, source, target, rounding):
    """Bits of `source` numbers -> bits of `target` numbers, rounded to the nearest even one."""
    bits = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}")
    numbers = torch.from_numpy(bits.copy()).view(_TORCH[source]).float()
    narrow = torch.int8 if target.primitive_bitwidth == 8 else getattr(torch, f"int{target.primitive_bitwidth}")
    return numbers.to(_TORCH[target]).view(narrow).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if a.dtype.scalar == tl.int8:
        product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    wide = [_convert_float(t.data, t.dtype.scalar, tl.float32, None).view(np.float32) for t in (a, b)]
    # In float64: on some CPUs a float32 product of numpy has other bits at its edges, on a card it has not.
    product = np.matmul(*(w.astype(np.float64) for w in wide))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _create_si_to_fp(self, source, target):
    wide = source.data.astype(np.float64 if target.scalar == tl.float64 else np.float32)
    if target.scalar not in (tl.float32, tl.float64):
        wide = _convert_float(wide, tl.float32, target.scalar, None).view(interpreter._get_np_dtype(target))
    return interpreter.TensorHandle(wide, target.scalar)


if DEVICE.type == "cpu":
    interpreter.InterpreterBuilder.create_si_to_fp = _create_si_to_fp
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
