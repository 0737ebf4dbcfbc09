"""The runner for a GPU with kernels: whole steps as CUDA graphs, over rows that lie in one pool.

What a recorded step cannot do (log-probabilities of a canvas, alternatives, top-p, scores, chance from elsewhere) goes
the plain way, over the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from diffusiongemma.diffusion import SeededDraws
from diffusiongemma.diffusion.batch import unfit
from diffusiongemma.engine.draw import DrawLane, drawable
from diffusiongemma.engine.graphs import Recorder
from diffusiongemma.engine.lane import Lane
from diffusiongemma.engine.params import WIDTHS
from diffusiongemma.engine.runner import Runner
from diffusiongemma.engine.scheduler import Limits
from diffusiongemma.engine.sequence import Sequence
from diffusiongemma.engine.slate import Slate
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import Ops, triton_ops
from diffusiongemma.model.fused import FusedNetwork
from diffusiongemma.model.pool import CachePool
from diffusiongemma.model.support import prepare, unsupported

log = logging.getLogger(__name__)
MOST_LANES = 8  # widths whose boards are kept


class FastRunner(Runner):
    def __init__(
        self,
        model: DiffusionGemma,
        ops: Ops,
        limits: Limits | None = None,
        *,
        graphs: bool = True,
        ahead: bool = True,
        overlap: bool = False,
    ) -> None:
        """`ahead`: launch a step before the one before it has been read. `overlap`: see `FusedNetwork`."""
        super().__init__(model)
        for left in prepare(model, ops):
            log.warning("without a kernel: %s", left)
        limits = limits or Limits()
        self.max_rows, self.ahead = limits.max_rows, ahead
        self.pool = CachePool(model.config, limits.max_bytes, self.dtype, self.device)
        self.network = FusedNetwork(model, self.pool, ops, overlap)
        self.recorder = Recorder(self.device, graphs)
        self.slate = Slate(self.network, self.recorder, limits.max_rows, limits.chunk + limits.max_rows)
        self.drawing = DrawLane(self.network, self.recorder, limits.max_rows)
        self._eager = Recorder(self.device, graphs=False)
        self._graphed = {*WIDTHS, model.config.canvas_length}
        self._lanes: dict[int, Lane] = {}  # by width; the last used comes last

    def new_row(self, max_length: int) -> CacheRow:
        return self.pool.new_row(max_length)

    def lane(self, width: int) -> Lane:
        if width not in self._lanes:
            # A width that may never come again is not worth a graph.
            recorder = self.recorder if width in self._graphed else self._eager
            self._lanes[width] = Lane(self.network, recorder, self.max_rows, width)
        self._lanes[width] = self._lanes.pop(width)
        idle = [w for w, lane in self._lanes.items() if w not in self._graphed and not lane.flights]
        for old in idle[: max(0, len(self._lanes) - MOST_LANES)]:
            if old != width:
                del self._lanes[old]
        return self._lanes[width]

    def _encode(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> Tensor:
        return self.slate.encode(tokens, rows, counts)

    @torch.inference_mode()
    def encode(self, work: Seq[tuple[Sequence, list[int]]]) -> None:
        drawing = [sequence for sequence, _ in work if drawable(sequence)]
        rest = [(sequence, tokens) for sequence, tokens in work if not drawable(sequence)]
        self._step(self.drawing, drawing)
        if rest:
            super().encode(rest)

    @torch.inference_mode()
    def denoise(self, sequences: Seq[Sequence]) -> None:
        plain, seated = list[Sequence](), dict[int, list[Sequence]]()
        for sequence in sequences:
            if (width := self._width(sequence)) is None:
                plain.append(sequence)
            else:
                seated.setdefault(width, []).append(sequence)
        for width in {**dict.fromkeys(self._flying()), **seated}:
            self._step(self.lane(width), seated.get(width, []))
        if plain:
            super().denoise(plain)

    def _flying(self) -> list[int]:
        return [width for width, lane in self._lanes.items() if lane.flights]

    def _step(self, lane: Lane | DrawLane, sequences: list[Sequence]) -> None:
        """One step of these; the next may be under way when this returns.

        Who comes while a step is under way waits for it: the step after it takes all.
        """
        if lane.flights and not lane.expected():
            lane.discard()
        if not lane.flights:
            if not sequences:
                return
            lane.seat(sequences)
            lane.launch()
        unchanged = {id(s) for s in lane.passengers} == {id(s) for s in sequences}
        if self.ahead and unchanged and lane.certain_to_go_on():
            lane.launch()
        lane.land()

    def _width(self, sequence: Sequence) -> int | None:
        """The lane that this canvas goes in; None: the plain way."""
        denoiser, canvas = sequence.denoiser, sequence.canvas
        if sequence.phase != "denoise" or sequence.params.logprobs is not None or denoiser is None or canvas is None:
            return None
        if not isinstance(sequence.draws, SeededDraws) or unfit(denoiser) is not None:
            return None
        return len(canvas)


def choose_runner(model: DiffusionGemma, limits: Limits, kernels: bool | None = None) -> Runner:
    """The fast runner where it can run, else the plain one. `kernels`: insist on it, or do without it."""
    if kernels is False or (kernels is None and model.device.type != "cuda"):
        return Runner(model)
    if reason := unsupported(model):
        if kernels:
            raise DeviceError(f"kernels=True cannot be honoured: {reason}")
        log.warning("the plain torch path is used: %s", reason)
        return Runner(model)
    return FastRunner(model, triton_ops(), limits)
