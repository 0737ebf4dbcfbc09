"""Runs sequences through the network: one encode pass, one denoise pass, each over whatever rows are ready.

This is the one place that calls the model. Rows of a pass are packed, so prompts, blocks and canvases of different
lengths share it without padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import accumulate, chain

import torch
from torch import Tensor

from diffusiongemma.engine.events import TokenLogprob
from diffusiongemma.engine.outbox import Outbox
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.sequence import Sequence, read_logprob
from diffusiongemma.model import CacheRow, DiffusionGemma

CHUNK, LARGE_CHUNK = 512, 2048  # tokens of an encode pass
FULL = 4096  # … where there is plenty of memory and no canvas waits for it
PATIENCE = 4  # ticks that new canvases wait at most for the prompts of others
ROOMY = 6 << 30  # bytes left on a card from which on a large pass is no matter: it takes less than one of them
PLENTY = 12 << 30  # … and all that is faster with more memory (`Ops.roomy`): 16 users of the 26B then take 7 of them


def default_chunk(device: torch.device, taken: int = 0) -> int:
    """How many tokens one pass should encode, where nobody has said it. `taken`: bytes that are spoken for.

    A card reads all experts for 512 tokens as for 2,048, so it takes the prompts of four users in little more than
    twice the time of one; a CPU takes four times as long for them.
    """
    left = bytes_left(device)
    return CHUNK if left is None or left - taken < ROOMY else LARGE_CHUNK


def default_room(device: torch.device, taken: int = 0) -> int:
    """The same for a pass that nobody waits for"""
    left = bytes_left(device)
    return default_chunk(device, taken) if left is None or left - taken < PLENTY else FULL


def bytes_left(device: torch.device) -> int | None:
    """Of a card, beside the tensors of this program (others do not count: a text must not depend on them); None: of no
    card."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[1] - torch.cuda.memory_allocated(device)


class Runner:
    def __init__(self, model: DiffusionGemma) -> None:
        self.model, self.device, self.dtype = model, model.device, model.dtype
        self.chunk = self.room = default_chunk(self.device)
        self.patience = PATIENCE if self.device.type == "cuda" else 0  # a CPU takes eight times as long for eight
        self.outbox = Outbox()  # of all sequences, so that a runner may hold it

    def new_row(self, max_length: int) -> CacheRow:
        return CacheRow(self.model.config, max_length, self.dtype, self.device)

    @torch.inference_mode()
    def encode(self, work: Seq[tuple[Sequence, list[int]]]) -> None:
        """Encode the next tokens of these sequences; those that draw get their next token from it."""
        rows = [_row(sequence) for sequence, _ in work]
        counts = [len(tokens) for _, tokens in work]
        # Hidden states are for the twin alone: a prompt or a committed block needs none.
        asked = any(s.params.mode == "ar" and s.to_encode == count for (s, _), count in zip(work, counts, strict=True))
        hidden = None
        if asked:
            hidden = self._encode(packed(work), rows, counts)
        else:
            self._remember(packed(work), rows, counts)
        last = (end - 1 for end in accumulate(counts))
        drawing = []
        for at, (sequence, _) in zip(last, work, strict=True):
            sequence.metrics.encoder_forwards += 1
            if sequence.to_encode == 0:
                if sequence.params.mode == "ar":
                    drawing.append((at, sequence))
                if sequence.phase == "encode":
                    sequence.encoded()
        if drawing:
            assert hidden is not None
            logits = self.model.logits(hidden[[at for at, _ in drawing]])
            for (_, sequence), row in zip(drawing, logits, strict=True):
                row[list(sequence.request.forbidden)] = -torch.inf
                token, logprob = draw_token(row, sequence.params, sequence.draws.uniforms(1))
                sequence.drawn(token, logprob)

    def _encode(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> Tensor:
        """tokens [N], on the CPU -> hidden [N, D]; the rows grow by them"""
        return self.model.encode_packed(tokens.to(self.device), rows, counts)

    def _remember(self, tokens: Tensor, rows: list[CacheRow], counts: list[int]) -> None:
        """The same without hidden states"""
        self.model.remember_packed(tokens.to(self.device), rows, counts)

    @torch.inference_mode()
    def denoise(self, sequences: Seq[Sequence]) -> None:
        """One step of each of these canvases."""
        canvases = [_canvas(sequence).to(self.device) for sequence in sequences]
        counts = [tokens.shape[0] for tokens in canvases]
        rows = [_row(sequence) for sequence in sequences]
        hidden = self.model.denoise_packed(torch.cat(canvases), self._soft(sequences, counts), rows, counts)
        logits = self.model.logits(hidden)
        going_on = []
        for sequence, canvas, part in zip(sequences, canvases, logits.split(counts), strict=True):
            if sequence.phase == "score":
                sequence.scored(_likelihood(part, canvas, sequence.to_score))
            elif sequence.stepped(part):
                going_on.append((sequence, part))
        if going_on:
            # `stepped` left the probabilities where the logits were; a canvas may have been cut meanwhile.
            kept = [part[: len(_canvas(sequence))] for sequence, part in going_on]
            softs = self.model.mean_embed(kept[0] if len(kept) == 1 else torch.cat(kept))
            for (sequence, _), soft in zip(going_on, softs.split([len(part) for part in kept]), strict=True):
                assert sequence.canvas is not None
                assert sequence.denoiser is not None
                sequence.soft = None if sequence.denoiser.forgets(sequence.canvas) else soft

    def _soft(self, sequences: Seq[Sequence], counts: list[int]) -> Tensor | None:
        """[N, D] what the canvases are conditioned on; zeros for those on their first step."""
        if all(sequence.soft is None for sequence in sequences):
            return None
        width = self.model.config.hidden_size
        zeros = torch.zeros(max(counts), width, dtype=self.dtype, device=self.device)
        return torch.cat([zeros[:n] if s.soft is None else s.soft for s, n in zip(sequences, counts, strict=True)])


def packed(work: Seq[tuple[Sequence, list[int]]]) -> Tensor:
    """[N] the tokens of all"""
    # An array, not a list: torch takes 0.3 ms to read a list of 2,048 numbers, while a card waits for them.
    return torch.frombuffer(array("q", chain.from_iterable(tokens for _, tokens in work)), dtype=torch.int64)


def _row(sequence: Sequence) -> CacheRow:
    assert sequence.row is not None
    return sequence.row


def _canvas(sequence: Sequence) -> Tensor:
    """[L] the tokens that the next pass reads: the noisy canvas, or the finished one for its score"""
    canvas = sequence.canvas
    assert canvas is not None
    if sequence.phase == "score":
        assert canvas.argmax is not None
        return canvas.argmax
    return canvas.tokens


def _likelihood(logits: Tensor, tokens: Tensor, at: list[int]) -> list[float]:
    """logits [L, V], tokens [L] -> log-probability of the tokens at these positions, given all of them"""
    where = torch.tensor(at, device=logits.device)
    logprobs: list[float] = logits[where].log_softmax(dim=-1).gather(1, tokens[where, None]).squeeze(1).tolist()
    return logprobs


def draw_token(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[int, TokenLogprob | None]:
    """logits [V], uniform [1] -> the next token by temperature and top-p (temperature 0: the best)"""
    if params.temperature == 0:
        token = int(logits.argmax())
    else:
        probs, order = (logits / params.temperature).softmax(dim=-1).sort(descending=True, stable=True)
        total = probs.cumsum(dim=0)
        # The smallest set whose probability reaches top_p: drop what comes after it is already reached.
        probs = torch.where(total - probs < params.top_p, probs, 0.0)
        total = probs.cumsum(dim=0)
        at = int(torch.searchsorted(total, uniform.to(total.device) * total[-1], right=True))
        token = int(order[min(at, int((probs > 0).sum()) - 1)])
    logprob = None if params.logprobs is None else read_logprob(logits, token, params.logprobs)
    return token, logprob
