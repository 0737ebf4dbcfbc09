"""What a checkpoint will hold, tensor by tensor: sizes at once, numbers when a shard is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from diffusiongemma.checkpoint.layout import Slot, stock_layout
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, formats_in
from diffusiongemma.ops.quant import Format, error_of, quantize
from diffusiongemma.ops.quantized import QuantWeight


@dataclass(frozen=True)
class Entry:
    """One tensor to write."""

    name: str
    nbytes: int
    fetch: Callable[[], Tensor]


@dataclass(frozen=True)
class TensorError:
    """What quantising did to one tensor: relative error |w - w'| / |w|, cosine of w and w', bytes with scales; and, of
    one that was fitted, the squares of what it changed in its products with the samples, and of all of them."""

    name: str
    parameter: str
    format: Format
    relative: float
    cosine: float
    numbers: int
    nbytes: int
    product: tuple[float, float] | None = None


@dataclass(frozen=True)
class Fitted:
    """A whole parameter [.., O, I], rounded by what it is multiplied with: its numbers, and per row [.., O] the squares
    of what that changed in the products and of the products themselves."""

    q: Tensor
    scale: Tensor
    change: Tensor
    whole: Tensor


def network_entries(model: DiffusionGemma, dtype: torch.dtype | None, scheme: Scheme | None) -> list[Entry]:
    """Of a network in memory: plain, quantised here and now by a scheme, or quantised already."""
    held, parameters = formats_in(model), model.state_dict()
    layout = stock_layout(model.config, split_experts=bool(held) or scheme is not None)
    expected = {slot.parameter for slot in layout.values()}
    plain = {name for name in parameters if name.rpartition(".")[0] not in held}
    if expected != plain | held.keys():
        odd = sorted(expected ^ (plain | held.keys()))
        raise CheckpointError("this network has other parameters than the stock layout, so it cannot be saved", odd)
    if any(parameter.is_meta for parameter in parameters.values()):
        raise CheckpointError("this network has shapes only (it is on the meta device): there are no weights to save")
    chosen = scheme.formats({name: tuple(parameters[name].shape) for name in plain}) if scheme else {}
    entries: list[Entry] = []
    for name, slot in layout.items():
        if slot.parameter in held:
            module = model.get_submodule(slot.parameter)
            assert isinstance(module, QuantWeight)
            entries += stored_entries(name, slot, module)
        elif slot.parameter in chosen:
            weight = partial(slot.of, parameters[slot.parameter])
            entries += quantised_entries(name, slot, chosen[slot.parameter], weight)
        else:
            entries.append(plain_entry(name, slot.of(parameters[slot.parameter]), dtype))
    return entries


def plain_entry(name: str, view: Tensor, dtype: torch.dtype | None) -> Entry:
    dtype = dtype or view.dtype

    def fetch() -> Tensor:
        tensor = view.to("cpu", dtype).contiguous()
        # safetensors refuses tensors that share memory, as the parts of a fused parameter do
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return Entry(name, view.numel() * dtype.itemsize, fetch)


def stored_entries(name: str, slot: Slot, weight: QuantWeight) -> list[Entry]:
    """Of a tensor that is quantised already."""
    names, sizes = _names(name, weight.format), _sizes(slot.shape, weight.format)

    def fetch(part: int) -> Tensor:
        tensor = replace(slot, expert=None).of(weight.stored(slot.expert)[part])
        return plain_entry(names[part], tensor, None).fetch()

    entries = [Entry(names[part], sizes[part], partial(fetch, part)) for part in (0, 1)]
    return [*entries, *_shape_entry(names, slot.shape)]


def quantised_entries(
    name: str,
    slot: Slot,
    fmt: Format,
    weight: Callable[[], Tensor],
    device: torch.device | None = None,
    report: Callable[[TensorError], None] | None = None,
    fitted: Callable[[], Fitted] | None = None,
) -> list[Entry]:
    """Of a tensor that is quantised when its shard is written, once for its numbers and its scales. `fitted`: where its
    parameter comes from if it is not simply rounded."""
    names, shape = _names(name, fmt), slot.shape
    sizes = _sizes(shape, fmt)
    ready: dict[str, Tensor] = {}

    def fetch(part: str) -> Tensor:
        if part not in ready:
            w = weight()
            product = None
            if fitted is None:
                q, scale = quantize(w, fmt, device)
            else:
                whole = fitted()
                q, scale = slot.of(whole.q), slot.of(whole.scale)
                product = float(slot.of(whole.change).sum()), float(slot.of(whole.whole).sum())
            if not scale.isfinite().all():
                raise CheckpointError(f"{name} holds infinities or numbers that are none: it cannot be quantised")
            if report is not None:
                report(TensorError(name, slot.parameter, fmt, *error_of(w, q, scale), prod(shape), sum(sizes), product))
            # copies: a part of a larger tensor would keep all of it
            ready.update({n: t.to("cpu", copy=True).contiguous() for n, t in zip(names, (q, scale), strict=False)})
        return ready.pop(part)

    entries = [Entry(part, size, partial(fetch, part)) for part, size in zip(names, sizes, strict=False)]
    return [*entries, *_shape_entry(names, shape)]


def _sizes(shape: tuple[int, ...], fmt: Format) -> tuple[int, int]:
    """Bytes of q and of the scales."""
    return prod(fmt.q_shape(shape)) * fmt.dtype.itemsize, prod(fmt.scale_shape(shape)) * fmt.scale_dtype.itemsize


def _names(name: str, fmt: Format) -> list[str]:
    """q, scales and, where q is packed, shape."""
    if fmt.kind == "int4":
        return [name + "_packed", name + "_scale", name + "_shape"]
    return [name, name + "_scale"]


def _shape_entry(names: list[str], shape: Iterable[int]) -> list[Entry]:
    return [Entry(name, 16, lambda: torch.tensor(tuple(shape))) for name in names[2:]]
