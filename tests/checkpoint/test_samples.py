"""Samples: where they come from in a text, and what a canvas of them holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusiongemma.checkpoint.samples import SHORTEST, prompt_for, random_samples, text_samples
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import InputError

BOS = 2
VOCABULARY = 10_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 400), max_size=4), st.integers(1, 60), st.integers(1, 60), st.booleans(), st.integers(0, 99)
)
def test_they_lie_side_by_side(lengths: list[int], prompt: int, canvas: int, bos: bool, seed: int) -> None:
    """No token of a text is in two samples, each sample is a run of one text, and only short rests are left out."""
    starts = [100 + 1000 * i for i in range(len(lengths))]
    texts = [[BOS] * bos + list(range(start, start + n)) for start, n in zip(starts, lengths, strict=True)]
    samples = text_samples(texts, VOCABULARY, 1000, canvas, prompt, BOS if bos else None, seed)
    used: list[int] = []
    for sample in samples:
        tokens = [*sample.prompt.tolist(), *sample.believed.tolist()]
        assert SHORTEST <= len(tokens) <= prompt + canvas
        if bos:
            assert tokens.pop(0) == BOS
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert len({t // 1000 for t in (tokens[0] - 100, tokens[-1] - 100)}) == 1
        assert 1 <= len(sample.believed) <= canvas
        assert len(sample.believed) == (canvas if len(tokens) + bos == prompt + canvas else len(sample.believed))
        used += tokens
    assert len(set(used)) == len(used)
    if prompt + canvas >= SHORTEST:
        assert sum(lengths) - len(used) < SHORTEST * max(1, len(lengths))


def test_as_many_as_asked_for_and_the_same_for_a_seed() -> None:
    texts = [list(range(5000))]
    first, again, other = (text_samples(texts, VOCABULARY, 10, 32, 32, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 10
    assert [s.noisy.tolist() for s in first] == [s.noisy.tolist() for s in again]
    assert [s.prompt.tolist() for s in first] != [s.prompt.tolist() for s in other]
    more = text_samples(texts, VOCABULARY, 20, 32, 32, seed=1)
    assert [s.prompt.tolist() for s in more[:10]] == [s.prompt.tolist() for s in first]


def test_noise_of_every_degree() -> None:
    samples = text_samples([[7] * 40_000], VOCABULARY, 150, 128, 128)
    shares = torch.tensor([float((s.noisy != s.believed).float().mean()) for s in samples])
    assert 0.4 < shares.mean() < 0.6
    assert shares.min() < 0.1
    assert shares.max() > 0.9
    assert (torch.cat([s.believed for s in samples]) == 7).all()


def test_random_ones() -> None:
    samples = random_samples(50, 3, prompt=5, canvas=4)
    assert [(len(s.prompt), len(s.noisy), len(s.believed)) for s in samples] == [(5, 4, 4)] * 3
    assert all(int(t.max()) < 50 for s in samples for t in (s.prompt, s.noisy, s.believed))
    with pytest.raises(InputError, match="at least one prompt"):
        random_samples(50, 0)


def test_a_tokenizer_of_another_model() -> None:
    with pytest.raises(InputError, match="do not belong together"):
        text_samples([list(range(51))], 50, 1, 32)
    assert text_samples([list(range(50))], 50, 1, 32)


def test_a_canvas_wider_than_its_prompt() -> None:
    (sample,) = text_samples([list(range(90))], VOCABULARY, 1, canvas=60, prompt=30)
    assert (len(sample.prompt), len(sample.noisy)) == (30, 60)


def test_prompts_leave_room_for_a_canvas() -> None:
    tiny = ModelConfig.preset("tiny")
    canvas = tiny.canvas_length
    assert prompt_for(tiny) == 256
    assert prompt_for(tiny.replace(max_position_embeddings=canvas + 5)) == 5
    with pytest.raises(InputError, match="no room for a prompt and a canvas"):
        prompt_for(tiny.replace(max_position_embeddings=canvas))
