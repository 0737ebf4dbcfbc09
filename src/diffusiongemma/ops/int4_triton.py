# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Sums over 4-bit weights, inside the product kernels (`ops/product_triton.py`; packing: `ops/int4.py`).

Unpacking must cost little: an H200 brings each multiprocessor about 35 weights a cycle, and it issues 128 operations.
A byte below 16 is a number of fp8 (e4m3) as it is, n 2^-9, so a nibble needs no conversion: a mask and a shift for 8
weights, and fp8's tensor cores multiply them with activations in fp8. A group's scale is applied to its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

NIBBLES = tl.constexpr(
    """{
    .reg .b32 t;
    and.b32 $0, $2, 0x0f0f0f0f;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0f0f0f0f;
    }"""
)


@triton.jit
def nibbles(tile, ASM: tl.constexpr):
    """Bytes -> their low and high halves as fp8 numbers n 2^-9: a byte below 16 is that number, subnormal or not"""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,r", [tile], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low, high = tile & 15, tile >> 4
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def sums_pairs(x_at, x_ok, w, w_scale, tile, K: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr,
               TURNS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """x_at: pointers to rows [T] of fp8; tile: which 64 pairs of rows of the weight -> their two sums [64, T], times
    2^-9. The offset 8 of the weights comes off in the same tensor cores: -8 2^-9 times x is what sums begin with."""
    r = tl.arange(0, 64)
    c = tl.arange(0, GROUP)
    w_at = w + tile * (64 * K) + r[:, None] * GROUP + c[None, :]
    s_at = w_scale + tile * (64 * (K // GROUP)) + r
    x_at = x_at[:, None] + c[None, :]
    minus = tl.full((64, GROUP), 0x88, tl.uint8).to(tl.float8e4nv, bitcast=True)  # -2^-6
    one = tl.zeros((64, T), tl.float32)
    two = tl.zeros((64, T), tl.float32)
    for start in tl.range(0, K // GROUP, TURNS, num_stages=STAGES):
        for turn in tl.static_range(TURNS):
            g = start + turn
            x = tl.trans(tl.load(x_at + g * GROUP, mask=x_ok[:, None], other=0.0))
            low, high = nibbles(tl.load(w_at + g * (64 * GROUP)), ASM)
            s = tl.load(s_at + g * 64)  # two bfloat16, whose bits are the upper half of a float32's
            offset = tl.dot(minus, x)
            first = tl.dot(low, x, offset)
            second = tl.dot(high, x, offset)
            one += first * (s << 16).to(tl.float32, bitcast=True)[:, None]
            two += second * (s & -65536).to(tl.float32, bitcast=True)[:, None]
    return one, two
