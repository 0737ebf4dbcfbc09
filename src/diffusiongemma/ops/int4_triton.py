# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Sums over 4-bit weights, inside the product kernel (`ops/product_triton.py`; packing: `ops/int4.py`).

A word of 16 bits holds four weights that lie 16 apart in K, so a tile of words gives four tiles of weights without
moving data between threads, and `ldmatrix` puts the words where the tensor cores want the weights.

Unpacking must cost little: an H200 brings each multiprocessor about 35 weights a cycle, and it issues 128 operations.
The bits of a bfloat16 below 256 are the number times 2^-133, through the subnormals and the first binade. So a nibble
needs no conversion: masked in the bits 0-3 it is n 2^-133, in the bits 4-7 it is 16 n 2^-133, and one fused
multiply-add for two weights scales it and takes off the offset 8, rounded once:
n 2^-133 · s 2^125 - 8 s 2^-8 = (n - 8) s 2^-8. The 2^8 is given back at the end. 9 instructions for 8 weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNPACK = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, t;
    and.b32 a, $4, 0x000f000f;
    and.b32 b, $4, 0x00f000f0;
    shr.u32 t, $4, 8;
    and.b32 c, t, 0x000f000f;
    and.b32 d, t, 0x00f000f0;
    fma.rn.bf16x2 $0, a, $5, $7;
    fma.rn.bf16x2 $1, b, $6, $7;
    fma.rn.bf16x2 $2, c, $8, $10;
    fma.rn.bf16x2 $3, d, $9, $10;
    }"""
)


@triton.jit
def load(at, o_ok, k_ok, MASK_O: tl.constexpr, MASK_K: tl.constexpr):
    """A tile of a weight, with masks only along the sides where it can stick out: o_ok [BO], k_ok [width]"""
    if MASK_O and MASK_K:
        return tl.load(at, mask=o_ok[:, None] & k_ok[None, :], other=0.0)
    elif MASK_K:
        return tl.load(at, mask=k_ok[None, :], other=0.0)
    elif MASK_O:
        return tl.load(at, mask=o_ok[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _spread(s, BO: tl.constexpr, NB: tl.constexpr):
    """One number a block of 64 weights [BO, NB] -> one a word [BO, 16 NB]"""
    return tl.reshape(tl.broadcast_to(s[:, :, None], (BO, NB, 16)), (BO, NB * 16))


@triton.jit
def _four_bits(words, s, t, BO: tl.constexpr, NB: tl.constexpr, ASM: tl.constexpr):
    """words [BO, 16 NB]; scales of the first two and of the last two quarters of every block, [BO, NB] each
    -> the quarters of the blocks, [BO, 16 NB] each; times 2^-8 where ASM"""
    if ASM:
        s_low = _spread(s * 4.253529586511731e37, BO, NB)  # 2^125
        s_high = _spread(s * 2.658455991569832e36, BO, NB)  # 2^121
        s_off = _spread(s * -0.03125, BO, NB)
        t_low = _spread(t * 4.253529586511731e37, BO, NB)
        t_high = _spread(t * 2.658455991569832e36, BO, NB)
        t_off = _spread(t * -0.03125, BO, NB)
        return tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            [words, s_low, s_high, s_off, t_low, t_high, t_off],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        s = _spread(s, BO, NB).to(tl.float32)
        t = _spread(t, BO, NB).to(tl.float32)
        a = (((words & 15) - 8).to(tl.float32) * s).to(tl.bfloat16)
        b = ((((words >> 4) & 15) - 8).to(tl.float32) * s).to(tl.bfloat16)
        c = ((((words >> 8) & 15) - 8).to(tl.float32) * t).to(tl.bfloat16)
        d = ((((words >> 12) & 15) - 8).to(tl.float32) * t).to(tl.bfloat16)
        return a, b, c, d


@triton.jit
def sums_int4(x_at, x_ok, w, w_scale, first, o, K: tl.constexpr, O: tl.constexpr, ROWS: tl.constexpr,
               GROUP: tl.constexpr, NEXT: tl.constexpr, T: tl.constexpr, BO: tl.constexpr, NB: tl.constexpr,
               STAGES: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """x_at: pointers to rows [T]; first: row of the weight [E ROWS, K] where the expert begins -> sums [BO, T], times
    2^-8 where ASM; and if NEXT is not 0 those of the weights NEXT rows further on, which share the loads of x"""
    c = tl.arange(0, 16 * NB)  # words of a tile
    block = tl.arange(0, NB)  # blocks of 64 weights
    R: tl.constexpr = 64 // GROUP  # groups a block
    MASK_K: tl.constexpr = K // 64 % NB != 0
    MASK_O: tl.constexpr = ROWS % (BO if NEXT == 0 else 2 * BO) != 0
    w_at = w + (first + o)[:, None] * (K // 4) + c[None, :]
    s_at = w_scale + first * (K // GROUP) + o[:, None] + (block * (R * ROWS))[None, :]
    x_at = x_at[:, None] + ((c // 16) * 64 + c % 16)[None, :]
    o_ok = o < O
    next_ok = o + NEXT < ROWS
    one = tl.zeros((BO, T), tl.float32)
    two = tl.zeros((BO, T), tl.float32)
    for b in tl.range(0, K // 64, NB, num_stages=STAGES):
        w_ok = c < K // 4 - b * 16
        s_ok = block < K // 64 - b
        words = load(w_at + b * 16, o_ok, w_ok, MASK_O, MASK_K)
        s = load(s_at + b * (R * ROWS), o_ok, s_ok, MASK_O, MASK_K)
        t = s
        if R == 2:
            t = load(s_at + b * (R * ROWS) + ROWS, o_ok, s_ok, MASK_O, MASK_K)
        x0 = tl.trans(load(x_at + b * 64, x_ok, w_ok, True, MASK_K))
        x1 = tl.trans(load(x_at + b * 64 + 16, x_ok, w_ok, True, MASK_K))
        x2 = tl.trans(load(x_at + b * 64 + 32, x_ok, w_ok, True, MASK_K))
        x3 = tl.trans(load(x_at + b * 64 + 48, x_ok, w_ok, True, MASK_K))
        w0, w1, w2, w3 = _four_bits(words, s, t, BO, NB, ASM)
        one = tl.dot(w0, x0, one)
        one = tl.dot(w1, x1, one)
        one = tl.dot(w2, x2, one)
        one = tl.dot(w3, x3, one)
        if NEXT > 0:
            words = load(w_at + b * 16 + NEXT * (K // 4), next_ok, w_ok, MASK_O, MASK_K)
            s = load(s_at + b * (R * ROWS) + NEXT, next_ok, s_ok, MASK_O, MASK_K)
            t = s
            if R == 2:
                t = load(s_at + b * (R * ROWS) + ROWS + NEXT, next_ok, s_ok, MASK_O, MASK_K)
            w0, w1, w2, w3 = _four_bits(words, s, t, BO, NB, ASM)
            two = tl.dot(w0, x0, two)
            two = tl.dot(w1, x1, two)
            two = tl.dot(w2, x2, two)
            two = tl.dot(w3, x3, two)
    return one, two
