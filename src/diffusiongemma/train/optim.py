"""Optimisation: float32 master weights, Muon for the matrices (or AdamW for all), EMA, and the learning-rate schedule.

The network may compute in bfloat16; what is optimised, averaged and saved is float32. Muon moves a matrix along its
orthogonalised momentum (five Newton-Schulz iterations); the update is scaled to the size of an AdamW update, so both
optimisers take similar rates. Matrices of one shape are stacked and go through the iterations together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffusiongemma.train.recipe import OptimConfig

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def rate(config: OptimConfig, step: int, progress: float) -> float:
    """The factor on the learning rates: even warm-up over steps, then even decay over the last share of the run."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    return warm * min(1.0, max(0.0, 1.0 - progress) / max(config.decay, 1e-9))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: the projections of the layers, not embeddings, routers or norms."""
    return parameter.ndim >= 2 and not name.startswith("embed_tokens") and ".router." not in name


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> about the nearest matrices whose singular values are equal"""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.transpose(1, 2)).float()


def gradient_norm(model: nn.Module) -> float:
    return float(torch.stack(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])).norm())


def clear_gradients(model: nn.Module, keep: bool) -> None:
    """With `keep` their memory stays where it is, set to zero."""
    if keep:
        torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])
    else:
        for parameter in model.parameters():
            parameter.grad = None


class Muon:
    """Momentum of all matrices by shape; fused parameters (gate and up) are taken apart."""

    def __init__(self, masters: dict[str, Tensor], momentum: float) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, int], list[str]] = {}
        self.masters = masters
        for name, master in masters.items():
            self.groups.setdefault(self._split(name, master).shape[1:], []).append(name)  # type: ignore[arg-type]
        self.buffers = {name: torch.zeros_like(master) for name, master in masters.items()}

    @staticmethod
    def _split(name: str, tensor: Tensor) -> Tensor:
        """A parameter as [n, rows, columns]"""
        rows, columns = tensor.shape[-2:]
        return tensor.view(-1, rows // 2, columns) if "gate_up_proj" in name else tensor.view(-1, rows, columns)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: float, weight_decay: float) -> None:
        for (rows, columns), names in self.groups.items():
            own, buffers = [grads[n] for n in names], [self.buffers[n] for n in names]
            torch._foreach_lerp_(buffers, own, 1.0 - self.momentum)
            ahead = torch._foreach_lerp(own, buffers, self.momentum)  # Nesterov
            stacked = torch.cat([self._split(n, g) for n, g in zip(names, ahead, strict=True)])
            update = orthogonalise(stacked) * (0.2 * max(rows, columns) ** 0.5)
            masters = [self.masters[n] for n in names]
            torch._foreach_mul_(masters, 1.0 - lr * weight_decay)
            sizes = [len(self._split(n, m)) for n, m in zip(names, masters, strict=True)]
            parts = [part.reshape(m.shape) for part, m in zip(update.split(sizes), masters, strict=True)]
            torch._foreach_add_(masters, parts, alpha=-lr)


class Optimizer:
    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config, self.model = config, model
        self.compute = dict(model.named_parameters())
        # In float32 the network's own parameters are the masters.
        self.masters = {
            name: p.detach() if p.dtype == torch.float32 else p.detach().float() for name, p in self.compute.items()
        }
        matrices = {n: p for n, p in self.masters.items() if is_matrix(n, p)}
        others = {n: p for n, p in self.masters.items() if n not in matrices}
        self.muon = Muon(matrices, config.momentum) if config.muon else None
        groups = [{"params": list(others.values()), "weight_decay": 0.0, "base": config.lr}]
        if not config.muon:
            decay = {"weight_decay": config.weight_decay, "base": config.matrix_lr}
            groups.append({"params": list(matrices.values()), **decay})
        fused = next(iter(self.masters.values())).is_cuda
        self.adamw = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-10, fused=fused)
        self.ema = {n: p.clone() for n, p in self.masters.items()} if config.ema else {}
        self.updates = 0

    @torch.no_grad()
    def step(self, factor: float, keep: bool = False) -> Tensor:
        """Apply the gradients that lie on the network, with the rates times `factor`; returns their norm. With `keep`
        their memory stays in place, set to zero."""
        grads = {n: p.grad.float() for n, p in self.compute.items() if p.grad is not None}
        assert len(grads) == len(self.compute), "a parameter without gradient"
        norms = torch._foreach_norm(list(grads.values()))
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(list(grads.values()), (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self.adamw.param_groups:
            group["lr"] = group["base"] * factor
        adam_names = [n for n in self.masters if self.muon is None or n not in self.muon.masters]
        for name in adam_names:
            self.masters[name].grad = grads[name]
        self.adamw.step()
        for name in adam_names:
            self.masters[name].grad = None
        if self.muon is not None:
            self.muon.step(grads, self.config.matrix_lr * factor, self.config.weight_decay)
        clear_gradients(self.model, keep)
        self._publish(self.masters)
        self.updates += 1
        if self.ema and self.updates % self.config.ema_every == 0:
            # Early on the average is short, or it would remember the random start.
            memory = min(self.config.ema**self.config.ema_every, self.updates / (self.updates + 10.0))
            torch._foreach_lerp_(list(self.ema.values()), list(self.masters.values()), 1.0 - memory)
        return norm

    @torch.no_grad()
    def _publish(self, weights: dict[str, Tensor]) -> None:
        """Masters into the network that computes."""
        pairs = [(p, weights[n]) for n, p in self.compute.items() if p.data_ptr() != weights[n].data_ptr()]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [w for _, w in pairs])

    def averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and to ship."""
        return self.ema or self.masters

    def swap(self, averaged: bool) -> None:
        """Put the averaged weights into the network, or the trained ones back; only where they are separate tensors."""
        if not self.ema:
            return
        if any(p.dtype == torch.float32 for p in self.compute.values()):
            for name, parameter in self.compute.items():  # the masters are the network: exchange contents
                kept = parameter.detach().clone()
                parameter.detach().copy_(self.ema[name])
                self.ema[name].copy_(kept)
        else:
            self._publish(self.ema if averaged else self.masters)

    # ---- saving --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; views of the live tensors."""
        out = {f"master.{n}": p for n, p in self.masters.items()} | {f"ema.{n}": p for n, p in self.ema.items()}
        if self.muon is not None:
            out |= {f"muon.{n}": p for n, p in self.muon.buffers.items()}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                out[f"adamw.{key}.{name}"] = value
        return out

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        sources = {"master": self.masters, "ema": self.ema, "muon": self.muon.buffers if self.muon else {}}
        for kind, targets in sources.items():
            for name, target in targets.items():
                if f"{kind}.{name}" in tensors:  # an average or a momentum that is new to the recipe starts afresh
                    target.copy_(tensors[f"{kind}.{name}"])
        for key, value in tensors.items():
            if key.startswith("adamw."):
                _, slot, name = key.split(".", 2)
                master = self.masters[name]
                where = torch.device("cpu") if slot == "step" and not master.is_cuda else master.device
                self.adamw.state[master][slot] = value.to(where, copy=True)
        self._publish(self.masters)
