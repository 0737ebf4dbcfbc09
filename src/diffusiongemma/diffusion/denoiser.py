"""One step of one canvas: schedule, constraint, beliefs, acceptance, renoising, stop rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusiongemma.diffusion.acceptance import Acceptance
from diffusiongemma.diffusion.beliefs import Beliefs, read_logits
from diffusiongemma.diffusion.canvas import Canvas
from diffusiongemma.diffusion.constraints import Constraint
from diffusiongemma.diffusion.noise import Draws
from diffusiongemma.diffusion.schedule import LinearTemperature
from diffusiongemma.diffusion.stopping import StableAndConfident


@dataclass(frozen=True)
class Denoiser:
    vocab_size: int
    schedule: LinearTemperature
    acceptance: Acceptance
    stop: StableAndConfident | None  # None: always run all steps
    constraints: Sequence[Constraint] = ()
    forget: int = 0  # after every so many steps the next one is not conditioned on what was believed; 0: always is

    def start(self, length: int, draws: Draws, device: torch.device | str = "cpu") -> Canvas:
        """A canvas of noise."""
        return self.resume(draws.tokens(length, self.vocab_size).to(device, non_blocking=True))

    def resume(self, tokens: Tensor, step: int = 0) -> Canvas:
        """A canvas that starts from these tokens [L] instead of noise, as if so many steps had been taken."""
        for constraint in self.constraints:
            tokens = constraint.start(tokens)
        return Canvas(tokens, step)

    def step(self, canvas: Canvas, logits: Tensor, draws: Draws) -> Canvas:
        """logits [L, V] of canvas.tokens, overwritten -> the canvas after one more step"""
        length = len(canvas)
        for constraint in self.constraints:
            logits = constraint.constrain(logits, canvas.tokens)
        remaining = self.schedule.steps - canvas.step
        beliefs = read_logits(logits, self.schedule.at(remaining), draws.uniforms(length))
        free = self._free(length).to(logits.device)
        accepted = self._accept(beliefs, free)
        noise = draws.tokens(length, self.vocab_size).to(logits.device)
        mean_entropy = beliefs.entropy[free].mean().item() if bool(free.any()) else 0.0
        settled = False
        history = canvas.history
        if self.stop is not None:
            settled = self.stop.done(beliefs.argmax, history, mean_entropy)
            history = (*history, beliefs.argmax)[-self.stop.stability :] if self.stop.stability else ()
        return Canvas(
            tokens=torch.where(accepted, beliefs.sample, noise),
            step=canvas.step + 1,
            done=settled or remaining == 1,
            settled=settled,
            argmax=beliefs.argmax,
            entropy=beliefs.entropy,
            accepted=accepted,
            logprob=beliefs.logprob,
            mean_entropy=mean_entropy,
            history=history,
        )

    def forgets(self, canvas: Canvas) -> bool:
        """Is the next step to read this canvas as it is, without the belief of the steps before?"""
        return self.forget > 0 and canvas.step % self.forget == 0

    def _free(self, length: int) -> Tensor:
        """[L] bool: the positions that no constraint has decided beforehand"""
        free = torch.ones(length, dtype=torch.bool)
        for constraint in self.constraints:
            free &= constraint.free(length)
        return free

    def _accept(self, beliefs: Beliefs, free: Tensor) -> Tensor:
        """What the rule accepts, and at least one free position: pins are always accepted, and that is no progress."""
        accepted = self.acceptance.accept(beliefs)
        if self.constraints and bool(free.any()) and not bool((accepted & free).any()):
            accepted[torch.where(free, beliefs.entropy, torch.inf).argmin()] = True
        return accepted

    @staticmethod
    def cut(canvas: Canvas, length: int) -> Canvas:
        """The first `length` positions alone: the rest is settled and need not be computed again."""

        def first(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[:length]

        return replace(
            canvas,
            tokens=canvas.tokens[:length],
            argmax=first(canvas.argmax),
            entropy=first(canvas.entropy),
            accepted=first(canvas.accepted),
            logprob=first(canvas.logprob),
            history=tuple(tokens[:length] for tokens in canvas.history),
        )
