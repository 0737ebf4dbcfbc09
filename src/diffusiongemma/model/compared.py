"""Operations that are each called twice, as a kernel and as its torch twin on the same inputs, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusiongemma.model.backend import Ops
from diffusiongemma.ops.fused import Rows, summed
from diffusiongemma.ops.norm import rms_norm
from diffusiongemma.ops.routing import Placed
from diffusiongemma.ops.sampler import State
from diffusiongemma.ops.vocab import Reading


class Limits(NamedTuple):
    """How far a kernel may be from its twin: both round, at other places. What is wrong is off by all of it."""

    all: float = 0.05  # the norm of the error, as a share of the result's
    row: float = 0.25  # the same for any one row
    whole: float = 0.98  # of whole numbers, so many are equal


ROUTERS = ("route", "place", "route_one")
NEAR = 0.98  # of the best experts' probability, so much have those that are picked: either of two alike may be
LIMITS = {
    "vocab_end": Limits(whole=0.75),  # either of two tokens that are alike
    "draws": Limits(1e-6, 1e-5, 1.0),
    "prepare": Limits(1e-6, 1e-5, 1.0),
    "store": Limits(0.0, 0.0),
}
# Of the vocabulary end, in nats: where a token is nearly sure they are nearly 0, and a tie that is broken otherwise is
# many times that. So: in so many of the rows, at least, is the number near?
NATS = {"entropy": 0.95, "logprob": 0.95, "sample_logprob": 0.75}
Named = Iterator[tuple[str, Tensor]]


class Wrong(Exception):
    """A kernel gave something else than its twin."""


def names(ops: Ops) -> list[str]:
    """All but those that compute nothing"""
    found = (field.name for field in fields(ops) if callable(getattr(ops, field.name)))
    return [name for name in found if name not in ("streams", "forget")]


class Compared:
    def __init__(self, kernels: Ops, twins: Ops) -> None:
        self.kernels, self.twins = kernels, twins
        self.current = "preparing"  # the operation that is called, or was last
        self.called = set[str]()

    def ops(self) -> Ops:
        """The kernels, each of which raises `Wrong` where it is"""
        changed: dict[str, Any] = {name: self._watched(name) for name in names(self.kernels)}
        return replace(self.kernels, **changed)

    def _watched(self, name: str) -> Callable[..., Any]:
        kernel, twin = getattr(self.kernels, name), getattr(self.twins, name)

        def run(*args: Any, **options: Any) -> Any:
            self.current = name
            self.called.add(name)
            if name in ("store", "decide"):
                return self._writing(name, kernel, twin, *args)
            kept = options.get("keep", False)
            apart: dict[str, Any] = {"keep": False} if kept else {}
            if "counts" in options:
                apart["counts"] = torch.zeros_like(options["counts"])
            want = twin(*args, **{**options, **apart})  # first: the kernel may overwrite what it reads
            got = kernel(*args, **options)
            if name in ROUTERS:
                _check_experts(name, got, args)
            _compare(name, dict(_parts(name, got, args)), dict(_parts(name, want, args)))
            if kept:
                _compare("store", *_stored(*args[1:5]))
            return got

        return run

    def _writing(self, name: str, kernel: Callable[..., None], twin: Callable[..., None], *args: Any) -> None:
        if name == "store":
            kernel(*args)
            return _compare(name, *_stored(*args))
        state = State(*(t.clone() for t in args[0]))
        twin(state, *args[1:])
        kernel(*args)
        return _compare(name, args[0]._asdict(), state._asdict())


def _stored(k: Tensor, v: Tensor, prefix: Any, new: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What lies in the cache behind each row, and what should"""
    begins, slots = new.begin.tolist(), prefix.keys.shape[2]
    got, want = dict[str, Tensor](), dict[str, Tensor]()
    for b, (row, length) in enumerate(zip(prefix.row.tolist(), prefix.length.tolist(), strict=True)):
        first = max(begins[b], begins[b + 1] - slots)
        at = torch.arange(length + first - begins[b], length + begins[b + 1] - begins[b], device=k.device) % slots
        for name, cache, fresh in (("keys", prefix.keys, k), ("values", prefix.values, v)):
            got[f"{name} of row {b}"] = cache[row][:, at].transpose(0, 1)
            want[f"{name} of row {b}"] = fresh[first : begins[b + 1]]
    return got, want


def _parts(name: str, result: Any, args: tuple[Any, ...]) -> Named:
    """What is compared of a result"""
    if name in ROUTERS:
        result = result[:3] if name == "route_one" else ()
    elif name == "experts":
        result = summed(result, len(args[0].values))
    elif name == "quantize_rows":
        result = Rows(*result)
    yield from _tensors(result)


def _check_experts(name: str, result: Any, args: tuple[Any, ...]) -> None:
    """Twins round scores to bfloat16, so that of two experts that are alike either may be taken. So: are those that
    were picked among the best, each once, and their weights what follows from that?"""
    one = name == "route_one"
    x, eps = (result[0], args[4]) if one else (args[0], args[5])
    proj, scale, per_expert, top_k = args[3] if one else args[1:5]
    index, weight = result[3:] if one else result[:2]
    _within(f"{name}'s experts", index, len(proj))
    scores = F.linear(rms_norm(x.float(), None, eps) * scale.float() * x.shape[1] ** -0.5, proj.float())
    probability = scores.softmax(dim=-1)
    picked = probability.gather(1, index)
    best = float((picked.sum() / probability.topk(top_k).values.sum()).nan_to_num())
    if best < NEAR or bool((index.sort(dim=1).values.diff(dim=1) == 0).any()):
        raise Wrong(f"{name} picks experts with {best:.1%} of the best ones' probability, or one twice")
    want = {"weight": picked / picked.sum(dim=1, keepdim=True) * per_expert.float()[index]}
    got = {"weight": weight}
    if name == "place":
        got["weight in lists"], want["weight in lists"] = _listed(result[2]), weight
    _compare(name, got, want)


def _listed(placed: Placed) -> Tensor:
    """[N, k] the weight of each pair, as it is found in the lists"""
    experts, tokens = placed.lists.shape
    _within("counts of an expert's pairs", placed.counts[:experts], tokens + 1)
    there = torch.arange(tokens, device=placed.lists.device)[None, :] < placed.counts[:experts, None]
    out = torch.zeros(tokens * placed.top_k, dtype=torch.float32, device=placed.lists.device)
    _within("pairs of the lists", placed.lists[there], len(out))
    out[placed.lists[there].long()] = placed.share[there]
    return out.view(tokens, placed.top_k)


def _within(what: str, numbers: Tensor, end: int) -> None:
    """To read by a number that is none would be the end of a card's work, not of this comparison."""
    if not bool(((numbers >= 0) & (numbers < end)).all()):
        raise Wrong(f"{what} are not all numbers from 0 to {end - 1}")


def _tensors(result: Any, name: str = "result") -> Named:
    if isinstance(result, Tensor):
        yield name, result
    elif isinstance(result, Rows):
        yield name, result.wide()
    elif isinstance(result, Reading):
        for field in fields(result):
            if (value := getattr(result, field.name)) is not None:
                yield field.name, value
    else:
        for at, part in enumerate(result):
            yield from _tensors(part, f"{name} {at}")


def _compare(op: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    limits = LIMITS.get(op, Limits())
    for name, wanted in want.items():
        in_nats = op == "vocab_end" and name in NATS
        if found := _far(got[name], wanted, NATS[name]) if in_nats else _off(got[name], wanted, limits):
            raise Wrong(f"{op} is not what torch makes of the same numbers: {name} {found}")


def _far(got: Tensor, want: Tensor, share: float) -> str | None:
    """The same of numbers in nats, of which so many must be near. NaN is not."""
    near = (got.double() - want.double()).abs() <= 0.1 + 0.05 * want.double().abs()
    found = float(near.double().mean())
    return None if found >= share else f"is near in {found:.1%} of the rows, of {share:.0%} at least"


def _off(got: Tensor, want: Tensor, limits: Limits) -> str | None:
    """What is wrong with a result, or None. NaN is never within a limit."""
    if got.shape != want.shape:
        return f"has the shape {list(got.shape)}, not {list(want.shape)}"
    if want.numel() == 0:
        return None
    if not want.is_floating_point():
        share = float((got == want).double().mean())
        return None if share >= limits.whole else f"has {share:.1%} of the numbers, of {limits.whole:.0%} at least"
    off, size = (t.double().reshape(len(t), -1).norm(dim=1) for t in (got.double() - want.double(), want))
    error = float(off.norm() / size.norm().clamp_min(1e-30))
    if not error <= limits.all:
        return f"is off by {error:.1%} of its norm, {limits.all:.1%} are allowed"
    row = float((off / torch.maximum(size, size.square().mean().sqrt() / 2).clamp_min(1e-30)).max())
    return None if row <= limits.row else f"has a row that is off by {row:.1%}, {limits.row:.1%} are allowed"
