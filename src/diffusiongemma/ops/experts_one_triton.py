# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The feed-forward of a few tokens in two launches: experts and dense MLP side by side, and what follows them.

Twin of `one.feed_forward`. The products are those of `few_triton`, in the same order of sums: programs of the dense MLP
come behind those of the experts, so that no second stream is needed to fill the card. The last program of a token adds
both contributions to it and norms it for the next layer, as `norm_triton.after_feed_forward` would.

Legend: as in `few_triton`; D hidden; names of the dense MLP have a D in front.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusiongemma.ops.early_triton import ready, run
from diffusiongemma.ops.few_triton import Plan, few_tile, kept_as, plan
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.last_triton import is_last
from diffusiongemma.ops.norm_triton import fed, limit_of, load_row, piece_for, rows_like
from diffusiongemma.ops.one import Ends
from diffusiongemma.ops.product import Weight

REGISTERS = 96  # of a thread: what the products need. One program a token ends the layer and would like 150.


@triton.jit
def both_up_kernel(
    x, x_scale, w, w_scale, index, out, dense_x, dense_x_scale, dense_w, dense_w_scale, dense_out, programs,
    TOP_K: tl.constexpr, K: tl.constexpr, O: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr, DK: tl.constexpr, DO: tl.constexpr,
    DFORMAT: tl.constexpr, DGROUP: tl.constexpr, DTILES: tl.constexpr, DBO: tl.constexpr, DSTEP: tl.constexpr,
    STAGES: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Below `programs`: the experts'. x, dense_x [N, D] -> out [N k, O], dense_out [N, DO], GeGLU of the products"""
    ready(HOPPER)
    pid = tl.program_id(0)
    if pid < programs:
        few_tile(pid, x, x_scale, w, w_scale, index, None, out, K, O, TOP_K, FORMAT, GROUP, True, "in", TILES, BO,
                 STEP, STAGES, HOPPER)  # fmt: skip
    else:
        few_tile(pid - programs, dense_x, dense_x_scale, dense_w, dense_w_scale, None, None, dense_out, DK, DO, 1,
                 DFORMAT, DGROUP, True, "no", DTILES, DBO, DSTEP, STAGES, HOPPER)  # fmt: skip


@triton.jit
def both_down_kernel(
    x, w, w_scale, index, share, out, dense_x, dense_w, dense_w_scale, dense_out, programs, residual, after_dense,
    after_sparse, after_sum, scalar, following, residual_out, normed_out, normed_scale, counters, width, eps,
    LIMIT: tl.constexpr, PIECE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, O: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr,
    DK: tl.constexpr, DO: tl.constexpr, DFORMAT: tl.constexpr, DGROUP: tl.constexpr, DTILES: tl.constexpr,
    DBO: tl.constexpr, DSTEP: tl.constexpr, STAGES: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """x [N k, K], dense_x [N, DK] -> out, dense_out [N, D]; and of these residual_out, normed_out [N, D]"""
    ready(HOPPER)
    pid = tl.program_id(0)
    if pid < programs:
        token = pid // TILES
        few_tile(pid, x, None, w, w_scale, index, share, out, K, O, TOP_K, FORMAT, GROUP, False, "out", TILES, BO,
                 STEP, STAGES, HOPPER)  # fmt: skip
    else:
        token = (pid - programs) // DTILES
        few_tile(pid - programs, dense_x, None, dense_w, dense_w_scale, None, None, dense_out, DK, DO, 1, DFORMAT,
                 DGROUP, False, "no", DTILES, DBO, DSTEP, STAGES, HOPPER)  # fmt: skip
    if is_last(counters + token, TILES + DTILES):
        w_dense, w_sparse = load_row(after_dense, width, PIECE), load_row(after_sparse, width, PIECE)
        w_sum, w_next = load_row(after_sum, width, PIECE), load_row(following, width, PIECE)
        factor = tl.load(scalar).to(tl.float32)
        fed(residual, dense_out, out, w_dense, w_sparse, w_sum, w_next, factor, residual_out, normed_out, normed_scale,
            token.to(tl.int64), width, eps, 1, LIMIT, PIECE, ".cg", HOPPER)  # fmt: skip


def feed_forward(
    x: Tensor, to_dense: Rows, to_sparse: Rows, index: Tensor, weight: Tensor, dense: tuple[Weight, Weight],
    sparse: tuple[Weight, Weight], ends: Ends, counters: Tensor,
) -> tuple[Tensor, Rows]:  # fmt: skip
    """As `one.feed_forward`; counters: N zeros at least"""
    tokens, hidden = x.shape
    assert counters.numel() >= tokens, f"{tokens} counters are needed, not {counters.numel()}"
    index, weight = index.contiguous(), weight.float().contiguous()
    (up, up_scale), (down, down_scale) = sparse
    (dense_up, dense_up_scale), (dense_down, dense_down_scale) = dense
    pairs, k = index.numel(), index.shape[1]
    first, beside = plan(up, hidden, True), plan(dense_up, hidden, True)
    inner = torch.empty(pairs, first.width, dtype=kept_as(to_sparse.values), device=x.device)
    dense_inner = torch.empty(tokens, beside.width, dtype=kept_as(to_dense.values), device=x.device)
    run(
        both_up_kernel, pairs * first.tiles + tokens * beside.tiles, to_sparse.values, to_sparse.scale, up, up_scale,
        index, inner, to_dense.values, to_dense.scale, dense_up, dense_up_scale, dense_inner, pairs * first.tiles,
        TOP_K=k, **_constants(first, hidden, beside, hidden),
    )  # fmt: skip
    second, beside = plan(down, inner.shape[1], False), plan(dense_down, dense_inner.shape[1], False)
    both = torch.empty(2, tokens, hidden, dtype=x.dtype, device=x.device)
    x_out, rows = torch.empty_like(x), rows_like(x, ends.quant)
    run(
        both_down_kernel, tokens * (second.tiles + beside.tiles), inner, down, down_scale, index, weight, both[0],
        dense_inner, dense_down, dense_down_scale, both[1], tokens * second.tiles, x, *ends.norms, ends.scalar,
        ends.following, x_out, rows.values, rows.scale, counters, hidden, ends.eps, LIMIT=limit_of(ends.quant),
        PIECE=piece_for(hidden), TOP_K=k, maxnreg=REGISTERS,
        **_constants(second, inner.shape[1], beside, dense_inner.shape[1]),
    )  # fmt: skip
    return x_out, rows


def _constants(sparse: Plan, inputs: int, dense: Plan, dense_inputs: int) -> dict[str, Any]:
    return dict(
        K=inputs, O=sparse.width, FORMAT=sparse.fmt, GROUP=sparse.group, TILES=sparse.tiles, BO=sparse.piece.outputs,
        STEP=sparse.piece.step, DK=dense_inputs, DO=dense.width, DFORMAT=dense.fmt, DGROUP=dense.group,
        DTILES=dense.tiles, DBO=dense.piece.outputs, DSTEP=dense.piece.step, STAGES=sparse.piece.stages,
        num_warps=sparse.piece.warps,
    )  # fmt: skip
