"""Weights rounded by what they are multiplied with, layer by layer, so that only one layer is ever in memory.

Samples go through the layers in both modes, prompts as in `encode` and their canvases as in `denoise`, every second
canvas with self-conditioning. In each layer the inputs of every matrix are seen, the matrices are rounded to them
(`ops/gptq.py`), and the samples go on through the rounded layer: the next one is fitted to inputs as they will be.
An expert is fitted to the tokens that pick it, its second matrix to what the first, rounded, makes of them.

Legend: S samples, N tokens of a pass, D hidden, E experts, O outputs, I inputs, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from diffusiongemma.checkpoint.entries import Fitted
from diffusiongemma.checkpoint.load import fill
from diffusiongemma.checkpoint.plan import Plan
from diffusiongemma.checkpoint.samples import Sample
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.cache import CacheRow
from diffusiongemma.model.layers import Experts, Layer, Pass
from diffusiongemma.ops.experts import geglu
from diffusiongemma.ops.gptq import gram_of, product_change, quantize_fitted
from diffusiongemma.ops.linear import Linear
from diffusiongemma.ops.quant import Format, dequantize

AT_ONCE = 8  # samples of a pass
GRAMS = 1 << 28  # bytes of gram matrices, so many experts are rounded together; what is made of them is 8 times that
Routed = tuple[Tensor, Tensor, Tensor]  # inputs [N, D], index [N, k], weight [N, k]


class LayerWalk:
    """Gives the fitted weights of any layer, in the order of the layers."""

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        formats: Mapping[str, Format],
        samples: Sequence[Sample],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.plan, self.samples = config, plan, samples
        self.formats = {name: fmt for name, fmt in formats.items() if name.startswith("layers.")}
        self.device, self.dtype = device, dtype
        with torch.device("meta"):
            self.model = DiffusionGemma(config).to(dtype).requires_grad_(False)
        self._layer = -1
        self._fitted: dict[str, Fitted] = {}
        longest = max(len(s.prompt) for s in samples)
        self._rows = [CacheRow(config, longest, dtype, device) for _ in range(min(AT_ONCE, len(samples)))]
        self._prompts, self._canvases = self._embed()

    def fitted(self, parameter: str) -> Fitted:
        """Of one parameter; those of earlier layers are gone."""
        wanted = int(parameter.split(".")[1])
        assert wanted >= self._layer, "layers are walked through in order"
        while self._layer < wanted:
            self._layer += 1
            self._fitted = {}  # before the next are made
            self._fitted = self._walk(self._layer)
        return self._fitted[parameter]

    # ---- through the network -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _embed(self) -> tuple[list[Tensor], list[Tensor]]:
        """What goes into the first layer: of each sample's prompt [T, D] and of its canvas [L, D]"""
        prompts, canvases = [], []
        with (
            self._loaded(self.model.embed_tokens, "embed_tokens."),
            self._loaded(self.model.self_conditioning, "self_conditioning."),
        ):
            for i, sample in enumerate(self.samples):
                prompts.append(self.model.embed(sample.prompt.to(self.device)))
                believed = self.model.embed(sample.believed.to(self.device)) if i % 2 else None
                noisy = self.model.embed(sample.noisy.to(self.device))
                canvases.append(self.model.self_conditioning(noisy, believed))
        return prompts, canvases

    @torch.inference_mode()
    def _walk(self, index: int) -> dict[str, Fitted]:
        layer = self.model.layers[index]
        assert isinstance(layer, Layer)
        prefix = f"layers.{index}."
        with self._loaded(layer, prefix):
            found = self._fit(layer, prefix)
            for at, prompts, canvases in self._through(layer):
                self._prompts[at], self._canvases[at] = prompts, canvases
        return found

    def _through(self, layer: Layer) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
        """Samples a few at a time through a layer, in both modes: which, and what comes out of it"""
        for first in range(0, len(self.samples), AT_ONCE):
            at = slice(first, min(first + AT_ONCE, len(self.samples)))
            rows = self._rows[: at.stop - first]
            for row in rows:
                row.truncate(0)
            prompts = self._pass("encode", layer, rows, self._prompts[at])
            for row, prompt in zip(rows, prompts, strict=True):
                row.advance(len(prompt))
            yield at, prompts, self._pass("denoise", layer, rows, self._canvases[at])

    def _pass(self, mode: str, layer: Layer, rows: list[CacheRow], parts: list[Tensor]) -> list[Tensor]:
        counts = [len(part) for part in parts]
        run = Pass.over("encode" if mode == "encode" else "denoise", rows, counts, self.config, self.dtype, self.device)
        out: Tensor = layer(torch.cat(parts), run)
        return list(out.split(counts))

    @contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """This part of the network is there, with its weights, within the block."""
        module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=self.device))
        pieces = [piece for piece in self.plan.weights if piece.slot.parameter.startswith(prefix)]
        fill(self.model, pieces)
        held = self.model.state_dict()
        for piece in pieces:
            if not piece.slot.of(held[piece.slot.parameter]).isfinite().all():
                raise CheckpointError(f"{piece.info.name} holds infinities or numbers that are none")
        try:
            yield
        finally:
            module.to("meta")

    # ---- rounding ------------------------------------------------------------------------------------------------

    def _fit(self, layer: Layer, prefix: str) -> dict[str, Fitted]:
        """Round what has a format, in place -> its numbers by its name"""
        names = {name.removeprefix(prefix) for name in self.formats if name.startswith(prefix)}
        found: dict[str, Fitted] = {}
        with _watching(layer, names) as (grams, routed):
            for _ in self._through(layer):
                pass
        try:
            for name, (gram, count) in grams.items():
                weight, fmt = layer.get_parameter(name), self.formats[prefix + name]
                one = _fit_some(weight[None], gram[None], [count], fmt)
                found[prefix + name] = Fitted(*(part[0] for part in (one.q, one.scale, one.change, one.whole)))
                weight.copy_(dequantize(one.q[0], one.scale[0]))
            if routed:
                found |= self._fit_experts(layer.experts, prefix + "experts.", routed)
        except ArithmeticError as error:
            raise CheckpointError(f"{prefix[:-1]} cannot be fitted to these samples: {error}") from None
        return found

    def _fit_experts(self, experts: Experts, prefix: str, routed: list[Routed]) -> dict[str, Fitted]:
        x, index, share = (torch.cat(parts) for parts in zip(*routed, strict=True))
        names = ("gate_up_proj", "down_proj")
        up, down = (getattr(experts, name) for name in names)  # [E, 2 I, D], [E, D, I]
        done: dict[str, list[Fitted]] = {name: [] for name in names}
        some = max(1, GRAMS // (4 * x.shape[1] ** 2))
        for first in range(0, len(up), some):
            picked = [(index == e).nonzero(as_tuple=True) for e in range(first, min(first + some, len(up)))]
            counts = [len(token) for token, _ in picked]
            part = slice(first, first + len(picked))
            inputs: list[Tensor] = [x[token] for token, _ in picked]  # [N, D] each
            done["gate_up_proj"].append(self._round(up, part, inputs, counts, self.formats[prefix + "gate_up_proj"]))
            inputs = [
                geglu(rows @ weight.t()) * share[token, slot, None].to(rows.dtype)
                for rows, weight, (token, slot) in zip(inputs, up[part], picked, strict=True)
            ]
            done["down_proj"].append(self._round(down, part, inputs, counts, self.formats[prefix + "down_proj"]))
        fields = ("q", "scale", "change", "whole")
        return {
            prefix + name: Fitted(*(torch.cat([getattr(one, field) for one in parts]) for field in fields))
            for name, parts in done.items()
        }

    def _round(self, weight: Tensor, part: slice, inputs: list[Tensor], counts: list[int], fmt: Format) -> Fitted:
        """Some experts of weight [E, O, I], in place"""
        one = _fit_some(weight[part], torch.stack([gram_of(rows) for rows in inputs]), counts, fmt)
        weight[part] = dequantize(one.q, one.scale).to(weight.dtype)
        return one


@contextmanager
def _watching(layer: Layer, names: set[str]) -> Iterator[tuple[dict[str, tuple[Tensor, int]], list[Routed]]]:
    """What the matrices with these names are multiplied with within the block: gram matrices, each of so many tokens,
    and of the experts the inputs themselves."""
    grams: dict[str, tuple[Tensor, int]] = {}
    routed: list[Routed] = []

    def see(name: str, _: nn.Module, args: tuple[Tensor]) -> None:
        gram, count = grams.get(name, (0, 0))
        grams[name] = gram + gram_of(args[0]), count + len(args[0])

    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and f"{name}.weight" in names:
            hooks.append(module.register_forward_pre_hook(partial(see, f"{name}.weight")))
        elif isinstance(module, Experts) and f"{name}.gate_up_proj" in names:
            hooks.append(module.register_forward_pre_hook(lambda _, args: routed.append(args)))
    try:
        yield grams, routed
    finally:
        for hook in hooks:
            hook.remove()


def _fit_some(weight: Tensor, gram: Tensor, counts: Sequence[int], fmt: Format) -> Fitted:
    """weight [E, O, I], gram [E, I, I]"""
    q, scale = quantize_fitted(weight, gram, counts, fmt)
    return Fitted(q, scale, *product_change(weight, dequantize(q, scale), gram))
