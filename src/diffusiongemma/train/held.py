"""Rows that a task with `hold` does not let go: those still wrong after their rounds come back in its next micro-batch.

They go on where they stood, canvas and belief, instead of starting from noise, and new rows take the places of those
that are solved or have had `hold` rounds. So the model trains most on what it finds hard, and on the states deep in a
long denoising, which a few rounds from noise never reach. The state is part of a checkpoint, or a resumed run would
not be the same.

With `forget` a row reads no belief in every so many rounds, as a sampler with that option: what is believed confirms
itself, and a canvas can hang in it. Without one the network takes accepted tokens at their word, and that is what
helps: it must not unlearn it on its own mistakes. So with `trust`, the rows in that share of the places get the right
tokens wherever some are accepted for such a round; the others go on from their own, and learn to repair them.

Legend: B rows, P prefix, L canvas, D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusiongemma.train.rows import Rows


@dataclass(frozen=True)
class Held:
    rows: Rows
    noisy: Tensor  # [B, L] the canvas that the next round reads
    soft: Tensor  # [B L, D] the belief that it is conditioned on
    age: Tensor  # [B] rounds taken; 0: nobody is held here
    limit: int  # rounds at most
    forget: int = 0  # rounds after which, and again, a row reads its canvas alone; 0: never
    trust: float = 0.0  # share of the places whose canvas is right then

    @classmethod
    def nobody(
        cls, like: Rows, hidden: int, dtype: torch.dtype, limit: int, forget: int = 0, trust: float = 0.0
    ) -> Held:
        """`like`: a micro-batch of the task, on the device."""
        rows = Rows(like.task, *(torch.zeros_like(t) for t in like.tensors()))
        device, size = like.canvas.device, like.canvas.numel()
        soft = torch.zeros(size, hidden, dtype=dtype, device=device)
        age = torch.zeros(len(like.canvas), dtype=torch.int64, device=device)
        return cls(rows, torch.zeros_like(like.canvas), soft, age, limit, forget, trust)

    def clear(self) -> None:
        self.age.zero_()

    def admit(self, new: Rows) -> Rows:
        """The rows of this micro-batch: who is held, and new ones in the free places"""
        here = (self.age > 0)[:, None]
        pairs = zip(self.rows.tensors(), new.tensors(), strict=True)
        return Rows(new.task, *(torch.where(here, old, fresh) for old, fresh in pairs))

    def state(self, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """noisy [B, L] as a new row would begin -> canvases [B, L], beliefs [B L, D] (zeros: none yet)"""
        here = self.age > 0
        along = here.repeat_interleave(noisy.shape[1])[:, None]
        return torch.where(here[:, None], self.noisy, noisy), torch.where(along, self.soft, 0.0)

    def forgets(self, rounds: int) -> Tensor:
        """[B]: who reads no belief after so many more rounds; not who has taken none, and has none yet"""
        age = self.age + rounds
        return (age > 0) & (age % self.forget == 0) if self.forget else torch.zeros_like(age, dtype=torch.bool)

    def told(self, rounds: int) -> Tensor:
        """[B]: who forgets then and is given the right tokens: the first places (a row stays in its place)"""
        places = len(self.age)
        return self.forgets(rounds) & (torch.arange(places, device=self.age.device) < math.ceil(places * self.trust))

    @torch.no_grad()
    def keep(self, rows: Rows, noisy: Tensor, soft: Tensor, solved: Tensor, rounds: int) -> None:
        """After `rounds` more: solved [B] rows leave, and those that have been here long enough."""
        age = self.age + rounds
        for mine, now in zip(self.rows.tensors(), rows.tensors(), strict=True):
            mine.copy_(now)
        self.noisy.copy_(noisy)
        self.soft.copy_(soft)
        self.age.copy_(torch.where(solved | (age >= self.limit), 0, age))

    def tensors(self) -> dict[str, Tensor]:
        names = ("prefix", "canvas", "pinned", "weight", "encoder_weight")
        rows = dict(zip(names, self.rows.tensors(), strict=True))
        return {**rows, "noisy": self.noisy, "soft": self.soft, "age": self.age}

    def load(self, saved: dict[str, Tensor]) -> bool:
        """Take up a saved state; False where it does not fit (another micro-batch size): nobody is held then."""
        mine = self.tensors()
        if any(name not in saved or saved[name].shape != tensor.shape for name, tensor in mine.items()):
            return False
        for name, tensor in mine.items():
            tensor.copy_(saved[name])
        return True
