"""One step of many canvases at once, on tensors alone: what a CUDA graph records of the sampler.

A `Board` holds R canvases of one width and all settings of each, so that requests with different settings share a
step. `Denoiser` is the definition: fed the same numbers, a row of the board goes the same way. Chance comes from
(seed, count of steps, position), so a row does not depend on its neighbours.

Legend: R rows of the board, B of them in use (the first), L width, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.diffusion.acceptance import ConfidenceThreshold, EntropyBound
from diffusiongemma.diffusion.canvas import Canvas
from diffusiongemma.diffusion.constraints import Forbidden, Pins
from diffusiongemma.diffusion.denoiser import Denoiser
from diffusiongemma.ops import sampler
from diffusiongemma.ops.sampler import State
from diffusiongemma.ops.vocab import Reading, Rules, ban

Prepare = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
Decide = Callable[[State, Reading, Tensor], None]

NEVER = 1 << 30  # a stability that no canvas reaches: it does not stop early
SETS = 2  # of banned tokens a row: before a position, and from it on


@dataclass(frozen=True)
class Board:
    tokens: Tensor  # [R, L] int64: what the network reads next
    soft: Tensor  # [R, L, D] what it is conditioned on
    previous: Tensor  # [R, L] int64: the best tokens of the step before; -1 before the first
    pin: Tensor  # [R, L] int32, -1 where free
    banned_set: Tensor  # [R, L] int32, -1 for none
    banned: Tensor  # [R SETS, V/32] int32
    counts: Tensor  # [6, R] int32: as `sampler.State` has them
    reals: Tensor  # [5, R] float32: t_min, t_max, entropy bound, threshold, confidence
    seed: Tensor  # [R] int64
    out: Tensor  # [R, 3 L + 2] int32: what the host wants to know after a step (`Outcome`)

    @classmethod
    def empty(
        cls, rows: int, width: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Board:
        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        board = cls(
            tokens=zeros(rows, width, kind=torch.int64),
            soft=zeros(rows, width, hidden, kind=dtype),
            previous=zeros(rows, width, kind=torch.int64),
            pin=zeros(rows, width) - 1,
            banned_set=zeros(rows, width) - 1,
            banned=zeros(rows * SETS, -(-vocab // 32)),
            counts=zeros(6, rows),
            reals=zeros(5, rows, kind=torch.float32),
            seed=zeros(rows, kind=torch.int64),
            out=zeros(rows, 3 * width + 2),
        )
        board.counts[3] = 1  # a row that nobody has filled may be computed too, and must not divide by zero
        board.reals[:2] = 1.0
        return board

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    # ---- the host's side ---------------------------------------------------------------------------------------------

    def put(self, row: int, denoiser: Denoiser, canvas: Canvas, soft: Tensor | None, seed: int, drawn: int) -> None:
        """A canvas [L] takes this row. `unfit` must have found nothing."""
        length = len(canvas)
        assert length == self.width
        self.tokens[row].copy_(canvas.tokens, non_blocking=True)
        if soft is None:
            self.soft[row].zero_()
        else:
            self.soft[row].copy_(soft, non_blocking=True)
        if canvas.history:
            self.previous[row].copy_(canvas.history[-1], non_blocking=True)
        else:
            self.previous[row].fill_(-1)
        stop, schedule, rule = denoiser.stop, denoiser.schedule, denoiser.acceptance
        counts = [
            canvas.step, drawn, _run_of(canvas.history), schedule.steps, NEVER if stop is None else stop.stability,
            denoiser.forget,
        ]  # fmt: skip
        bound = rule.bound if isinstance(rule, EntropyBound) else 0.0
        threshold = rule.threshold if isinstance(rule, ConfidenceThreshold) else -1.0  # below 0: by entropy bound
        reals = [schedule.t_min, schedule.t_max, bound, threshold, 0.0 if stop is None else stop.confidence]
        self.counts[:, row].copy_(torch.tensor(counts, dtype=torch.int32), non_blocking=True)
        self.reals[:, row].copy_(torch.tensor(reals), non_blocking=True)
        self.seed[row : row + 1].copy_(torch.tensor([seed]), non_blocking=True)
        pin, which, sets = _constraints(denoiser, length)
        self.pin[row].copy_(pin, non_blocking=True)
        self.banned_set[row].copy_(torch.where(which < 0, which, which + SETS * row), non_blocking=True)
        if sets:
            bits = ban(sets, denoiser.vocab_size)
            self.banned[SETS * row : SETS * (row + 1)].copy_(bits, non_blocking=True)

    def swap_in(self, source: int, target: int) -> None:
        """The canvas of one row moves to another row, whose own is gone."""
        for tensor in (self.tokens, self.soft, self.previous, self.pin, self.seed):
            tensor[target].copy_(tensor[source])
        for tensor in (self.counts, self.reals):
            tensor[:, target].copy_(tensor[:, source])
        moved = self.banned_set[source]
        self.banned_set[target].copy_(torch.where(moved < 0, moved, moved + SETS * (target - source)))
        self.banned[SETS * target : SETS * (target + 1)].copy_(self.banned[SETS * source : SETS * (source + 1)])

    def take(self, row: int) -> tuple[Tensor, Tensor]:
        """tokens [L] and soft embeddings [L, D] of a row, copied: what the next step would read"""
        return self.tokens[row].clone(), self.soft[row].clone()

    # ---- the device's side -------------------------------------------------------------------------------------------

    def draws(self, rows: int, vocab: int, prepare: Prepare = sampler.prepare) -> tuple[Tensor, Tensor, Tensor]:
        """-> temperature, uniform [B L] float32, token [B L] int64"""
        return prepare(self.counts[:, :rows], self.reals[:, :rows], self.seed[:rows], self.width, vocab)

    def rules(self, rows: int, temperature: Tensor, uniform: Tensor, ruled: bool = True) -> Rules:
        """temperature, uniform [B L] -> what the vocabulary end obeys. Not `ruled`: no row has a pin or a banned token;
        the kernel for that is another one, which is faster and rounds differently."""
        if not ruled:
            return Rules(temperature, uniform)
        return Rules(temperature, uniform, self.pin[:rows].flatten(), self.banned, self.banned_set[:rows].flatten())

    def decide(self, rows: int, reading: Reading, noise: Tensor, decide: Decide = sampler.decide) -> None:
        """What was read of the logits, noise [B L] -> the boards' next state, and the outcome in `out`"""
        first = [t[:rows] for t in (self.tokens, self.soft, self.previous, self.pin)]
        state = State._make([*first, self.counts[:, :rows], self.reals[:, :rows], self.out[:rows]])
        decide(state, reading, noise)


@dataclass(frozen=True)
class Outcome:
    """What the host learns of one row's step."""

    argmax: Tensor  # [L] int64
    entropy: Tensor  # [L] float32
    accepted: Tensor  # [L] bool
    mean_entropy: float
    done: bool
    settled: bool  # by the stop rule

    @classmethod
    def read(cls, out: Tensor) -> Outcome:
        """A row of `Board.out`, [3 L + 2] int32 on the CPU; copied, for the memory is used again"""
        width = (out.shape[0] - 2) // 3
        argmax, entropy, accepted, rest = out.split([width, width, width, 2])
        mean = float(rest[:1].view(torch.float32))
        ended = int(rest[1])  # 0: it goes on; 1: its steps ran out; 2: the stop rule held
        return cls(argmax.long(), entropy.view(torch.float32).clone(), accepted > 0, mean, ended > 0, ended > 1)


# ---- what a denoiser asks for ----------------------------------------------------------------------------------------


def unfit(denoiser: Denoiser) -> str | None:
    """Why a board cannot hold a canvas of this denoiser, or None."""
    if not isinstance(denoiser.acceptance, EntropyBound | ConfidenceThreshold):
        return f"the rule {type(denoiser.acceptance).__name__}"
    others = [c for c in denoiser.constraints if not isinstance(c, Pins | Forbidden)]
    if others:
        return f"the constraint {type(others[0]).__name__}"
    borders = {c.until for c in denoiser.constraints if isinstance(c, Forbidden) and c.until is not None}
    return "tokens forbidden up to several positions" if len(borders) > 1 else None


def _constraints(denoiser: Denoiser, length: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """-> pin [L] int32, which set [L] int32 (0 before the border, 1 from it on, -1 none), the sets"""
    pin = torch.full((length,), -1, dtype=torch.int32)
    always, early, border = list[int](), list[int](), 0
    for constraint in denoiser.constraints:
        if isinstance(constraint, Pins):
            for at, token in constraint.tokens.items():
                if at < length:
                    pin[at] = token
        elif isinstance(constraint, Forbidden) and constraint.until is None:
            always += constraint.tokens
        elif isinstance(constraint, Forbidden):
            assert constraint.until is not None
            early, border = [*early, *constraint.tokens], constraint.until
    if not always and not early:
        return pin, torch.full((length,), -1, dtype=torch.int32), []
    which = (torch.arange(length) >= border).int()
    return pin, which, [[*always, *early], always]


def _run_of(history: Sequence[Tensor]) -> int:
    """How many of the last steps left the best tokens as they were"""
    run = 0
    for earlier, later in zip(reversed(history[:-1]), reversed(history[1:]), strict=True):
        if not torch.equal(earlier, later):
            break
        run += 1
    return run
