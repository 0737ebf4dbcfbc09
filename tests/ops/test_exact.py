"""`scripts/check_ops.py` on a CPU: the torch twins are within the limits of its references, a wrong one is not."""

from ops.triton_cpu import DEVICE  # isort: skip

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.model.backend import VENDOR_ROWS, Ops, torch_ops, triton_ops
from diffusiongemma.ops import experts_triton, kernels, product_cuda, routing, sampler, soft_triton, weigh_triton
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.product_cuda import Tile
from diffusiongemma.ops.quant import FP8
from diffusiongemma.ops.tiles import block_rows
from scripted import load_script

KINDS = ["bf16", "fp8", "int8", "int4"]


script = load_script("check_ops")

import exact_cases  # noqa: E402  # beside the script, which has made them found
import exact_chain  # noqa: E402
import exact_cuda  # noqa: E402
import exact_limits  # noqa: E402
import exact_products  # noqa: E402
import exact_small  # noqa: E402
from exact_limits import Part, judge  # noqa: E402
from exact_shapes import Inputs, Shapes, shapes_of, streamed  # noqa: E402

TINY = Shapes(
    ModelConfig.preset(
        "tiny", vocab_size=272, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_global_key_value_heads=1, global_head_dim=32,
        num_experts=16, top_k_experts=2, sliding_window=16, canvas_length=8, layer_types=(SLIDING, FULL),
    ),
    rows=(1, 6), sorted=(6,), placed=(9,), dense=(7,), canvases=(((0, 3), (20, 5)),), prompts=(((5, 18), (0, 2)),),
    ones=(((20, 1), (0, 1)),), read=(5,), few=(2,),
)  # fmt: skip


def outcome(kind: str, ops: Ops, shapes: Shapes = TINY, only: str = "") -> Any:
    cases = script.cases_of(kind, shapes, Inputs(DEVICE), routing.route, ops.few, exact=False, card=False)
    return script.check([case for case in cases if only in case.name], ops, lambda text: None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twins_are_within_every_limit(kind: str) -> None:
    """They round in more places than kernels do, and all of those are in the limits."""
    found = outcome(kind, torch_ops(), shapes_of("small"))
    assert found.broken == []
    assert found.outside == []
    assert found.called == set(exact_chain.names(torch_ops())), "an operation of Ops has no case"
    numbers = [verdict for _, what, verdict in found.lines if verdict.limit > 0]
    assert len(numbers) > 60
    # A limit that is far from what is found would find nothing: half of the results use a tenth of theirs and more.
    assert sorted(verdict.worst for verdict in numbers)[len(numbers) // 2] > 0.1


def test_the_script_on_the_kernels_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "shapes_of", lambda name: TINY)
    monkeypatch.setattr(script, "DEVICE", DEVICE)
    assert script.main(["--kind", "int4", "--shapes", "small", "--out", str(tmp_path / "table.txt")]) == 0
    told = capsys.readouterr().out
    assert (tmp_path / "table.txt").read_text() == told
    lines = told.splitlines()
    assert lines[0].split() == ["operation", "shape", "format", "result", "error", "limit", "worst"]
    assert all(line.endswith(" ok") for line in lines[1:-1])
    assert " 0 outside, 0 failed, " in lines[-1]


def test_the_kernels_as_on_another_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "shapes_of", lambda name: TINY)
    monkeypatch.setattr(kernels, "card", kernels.card)  # which the script changes
    seen = list[Any]()
    monkeypatch.setattr(script, "check_kind", lambda *args: not seen.append(kernels.card(DEVICE)))
    assert script.main(["--kind", "fp8", "--card", "8.9"]) == 0
    assert seen == [kernels.Card((8, 9), 101_376, kernels.NO_CARD.processors)]


def test_what_only_a_card_is_asked() -> None:
    """A row alone, and the vendor's products. Here, sums may depend on the batch: but nothing may fail."""
    shapes = replace(TINY, rows=(VENDOR_ROWS,), dense=())
    cases = script.cases_of("bf16", shapes, Inputs(DEVICE), routing.route, 0, exact=True, card=True)
    found = script.check(cases, torch_ops(), lambda text: None)
    assert found.broken == []
    alone = {(case.name, what) for case, what, _ in found.lines if what.endswith("alone")}
    assert len(alone) == 6 + 6  # attention of two layers, figures of the vocabulary end
    assert all(what.endswith("alone") for what in found.outside)
    cases = script.cases_of("bf16", shapes, Inputs(DEVICE), routing.route, 0, exact=False, card=True)
    vendors = script.check([case for case in cases if case.name.startswith("linear")], torch_ops(), lambda text: None)
    own = [verdict for case, _, verdict in found.lines if case.name.startswith("linear")]
    assert all(a.limit > b.limit for (*_, a), b in zip(vendors.lines, own, strict=True))


@pytest.mark.parametrize("kind", ["int8", "fp8", "bf16"])
def test_a_head_with_another_bit_than_its_twin_is_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def heads() -> Any:
        cases = script.cases_of(kind, TINY, Inputs(DEVICE), routing.route, 0, exact=True, card=True)
        heads = [case for case in cases if case.name.startswith("head ")]
        assert {case.format for case in heads} == {kind}
        return script.check(heads, torch_ops(), lambda text: None)

    plain = weigh_triton.weigh_fused

    def wrong(*args: Any) -> Any:
        weights, stats, tile = plain(*args)
        stats.tilt.view(torch.int32)[-1, -1] ^= args[-1]
        return weights, stats, tile

    found = heads()
    assert found.broken == found.outside == []
    assert len(found.lines) == 3 * 5
    monkeypatch.setattr(weigh_triton, "weigh_fused", wrong)
    assert [told.partition(": ")[2] for told in heads().outside] == ["tilt as by Triton"] * 3


class Stand:
    """In for the kernel in CUDA C++: what Triton's makes, with another bit where it is `wrong`. Tiny shapes have tiles,
    too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> None:
        self.wrong, self.tiles = wrong, list[Tile]()
        monkeypatch.setattr(kernels, "cpp", lambda device: True)
        monkeypatch.setattr(product_cuda, "product", self.product)
        monkeypatch.setattr(product_cuda, "MEASURED", {(64, 128): ((range(6, 8), Tile(64, 8, 2)),)})
        monkeypatch.setattr(product_cuda, "LINE", 64)
        monkeypatch.setattr(exact_cuda, "ROWS", 5)
        monkeypatch.setattr(exact_cuda, "INPUTS", (128,))

    def product(self, x: Rows, w: Tensor, scale: Tensor | None, tile: Tile) -> Tensor:
        self.tiles.append(tile)
        out = exact_cases.by_triton().linear(x, (w, scale))
        out.view(torch.int16)[-1, -1] ^= self.wrong
        return out


@pytest.mark.parametrize("wrong", [False, True])
def test_another_bit_than_that_of_triton_is_told(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel in CUDA C++ is used: by the operations, and in each of its tiles"""
    stand = Stand(monkeypatch, wrong)
    found = [outcome("fp8", triton_ops(exact=True), only=name) for name in ("linear o", "CUDA C++")]
    assert [each.broken for each in found] == [[], []]
    assert set(stand.tiles) == {*exact_cuda.tiles(), Tile(64, 8, 2)}
    lines = [(case.name, case.shape.partition(" ")[0], what) for each in found for case, what, _ in each.lines]
    compared = [(name, rows) for name, rows, what in lines if what == "as by Triton"]
    assert set(compared[: -len(exact_cuda.tiles())]) == {("linear o sliding", "6"), ("linear o sliding", "7")}
    told = [f"{name}: as by Triton" for name, _ in compared]
    assert [each for one in found for each in one.outside] == (told if wrong else [])


def test_memcheck_calls_the_kernel_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    monkeypatch.setattr(script, "shapes_of", lambda name: TINY)
    monkeypatch.setattr(script, "triton_ops", lambda exact: torch_ops())
    for kind, code in (("fp8", 0), ("bf16", 1), ("int8", 1), ("int4", 1)):  # 1: there is no such case
        stand.tiles.clear()
        assert script.main(["--memcheck", "--kind", kind, "--only", "CUDA C++"]) == code
        assert stand.tiles == (exact_cuda.tiles() if kind == "fp8" else [])


def test_on_a_card_every_tile_in_cuda_has_a_case_of_the_engines_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """… of a canvas, too; and rows that do not fill it"""
    monkeypatch.setattr(kernels, "cpp", lambda device: True)
    shapes, found = shapes_of("26b"), dict[tuple[int, int], set[tuple[Tile, int]]]()
    hidden = shapes.config.hidden_size
    for layer in shapes.layers():
        for ins, outs in ((hidden, layer.projected), (layer.heads * layer.size, hidden)):
            w = torch.empty(outs, ins, dtype=FP8, device="meta")
            for n in (*shapes.rows, *shapes.dense):
                x = Rows(torch.empty(n, ins, dtype=FP8, device="meta"), torch.empty(n, 1, device="meta"))
                tile = product_cuda.tile_for(x, w)
                found.setdefault((ins, outs), set()).update([] if tile is None else [(tile, n)])
    assert found.keys() == product_cuda.MEASURED.keys()
    for shape, known in product_cuda.MEASURED.items():
        tiles = {tile for _, tile in known}
        assert {tile for tile, _ in found[shape]} == tiles
        assert {tile for tile, n in found[shape] if n % tile.rows} == tiles
        assert {n for _, n in found[shape]} >= {256}


def test_tiles_in_cuda_are_checked_with_what_sticks_out_of_them() -> None:
    stages = {tile.stages for tile in exact_cuda.tiles()}
    few, many = (-(-inputs // 128) for inputs in exact_cuda.INPUTS)
    assert few < min(stages)
    assert 2 * max(stages) < many
    assert all(inputs % 128 == 0 for inputs in exact_cuda.INPUTS), "Triton takes other steps along others"
    assert all(exact_cuda.ROWS % rows for rows in (64, 128))
    for tile in exact_cuda.tiles():
        assert (2 * tile.outputs + 24) % tile.outputs


def test_what_the_limits_say_of_the_kernels_is_so() -> None:
    assert soft_triton.FP8_TOP.value == exact_limits.SOFT_TOP
    assert soft_triton.FP8_STEPS * soft_triton.soft_blocks(1).depth == exact_limits.SOFT_RUN
    assert weigh_triton.head_blocks(False, torch.float8_e4m3fn).vocab * exact_limits.FP32 < exact_limits.SUM_PLAIN


def test_two_numbers_near_nothing_may_be_off_by_the_product_of_their_errors() -> None:
    nothing, off = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    want, bound = exact_products._gated((nothing, off))
    assert want.item() == 0
    assert bound.item() >= 0.5 * off.prod()  # gelu'(0) = 1/2


# ---- what is wrong is told -----------------------------------------------------------------------------------------


def scaled(rows: Rows, factor: float) -> Rows:
    return Rows(rows.values, rows.scale * factor) if rows.scale is not None else Rows(rows.values * factor)


def one_number(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[-1, out[-1].abs().argmax()] *= 1.05
    return out


def later(op: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **options: change(op(*args, **options))


TWINS = torch_ops()
WRONG: dict[str, tuple[str, str, Callable[..., Any]]] = {  # what: kind, operation, what it does instead
    "no weight": ("bf16", "norm_rows", lambda x, w, *rest: TWINS.norm_rows(x, None, *rest)),
    "another scale": ("fp8", "norm_rows", later(TWINS.norm_rows, lambda rows: scaled(rows, 1.02))),
    "norms swapped": (
        "fp8", "after_attention",
        lambda x, a, post, dense, sparse, *rest: TWINS.after_attention(x, a, post, sparse, dense, *rest),
    ),
    "no scalar": (
        "bf16", "after_feed_forward",
        lambda x, a, b, w, scalar, *rest: TWINS.after_feed_forward(x, a, b, w, scalar * 0 + 1, *rest),
    ),
    "rounded down": (
        "int8", "quantize_rows",
        later(TWINS.quantize_rows, lambda pair: ((pair[0].float() * 0.97).to(pair[0].dtype), pair[1])),
    ),
    "the next position": ("bf16", "rope_at", lambda at, *rest: TWINS.rope_at(at + 1, *rest)),
    "turned back": (
        "bf16", "split_heads", lambda qkv, q, k, rope, *rest: TWINS.split_heads(qkv, q, k, (rope[0], -rope[1]), *rest)
    ),
    "the next expert": ("bf16", "route", later(TWINS.route, lambda pair: ((pair[0] + 1) % 16, pair[1]))),
    "an expert twice": ("bf16", "route", later(TWINS.route, lambda pair: (pair[0][:, :1].expand(-1, 2), pair[1]))),
    "a pair in another list": (
        "bf16", "place",
        later(TWINS.place, lambda found: (*found[:2], replace(found[2], lists=found[2].lists.roll(1, 0)))),
    ),
    "places of the next": (
        "bf16", "place",
        later(TWINS.place, lambda found: (*found[:2], replace(found[2], place=found[2].place.roll(1)))),
    ),
    "shares of the next": (
        "bf16", "place",
        later(TWINS.place, lambda found: (*found[:2], replace(found[2], share=found[2].share.roll(1, 0)))),
    ),
    "weights of the next": ("bf16", "place", later(TWINS.place, lambda found: (found[0], found[1].flip(1), found[2]))),
    "shares of all": ("bf16", "route", later(TWINS.route, lambda pair: (pair[0], pair[1] * 0.9))),
    "half of a scale": ("int8", "linear", lambda x, w: TWINS.linear(x, (w[0], w[1] * 2 if w[1] is not None else None))),
    "one scale": (
        "fp8", "linear",
        lambda x, w: TWINS.linear(x, (w[0], torch.cat((w[1][:1] * 2, w[1][1:])) if w[1] is not None else None)),
    ),
    "one number": ("bf16", "linear", later(TWINS.linear, one_number)),
    "gate and up swapped": (
        "bf16", "geglu", lambda x, w: TWINS.geglu(x, (torch.cat(w[0].chunk(2)[::-1]), w[1]))
    ),
    "one expert's scale": (
        "fp8", "experts",
        lambda x, at, share, up, down, *rest: TWINS.experts(
            x, at, share, up, (down[0], down[1].index_add(0, at[0, :1], down[1][at[0, :1]]))  # one that is taken
        ),
    ),
    "4-bit halves swapped": (
        "int4", "experts",
        lambda x, at, share, up, down, *rest: TWINS.experts(
            x, at, share, up, ((down[0] << 4) | (down[0] >> 4), down[1])
        ),
    ),
    "all shares the same": (
        "int4", "experts", lambda x, at, share, up, down, *rest: TWINS.experts(x, at, share * 0 + 0.5, up, down)
    ),
    "a window one too narrow": (
        "bf16", "attend",
        lambda q, k, v, prefix, new, causal, window, *rest, **options: TWINS.attend(
            q, k, v, prefix, new, causal, window and window - 1, *rest, **options
        ),
    ),
    "nothing kept": ("fp8", "attend", lambda *args, keep=False: TWINS.attend(*args, keep=False)),
    "kept by a canvas": ("fp8", "attend", lambda *args, keep=False: TWINS.attend(*args, keep=True)),
    "a counter that is left": (
        "bf16", "route_one", lambda *args: (TWINS.route_one(*args), args[-1].add_(1))[0]
    ),
    "the experts' norm for both": (
        "fp8", "route_one",
        lambda x, branch, norms, *rest: TWINS.route_one(x, branch, (norms[0], norms[2], norms[2]), *rest),
    ),
    "the next token": (
        "bf16", "vocab_end", later(TWINS.vocab_end, lambda r: replace(r, sample=(r.sample + 1) % 272))
    ),
    "the next best": (
        "int8", "vocab_end", later(TWINS.vocab_end, lambda r: replace(r, argmax=(r.argmax + 1) % 272))
    ),
    "bits for nats": ("int8", "vocab_end", later(TWINS.vocab_end, lambda r: replace(r, entropy=r.entropy * 1.4427))),
    "bans not obeyed": (
        "bf16", "vocab_end",
        lambda x, table, rules, *rest, **options: TWINS.vocab_end(
            x, table, replace(rules, banned=None, banned_set=None), *rest, **options
        ),
    ),
    "a warmer softmax": (
        "bf16", "vocab_end",
        lambda x, table, rules, *rest, **options: TWINS.vocab_end(
            x, table, replace(rules, temperature=rules.temperature * 1.01), *rest, **options
        ),
    ),
    "soft embeddings of no scale": (
        "fp8", "vocab_end",
        later(TWINS.vocab_end, lambda r: r if r.soft is None else replace(r, soft=r.soft * 1.2)),
    ),
    "keys for values": ("bf16", "store", lambda k, v, prefix, new: TWINS.store(v, k, prefix, new)),
    "a warmer canvas": ("bf16", "prepare", later(TWINS.prepare, lambda t: (t[0] * 1.0001, *t[1:]))),
    "chance of another step": (
        "bf16", "prepare",
        lambda counts, *rest: TWINS.prepare(counts + torch.tensor([0, 1, 0, 0, 0, 0])[:, None], *rest),
    ),
    "a stop that comes late": (
        "bf16", "decide",
        lambda s, *rest: TWINS.decide(s._replace(reals=s.reals - torch.tensor([0, 0, 0, 0, 3.0])[:, None]), *rest),
    ),
    "a smaller bound": (
        "bf16", "decide",
        lambda s, *rest: TWINS.decide(s._replace(reals=s.reals * torch.tensor([1, 1, 0.5, 1, 1])[:, None]), *rest),
    ),
    "another draw": ("bf16", "draws", later(TWINS.draws, lambda pair: (pair[0], pair[1] + 1))),
    "not a number": ("bf16", "norm_rows", later(TWINS.norm_rows, lambda rows: scaled(rows, float("nan")))),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_operation_is_outside(what: str) -> None:
    kind, name, op = WRONG[what]
    found = outcome(kind, replace(torch_ops(), **{name: op}), only=name)
    assert found.broken == []
    assert found.outside
    assert outcome(kind, torch_ops(), only=name).outside == []


def test_every_operation_has_been_seen_wrong() -> None:
    assert {name for _, name, _ in WRONG.values()} == set(exact_chain.names(torch_ops()))


@pytest.mark.parametrize("rule", ["a free position at least", "the surest at least"])
def test_a_sampler_without_one_of_its_rules_is_outside(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = sampler._accept

    def wrong(
        entropy: Tensor, whole: Tensor, logprob: Tensor, bound: Tensor, threshold: Tensor, free: Tensor
    ) -> Tensor:
        if rule == "a free position at least":
            return accept(entropy, whole, logprob, bound, threshold, torch.ones_like(free))
        more = (F.pad(t, (0, 1), value=v) for t, v in ((entropy, torch.inf), (whole, 0), (logprob, torch.nan)))
        return accept(*more, bound, threshold, F.pad(free, (0, 1)))[:, :-1]  # beside NaN none is the surest

    monkeypatch.setattr(sampler, "_accept", wrong)
    assert outcome("bf16", torch_ops(), only="decide").outside


def test_a_wrong_order_of_pairs_is_outside() -> None:
    index = torch.tensor([[1, 0], [0, 2]])
    right = routing.route(index, 4, 16)
    assert all(judge(part).good for part in exact_small.sort(right, index, 4, 16))
    unstable = replace(right, order=right.order[[1, 0, 2, 3]])
    assert not all(judge(part).good for part in exact_small.sort(unstable, index, 4, 16))


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """1 for what is outside, for what fails and for what is never called"""

    def code(ops: Ops, *argv: str) -> int:
        monkeypatch.setattr(script, "triton_ops", lambda exact: ops)
        monkeypatch.setattr(script, "shapes_of", lambda name: TINY)
        return script.main(["--kind", "fp8", *argv])

    def fails(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    twins = torch_ops()
    assert code(twins) == 0
    assert code(replace(twins, draws=WRONG["another draw"][2])) == 1
    assert "OUTSIDE" in capsys.readouterr().out
    assert code(replace(twins, draws=fails)) == 1
    assert "FAILED: RuntimeError: no such kernel" in capsys.readouterr().out
    assert code(replace(twins, draws=fails), "--memcheck") == 1
    assert code(twins, "--memcheck") == 0
    out = capsys.readouterr().out
    assert "0 results" in out
    assert "limit" not in out
    assert code(twins, "--only", "no such operation") == 1  # nothing was checked
    monkeypatch.setattr(script, "vocab_cases", lambda *args, **options: ())
    assert code(twins) == 1
    assert "never called: vocab_end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--kind", "fp16"], "no number format fp16"),
        (["--memcheck", "--chain"], "ask for one"),
        (["--memcheck", "--out", "x"], "makes no table"),
        (["--chain", "--exact"], "shapes of its own"),
        pytest.param(
            ["--shapes", "26b"], "needs a CUDA card",
            marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a card"),
        ),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        script.main(argv)
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err


# ---- the judge and the chain ---------------------------------------------------------------------------------------


def test_the_judge() -> None:
    want, bound = torch.ones(100, dtype=torch.float64), torch.full((100,), 0.01, dtype=torch.float64)
    everywhere, once = want * 1.011, want.clone()
    once[7] = 1 + 1.01 * exact_limits.SPREAD * 0.01
    assert judge(Part("", want * 1.009, want, bound)).good
    assert not judge(Part("", everywhere, want, bound)).good  # no number is far off, but all are
    assert judge(Part("", once, want, bound)).error < 0.01
    assert not judge(Part("", once, want, bound)).good  # one is
    assert not judge(Part("", everywhere, want, bound, "most")).good
    assert judge(Part("", want * 1.009, want, bound, "most")).good
    for how in ("norm", "most"):
        assert not judge(Part("", want * torch.nan, want, bound, how)).good
        assert judge(Part("", want, want, bound * 0, how)).good
    assert judge(Part("", once, want, how="equal")).error == 1
    with pytest.raises(ValueError, match="a result of"):
        judge(Part("", want[:9], want, bound))


def test_bits_that_change_from_call_to_call_are_noticed() -> None:
    calls = iter(range(100))
    restless = replace(torch_ops(), draws=lambda *args: (torch.tensor([next(calls)]), torch.zeros(1)))
    unstable: set[str] = set()
    ops = exact_chain.twice(restless, DEVICE, unstable)
    ops.norm_rows(torch.randn(2, 8), None, 1e-6)
    assert unstable == set()
    ops.draws()
    assert unstable == {"draws"}


def test_experts_that_are_called_twice_have_marks_of_their_own_and_find_them_zero() -> None:
    """Streamed, they take tiles by them: with those of the call before, nothing would be left to do."""

    def experts(x: Rows, index: Tensor, weight: Tensor, up: Any, down: Any, placed: routing.Placed) -> Tensor:
        placed.marks[0] += 1
        return placed.marks[:1].clone()

    unstable: set[str] = set()
    ops = exact_chain.twice(replace(torch_ops(), experts=experts), DEVICE, unstable)
    placed = routing.place(torch.tensor([[0, 1]]), torch.ones(1, 2), 2, 16)
    assert ops.experts(Rows(torch.ones(1, 2)), None, None, None, None, placed).item() == 1
    assert unstable == set()


@pytest.mark.parametrize("shapes", [shapes_of("26b"), streamed(shapes_of("small"))], ids=["26b", "small"])
def test_on_a_card_all_kernels_that_stream_experts_have_a_case(shapes: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in fp8: of few rows, and of many."""
    config = shapes.config
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    up, down = (
        torch.empty(experts, *shape, dtype=FP8, device="meta") for shape in ((2 * width, hidden), (hidden, width))
    )
    monkeypatch.setattr(experts_triton, "gluon", lambda device: True)
    found = {block_rows(n * config.top_k_experts, experts, "fp8") for n in (*shapes.rows, *shapes.placed)}
    assert {block for block in found if experts_triton.streams(block, up, down)} == {32, 64}
    assert {block for block in found if experts_triton.streams_wide(block, up, down)} == {128, 160}


def test_on_a_card_the_chain_has_pairs_that_are_sorted_and_experts_that_are_streamed() -> None:
    config, ops = exact_chain.config_for(True), torch_ops()
    placed, blocks = set[bool](), set[int]()
    for lengths in exact_chain.LENGTHS[True]:
        for tokens in (sum(lengths), len(lengths) * config.canvas_length):
            here = ops.places(tokens, config.num_experts, config.top_k_experts)
            placed.add(here)
            if here:
                blocks.add(block_rows(tokens * config.top_k_experts, config.num_experts, "fp8"))
    assert placed == {False, True}
    assert blocks == {32, 64}, "those of `experts_triton.streams`"
    assert config.hidden_size % 128 == config.moe_intermediate_size % 64 == 0


def test_the_chain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the twins: in the interpreter it would take a minute."""

    def lines(ops: Ops, code: int) -> list[str]:
        monkeypatch.setattr(exact_chain, "triton_ops", lambda exact: ops)
        assert script.main(["--chain", "--kind", "fp8"]) == code
        return capsys.readouterr().out.splitlines()

    assert len(told := lines(torch_ops(), 0)) >= 2 * 7
    assert all(line.endswith(": yes") for line in told)
    draws = iter(range(1000))
    route = later(TWINS.route_one, lambda routed: (routed[0] * (1 + next(draws) / 8), *routed[1:]))
    told = lines(replace(torch_ops(), route_one=route, few=4), 1)
    assert "fp8, 16 tokens: the same bits again: yes" in told
    assert "fp8, 16 tokens: the same bits of tokens one by one again: NO" in told
    calls = iter(range(1000))
    restless = later(TWINS.norm_rows, lambda rows: scaled(rows, 1 + next(calls) / 8))
    told = lines(replace(torch_ops(), norm_rows=restless), 1)
    assert "fp8, 16 tokens: the same bits again: NO" in told
    assert "fp8, 16 tokens: the same bits of norm_rows when called twice: NO" in told
