"""A card that nobody has tried: every operation against its torch twin, before the engine relies on the kernels.

The kernels are measured and tested on Hopper; for other cards they are compiled in tests (`tests/ops/test_cards.py`),
and no more. So on such a card two of the model's layers, of each kind the first, read a prompt, take steps and draw a
token. Each operation is called as the engine calls it, and its twin on the same inputs: these are the kernels that the
model needs, so what is compiled here is compiled once. The model's weights stay as they are.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from diffusiongemma.checkpoint.progress import shown
from diffusiongemma.engine import draw, slate, steps
from diffusiongemma.engine.scheduler import Limits
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import CacheRow, DiffusionGemma
from diffusiongemma.model.backend import Ops, torch_ops
from diffusiongemma.model.compared import Compared, Wrong
from diffusiongemma.model.network import Embedding
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops import kernels
from diffusiongemma.ops.fused import Rows
from diffusiongemma.ops.memory import is_out_of_memory
from diffusiongemma.ops.quantized import QuantEmbedding, QuantWeight

if TYPE_CHECKING:
    from diffusiongemma.engine.fast import FastRunner

log = logging.getLogger(__name__)
VOCAB = 4096  # tokens that these layers know: the twin of the whole table's end would want gigabytes
PROMPT = slate.LEAST  # a pass of its own that is not filled up: what is computed there beside a row means nothing

LARGE = (1, 16, 32)  # times that prompt: so many tokens of an expert have tiles of their own
DRAWN = 3  # tokens that are drawn, if need be: of two that are nearly alike, a kernel and its twin may take either

_found: dict[tuple[object, ...], str | None] = {}  # once a process: by device, geometry and number formats


class _NoMemory(Exception):
    """There is none left to try the kernels."""


def failed(model: DiffusionGemma, ops: Ops) -> str | None:
    """Why these kernels cannot be relied on here, or None. Says on a terminal that it looks, and what it found."""
    kinds = {str(t.dtype) for t in model.state_dict().values()}
    kinds |= {str(weight.format) for weight in model.modules() if isinstance(weight, QuantWeight)}
    key = (model.device, model.config, *sorted(kinds))
    if key not in _found:
        began = time.perf_counter()
        card = f"compute capability {kernels.dotted(kernels.card(model.device).capability)}"
        with _line(f"checking the kernels on a card that is new to them ({card})") as end:
            try:
                _found[key] = _failed(model, ops)
            except _NoMemory as error:
                return str(error)  # that says nothing about the card: another time there may be some
            if _found[key] is None:
                end(f"kernels: Triton, checked on this card ({card}) in {time.perf_counter() - began:.0f} s")
    return _found[key]


@contextmanager
def _line(what: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, what goes on; how it ended stays there, and goes to the log"""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with shown(None, SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        bar.add_task(what, total=None)

        def end(told: str) -> None:
            log.info("%s", told)
            if not bar.disable:
                bar.console.print(told, highlight=False)

        yield end


def _failed(model: DiffusionGemma, ops: Ops) -> str | None:
    compared = Compared(ops, torch_ops())
    try:
        _try(model, ops, compared.ops())
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        told = f"{compared.current} failed: {type(error).__name__}: {str(error)[:300]}"
        if is_out_of_memory(error):
            raise _NoMemory(f"there is no memory to try them: {told}") from error
        if _lost(model.device):
            raise DeviceError(f"{told}; Engine(kernels=False) does without the kernels") from error
        return told
    return None


def _lost(device: torch.device) -> bool:
    """Does nothing work any more on this card, as after a kernel has read what is not there?"""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@torch.inference_mode()
def _try(model: DiffusionGemma, ops: Ops, compared: Ops) -> None:
    from diffusiongemma.engine.fast import FastRunner  # which asks for this

    part = excerpt(model)
    length = PROMPT + 2 * part.config.canvas_length
    limits = Limits(max_rows=1, max_bytes=4 * CacheRow.bytes_for(part.config, length, part.dtype))
    runner = FastRunner(part, ops, limits, graphs=False, overlap=())
    if model.device.type == "cuda":
        with kernels.compiling():  # all at once; what does not compile says so when it is called
            _passes(runner, runner.new_row(length))
    runner.network.ops = compared
    _passes(runner, runner.new_row(length))


def excerpt(model: DiffusionGemma) -> DiffusionGemma:
    """A network of the first layer of each kind, which knows the first few tokens; it shares the model's tensors, but
    for those of 4-bit weights"""
    config = model.config
    kinds = dict.fromkeys(config.layer_types)
    own: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for weight in model.modules():
        if isinstance(weight, QuantWeight) and weight.format.kind == "int4":  # laid out in its own memory: copied
            del own[id(weight.q)], own[id(weight.scale)]
    small = config.replace(
        num_hidden_layers=len(kinds), layer_types=tuple(kinds), vocab_size=min(VOCAB, config.vocab_size)
    )
    with torch.device("meta"):
        part = DiffusionGemma(small)
    part.layers = nn.ModuleList(copy.deepcopy(model.layers[config.layer_types.index(kind)], own) for kind in kinds)
    part.self_conditioning = copy.deepcopy(model.self_conditioning, own)
    part.norm = copy.deepcopy(model.norm, own)
    part.embed_tokens = _rows(model.embed_tokens, small.vocab_size)  # type: ignore[assignment]
    return part.eval().requires_grad_(False)


def _rows(embedding: nn.Module, count: int) -> nn.Module:
    """The first rows of an embedding"""
    if isinstance(embedding, QuantEmbedding):
        few = QuantEmbedding(count, embedding.weight.shape[1], embedding.weight.format, embedding.dtype)
        few.weight.q, few.weight.scale = embedding.weight.q[:count], embedding.weight.scale[:count]
        return few
    assert isinstance(embedding, Embedding)
    with torch.device("meta"):
        plain = Embedding(count, embedding.weight.shape[1])
    plain.weight = nn.Parameter(embedding.weight.data[:count], requires_grad=False)
    return plain


def _passes(runner: FastRunner, row: CacheRow) -> None:
    """A prompt; steps of a canvas, with pins and banned tokens and without, the last with a block before it; a token;
    and what only long prompts need"""
    network = runner.network
    config, device, width = network.config, network.device, network.config.canvas_length
    assert isinstance(row, PoolRow)
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(config.vocab_size, (count,), generator=random)

    hidden = runner.slate.encode(tokens(PROMPT), [row], [PROMPT]).clone()
    offsets = network.pool.offsets([row])
    for warm, ruled in ((True, False), (False, True)):
        lane = runner.lane(width, warm, ruled)
        board = lane.board
        board.tokens[:1].copy_(tokens(width))
        if ruled:
            board.pin[0, :2].copy_(tokens(2))
            board.banned[:1].fill_(0x55555555)
            board.banned_set[0, 2:4].zero_()
        lane.offsets.copy_(offsets)
        lane.length.fill_(row.length)
        before = None
        if not ruled:
            lane.step(steps.Kind(1, network.pool.reach_for(row.length)))
            block = slate.Parcel(tokens(width), [row], [width])
            before = runner.slate.kind(block)._replace(size=width, most=width)
            runner.slate.put(block, before)
            lane.length.fill_(row.length)
        lane.step(steps.Kind(1, network.pool.reach_for(row.length), before))
    drawing = runner.drawing
    drawing.offsets.copy_(offsets)
    drawing.length.fill_(row.length)
    for left in reversed(range(DRAWN)):
        drawing.tokens.copy_(tokens(1))
        try:
            drawing.step(draw.Kind(1, network.pool.reach_for(row.length + 1)))
            break
        except Wrong:
            if not left:
                raise
    ops, layer = network.ops, network.layers[0]
    router = layer.module.router
    for times in LARGE:
        many = hidden.repeat(times, 1)
        picked = ops.route(many, router.proj.weight, router.scale, router.per_expert_scale, router.top_k, network.eps)
        ops.experts(ops.rows_for(Rows(many), layer.up), *picked, layer.up, layer.down)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        ops.quantize_rows(hidden, dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
