"""What the network promises on its own: chunks, batches, both modes, clear errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CacheError, InputError
from diffusiongemma.model import DiffusionGemma, KVCache

CONFIG = ModelConfig.preset("tiny", vocab_size=128, hidden_size=32, sliding_window=6, canvas_length=8)
MODEL = DiffusionGemma(CONFIG).init_weights(seed=1, std=0.2).eval().requires_grad_(False)


def draw(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (rows, count), generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 11), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_chunks_of_any_size_give_what_the_whole_prompt_gives(chunks: list[int]) -> None:
    tokens, canvas = draw(1, sum(chunks)), draw(1, 8, 1)
    whole, parts = MODEL.new_cache(1, 100), MODEL.new_cache(1, 100)
    expected = MODEL.encode(tokens, whole)
    got = torch.cat([MODEL.encode(part, parts) for part in tokens.split(chunks, dim=1)], dim=1)
    assert torch.equal(got, expected)  # to the bit
    assert torch.equal(MODEL.denoise(canvas, parts), MODEL.denoise(canvas, whole))


@pytest.mark.parametrize("chunks", [[13], [1, 1], [30], [20, 7]])
def test_remembering_fills_the_cache_as_encoding_does(chunks: list[int]) -> None:
    """The last layer stops at its keys and values; nothing that reads the cache can tell."""
    read, kept = MODEL.new_cache(2, 60), MODEL.new_cache(2, 60)
    for i, count in enumerate(chunks):
        tokens = draw(2, count, i)
        MODEL.encode(tokens, read)
        MODEL.remember_packed(tokens.flatten(), kept.rows, [count, count])
    assert [row.length for row in kept.rows] == [sum(chunks)] * 2
    for a, b in zip(read.rows, kept.rows, strict=True):
        for layer in range(CONFIG.num_hidden_layers):
            for x, y in zip(a.last(layer, 60), b.last(layer, 60), strict=True):
                assert torch.equal(torch.cat(x, dim=1), torch.cat(y, dim=1))
    assert torch.equal(MODEL.denoise(draw(2, 8, 9), kept), MODEL.denoise(draw(2, 8, 9), read))


def test_one_token_at_a_time() -> None:
    tokens = draw(2, 25)
    whole, steps = MODEL.new_cache(2, 40), MODEL.new_cache(2, 40)
    expected = MODEL.encode(tokens, whole)
    assert torch.equal(torch.cat([MODEL.encode(tokens[:, i : i + 1], steps) for i in range(25)], dim=1), expected)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(rows: list[tuple[int, int]]) -> None:
    caches, canvas = [], draw(len(rows), 8, 3)
    for i, (prefix, _) in enumerate(rows):
        cache = MODEL.new_cache(1, 40)
        if prefix:
            MODEL.encode(draw(1, prefix, i), cache)
        caches.append(cache)
    widths = [width for _, width in rows]
    batch = KVCache([cache.rows[0] for cache in caches])
    first = MODEL.denoise(canvas, batch, lengths=widths)
    second = MODEL.denoise(canvas, batch, first, lengths=widths)
    for i, width in enumerate(widths):
        alone = MODEL.denoise(canvas[i : i + 1, :width], caches[i])
        assert torch.equal(first[i, :width], alone[0])
        again = MODEL.denoise(canvas[i : i + 1, :width], caches[i], alone)
        assert torch.equal(second[i, :width], again[0])
        assert not first[i, width:].any()


def test_prompts_of_different_lengths_in_one_encode() -> None:
    lengths = [3, 17, 1, 9]
    tokens = draw(4, 17)
    together = MODEL.new_cache(4, 40)
    hidden = MODEL.encode(tokens, together, lengths=lengths)
    assert together.lengths == lengths
    for i, n in enumerate(lengths):
        alone = MODEL.new_cache(1, 40)
        assert torch.equal(hidden[i, :n], MODEL.encode(tokens[i : i + 1, :n], alone)[0])
        assert not hidden[i, n:].any()


def test_denoise_never_changes_the_cache() -> None:
    cache = MODEL.new_cache(1, 40)
    MODEL.encode(draw(1, 13), cache)
    before = [t.clone() for t in (*cache.rows[0].keys, *cache.rows[0].values)]
    logits = MODEL.denoise(draw(1, 8), cache)
    MODEL.denoise(draw(1, 8), cache, logits)
    after = [*cache.rows[0].keys, *cache.rows[0].values]
    assert cache.lengths == [13]
    for layer, (a, b) in enumerate(zip(before, after, strict=True)):
        used = a.shape[1] if CONFIG.is_sliding(layer % CONFIG.num_hidden_layers) else 13
        assert torch.equal(a[:, : min(used, 13)], b[:, : min(used, 13)])


def test_canvas_positions_see_each_other_both_ways_and_text_does_not() -> None:
    cache = MODEL.new_cache(1, 40)
    MODEL.encode(draw(1, 5), cache)
    canvas = draw(1, 8)
    changed = canvas.clone()
    changed[0, 4] = (canvas[0, 4] + 1) % CONFIG.vocab_size
    moved = (MODEL.denoise(canvas, cache) != MODEL.denoise(changed, cache)).any(-1)[0]
    assert moved.all()
    a, b = MODEL.new_cache(1, 40), MODEL.new_cache(1, 40)
    moved = (MODEL.encode(canvas, a) != MODEL.encode(changed, b)).any(-1)[0]
    assert moved.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("full_window", [False, True])
def test_every_canvas_position_sees_the_same_prefix_tokens(full_window: bool) -> None:
    """A network of sliding layers only (but the last, cut off): which prefix tokens reach the canvas?"""
    config = CONFIG.replace(
        num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"), canvas_sees_full_window=full_window
    )
    model = DiffusionGemma(config).init_weights(seed=2, std=0.2)
    model.layers = model.layers[:1]
    canvas, tokens = draw(1, 8), draw(1, 12)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache(1, 20)
        model.encode(tokens, cache)
        return model.denoise(canvas, cache)

    base = run(tokens)
    window = config.sliding_window if full_window else config.sliding_window - 1
    for at in range(12):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % config.vocab_size
        moved = (run(changed) != base).any(-1)[0]
        assert moved.tolist() == [at >= 12 - window] * 8


def test_logits_are_capped_float32() -> None:
    logits = MODEL.logits(torch.full((1, 2, 32), 1e4))
    assert logits.dtype == torch.float32
    assert logits.abs().max() <= 30.0


def test_training_can_differentiate_both_modes() -> None:
    model = DiffusionGemma(CONFIG).init_weights(std=0.1)
    cache = model.new_cache(1, 32)
    hidden = model.encode(draw(1, 5), cache)
    loss = model.logits(hidden).logsumexp(-1).sum()
    with torch.no_grad():
        cache = model.new_cache(1, 32)
        model.encode(draw(1, 5), cache)
    loss = loss + model.denoise(draw(1, 8), cache, torch.zeros(1, 8, CONFIG.vocab_size)).logsumexp(-1).sum()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: MODEL.encode(torch.tensor([1, 2]), c), InputError, "shape"),
        (lambda c: MODEL.encode(torch.ones(1, 2), c), InputError, "integers"),
        (lambda c: MODEL.encode(draw(2, 3), c), InputError, "cache of 1"),
        (lambda c: MODEL.encode(torch.tensor([[128]]), c), InputError, "0 to 127"),
        (lambda c: MODEL.encode(torch.tensor([[-1]]), c), InputError, "0 to 127"),
        (lambda c: MODEL.encode(draw(1, 3), c, lengths=[4]), InputError, "lengths"),
        (lambda c: MODEL.encode(draw(1, 3), c, lengths=[0]), InputError, "no token"),
        (lambda c: MODEL.encode(draw(1, 21), c), CacheError, "max_length"),
        (lambda c: MODEL.denoise(draw(1, 8), c, torch.zeros(1, 8, 5)), InputError, "self_conditioning"),
    ],
)
def test_wrong_input_gets_a_named_error_and_leaves_the_cache_alone(call, error, words) -> None:
    cache = MODEL.new_cache(1, 20)
    with pytest.raises(error, match=words):
        call(cache)
    assert cache.lengths == [0]


def test_same_seed_same_weights() -> None:
    a, b, c = (DiffusionGemma(CONFIG).init_weights(seed=s) for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)


def test_logits_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    """Nor on how many numbers are left over when a processor takes them sixteen at a time."""
    config = ModelConfig.preset("tiny", vocab_size=389, eos_token_ids=(1,))
    model = DiffusionGemma(config).init_weights(0, std=0.3).eval()
    hidden = 3 * torch.randn(11, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together = model.logits(hidden)
        assert all(torch.equal(model.logits(hidden[i : i + 1])[0], together[i]) for i in range(11))
