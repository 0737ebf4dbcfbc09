"""What is learned: a noisy canvas says what each token should be, and the encoder says the next token.

A canvas draws t ~ U(1e-3, 1), and each of its tokens becomes a uniform random one with probability t (never a pinned
one); with `span`, the noise is one hole instead: everything inside, nothing outside. Half of the canvases are
conditioned on what a first pass without gradient believed. A share of those (`unroll`) goes on to the canvas that the
sampler would make of that belief, accepted guesses and fresh noise, so that the model learns to repair its mistakes.
The right tokens are asked for all the same, whatever was accepted. Where many answers are right, as for icons, a path
towards another of them is then no mistake, and the model learns the mean of all: such tasks have `unroll = 0` and one
round.

A task with `rounds` follows the sampler further: every pass is trained, and what it believed makes the canvas and the
conditioning of the next. No pass is without gradient, and the model meets the states that it leads itself into; boards
that need many steps of thought gain most. With `hold` it follows it into the next micro-batches, and with `forget`
through the rounds in which the sampler drops what it believes (train/held.py). `drop` leaves out the belief of a share
of the positions in every round.

Legend: B rows, P prefix, L canvas, R = views * B canvases, N = R L, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.train.forward import Routing, TrainingForward
from diffusiongemma.train.held import Held
from diffusiongemma.train.losses import cross_entropy, look
from diffusiongemma.train.recipe import ObjectiveConfig
from diffusiongemma.train.rows import Rows

NOISE = (1e-3, 1.0)


@dataclass(frozen=True)
class Result:
    loss: Tensor  # scalar, with gradient
    load: Tensor  # [layers, E]: how the experts were used
    metrics: dict[str, Tensor]  # scalars, on the device


def corrupt(canvas: Tensor, pinned: Tensor, vocabulary: int, span: float, noise: tuple[float, float] = NOISE) -> Tensor:
    """canvas, pinned [R, L] -> noisy canvas [R, L]"""
    rows, length = canvas.shape
    device = canvas.device
    t = noise[0] + (noise[1] - noise[0]) * torch.rand(rows, 1, device=device)
    hit = torch.rand(rows, length, device=device) < t
    if span > 0:
        width = (t * length).ceil()
        first = (torch.rand(rows, 1, device=device) * (length - width + 1)).floor()
        at = torch.arange(length, device=device)
        inside = (at >= first) & (at < first + width)
        hit = torch.where(torch.rand(rows, 1, device=device) < span, inside, hit)
    return torch.where(hit & ~pinned, torch.randint(vocabulary, canvas.shape, device=device), canvas)


def sampler_step(candidate: Tensor, entropy: Tensor, bound: Tensor, fresh: Tensor) -> Tensor:
    """candidate, entropy, fresh [R, L], bound [R, 1] -> the next canvas: the surest candidates, noise elsewhere"""
    ordered, order = entropy.sort(dim=-1)
    accepted = torch.zeros_like(order, dtype=torch.bool)
    accepted.scatter_(1, order, (ordered.cumsum(dim=-1) - ordered) <= bound)
    return torch.where(accepted, candidate, fresh)


def without(soft: Tensor, gone: Tensor) -> Tensor:
    """soft [N, D], gone [N] -> no belief (zeros) there"""
    return torch.where(gone[:, None], 0.0, soft)


def balance(routing: list[Routing], usage: Tensor | None) -> Tensor:
    """Switch's balancing loss, 1 when even. `usage` [layers, E] is the load over many steps and tasks, so that an
    expert may serve one task as long as others serve the rest; None takes the load of this pass."""
    terms = []
    for one in routing:
        load = one.load if usage is None else usage
        terms.append((load * one.probability).sum(dim=-1).mean() * load.shape[-1])
    return torch.stack(terms).mean()


def micro_loss(
    forward: TrainingForward,
    rows: Rows,
    config: ObjectiveConfig,
    views: int = 1,
    usage: Tensor | None = None,
    rounds: int = 1,
    noise: tuple[float, float] = NOISE,
    held: Held | None = None,
    drop: float = 0.0,
) -> Result:
    """The loss of one micro-batch; uses the default random generators of the rows' device."""
    if held is not None:
        rows = held.admit(rows)
    model, cap = forward.model, forward.config.final_logit_softcapping
    head = model.embed_tokens.weight
    tokens = torch.cat([rows.prefix, rows.canvas], dim=1)
    hidden, prefix, routing = forward.encode(tokens, rows.prefix.shape[1])
    target = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).flatten()
    next_weight = torch.cat([rows.encoder_weight[:, 1:], torch.zeros_like(rows.encoder_weight[:, :1])], dim=1)
    encoder, *_ = cross_entropy(hidden, head, target, next_weight.flatten(), cap, forward.compiled)

    canvas, pinned, weight = (t.repeat(views, 1) for t in (rows.canvas, rows.pinned, rows.weight))  # [R, L]
    noisy = corrupt(canvas, pinned, model.config.vocab_size, config.span, noise)
    soft = None
    conditioned = int(len(canvas) * config.self_conditioning) if rounds == 1 else 0
    if conditioned:
        given = torch.where(pinned, canvas, -1)[:conditioned]
        soft, drafted = _first_pass(forward, noisy[:conditioned], given, prefix, config)
        unrolled = int(conditioned * config.unroll)
        noisy = torch.cat([drafted[:unrolled], noisy[unrolled:]])
        soft = torch.cat([soft, soft.new_zeros(noisy.numel() - len(soft), soft.shape[1])])  # zeros: no belief yet
    if held is not None:
        noisy, soft = held.state(noisy)
    losses, routings = [], [routing]
    for n in range(rounds):
        if held is not None and soft is not None:
            soft = without(soft, held.forgets(n).repeat_interleave(canvas.shape[1]))
        if soft is not None and drop:
            soft = without(soft, torch.rand(len(soft), device=soft.device) < drop)
        hidden, decoder_routing = forward.denoise(noisy, soft, prefix)
        loss, _, right = cross_entropy(hidden, head, canvas.flatten(), weight.flatten(), cap, forward.compiled)
        losses.append(loss)
        routings.append(decoder_routing)
        if n + 1 < rounds or held is not None:
            hint = None if held is None else torch.where(held.told(n + 1)[:, None], canvas, -1)
            soft, noisy = _believe(forward, hidden.detach(), torch.where(pinned, canvas, -1), config, hint)
    decoder = torch.stack(losses).mean()
    if held is not None:
        assert soft is not None
        solved = (right.view(canvas.shape) | (weight == 0)).all(dim=1)
        held.keep(rows, noisy, soft, solved, rounds)

    aux = balance(routings, usage)
    # The balance is a mean over layers; its weight is meant for each of them.
    loss = decoder + config.encoder_weight * encoder + config.balance_weight * len(prefix) * aux
    load = torch.stack([one.load for one in routings]).mean(dim=0).detach()
    with torch.no_grad():
        counted = weight.flatten() / weight.sum().clamp(min=1e-9)
        metrics = {
            "decoder": decoder.detach(),
            "encoder": encoder.detach(),
            "accuracy": (right * counted).sum(),  # of the last round
            "balance": aux.detach(),
        }
        if rounds > 1:
            metrics |= {"first round": losses[0].detach(), "last round": losses[-1].detach()}
        if held is not None:
            metrics |= {"solved": solved.float().mean(), "held": (held.age > 0).float().mean()}
    return Result(loss, load, metrics)


@torch.no_grad()
def _first_pass(
    forward: TrainingForward,
    noisy: Tensor,
    given: Tensor,
    prefix: list[tuple[Tensor, Tensor]],
    config: ObjectiveConfig,
) -> tuple[Tensor, Tensor]:
    """noisy, given [r, L] -> what `_believe` makes of one pass"""
    hidden, _ = forward.denoise(noisy, None, prefix)
    return _believe(forward, hidden, given, config)


@torch.no_grad()
def _believe(
    forward: TrainingForward, hidden: Tensor, given: Tensor, config: ObjectiveConfig, hint: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [r L, D] -> soft embeddings [r L, D] of what the network believes, and the sampler's next canvas [r, L].
    `given` [r, L]: pinned tokens, -1 elsewhere; they are believed and stay, as the sampler has it. `hint` [r, L]:
    tokens to accept instead of the sampled ones, -1 where there is none."""
    model, (rows, length), pinned = forward.model, given.shape, given >= 0
    low, high = config.temperature
    temperature = low + (high - low) * torch.rand(rows, 1, device=hidden.device)
    heat = temperature.expand(rows, length).flatten()
    cap = forward.config.final_logit_softcapping
    soft, entropy, sample = look(hidden, model.embed_tokens.weight, heat, cap, forward.compiled)
    low, high = config.accept
    bound = low * (high / low) ** torch.rand(rows, 1, device=hidden.device)
    sure = torch.where(pinned, 0.0, entropy.view(rows, length))  # as the sampler: what is pinned costs nothing
    candidate = sample.view(rows, length)
    if hint is not None:
        candidate = torch.where(hint >= 0, hint, candidate)
    fresh = torch.randint(model.config.vocab_size, candidate.shape, device=candidate.device)
    soft = soft * model._embed_scale()
    known = model.embed(given.clamp_min(0).flatten()).to(soft.dtype)
    soft = torch.where(pinned.flatten()[:, None], known, soft)
    return soft, torch.where(pinned, given, sampler_step(candidate, sure, bound, fresh))
