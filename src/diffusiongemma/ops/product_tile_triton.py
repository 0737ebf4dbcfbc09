# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""One tile of a product with a weight, inside the kernel of `product_triton.py`: which rows, their sums, their end.

Legend: K inputs, O outputs, T rows of a tile, BO outputs of a tile, k experts a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diffusiongemma.ops.int4_triton import sums_pairs


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
def _sums(x_at, x_ok, more_at, more_ok, w, first, o, K: tl.constexpr, O: tl.constexpr, GATED: tl.constexpr,
          T: tl.constexpr, MORE: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """x_at: pointers to rows [T]; first: row of the weight where the expert begins -> sums [BO, T] of its rows o and,
    where gated, of those O further on; weights of one number a place: bfloat16, int8, fp8. The same of MORE rows
    (0: none), which are multiplied with the tile of the weight while it is here: sums [BO, MORE]"""
    c = tl.arange(0, BK)
    w_at = w + (first + o)[:, None] * K + c[None, :]
    x_at = x_at[:, None] + c[None, :]
    more_at = more_at[:, None] + c[None, :]
    gate = tl.zeros((BO, T), tl.float32)
    up = tl.zeros((BO, T), tl.float32)
    more_gate = tl.zeros((BO, MORE if MORE > 0 else 1), tl.float32)
    more_up = more_gate
    o_ok = o < O
    MASK_K: tl.constexpr = K % BK != 0
    MASK_O: tl.constexpr = O % BO != 0
    for k in tl.range(0, K, BK, num_stages=STAGES):
        k_ok = c < K - k
        w0 = load(w_at + k, o_ok, k_ok, MASK_O, MASK_K)
        x = load(x_at + k, x_ok, k_ok, True, MASK_K)
        gate = tl.dot(w0.to(x.dtype), tl.trans(x), gate)
        if GATED:
            w1 = load(w_at + k + O * K, o_ok, k_ok, MASK_O, MASK_K)
            up = tl.dot(w1.to(x.dtype), tl.trans(x), up)
        if MORE > 0:
            more = load(more_at + k, more_ok, k_ok, True, MASK_K)
            more_gate = tl.dot(w0.to(x.dtype), tl.trans(more), more_gate)
            if GATED:
                more_up = tl.dot(w1.to(x.dtype), tl.trans(more), more_up)
    return gate, up, more_gate, more_up


PREFETCH = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.u32 some, $2, 0;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def prefetch(at, size):
    """Asks for these many bytes from each of these addresses to be brought into the L2 cache; 0: for none."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [at.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _rows(x_scale, order, share, row, end, TOP_K: tl.constexpr, ROUTED: tl.constexpr, PLACED: tl.constexpr):
    """For these rows of `order`: whether they are there, the row of x, the row of the result, and the two numbers that
    sums are multiplied with. All are asked for before the sums are made, and are there when they are. Nothing is made
    of them here, for that would wait, and the loads of x and weights behind it; where an address comes from another
    load ("in", and the shares of pairs that were sorted), it does."""
    ok = row < end
    scale = tl.full(row.shape, 1.0, tl.float32)
    part = scale
    source = row
    target = row
    if ROUTED != "no":
        pair = tl.load(order + row, mask=ok, other=0)
        if ROUTED == "in":
            source = pair // TOP_K
        else:
            target = pair
            part = tl.load(share + (row if PLACED else pair), mask=ok, other=0.0)
    if x_scale is not None:
        scale = tl.load(x_scale + source, mask=ok, other=0.0)
    return ok, source.to(tl.int64), target, scale, part


@triton.jit
def _finish(gate, up, w_gate, w_up, scale, part, ok, target, out, o, O: tl.constexpr, GATED: tl.constexpr,
            PAIRED: tl.constexpr, UNIT: tl.constexpr, BO: tl.constexpr, STAY: tl.constexpr):  # fmt: skip
    """Sums [BO, T] of each row of the weight, times their scales -> rows of the result"""
    factor = UNIT * scale * part
    gate = gate * w_gate[:, None] * factor[None, :]
    up = up * w_up[:, None] * factor[None, :]
    if GATED:  # gelu in its tanh form, which is x sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    at = out + target.to(tl.int64)[:, None] * O + o[None, :]
    ok = ok[:, None] & (o < O)[None, :]
    tl.store(at, tl.trans(gate).to(out.dtype.element_ty), mask=ok, eviction_policy=STAY)
    if PAIRED:
        tl.store(at + BO, tl.trans(up).to(out.dtype.element_ty), mask=ok, eviction_policy=STAY)


@triton.jit
def tile_of(x, x_scale, w, w_scale, out, order, share, expert, tile, start, end, K: tl.constexpr, O: tl.constexpr,
          APART: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
          ROUTED: tl.constexpr, PLACED: tl.constexpr, T: tl.constexpr, MORE: tl.constexpr, BO: tl.constexpr,
          STEP: tl.constexpr, STAGES: tl.constexpr, STAY: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """Rows start … end of `order`, at most T + MORE, times one tile of an expert's outputs"""
    PAIRED: tl.constexpr = FORMAT == "pairs" and not GATED
    WIDE: tl.constexpr = 2 * BO if PAIRED else BO
    o = tile * WIDE + tl.arange(0, BO)
    UNIT: tl.constexpr = 256.0 if FORMAT == "pairs" else 1.0
    ok, source, target, scale, part = _rows(x_scale, order, share, start + tl.arange(0, T), end, TOP_K, ROUTED, PLACED)
    w_gate = tl.full((BO,), 1.0, tl.float32)
    w_up = w_gate
    first = tl.full((), 0, tl.int64) + expert
    if FORMAT == "pairs":
        which = first * (O // WIDE) + tile
        gate, up = sums_pairs(x + source * APART, ok, w, w_scale, which, K, GROUP, T, STEP // GROUP, STAGES, HOPPER)
    else:
        first *= 2 * O if GATED else O
        if w_scale is not None:
            w_gate = tl.load(w_scale + first + o, mask=o < O, other=0.0)
            if GATED:
                w_up = tl.load(w_scale + first + O + o, mask=o < O, other=0.0)
        later = start + T + tl.arange(0, MORE if MORE > 0 else 1)
        more_ok, more_source, more_target, more_scale, more_part = _rows(
            x_scale, order, share, later, end, TOP_K, ROUTED, PLACED
        )
        gate, up, more_gate, more_up = _sums(x + source * APART, ok, x + more_source * APART, more_ok, w, first, o, K,
                                             O, GATED, T, MORE, BO, STEP, STAGES)  # fmt: skip
        if MORE > 0:
            _finish(more_gate, more_up, w_gate, w_up, more_scale, more_part, more_ok, more_target, out, o, O, GATED,
                    PAIRED, UNIT, BO, STAY)  # fmt: skip
    _finish(gate, up, w_gate, w_up, scale, part, ok, target, out, o, O, GATED, PAIRED, UNIT, BO, STAY)
