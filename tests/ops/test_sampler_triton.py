"""The sampler's kernels against their torch definitions: in Triton's interpreter, or on a card if there is one."""

from ops.triton_cpu import DEVICE  # isort: skip

import pytest
import torch

from diffusiongemma.ops import sampler, sampler_triton
from diffusiongemma.ops.sampler import State
from diffusiongemma.ops.vocab import Reading

HIDDEN, ROOM = 24, 5  # a board has rows that are not in use: settings lie further apart than there are canvases


def make(
    rows: int, width: int, seed: int, settled: bool = False, odd: bool = False
) -> tuple[State, Reading, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    argmax = whole(0, 90, rows, width)
    previous = argmax.clone() if settled else whole(0, 90, rows, width)
    pin = torch.where(torch.rand(rows, width, generator=g) < 0.2, 5, -1)
    if odd:
        pin[0], pin[-1, : width // 2] = 5, 5  # all pinned; many
    limits = ((0, 9), (0, 50), (0, 3), (5, 12), (0, 3), (0, 4))
    counts = torch.stack([whole(*limit, ROOM) for limit in limits]).int()
    reals = torch.rand(5, ROOM, generator=g) + 0.05
    reals[2] *= width / 20  # entropy bound
    reals[3] = torch.where(torch.rand(ROOM, generator=g) < 0.5, -1.0, reals[3])
    reals[4] *= 3
    entropy = torch.rand(rows, width, generator=g) ** 3
    entropy = (entropy * 8).round() / 8 if seed % 2 else entropy  # many are equal
    if odd:
        entropy[0, 1], entropy[0, 2], entropy[-1, 0], entropy[-1, 3] = torch.nan, torch.inf, 0.0, -0.0
        entropy[-1, 4:6] = torch.nan
    logprob = -3 * torch.rand(rows, width, generator=g)
    if odd:
        logprob[-1, 4] = torch.nan
    reading = Reading(
        argmax.flatten(), whole(0, 90, rows * width), entropy.flatten(), logprob.flatten(),
        torch.zeros(rows * width), torch.randn(rows * width, HIDDEN, generator=g),
    )  # fmt: skip
    state = State(
        whole(0, 90, rows, width), torch.randn(rows, width, HIDDEN, generator=g), previous, pin.int(),
        counts[:, :rows], reals[:, :rows], torch.zeros(rows, 3 * width + 2, dtype=torch.int32),
    )  # fmt: skip
    return state, reading, whole(0, 90, rows * width)


def on_device(state: State, reading: Reading) -> tuple[State, Reading]:
    """Copies; settings stay views of a larger board."""
    counts, reals = (torch.zeros(len(t), ROOM, dtype=t.dtype, device=DEVICE) for t in (state.counts, state.reals))
    rows = len(state.tokens)
    counts[:, :rows], reals[:, :rows] = state.counts, state.reals
    first = (t.to(DEVICE, copy=True) for t in state[:4])
    placed = State(*first, counts[:, :rows], reals[:, :rows], state.out.to(DEVICE, copy=True))
    given = (reading.argmax, reading.sample, reading.entropy, reading.logprob, reading.sample_logprob, reading.soft)
    return placed, Reading(*(None if t is None else t.to(DEVICE) for t in given))


@pytest.mark.parametrize("width", [1, 12, 64, 100])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_decisions_are_those_of_the_definition(width: int, rows: int, seed: int) -> None:
    odd = width > 6 and seed > 1
    state, reading, noise = make(rows, width, seed, settled=seed % 3 == 0, odd=odd)
    if seed == 1:
        reading = Reading(
            *(getattr(reading, f) for f in ("argmax", "sample", "entropy", "logprob", "sample_logprob")), None
        )
    (want, want_reading), (got, got_reading) = on_device(state, reading), on_device(state, reading)
    sampler.decide(want, want_reading, noise.to(DEVICE))
    sampler_triton.decide(got, got_reading, noise.to(DEVICE))
    for name, a, b in zip(State._fields, got, want, strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(got.counts, state.counts.to(DEVICE))  # a step was taken


@pytest.mark.parametrize("width", [300, 520, 1025])
def test_wide_canvases_are_decided_alike(width: int) -> None:
    state, reading, noise = make(2, width, 2, odd=True)
    (want, want_reading), (got, got_reading) = on_device(state, reading), on_device(state, reading)
    sampler.decide(want, want_reading, noise.to(DEVICE))
    sampler_triton.decide(got, got_reading, noise.to(DEVICE))
    for name, a, b in zip(State._fields, got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("width", [1, 100, 256, 257, 512, 1000, 4096, 20_000])
def test_wide_canvases_are_compared_in_smaller_pieces(width: int) -> None:
    """All pairs that are compared at once lie in registers: 32 each of 1,024 positions and more did not."""
    block = 1 << (width - 1).bit_length()
    assert sampler_triton.others(width) * block <= max(8192, block)
    assert sampler_triton.others(256) == 32


def test_canvases_end_for_every_reason() -> None:
    """Else the test above would compare less than it seems."""
    ends = set()
    for seed in range(12):
        state, reading, noise = make(4, 12, seed, settled=seed % 3 == 0)
        sampler.decide(state, reading, noise)
        ends |= set(state.out[:, -1].tolist())
    assert ends == {0, 1, 2}


@pytest.mark.parametrize("width", [1, 100, 256])
@pytest.mark.parametrize("rows", [1, 4])
def test_chance_and_temperature_are_those_of_the_definition(width: int, rows: int) -> None:
    state, _, _ = make(rows, width, 3)
    state, _ = on_device(state, Reading(*[torch.zeros(0)] * 5, None))
    seed = (torch.arange(rows, device=DEVICE) * 1_000_003 + (1 << 40))[:rows]
    want = sampler.prepare(state.counts, state.reals, seed, width, 262_144)
    got = sampler_triton.prepare(state.counts, state.reals, seed, width, 262_144)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert len(set(got[2].tolist())) > 0.9 * rows * width


@pytest.mark.parametrize("lost", [(), (5, 7), (2,)])
def test_a_canvas_of_which_only_pins_are_sure_goes_on(lost: tuple[int, ...]) -> None:
    """Its surest free position is accepted, or one that has no number, as torch finds it."""
    state, reading, noise = make(1, 12, 1)
    state.pin.fill_(-1)[0, 3] = 5
    state.reals[2], state.reals[3] = 1e-6, -1.0
    entropy = torch.linspace(1.0, 0.5, 12)
    entropy[3] = 1e-3
    entropy[[*lost]] = torch.nan
    reading = Reading(reading.argmax, reading.sample, entropy, *[-entropy] * 2, None)
    (want, want_reading), (got, got_reading) = on_device(state, reading), on_device(state, reading)
    sampler.decide(want, want_reading, noise.to(DEVICE))
    sampler_triton.decide(got, got_reading, noise.to(DEVICE))
    assert torch.equal(got.out, want.out)
    assert got.out[0, 24:36].nonzero().flatten().tolist() == sorted((3, lost[0] if lost else 11))


@pytest.mark.parametrize("pinned", [0, 3])
def test_where_no_entropy_is_finite_no_pin_is_taken_for_progress(pinned: int) -> None:
    state, reading, noise = make(1, 12, 1)
    state.pin.fill_(5)[0, [2 + pinned, 9]] = -1
    state.reals[2], state.reals[3] = 1e-6, -1.0
    entropy = torch.full((12,), 0.5)
    entropy[[0, 2 + pinned, 9]] = torch.inf
    reading = Reading(reading.argmax, reading.sample, entropy, *[-entropy] * 2, None)
    (want, want_reading), (got, got_reading) = on_device(state, reading), on_device(state, reading)
    sampler.decide(want, want_reading, noise.to(DEVICE))
    sampler_triton.decide(got, got_reading, noise.to(DEVICE))
    assert torch.equal(got.out, want.out)
    assert got.out[0, 24:36].nonzero().flatten().tolist() == [1, 2 + pinned]
