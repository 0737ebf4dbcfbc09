# ruff: noqa: E402
# mypy: ignore-errors
"""A trial, not part of the engine: would a layer be faster with the router's product folded into that behind attention?

    python3 scripts/try_fold.py [--quant fp8|bf16|int4] [--layers 6] [--rounds 9]     # on a card; --tiny without one

Between attention and the experts there are three small kernels that wait for each other: norms, the router's scores,
picking; 3.7 + 5.0 + 3.1 us a layer of the 26B in fp8. The scores are linear in what the norms are given, but for two
numbers a row:

    x' = x + b w / rms(b)                       b: the product behind attention, w: the weight of the norm behind it
    scores = (x' s) P / rms(x') / sqrt(D)       s: the router's scale, P: its projection
           = ((x s) P  +  b (w s P) / rms(b)) / rms(x') / sqrt(D)

The first product is of the layer's input: it can be made beside attention ("rest"). b (w s P) is attention's output
times one more matrix, which is known when a model is loaded: as many columns more of the product behind attention as
there are experts (in fp8 twice as many, what the first half rounds off is the second half). So one kernel ("settle")
makes norms, scores and picks. Predicted: 6 us a layer less, of 252 in fp8, 185 in 4 bits and 437 in bf16.

Printed: picks and weights of both ways against float64, then microseconds a layer by turns, one user's canvas of 256
tokens over 512. Never run on a card yet. If it is not faster, delete it, and say so in docs/log.md.

Legend: N tokens, D hidden, K inputs of the product behind attention, E experts, k experts a token.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops"), str(ROOT / "scripts")]
CUDA = torch.cuda.is_available()
if not CUDA:
    import triton_cpu  # noqa: F401  # turns Triton's interpreter on, before Triton is imported

import triton
import triton.language as tl
from bench_layers import config_of, recorded
from bench_stream import microseconds
from exact_chain import ahead

from diffusiongemma.engine import Limits, fast
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.fused_weights import FusedLayer, quant_of
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops.attention_cached import New
from diffusiongemma.ops.early_triton import SEPARATE, ready, run
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.norm_triton import (
    KEPT,
    _times,
    added,
    limit_of,
    load_row,
    piece_for,
    put_row,
    rows_like,
    store_row,
    stored,
    warps_for,
    weighed,
    wide,
)
from diffusiongemma.ops.one import Router
from diffusiongemma.ops.product import Weight
from diffusiongemma.ops.quant import FP8, Format, dequantize, quantize
from diffusiongemma.ops.routing import Placed, counters, most_beyond
from diffusiongemma.ops.tiles import block_rows, format_of

DEVICE = torch.device("cuda" if CUDA else "cpu")
PART, ROWS = 256, 16  # of `rest`: as the router's own product has them


def router_of(layer: FusedLayer) -> Router:
    r = layer.module.router
    return Router(r.proj.weight, r.scale, r.per_expert_scale, r.top_k)


def norms_of(layer: FusedLayer) -> tuple[Tensor, Tensor, Tensor]:
    m = layer.module
    before = (m.post_attention_layernorm, m.pre_feedforward_layernorm, m.pre_feedforward_layernorm_2)
    return tuple(norm.weight for norm in before)


def folded(layer: FusedLayer) -> Weight:
    """The weight behind attention with the folded columns: [D + E, K], in fp8 [D + 2 E, K]"""
    (q, scale), router = layer.o, router_of(layer)
    plain = q.float() if scale is None else dequantize(q, scale)
    more = (router.proj.float() * (router.scale.float() * norms_of(layer)[0].float())) @ plain  # [E, K]
    if scale is None:
        return torch.cat([q, more.to(q.dtype)]), None
    high, high_scale = quantize(more, Format("fp8"))
    low, low_scale = quantize(more - dequantize(high, high_scale), Format("fp8"))
    numbers = torch.cat([t.view(torch.uint8) for t in (q, high, low)]).view(FP8)
    return numbers, torch.cat([scale, high_scale, low_scale])


# ---- the two kernels ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def rest_kernel(x, proj, scale, part, rows, width, E: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
                HOPPER: tl.constexpr):  # fmt: skip
    """One part of (x scale) [N, D] times proj [E, D]"""
    blocks = tl.cdiv(rows, ROWS)
    row, which = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.program_id(0) // blocks
    e, d = tl.arange(0, E), which * PART + tl.arange(0, PART)
    live, inside = row < rows, d < width
    w = tl.load(proj + e[:, None] * width + d[None, :], mask=inside[None, :], other=0.0)
    s = tl.load(scale + d, mask=inside, other=0.0).to(tl.float32)
    ready(HOPPER)
    a = tl.load(x + row.to(tl.int64)[:, None] * width + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    acc = tl.dot(w, tl.trans((a.to(tl.float32) * s[None, :]).to(w.dtype)), input_precision="ieee")
    place = which.to(tl.int64) * rows + row
    tl.store(part + place[:, None] * E + e[None, :], tl.trans(acc), mask=live[:, None])


@triton.jit(do_not_specialize=["rows"])
def settle_kernel(x, branch, rest, post, dense, sparse, per_expert, x_out, dense_out, dense_scale, sparse_out,
                  sparse_scale, index, weight, lists, place, share, counts, beyond, rows, width, apart, eps,
                  E: tl.constexpr, MORE: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr, PLACE: tl.constexpr,
                  LIMIT: tl.constexpr, KEEP: tl.constexpr, PIECE: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """`norm_triton.after_attention` and `router_triton.place` of one row; MORE: times E folded columns of `branch`,
    whose rows lie `apart`"""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, E)
    w_post = load_row(post, width, PIECE)
    w_dense, w_sparse = load_row(dense, width, PIECE), load_row(sparse, width, PIECE)
    worth = tl.load(per_expert + e).to(tl.float32)
    ready(HOPPER)
    z = load_row(branch + row * apart, width, PIECE)
    y = load_row(x + row * width, width, PIECE)
    of_branch, of_x = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.float32)
    for i in tl.static_range(MORE):
        of_branch += tl.load(branch + row * apart + width + i * E + e).to(tl.float32)
    for i in tl.static_range(PARTS):
        of_x += tl.load(rest + (i * rows + row) * E + e)
    z = wide(z)
    back = 1.0 / tl.sqrt(tl.sum(z[0] * z[0] + z[1] * z[1] + z[2] * z[2]) / width + eps)
    y = stored(added(wide(y), weighed(_times(z, back), w_post)), x_out)
    inverse = 1.0 / tl.sqrt(tl.sum(y[0] * y[0] + y[1] * y[1] + y[2] * y[2]) / width + eps)
    scores = (of_x + back * of_branch) * (inverse / tl.sqrt(width.to(tl.float32)))
    soft = tl.exp(scores - tl.max(scores))
    # A number's bits, as a whole number, with the expert's behind them: the largest is the best, of equals the first.
    order = tl.where(soft == soft, soft, 0.0).to(tl.int32, bitcast=True).to(tl.int64) * E + (E - 1 - e)
    rank = tl.full((E,), TOP, tl.int32)
    for i in tl.static_range(TOP):
        best = order == tl.max(order)
        rank, order = tl.where(best, i, rank), tl.where(best, -1, order)
    mine = rank < TOP
    worth *= soft / tl.sum(tl.where(mine, soft, 0.0))
    pair = row * TOP + rank
    before = tl.atomic_add(counts + e, 1, mask=mine, sem="relaxed")
    tl.store(index + pair, e.to(tl.int64), mask=mine)
    tl.store(weight + pair, worth, mask=mine)
    store_row(x_out + row * width, y, width, PIECE, KEEP)
    y = _times(y, inverse)
    put_row(dense_out, dense_scale, weighed(y, w_dense), row, width, PIECE, LIMIT, HOPPER)
    put_row(sparse_out, sparse_scale, weighed(y, w_sparse), row, width, PIECE, LIMIT, HOPPER)
    at = e * rows + before
    tl.store(lists + at, pair.to(tl.int32), mask=mine)
    tl.store(share + at, worth, mask=mine)
    tl.store(place + pair, at, mask=mine)
    opens = mine & (before > 0) & (before % PLACE == 0)
    begun = tl.atomic_add(counts + E + e * 0, 1, mask=opens, sem="relaxed")
    tl.store(beyond + begun, at, mask=opens)


def rest_of(x: Tensor, router: Router) -> Tensor:
    """x [N, D] -> its share of the scores, in parts [S, N, E]"""
    (rows, width), experts = x.shape, len(router.proj)
    part = torch.empty(triton.cdiv(width, PART), rows, experts, dtype=torch.float32, device=x.device)
    run(
        rest_kernel, triton.cdiv(rows, ROWS) * len(part), x, router.proj, router.scale, part, rows, width,
        E=experts, PART=PART, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return part


Settled = tuple[Tensor, Rows, Rows, Tensor, Tensor, Placed]


def settle(
    x: Tensor, branch: Tensor, rest: Tensor, layer: FusedLayer, eps: float, quant: torch.dtype | None, counts: Tensor
) -> Settled:
    """x [N, D], branch [N, D + …], rest [S, N, E] -> as `after_attention` and `place`"""
    router = router_of(layer)
    (rows, width), experts, k = x.shape, len(router.proj), router.top_k
    block = block_rows(rows * k, experts, format_of(layer.up[0]))
    counts, marks = counts[: experts + 1], counts[counters(experts, rows * k)[1] :]
    lists = torch.empty(experts, rows, dtype=torch.int32, device=x.device)
    at = torch.empty(rows * k, dtype=torch.int32, device=x.device)
    share = torch.empty(experts, rows, dtype=torch.float32, device=x.device)
    beyond = torch.empty(most_beyond(rows * k, block), dtype=torch.int32, device=x.device)
    index = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    weight = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    x_out, to_dense, to_sparse = torch.empty_like(x), rows_like(x, quant), rows_like(x, quant)
    piece = piece_for(width)
    run(
        settle_kernel, rows, x, branch, rest, *norms_of(layer), router.per_expert, x_out, to_dense.values,
        to_dense.scale, to_sparse.values, to_sparse.scale, index, weight, lists, at, share, counts, beyond, rows, width,
        branch.shape[1], eps, E=experts, MORE=(branch.shape[1] - width) // experts, TOP=k, PARTS=len(rest), PLACE=block,
        LIMIT=limit_of(quant), KEEP=rows <= KEPT, PIECE=piece, num_warps=max(1, warps_for(piece)), maxnreg=128,
        eager=True, **SEPARATE,
    )  # fmt: skip
    return x_out, to_dense, to_sparse, index, weight, Placed(lists, at, share, counts, beyond, marks, block, k)


# ---- the network with them ---------------------------------------------------------------------------------------


class Folded(FusedNetwork):
    """One user's canvases go through the two kernels if it is `on`; `late`: rest is begun beside attention alone, not
    beside the product before it, too"""

    on = late = False

    def fold(self) -> None:
        self.wider = [replace(layer, o=folded(layer)) for layer in self.layers]

    def _rest(self, x: Tensor, layer: FusedLayer) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._side is None:
            return rest_of(x, router_of(layer)), None
        done = torch.cuda.Event()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._parted = True
        with torch.cuda.stream(self._side):
            part = rest_of(x, router_of(layer))
            done.record(self._side)
        return part, done

    def _run(self, x: Tensor, *parts, hidden: bool = True) -> Tensor:
        if not self.on or [mode for mode, _ in parts] != ["denoise"]:
            return super()._run(x, *parts, hidden=hidden)
        rope = {kind: self.ops.rope_at(parts[0][1].positions, f, self.dtype) for kind, f in self._frequency.items()}
        first = self.wider[0]
        h = self.ops.norm_rows(x, first.module.input_layernorm.weight, self.eps, quant_of(first.qkv))
        counts, spent, beside = self._counts(len(x)), list[Tensor](), self._side is not None
        for at, layer in enumerate(self.wider):
            if not self.late:
                rest, done = self._rest(x, layer)
            heads = self._heads(layer, h, rope[layer.kind])
            if self.late:
                rest, done = self._rest(x, layer)
            mixed = self._attend(layer, at, parts, *heads)
            self._forget(spent, beside)
            branch = self.ops.linear(mixed, layer.o)
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
            x, h, spent = self._settled(layer, at, x, branch, rest, self._placing(counts, at, len(x)), beside)
        return h.values

    def _settled(self, layer, at, x, branch, rest, counts, beside):
        m, ops = layer.module, self.ops
        quant = layer.mlp.quant() if layer.mlp.quant() == quant_of(layer.up) else None
        x, to_dense, to_sparse, index, weight, placed = settle(x, branch, rest, layer, self.eps, quant, counts)
        join = self._begun(lambda: layer.mlp(ops, to_dense, slim=beside), beside)
        sparse = ops.experts(ops.rows_for(to_sparse, layer.up), index, weight, layer.up, layer.down, placed)
        dense = join()
        after = (m.post_feedforward_layernorm_1, m.post_feedforward_layernorm_2, m.post_feedforward_layernorm)
        if at + 1 < len(self.wider):
            following, quant = self.wider[at + 1].module.input_layernorm.weight, quant_of(self.wider[at + 1].qkv)
        else:
            following, quant = self.model.norm.weight, None
        weights = tuple(norm.weight for norm in after)
        out, h = ops.after_feed_forward(x, dense, sparse, weights, m.decoder_scalar, following, self.eps, quant, None)
        return out, h, [x, dense, sparse]


# ---- is it right? ------------------------------------------------------------------------------------------------


def exact(x: Tensor, mixed: Rows, layer: FusedLayer, eps: float) -> tuple[Tensor, Tensor]:
    """The residual and the scores in float64"""
    q, scale = layer.o
    branch = mixed.wide().double() @ (q if scale is None else dequantize(q, scale)).double().t()
    post, router = norms_of(layer)[0].double(), router_of(layer)
    y = x.double() + branch * (branch.square().mean(-1, keepdim=True) + eps).rsqrt() * post
    normed = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * x.shape[1] ** -0.5
    return y, (normed * router.scale.double()) @ router.proj.double().t()


def errors(index: Tensor, weight: Tensor, scores: Tensor, router: Router) -> tuple[float, float]:
    """-> share of picks that float64 would not make, and how far the weights are from its own"""
    best = scores.topk(router.top_k, -1).indices
    share = scores.softmax(-1).gather(1, best)
    share = share / share.sum(-1, keepdim=True) * router.per_expert.double()[best]
    wanted = torch.zeros_like(scores).scatter(1, best, share)
    got = torch.zeros_like(scores).scatter(1, index, weight.double())
    other = 1 - float(((got > 0) & (wanted > 0)).sum() / best.numel())
    return other, float((got - wanted).norm() / wanted.norm())


def compare(network: Folded, tokens: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Both ways through the first layer, from what attention gives to picks and weights: their `errors`"""
    random, layer, wider = torch.Generator().manual_seed(seed), network.layers[0], network.wider[0]
    ops, quant, hidden = network.ops, quant_of(layer.up), network.config.hidden_size
    seen = torch.randn(tokens, layer.heads * layer.head_dim, generator=random).to(DEVICE, network.dtype)
    x = (2 * torch.randn(tokens, hidden, generator=random)).to(DEVICE, network.dtype)
    mixed = ops.rows_for(Rows(seen), layer.o)
    _, scores = exact(x, mixed, layer, network.eps)
    narrow, branch = ops.linear(mixed, layer.o), ops.linear(mixed, wider.o)
    assert torch.equal(narrow, branch[:, :hidden]), "columns beside it change no bit of a product"
    counts = network._counts(tokens)
    y, dense, sparse = ops.after_attention(x, narrow, *norms_of(layer), network.eps, quant)
    index, weight, placed = ops.place(y, *router_of(layer), network.eps, layer.up, counts=counts[0].clone())
    got = settle(x, branch, rest_of(x, router_of(layer)), layer, network.eps, quant, counts[0].clone())
    for one, other in ((y, got[0]), (dense.wide(), got[1].wide()), (sparse.wide(), got[2].wide())):
        assert fused_error(one, other) < 0.01, "norms and residual are the same"
    assert int(got[5].counts[:-1].sum()) == int(placed.counts[:-1].sum()) == index.numel(), "every pair has its place"
    router = router_of(layer)
    return {"direct": errors(index, weight, scores, router), "folded": errors(*got[3:5], scores, router)}


def fused_error(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / one.double().norm())


def make(quant: str, layers: int, tiny: bool) -> tuple[FastRunner, Folded]:
    config = config_of(layers, tiny)
    group = (32 if tiny else 64) if quant == "int4" else None
    scheme = None if quant == "bf16" else Scheme.parse(quant, group)
    torch.manual_seed(0)
    model = random_network(config, scheme, DEVICE, torch.bfloat16, std=0.02)
    for layer in model.layers:  # weights of norms as a trained model has them: not all one
        for weight in (layer.post_attention_layernorm.weight, layer.router.scale):
            weight.data.copy_(0.5 + torch.rand(config.hidden_size))
        layer.router.proj.weight.data.mul_(50)  # scores that differ by about one, as where somebody was trained
    limits = Limits(max_bytes=1 << (22 if tiny else 31), max_rows=1, chunk=16 if tiny else 2048)
    before, fast.FusedNetwork = fast.FusedNetwork, Folded
    try:
        runner = FastRunner(model, triton_ops(), limits, graphs=CUDA)
    finally:
        fast.FusedNetwork = before
    runner.network.ops = triton_ops().roomy()
    runner.network.fold()
    return runner, runner.network


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("fp8", "bf16", "int4"), default="fp8")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not (CUDA or args.tiny):
        parser.error("there is no GPU: --tiny checks the script itself")
    runner, network = make(args.quant, 2 if args.tiny else args.layers, args.tiny)
    width, prefix = (8, 16) if args.tiny else (256, 512)
    print(f"{args.quant}, {torch.cuda.get_device_name() if CUDA else 'no card'}", flush=True)

    def batch_of(each: int, held: int) -> Batch:
        numbers = {"dtype": torch.int32, "device": DEVICE}
        return Batch(
            runner.pool.offsets([row]).to(DEVICE), torch.full((1,), held, **numbers),
            torch.arange(held, held + each, **numbers), New(torch.arange(2, **numbers) * each, each),
            runner.pool.reach_for(prefix + width),
        )  # fmt: skip

    row = runner.new_row(prefix + width)
    x = torch.randn(prefix, network.config.hidden_size).to(DEVICE, network.dtype)
    prompt, canvas = batch_of(prefix, 0), batch_of(width, prefix)
    for work in (lambda: network._run(x, ("encode", prompt)), lambda: network._run(x[:width], ("denoise", canvas))):
        if CUDA:
            ahead(DEVICE, work)
        work()
    for way, (other, error) in compare(network, width).items():
        print(f"{way}: {other:.2%} of the picks are not float64's, weights {error:.5f} away", flush=True)
    ways = {"as it is": (False, False), "folded": (True, False), "folded, begun late": (True, True)}
    replays, results = [], []
    for network.on, network.late in ways.values():
        replay, out = recorded(runner.recorder, lambda: network._run(x[:width], ("denoise", canvas)))
        replay()
        replays.append(replay)
        results.append(out[0].clone())
    times = microseconds(replays, args.rounds, 12) if CUDA else [0.0] * len(ways)
    for way, taken, result in zip(ways, times, results, strict=True):
        distance = fused_error(results[0], result)  # a pick that is another makes a row another
        print(f"{way:<20}{taken / args.layers:8.1f} us a layer; {distance:.4f} from the first", flush=True)


if __name__ == "__main__":
    main()
