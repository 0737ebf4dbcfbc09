# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Sums over 4-bit weights, inside the product kernels (`ops/product_triton.py`; packing: `ops/int4.py`).

Unpacking must cost little: an H200 brings each multiprocessor about 35 weights a cycle, and it issues 128 operations.
Bytes 0 … 16 are numbers of fp8 (e4m3) as they are, n 2^-9, and bit 7 is the sign. So a nibble 2 c is the weight c, and
a nibble 2 c + 1 plus 0x81 is -(c + 1), both times 2^-8: masks and a product of integers for 4 weights, no conversion.
fp8's tensor cores multiply them with activations in fp8. Both weights of a byte go into one product of 128 rows, which
is waited for once. A group's scale is applied to its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALVES = tl.constexpr(
    """{
    .reg .b32 n, s, t;
    and.b32 n, $2, 0x0f0f0f0f;
    and.b32 s, $2, 0x01010101;
    mad.lo.u32 $0, s, 0x81, n;
    shr.u32 t, $2, 4;
    and.b32 n, t, 0x0f0f0f0f;
    and.b32 s, t, 0x01010101;
    mad.lo.u32 $1, s, 0x81, n;
    }"""
)


@triton.jit
def halves(tile, ASM: tl.constexpr):
    """Bytes of two weights -> both, times 2^-8, as fp8 numbers"""
    if ASM:  # "&": the first result is written before the bytes are read again
        first, second = tl.inline_asm_elementwise(
            HALVES, "=&r,=&r,r", [tile], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        first = (tile & 15) + (tile & 1) * 0x81
        second = (tile >> 4) + (tile >> 4 & 1) * 0x81
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


@triton.jit
def sums_pairs(x_at, x_ok, w, w_scale, tile, K: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr,
               TURNS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """x_at: pointers to rows [T] of fp8; tile: which 64 pairs of rows of the weight -> their two sums [64, T], times
    2^-8"""
    r = tl.arange(0, 64)
    c = tl.arange(0, GROUP)
    w_at = w + tile * (64 * K) + r[:, None] * GROUP + c[None, :]
    s_at = w_scale + tile * (64 * (K // GROUP)) + r
    x_at = x_at[:, None] + c[None, :]
    one = tl.zeros((64, T), tl.float32)
    two = tl.zeros((64, T), tl.float32)
    for start in tl.range(0, K // GROUP, TURNS, num_stages=STAGES):
        for turn in tl.static_range(TURNS):
            g = start + turn
            x = tl.trans(tl.load(x_at + g * GROUP, mask=x_ok[:, None], other=0.0))
            first, second = halves(tl.load(w_at + g * (64 * GROUP)), ASM)
            # The second rows below the first: with 4 warps, no number leaves its thread.
            both = tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (128, GROUP))
            s = tl.load(s_at + g * 64)  # two bfloat16, whose bits are the upper half of a float32's
            sums = tl.dot(both, x)
            first, second = tl.split(tl.permute(tl.reshape(sums, (2, 64, T)), (1, 2, 0)))
            one += first * (s << 16).to(tl.float32, bitcast=True)[:, None]
            two += second * (s & -65536).to(tl.float32, bitcast=True)[:, None]
    return one, two
