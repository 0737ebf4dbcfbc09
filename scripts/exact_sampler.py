"""The sampler around the network's pass: chance, temperature, what is accepted and when a canvas stops, in Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

import exact_small as small
import torch
from exact_cases import Case
from exact_limits import A_FEW, Part
from exact_shapes import Inputs, Shapes
from torch import Tensor

from diffusiongemma.model.backend import Ops
from diffusiongemma.ops.sampler import FINE, LOST, State
from diffusiongemma.ops.vocab import Reading

ROOM = 9  # rows of a board, more than canvases are on it
STUCK, UNSURE = 2, 3  # canvases: of which only a pin is sure; of which nothing is sure enough
Step = tuple[State, Reading, Tensor]


def sampler_cases(shapes: Shapes, inputs: Inputs) -> Iterator[Case]:
    config = shapes.config
    for canvases, width in ((1, config.canvas_length), (8, config.canvas_length), (3, 12)):
        counts, reals = _settings(inputs)
        counts, reals = counts[:, :canvases], reals[:, :canvases]
        seed = torch.arange(canvases, device=inputs.device) * 2**40 - 7
        yield _prepare(counts, reals, seed, width, config.vocab_size)
        yield _decide(_board(canvases, width, counts, reals, shapes, inputs))


def _settings(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """counts [6, ROOM], reals [5, ROOM]: canvases that go on, run out of steps, settle; by bound and by confidence"""
    device = inputs.device
    counts = [[3, 8, 0, 7, 2, 4, 8, 1, 0], [5] * ROOM, [0, 1, 2] * 3, [9] * ROOM, [1, 2, 0] * 3, [0, 3, 2] * 3]
    reals = inputs.uniform(5 * ROOM).view(5, ROOM) + 0.1
    reals[3] = torch.where(torch.arange(ROOM, device=device) % 4 == 3, reals[3], -1.0)
    reals[4] *= 4
    reals[2, STUCK], reals[3, UNSURE] = 1e-6, 1.5
    return torch.tensor(counts, dtype=torch.int32, device=device), reals


def _board(canvases: int, width: int, counts: Tensor, reals: Tensor, shapes: Shapes, inputs: Inputs) -> Step:
    device, count, tokens = inputs.device, canvases * width, shapes.config.vocab_size
    drawn = [(inputs.uniform(count) * tokens).long() for _ in range(4)]
    argmax, sample, noise, previous = drawn
    previous = torch.where((torch.arange(count, device=device) // width) % 2 == 0, argmax, previous)  # settled or not
    entropy = inputs.uniform(count) ** 4
    entropy[::5] = (entropy[::5] * 4).round() / 4  # several are equal
    entropy[-1], entropy[-2] = torch.nan, torch.inf
    pin = torch.where(inputs.uniform(count) < 0.1, 5, -1).int()
    if canvases > STUCK:
        own = slice(STUCK * width, (STUCK + 1) * width)
        entropy[own] = entropy[own].clamp_min(0.01)
        entropy[own.start + 1], pin[own.start + 1] = 0.001, 5
    soft = inputs.randn(count, shapes.config.hidden_size)
    logprob = -entropy - 0.01 * inputs.uniform(count)
    if canvases > UNSURE:
        entropy[UNSURE * width + 2], logprob[UNSURE * width + 2] = 1.0, 0.0  # surest, though not by entropy
    reading = Reading(argmax, sample, entropy, logprob, entropy, soft)
    board = (canvases, width)
    state = State(
        torch.zeros(board, dtype=torch.int64, device=device), torch.zeros_like(soft).view(*board, -1),
        previous.view(board), pin.view(board), counts, reals,
        torch.zeros(canvases, 3 * width + 2, dtype=torch.int32, device=device),
    )  # fmt: skip
    return state, reading, noise


def _prepare(counts: Tensor, reals: Tensor, seed: Tensor, width: int, tokens: int) -> Case:
    def parts(got: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
        each = [t.repeat_interleave(width) for t in (seed, counts[1])]
        left = (counts[3] - counts[0]).double() / counts[3]
        want = (reals[0].double() + (reals[1].double() - reals[0].double()) * left).repeat_interleave(width)
        at = torch.arange(width, device=seed.device).repeat(len(seed))
        return [
            Part("temperature", got[0], want, A_FEW * want.abs(), how="most"),
            *small.draws((got[1], got[2]), *each, at, tokens),
        ]

    args = (counts, reals, seed, width, tokens)
    return Case("prepare", f"{len(seed)} canvases of {width}", "float32", lambda ops: ops.prepare(*args), parts)


def _decide(step: Step) -> Case:
    state, reading, noise = step

    def call(ops: Ops) -> State:
        counts = torch.zeros(len(state.counts), ROOM, dtype=torch.int32, device=noise.device)
        counts[:, : len(state.tokens)] = state.counts
        own = State._make(t.clone() for t in state)._replace(reals=state.reals, counts=counts[:, : len(state.tokens)])
        ops.decide(own, reading, noise)
        return own

    canvases, width = state.tokens.shape
    return Case("decide", f"{canvases} canvases of {width}", "int64", call, lambda got: _parts(got, step))


def _parts(got: State, step: Step) -> list[Part]:
    state, reading, noise = step
    assert reading.soft is not None
    shape = state.tokens.shape
    tokens, out, counts, belief = [], [], [], []
    for row in range(len(state.tokens)):
        own = slice(row * shape[1], (row + 1) * shape[1])
        argmax, sample, drawn = (t[own].tolist() for t in (reading.argmax, reading.sample, noise))
        entropy = reading.entropy[own].tolist()
        accepted, mean = _accepted(state, row, entropy, reading.logprob[own].double().exp().tolist())
        taken, asked, run, steps, stability, forget = state.counts[:, row].tolist()
        run = run + 1 if argmax == state.previous[row].tolist() else 0
        stopped = mean < float(state.reals[4, row]) and run >= stability
        tokens.append([s if yes else n for s, n, yes in zip(sample, drawn, accepted, strict=True)])
        bits = [*reading.entropy[own].view(torch.int32).tolist()]
        mean_bits = int(torch.tensor(mean, dtype=torch.float64).float().view(torch.int32))
        ended = 2 if stopped else int(taken + 1 >= steps)
        out.append([*argmax, *bits, *(int(yes) for yes in accepted), mean_bits, ended])
        counts.append([taken + 1, asked + 1, run, steps, stability, forget])
        belief.append(0.0 if forget and (taken + 1) % forget == 0 else 1.0)
    kept = torch.tensor(belief, device=noise.device)[:, None, None] * reading.soft.view(*shape, -1).float()
    device = noise.device
    return [
        Part("tokens", got.tokens, torch.tensor(tokens, device=device), how="equal"),
        Part("best before", got.previous, reading.argmax.view(shape), how="equal"),
        Part("counts", got.counts, torch.tensor(counts, device=device).t(), how="equal"),
        Part("told", got.out, torch.tensor(out, device=device), how="equal"),
        Part("belief", got.soft.float(), kept, how="equal"),
    ]


def _accepted(state: State, row: int, entropy: list[float], sure: list[float]) -> tuple[list[bool], float]:
    """Which positions keep their sample, and the mean entropy of the free ones"""
    bound, threshold = float(state.reals[2, row]), float(state.reals[3, row])
    free = [pin < 0 for pin in state.pin[row].tolist()]
    whole = [int((LOST if math.isnan(e) or math.isinf(e) else e) * FINE) for e in entropy]
    order = sorted(
        range(len(entropy)), key=lambda i: (math.isnan(entropy[i]), -1 if math.isnan(entropy[i]) else entropy[i])
    )
    accepted, before = [False] * len(entropy), 0
    for i in order:
        accepted[i], before = before <= bound * FINE, before + whole[i]
    if threshold >= 0:
        surest = math.nan if any(math.isnan(s) for s in sure) else max(sure)  # with NaN among them none is
        accepted = [s >= threshold or s == surest for s in sure]
    if any(free) and not any(a and f for a, f in zip(accepted, free, strict=True)):
        lost = [i for i in order if free[i] and math.isnan(entropy[i])]
        accepted[min(lost) if lost else next(i for i in order if free[i])] = True
    total = sum(w for w, f in zip(whole, free, strict=True) if f)
    return accepted, total / FINE / max(1, sum(free))
