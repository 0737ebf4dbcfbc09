import pytest
import torch

from diffusiongemma.ops import attention
from diffusiongemma.ops.attention import attend_canvas, attend_causal


def plain(q, k, v, seen):
    """The definition, in float64: q [T, H, Dh], k and v [K, S, Dh], seen [T, S]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[0]
    outs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[head // group].T
        outs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[head // group])
    return torch.stack(outs, 1).float()


def make(tokens: int, keys: int, heads: int = 4, kv_heads: int = 2, size: int = 8):
    g = torch.Generator().manual_seed(tokens * 100 + keys)
    return (
        torch.randn(tokens, heads, size, generator=g),
        torch.randn(kv_heads, keys, size, generator=g),
        torch.randn(kv_heads, keys, size, generator=g),
    )


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (5, 5), (7, 30), (32, 33)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1)])
def test_canvas(tokens, keys, heads, kv_heads) -> None:
    q, k, v = make(tokens, keys, heads, kv_heads)
    seen = torch.ones(tokens, keys, dtype=torch.bool)
    torch.testing.assert_close(attend_canvas(q, k, v), plain(q, k, v, seen), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [3, 16, 1024])  # the size of query blocks must not change anything
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (1, 6), (5, 0), (12, 0), (12, 8), (30, 3)])
def test_causal(tokens, cached, window, block, monkeypatch) -> None:
    monkeypatch.setattr(attention, "CPU_BLOCK", block)
    q, k, v = make(tokens, cached + tokens)
    at, key = torch.arange(cached, cached + tokens)[:, None], torch.arange(cached + tokens)[None]
    seen = (key <= at) & (key > at - (window or 10**6))
    torch.testing.assert_close(attend_causal(q, k, v, cached, window), plain(q, k, v, seen), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5, 40])
def test_a_query_keeps_its_bits_wherever_the_text_is_cut(window) -> None:
    q, k, v = make(90, 90)
    whole = attend_causal(q, k, v, 0, window)
    for cuts in ([1] * 90, [7] * 12 + [6], [64, 26], [16, 16, 58], [33, 57]):
        at, parts = 0, []
        for size in cuts:
            first = 0 if window is None else max(0, at - window + 1)  # a ring holds no more
            end = at + size
            parts.append(attend_causal(q[at:end], k[:, first:end], v[:, first:end], at, window))
            at = end
        assert torch.equal(torch.cat(parts), whole)


def test_a_backend_may_lay_its_result_out_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in float32 torch gives heads that do not lie in a row."""
    q, k, v = make(20, 20)
    expected = attend_causal(q, k, v, 0, 8)
    plain_sdpa = attention.F.scaled_dot_product_attention

    def scattered(*args, **options):
        return plain_sdpa(*args, **options).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", scattered)
    torch.testing.assert_close(attend_causal(q, k, v, 0, 8), expected)
