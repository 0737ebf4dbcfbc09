"""The vocabulary end in Triton against its torch definition: in Triton's interpreter, or on a card if there is one."""

from ops.triton_cpu import DEVICE  # isort: skip

from dataclasses import replace

import pytest
import torch

from diffusiongemma.diffusion.beliefs import read_logits
from diffusiongemma.errors import InputError
from diffusiongemma.ops import soft_triton, vocab_triton, weigh_triton
from diffusiongemma.ops.quant import FP8, Format, dequantize, quantize
from diffusiongemma.ops.vocab import Rules, Table, ban, draws, make_table, obey, philox, vocab_end

CAP, SCALE = 30.0, 8.0
FP32, BF16 = torch.float32, torch.bfloat16
MANY = 140 if DEVICE.type == "cuda" else 18  # rows: more than a tile has, or what an interpreter can do


def make(rows: int = 5, vocab: int = 1312, width: int = 64, dtype=FP32, kind=None, soft=False, seed=0, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(vocab, width, generator=g) * spread).to(DEVICE, dtype)
    hidden = torch.randn(rows, width, generator=g).to(DEVICE, dtype)
    temperature = torch.rand(rows, generator=g).to(DEVICE) + 0.4
    return hidden, make_table(weight, kind, soft), Rules(temperature, torch.rand(rows, generator=g).to(DEVICE))


def with_rules(rules: Rules, vocab: int) -> Rules:
    """Two sets of banned tokens, one of which bans a whole tile, and a pin."""
    rows = len(rules.temperature)
    sets = ban([[0, 3, 31, 32, vocab - 1], list(range(256, 768))], vocab, DEVICE)
    which = torch.tensor([(0, 1, -1)[i % 3] for i in range(rows)], dtype=torch.int32, device=DEVICE)
    pin = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    pin[2], pin[3] = 700, vocab - 1  # one in its own banned tile's set or not: a pin wins
    return Rules(rules.temperature, rules.uniform, pin, sets, which)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def passes(sample: torch.Tensor, probs: torch.Tensor, uniform: torch.Tensor, slack: float) -> bool:
    """Does the running sum of the probabilities pass the uniform number at the sample?"""
    below = probs.cumsum(dim=1)
    after = below.gather(1, sample[:, None]).squeeze(1)
    before = after - probs.gather(1, sample[:, None]).squeeze(1)
    return bool(((before <= uniform + slack) & (uniform <= after + slack)).all())


FORMATS = [
    (FP32, None, False), (FP32, None, True), (FP32, "int8", True), (FP32, "fp8", True),
    (BF16, None, False), (BF16, None, True), (BF16, "int8", True), (BF16, "fp8", True),
]  # fmt: skip


@pytest.mark.parametrize("how", ["fused", "library"])
@pytest.mark.parametrize(
    ("dtype", "kind", "soft", "ruled"), [*((*f, True) for f in FORMATS), (BF16, None, False, False)]
)
def test_equals_the_definition(dtype, kind, soft, ruled, how) -> None:
    if how == "library" and (kind == "int8" or (kind == "fp8" and DEVICE.type == "cpu")):
        pytest.skip("no library has this product here")
    hidden, table, rules = make(dtype=dtype, kind=kind, soft=soft)
    vocab = table.weight.shape[0]
    if ruled:
        rules = with_rules(rules, vocab)
    assert vocab_triton.supported(hidden, table, soft=True) is None
    got = vocab_triton.vocab_end(hidden, table, rules, CAP, SCALE, how, how)
    want = vocab_end(hidden, table, rules, CAP, SCALE, torch.float64)
    # A library's product rounds the logits to the dtype; the fused one does not.
    loose = 0.05 if how == "library" and (dtype == BF16 or kind == "fp8") else 1e-4
    assert torch.equal(got.argmax, want.argmax)
    assert (got.entropy - want.entropy).abs().max() < loose
    assert (got.logprob - want.logprob).abs().max() < loose
    probs = _probs(hidden, table, rules)
    assert passes(got.sample, probs, rules.uniform, 0.01 if dtype == BF16 or loose > 0.01 else 1e-5)
    same = got.sample == want.sample
    assert (got.sample_logprob - want.sample_logprob)[same].abs().max() < loose + (0.005 if dtype == BF16 else 0)
    assert got.soft is not None
    assert want.soft is not None
    assert got.soft.dtype == dtype
    # With the fp8 copy, the weights are fp8 too: half a step of 3 bits each
    limit = 0.04 if soft else {FP32: 1e-5, BF16: 0.02 if how == "library" else 0.005}[dtype]
    assert relative(got.soft, want.soft) < limit


def _probs(hidden, table, rules):
    """[N, V] float64, by definition"""
    x = hidden.double()
    if table.scale is not None:
        x = dequantize(*quantize(hidden.float(), Format("fp8" if table.weight.dtype == FP8 else "int8"))).double()
    z = CAP * torch.tanh(x @ table.wide(torch.float64).t() / CAP)
    return (obey(z, rules) / rules.temperature[:, None]).softmax(dim=1)


def test_the_definition_is_what_the_sampler_reads() -> None:
    """`vocab.vocab_end` against the engine's `read_logits` and the network's soft embedding, on float32."""
    hidden, table, rules = (t.cpu() if isinstance(t, torch.Tensor) else t for t in make(rows=6))
    table, rules = Table(table.weight.cpu()), Rules(torch.full((6,), 0.7), rules.uniform.cpu())
    got = vocab_end(hidden, table, rules, CAP, SCALE)
    logits = CAP * torch.tanh(hidden @ table.weight.t() / CAP)
    beliefs = read_logits(logits, 0.7, rules.uniform)
    assert torch.equal(got.argmax, beliefs.argmax)
    assert torch.equal(got.sample, beliefs.sample)
    torch.testing.assert_close(got.entropy, beliefs.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.logprob, beliefs.logprob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.soft, beliefs.probs @ table.weight * SCALE, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["fused", "library"])
def test_rules_are_obeyed(how) -> None:
    hidden, table, rules = make(rows=8, spread=0.05)
    for uniform in (0.0, 1 - 2**-24):
        ruled = with_rules(rules, 1312)
        ruled = Rules(
            ruled.temperature, torch.full_like(rules.uniform, uniform), ruled.pin, ruled.banned, ruled.banned_set
        )
        got = vocab_triton.vocab_end(hidden, table, ruled, CAP, SCALE, how)
        for row, token in ((2, 700), (3, 1311)):
            assert got.argmax[row] == got.sample[row] == token
            assert got.entropy[row] == got.logprob[row] == got.sample_logprob[row] == 0
            torch.testing.assert_close(got.soft[row], table.weight[token] * SCALE)
        for tokens in (got.argmax, got.sample):
            assert not {int(tokens[i]) for i in (0, 6)} & {0, 3, 31, 32, 1311}
            assert not any(256 <= int(tokens[i]) < 768 for i in (1, 4, 7))


def test_the_sample_follows_the_probabilities() -> None:
    """Evenly spread uniform numbers give every token its share, to one."""
    rows = 48
    hidden, table, _ = make(rows=1, vocab=96, spread=0.1)
    rules = Rules(torch.ones(rows, device=DEVICE), (torch.arange(rows, device=DEVICE) + 0.5) / rows)
    got = vocab_triton.vocab_end(hidden.expand(rows, -1), table, rules, CAP, None)
    assert got.soft is None
    probs = _probs(hidden, table, Rules(rules.temperature[:1], rules.uniform[:1]))[0]
    counts = torch.bincount(got.sample, minlength=96)
    assert (counts - rows * probs).abs().max() <= 1
    assert (got.sample.diff() >= 0).all()


@pytest.mark.parametrize(("kind", "soft", "few"), [(None, False, False), ("int8", True, False), (None, False, True)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind, soft, few) -> None:
    hidden, table, rules = make(rows=16 if few else MANY, vocab=544, kind=kind, soft=soft)
    whole = vocab_triton.vocab_end(hidden, table, rules, CAP, SCALE, few=few)
    for part in (slice(0, 1), slice(3, 9), slice(len(hidden) - 1, len(hidden))):
        alone = vocab_triton.vocab_end(hidden[part], table, rules.rows(part.start, part.stop), CAP, SCALE, few=few)
        for name in ("argmax", "sample", "entropy", "logprob", "sample_logprob", "soft"):
            a, b = getattr(alone, name), getattr(whole, name)[part]
            # The interpreter's products are NumPy's, whose bits depend on where in a tile a row lies; a card's do not.
            assert torch.equal(a, b) or (DEVICE.type == "cpu" and torch.allclose(a, b, atol=1e-6)), name


NAMES = ("argmax", "sample", "entropy", "logprob", "sample_logprob", "soft")


@pytest.mark.parametrize("coldest", [0.4, None])
@pytest.mark.parametrize(("dtype", "kind", "soft"), [(FP32, None, False), (BF16, "int8", True)])
def test_rules_of_one_row_do_not_show_in_another(dtype, kind, soft, coldest) -> None:
    """A row's bits are the same whether its neighbours have pins and banned tokens or nobody has."""
    hidden, table, rules = make(rows=MANY, dtype=dtype, kind=kind, soft=soft)
    ruled = with_rules(rules, 1312)
    nobody = torch.full_like(ruled.pin, -1)
    free = Rules(rules.temperature, rules.uniform, nobody, ruled.banned, nobody)
    got, want = (vocab_triton.vocab_end(hidden, table, r, CAP, SCALE, coldest=coldest) for r in (ruled, free))
    rows = torch.tensor([i for i in range(MANY) if i % 3 == 2 and i != 2], device=DEVICE)
    for name in NAMES:
        assert torch.equal(getattr(got, name)[rows], getattr(want, name)[rows]), name
    assert not torch.equal(got.argmax, want.argmax)
    if DEVICE.type == "cpu":  # on a card, rules that are not there at all are another kernel
        none = vocab_triton.vocab_end(hidden, table, rules, CAP, SCALE, coldest=coldest)
        assert all(torch.equal(getattr(none, name), getattr(want, name)) for name in NAMES)


def test_many_rows_are_read_in_pieces(monkeypatch) -> None:
    hidden, table, rules = make(rows=7)
    whole = vocab_triton.vocab_end(hidden, table, with_rules(rules, 1312), CAP, SCALE)
    read, finish = [], vocab_triton._finish
    monkeypatch.setattr(vocab_triton, "_finish", lambda x, *rest: read.append(len(x)) or finish(x, *rest))
    pieces = vocab_triton.vocab_end(hidden, table, with_rules(rules, 1312), CAP, SCALE, at_once=3)
    assert read == [3, 3, 1]
    assert all(torch.equal(getattr(pieces, name), getattr(whole, name)) for name in NAMES if name != "soft")
    torch.testing.assert_close(pieces.soft, whole.soft, atol=1e-6, rtol=1e-5)


def test_small_temperatures_and_large_logits() -> None:
    """Logits at the cap over a temperature of 0.01 are 3,000 apart from the rest: nothing overflows."""
    hidden, table, rules = make(spread=20.0)
    cold = Rules(torch.full_like(rules.temperature, 0.01), rules.uniform)
    got = vocab_triton.vocab_end(hidden, table, cold, CAP, SCALE)
    want = vocab_end(hidden, table, cold, CAP, SCALE, torch.float64)
    assert torch.equal(got.sample, want.sample) or passes(got.sample, _probs(hidden, table, cold), cold.uniform, 1e-3)
    for name in ("entropy", "logprob", "sample_logprob", "soft"):
        assert getattr(got, name).isfinite().all(), name
    torch.testing.assert_close(got.entropy, want.entropy, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("dtype", "kind", "soft", "how"),
    [(FP32, None, False, "fused"), (BF16, None, False, "fused"), (FP32, None, False, "library"),
     (BF16, "int8", True, "fused"), (FP32, "fp8", True, "fused")],
)  # fmt: skip
def test_a_reference_that_does_not_depend_on_the_logits(dtype, kind, soft, how) -> None:
    hidden, table, rules = make(rows=6, dtype=dtype, kind=kind, soft=soft, spread=1.0)
    rules = with_rules(rules, 1312)
    rules.temperature[0], rules.temperature[5] = 0.39, 2.0
    got = vocab_triton.vocab_end(hidden, table, rules, CAP, SCALE, how, how, coldest=0.39)
    want = vocab_end(hidden, table, rules, CAP, SCALE, torch.float64)
    assert torch.equal(got.argmax, want.argmax)
    assert (got.entropy - want.entropy).abs().max() < 1e-4
    assert (got.logprob - want.logprob).abs().max() < 1e-4
    assert passes(got.sample, _probs(hidden, table, rules), rules.uniform, 0.01 if dtype == BF16 else 1e-4)
    assert got.entropy[2] == got.logprob[2] == 0
    assert relative(got.soft, want.soft) < (0.04 if soft else 1e-5 if dtype == FP32 else 0.005)
    # Temperatures that would leave the range of the numbers are read the other way, whose bits are the same as ever.
    cold = Rules(torch.full_like(rules.temperature, 0.01), rules.uniform)
    one, two = (vocab_triton.vocab_end(hidden, table, cold, CAP, SCALE, how, how, coldest=c) for c in (0.01, None))
    assert torch.equal(one.soft, two.soft)


@pytest.mark.parametrize(("dtype", "kind", "soft", "coldest"), [(FP32, None, False, None), (FP32, None, False, 0.4),
                                                                (BF16, "int8", True, None)])  # fmt: skip
def test_what_is_skipped_is_bounded(dtype, kind, soft, coldest) -> None:
    """Positions that are sure of themselves: most tiles hold nothing, and what is left out is within what may be."""
    hidden, table, rules = make(rows=3, vocab=2624, dtype=dtype, kind=kind, soft=soft, spread=1.0)
    rules = Rules(torch.full_like(rules.temperature, 0.4), rules.uniform)
    args = (hidden, table, rules, CAP, SCALE)
    whole = vocab_triton.vocab_end(*args, coldest=coldest)
    norm = float(table.wide_soft(torch.float64).norm(dim=1).max()) * SCALE
    for skip in (1e-9, 1e-3, 0.03):
        got = vocab_triton.vocab_end(*args, coldest=coldest, skip=skip)
        assert torch.equal(got.sample, whole.sample)
        rounding = 0.02 * norm if dtype == BF16 else 1e-5 * norm
        assert (got.soft.double() - whole.soft.double()).norm(dim=1).max() <= skip * norm + rounding
    # and it does skip
    weighed = weigh_triton.weigh_fused(*args[:4], weigh_triton.head_blocks(False, torch.float32))
    factor, share, _ = vocab_triton.result(rules, vocab_triton.Weighed(*weighed, CAP, False))
    parts = soft_triton.Parts(weighed[0], factor, share, weighed[1].mass, weighed[2], False)
    counts = [int(soft_triton.needed(parts, skip, 32).tiles.sum()) for skip in (1e-12, 1e-3, 0.03)]
    probs = _probs(hidden, table, rules)
    tiles = torch.nn.functional.pad(probs, (0, -probs.shape[1] % weighed[2])).unflatten(1, (-1, weighed[2])).sum(2)
    assert counts[0] > counts[1] > counts[2] > 0
    assert counts[2] == int((tiles > 0.03 / tiles.shape[1]).any(dim=0).sum())


def test_draws_are_the_same_to_the_bit() -> None:
    g = torch.Generator().manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (300,), generator=g).to(DEVICE)
    step = torch.randint(0, 10_000, (300,), generator=g, dtype=torch.int32).to(DEVICE)
    position = torch.arange(300, dtype=torch.int32, device=DEVICE) % 256
    for vocab in (262_144, 50_257):
        got, want = vocab_triton.draws(seed, step, position, vocab), draws(seed, step, position, vocab)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    # one position's numbers do not depend on the others
    alone = vocab_triton.draws(seed[7:8], step[7:8], position[7:8], 50_257)
    assert alone[0] == got[0][7]
    assert alone[1] == got[1][7]


def test_numbers_that_do_not_lie_side_by_side_are_read_as_they_are_meant() -> None:
    """One seed, step and temperature for a whole row, expanded: its stride is 0"""
    count = 40
    seed, step = (torch.tensor([n], device=DEVICE).expand(count) for n in (11, 3))
    position = torch.arange(2 * count, dtype=torch.int32, device=DEVICE)[::2]
    for got, want in zip(vocab_triton.draws(seed, step, position, 999), draws(seed, step, position, 999), strict=True):
        assert torch.equal(got, want)
    hidden, table, rules = make()
    one = replace(rules, temperature=torch.tensor([0.7], device=DEVICE).expand(len(hidden)))
    same = replace(rules, temperature=one.temperature.contiguous())
    got, want = (vocab_triton.vocab_end(hidden, table, r, CAP, 1.0) for r in (one, same))
    assert torch.equal(got.entropy, want.entropy)
    assert torch.equal(got.sample, want.sample)


def test_philox_is_philox() -> None:
    """A known answer of Random123: counter and key all zeros."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.tensor([-1])
    assert [f"{int(w):08x}" for w in philox(zero, (zero, zero))] == ["6627e8d5", "e169c58d"]
    assert [f"{int(w):08x}" for w in philox(ones, (zero, zero))] != ["6627e8d5", "e169c58d"]


def test_draws_are_uniform() -> None:
    count = 20_000
    where = torch.arange(count, dtype=torch.int32)
    uniform, token = draws(torch.full((count,), 5), where // 256, where % 256, 1000)
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert 0 <= float(uniform.min()) < 0.001 < 0.999 < float(uniform.max()) < 1
    assert token.unique().numel() == 1000
    assert torch.bincount(token).max() < 50
    other, _ = draws(torch.full((count,), 6), where // 256, where % 256, 1000)
    assert abs(float(torch.corrcoef(torch.stack([uniform, other]))[0, 1])) < 0.03


def test_reasons() -> None:
    hidden, table, rules = make()
    assert "hidden states must be" in str(vocab_triton.supported(hidden.half(), table, True))
    assert "for hidden states of" in str(vocab_triton.supported(hidden.bfloat16(), table, True))
    assert "with_soft" in str(vocab_triton.supported(hidden, make_table(table.weight, "int8"), True))
    assert vocab_triton.supported(hidden, make_table(table.weight, "int8"), False) is None
    assert "multiple of 16" in str(vocab_triton.supported(hidden[:, :40], Table(table.weight[:, :40]), True))
    with pytest.raises(InputError, match="how='fused'"):
        vocab_triton.vocab_end(hidden, make_table(table.weight, "int8", True), rules, CAP, SCALE, "library")
